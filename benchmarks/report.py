"""Writes docs/benchmarks.md and its plots from benchmarks/results/.

    python benchmarks/report.py

Owns the order and the words of the page. Figures come from the results only, limits from goals.py;
what was found out about a figure stands in notes/, one file a result.
"""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import goals
import plots
import results

HERE = pathlib.Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "benchmarks.md"
PLOTS = HERE.parent / "docs" / "assets" / "plots"
Result = Mapping[str, Any]

# In the order of the page: the result, its heading, and what is trained.
SECTIONS = {
    "custom-loop": (
        "The custom loop",
        "The program of the front page: one layer, 784-10, Adam, batches of 64. There is next to "
        "no arithmetic in it, so what is seen is what a library adds to a step.",
    ),
    "keras-fit": (
        "Keras: fit",
        "784-128-10 with Adam and accuracy, batches of 32; and a small CNN with batch norm. The "
        "models, the data and the starting weights are the same everywhere.",
    ),
    "fashion": (
        "Fashion-MNIST to 89 %",
        "A CNN with three convolutions and batch norm on real images, batches of 128, two "
        "replicas, trained until 89 % of the test images are right.",
    ),
    "growth-replicas": (
        "More replicas",
        "A ten-layer MLP on 1 to 64 replicas: how often the function is traced, what the first "
        "step takes, what one call costs the host, and memory.",
    ),
    "growth-variables": (
        "More variables",
        "10 to 1000 small variables written in one step.",
    ),
    "several-workers": (
        "Two processes",
        "784-128-10 with SGD on two processes of one machine, 32 rows each, over Gloo.",
    ),
    "parameter-servers": (
        "Parameter servers",
        "Workers that push gradients to servers and do not wait for each other.",
    ),
    "nnx": (
        "Flax NNX",
        "Eight Linear layers and Adam, as NNX objects: 50 arrays of state.",
    ),
    "reductions": (
        "Sharded state and other reductions",
        "Four 256 x 256 layers and Adam. Times and memory are held against the plain all-reduce.",
    ),
    "gpu-gpt2": ("GPT-2 small on one GPU", "bfloat16, 32 x 1024 tokens, AdamW."),
    "gpu-resnet50": ("ResNet-50 on one GPU", "bfloat16, batches of 256 images of 224 x 224."),
    "gpu-loop": ("The custom loop on one GPU", "784-10, batches of 64: dispatch alone."),
    "gpu-gpt2-variants": (
        "Forms of GPT-2 small on one GPU",
        "Hand-written JAX again, with one part written another way, over the form above.",
    ),
    "gpu-mock-8": (
        "GPT-2 small compiled for 8 GPUs",
        "What the functional step would send, and what it would take on each device.",
    ),
}

INTRODUCTION = """# Benchmarks

mirrored beside hand-written JAX, stock Keras, TensorFlow's tf.distribute and PyTorch's
DistributedDataParallel: the same data, the same starting weights, the same order. Losses are
compared before a time is taken; contenders take turns within one run; a figure is the median of
the rounds, a ratio the median of the ratios within a round. Below 1, mirrored takes less. In the
plots a line spans the middle half of the rounds.

This page is written by `benchmarks/report.py` from the files in `benchmarks/results/`.
"""

CAVEATS = """## Before you read a figure

- **Virtual CPU devices, but for the last part.** All figures above [GPUs](#gpus) come from virtual
  devices of one small machine ({machine}). They show what a library adds to a step, and how that
  grows, not how fast a GPU or a TPU trains. On accelerators one GPU was measured ({gpu}), several
  never; nothing was measured on a TPU.
- **Tiny models on purpose.** The smaller the arithmetic, the larger the share of overhead. With a
  model that keeps a device busy for milliseconds most of these differences vanish.
- **Virtual devices share the cores.** Two replicas on two cores compete with the host's own work;
  more than two queue for them.
- **Peers differ in kind.** PyTorch's replicas are processes, the others' devices of one process.
  TensorFlow runs its own kernels; its ratios compare whole products, not only their bookkeeping.
- **A ratio is good to a few percent.** Each table says how far apart the middle half of the rounds
  lies. Differences smaller than that mean nothing.
"""

REPEAT = """## How to repeat

```
make bench                            # all that this machine can run, about 20 minutes
make bench ARGS="--only custom-loop"  # one of them; --list names them all
make bench ARGS="--torch-python PYTHON --tensorflow-python PYTHON"
.venv/bin/python benchmarks/report.py # writes this page anew
```

`make bench` makes the environments of TensorFlow and PyTorch itself, from the versions pinned in
`benchmarks/requirements/`, in `.bench/`; it takes Fashion-MNIST out of Debian's package
`dataset-fashion-mnist`. It prints ratios first, holds them against the goals, and says which got
worse than in the last committed results by more than 5 % and more than noise. Let nothing else run
meanwhile. On a machine with a GPU: `python benchmarks/gpu/run.py --out benchmarks/results`.
"""


def read_results() -> dict[str, Any]:
    """The committed results, in the order of the page."""
    found = {path.stem: json.loads(path.read_text()) for path in HERE.glob("results/*.json")}
    return {name: found[name] for name in SECTIONS if name in found}


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _table(head: list[str], rows: list[list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _ratios(result: Result) -> Iterator[str]:
    """Ratios as rows, cases as columns; goals beside them."""
    cases = result["cases"]
    known = [goal for goal in goals.GOALS if goal.result == result["name"] and not goal.contender]
    keys: list[str] = []
    for case in cases:
        keys += [key for key in case["ratios"] if key not in keys]
    rows = []
    for key in keys:
        row = [key]
        limits = []
        for case in cases:
            value = case["ratios"].get(key)
            goal = next((g for g in known if g.case == case["name"] and g.fits(key)), None)
            text = "" if value is None else f"{value:.2f}" if value < 10 else f"{value:.1f}"
            if value is not None and goal:
                # A value close to its limit is shown with the digits that decide.
                text = f"{value:.3f}" if abs(value / goal.limit - 1) < 0.01 else text
                limits.append(goal.bound)
                text += " ✓" if goal.verdict(value) == "met" else " **✗**"
            row.append(text)
        row.append(", ".join(dict.fromkeys(limits)))
        rows.append(row)
    yield from _table(["ratio", *(case["name"] for case in cases), "goal"], rows)


def _figures(result: Result) -> Iterator[str]:
    """Every contender's figures, one row each."""
    on_gpu = bool(result["machine"].get("gpu"))
    columns = {
        "spread": lambda f: f"{results.spread(f['rounds']):.0%}" if len(f["rounds"]) > 1 else "",
        "thread": lambda f: _number(f["thread"]) if "thread" in f else "",
        "first_step_s": lambda f: f"{f['first_step_s']:.2f}" if "first_step_s" in f else "",
        "trace_s": lambda f: f"{f['trace_s']:.2f}" if "trace_s" in f else "",
        "compile_s": lambda f: f"{f['compile_s']:.2f}" if "compile_s" in f else "",
        "traces": lambda f: str(f.get("traces", "")),
        "peak_bytes": lambda f: f"{f['peak_bytes'] / 2**20:,.0f}" if f.get("peak_bytes") else "",
        "needed_bytes": lambda f: (
            f"{f['needed_bytes'] / 2**20:,.0f}" if "needed_bytes" in f else ""
        ),
        "optimizer_bytes": lambda f: f"{f['optimizer_bytes'] / 2**20:.2f}",
        "first_epoch_s": lambda f: f"{f['first_epoch_s']:.1f}",
        "seconds_to_accuracy": lambda f: (
            f"{f['seconds_to_accuracy']:.1f}" if f["seconds_to_accuracy"] else "not reached"
        ),
        "accuracies": lambda f: f"{max(f['accuracies']):.2%}",
    }
    titles = {
        "spread": "middle half apart",
        "thread": "calling thread",
        "first_step_s": "first step, s",
        "trace_s": "trace and lower, s",
        "compile_s": "compile, s",
        "peak_bytes": "the allocator's peak, MiB" if on_gpu else "process, MiB",
        "needed_bytes": "needed, MiB",
        "optimizer_bytes": "optimizer, MiB a device",
        "first_epoch_s": "first epoch, s",
        "seconds_to_accuracy": "to 89 %, s",
        "accuracies": "best epoch",
    }
    every = [f for case in result["cases"] for f in case["contenders"].values() if "median" in f]
    shown = ["spread", *(key for key in columns if any(key in f for f in every))]
    rows = []
    for case in result["cases"]:
        for name, figures in case["contenders"].items():
            if "median" in figures:
                cells = [columns[key](figures) for key in shown]
                rows.append([case["name"], name, _number(figures["median"]), *cells])
    head = ["", "", every[0]["unit"], *(titles.get(key, key) for key in shown)]
    yield from _table(head, rows)


def _section(name: str, result: Result) -> Iterator[str]:
    title, words = SECTIONS[name]
    yield f"## {title}\n"
    yield f"{words}\n"
    if name in plots.DRAWN_BY:
        yield f"![{title}: every contender's figures](assets/plots/{name}.png)\n"
    yield from _ratios(result) if any(case["ratios"] for case in result["cases"]) else ()
    yield ""
    for case in result["cases"]:
        yield from _compiled(case["contenders"].get("mirrored", {}))
    for goal, value in goals.standing({name: result}):
        if goal.contender:
            yield f"- {goal.case}, {goal.text(value)}: {goal.verdict(value)}"
    yield ""
    for caveat in result["caveats"]:
        yield f"- {caveat}"
    load = result["machine"].get("load", 0)
    busy = f" **Other work was running (load {load:g}).**" if _is_busy(result) else ""
    yield f"- Measured {result['date']} on {_machine(result)}.{busy}\n"
    if any("median" in f for case in result["cases"] for f in case["contenders"].values()):
        yield '<details markdown="1"><summary>All figures</summary>\n'
        yield from _figures(result)
        yield "\n</details>\n"
    yield from _notes(name)


def _compiled(figures: Mapping[str, Any]) -> Iterator[str]:
    """What a program sends and takes, where that was looked at."""
    kinds = figures.get("collectives")
    if isinstance(kinds, dict):
        for kind, sent in kinds.items():
            yield f"- {sent['count']} {kind}, {sent['bytes'] / 2**20:,.1f} MiB"
        yield f"- parameters: {figures['parameter_bytes'] / 2**20:,.1f} MiB"
        for part, size in figures["memory"].items():
            yield f"- {part}: {size / 2**20:,.1f} MiB"


def _notes(name: str) -> Iterator[str]:
    path = HERE / "notes" / f"{name}.md"
    if path.exists():
        yield path.read_text().strip() + "\n"


def _is_busy(result: Result) -> bool:
    # The benchmark's own processes, up to five of them, are part of the load.
    return result["machine"].get("load", 0) > 6


def _machine(result: Result) -> str:
    machine = result["machine"]
    place = f"{machine['cores']} cores, {machine['memory']}, {machine['processor']}"
    return f"{machine['gpu']}, {place}" if machine.get("gpu") else place


def _goals(found: Mapping[str, Result]) -> Iterator[str]:
    """What was promised and is not so, or not known."""
    open_goals: dict[str, dict[str, list[str]]] = {"MISSED": {}, "not measured": {}}
    count = {"met": 0, "MISSED": 0, "not measured": 0}
    for goal in goals.GOALS:
        value = goal.value(found[goal.result]) if goal.result in found else None
        verdict = goal.verdict(value)
        count[verdict] += 1
        if verdict != "met":
            what = f"{goal.contender}: {goal.what}" if goal.contender else goal.what
            line = f"[{SECTIONS[goal.result][0]}](#{_anchor(goal)}): {what}, {goal.bound}"
            text = goal.case if value is None else f"{value:.3f}{goal.unit} at {goal.case}"
            open_goals[verdict].setdefault(line, []).append(text)
    yield "## Goals\n"
    yield (
        f"Of {len(goals.GOALS)} goals {count['met']} are met, {count['MISSED']} missed, "
        f"{count['not measured']} not measured. Each stands beside its figure below.\n"
    )
    for verdict, lines in open_goals.items():
        if lines:
            yield f"{verdict.capitalize()}:\n"
            yield from (f"- {line} ({'; '.join(texts)})" for line, texts in lines.items())
            yield ""


def _anchor(goal: goals.Goal) -> str:
    if goal.result.startswith("gpu"):
        return "gpus"
    title = re.sub(r"[^\w\s-]", "", SECTIONS[goal.result][0].lower())
    return re.sub(r"[\s]+", "-", title.strip())


def _machines(results: Iterable[Result]) -> str:
    return "; ".join(sorted({_machine(result) for result in results})) or "none yet"


def _versions(found: Mapping[str, Result]) -> Iterator[str]:
    lines: dict[str, list[str]] = {}
    for name, result in found.items():
        for peer, versions in result["versions"].items():
            text = ", ".join(f"{package} {version}" for package, version in versions.items())
            lines.setdefault(f"{peer}: {text}", []).append(name)
    yield "## Versions\n"
    for line, names in lines.items():
        yield f"- {line} ({', '.join(names)})"
    yield ""


def page(found: Mapping[str, Result]) -> str:
    """The text of the page."""
    on_gpu = {name for name in found if name.startswith("gpu-")}
    caveats = CAVEATS.format(
        machine=_machines(found[name] for name in found if name not in on_gpu),
        gpu=_machines(found[name] for name in on_gpu if found[name]["machine"].get("gpu")),
    )
    lines = [INTRODUCTION, caveats.rstrip()]
    busy = [SECTIONS[name][0] for name, result in found.items() if _is_busy(result)]
    if busy:
        lines.append(
            f"- **The machine was not quiet** when these were measured: {', '.join(busy)}. Rounds "
            "alternate, so a ratio survives that better than a time does; a goal that is missed or "
            "met by little is undecided until it is measured again."
        )
    lines.append("")
    lines += _goals(found)
    for name, result in found.items():
        if name not in on_gpu:
            lines += _section(name, result)
    lines.append("## GPUs\n")
    lines += _notes("gpu")
    for name in SECTIONS:
        if name in on_gpu:
            lines += _section(name, found[name])
    lines += _versions(found)
    lines.append(REPEAT)
    return "\n".join(lines).replace("\n\n\n", "\n\n")


def main() -> None:
    found = read_results()
    PLOTS.mkdir(exist_ok=True)
    for name, result in found.items():
        if name in plots.DRAWN_BY:
            plots.draw(result, PLOTS / f"{name}.png")
    PAGE.write_text(page(found))
    print(f"wrote {PAGE.relative_to(HERE.parent)} from {len(found)} results")


if __name__ == "__main__":
    main()
