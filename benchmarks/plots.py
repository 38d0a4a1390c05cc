"""The plots of the report, one a result; each carries a digest of the figures it shows."""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import results

Result = Mapping[str, Any]
# By the words of a contender's name: the same peer looks the same in every plot.
OURS = "#3949ab"
PEERS = {
    "TensorFlow": "#ef6c00",
    "PyTorch": "#c62828",
    "torch": "#c62828",
    "stock Keras": "#00897b",
    "scan": "#bdbdbd",
    "each step": "#bdbdbd",
    "by hand": "#757575",
    "jax": "#757575",
    "hand-written JAX": "#757575",
}
OTHERS = ("#8d6e63", "#f9a825", "#00897b", "#c62828", "#757575", "#ef6c00")


def digest(result: Result) -> str:
    """A digest of the cases: what a plot shows."""
    return hashlib.sha256(json.dumps(result["cases"], sort_keys=True).encode()).hexdigest()


def draw(result: Result, path: pathlib.Path) -> None:
    """Draws a result into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams |= {
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "figure.dpi": 110,
    }
    figure = DRAWN_BY[result["name"]](result, pyplot)
    figure.savefig(path, metadata={"Source": digest(result), "Software": None}, bbox_inches="tight")
    pyplot.close(figure)


def _colors(names: list[str]) -> dict[str, str]:
    found, others = {}, iter(OTHERS)
    for name in names:
        known = [color for words, color in PEERS.items() if words in name]
        ours = name.startswith("mirrored")
        found[name] = OURS if ours else known[0] if known else next(others)
    return found


def bars(unit: str, *, log: bool = False) -> Callable[[Result, Any], Any]:
    """A bar or, on a log scale, a point for each contender; a line spans half of its rounds."""

    def drawn(result: Result, pyplot: Any) -> Any:
        from matplotlib import ticker

        cases = result["cases"]
        rows = max(len(case["contenders"]) for case in cases)
        figure, axes = pyplot.subplots(
            1, len(cases), figsize=(4.6 * len(cases) + 1.4, 0.45 * rows + 1.2), squeeze=False
        )
        for axis, case in zip(axes[0], cases):
            names = list(case["contenders"])[::-1]
            colors = _colors(names)
            for place, name in enumerate(names):
                figures = case["contenders"][name]
                low, high = results.quartiles(figures["rounds"])
                if log:  # A bar would begin anywhere.
                    axis.plot(figures["median"], place, "o", color=colors[name], markersize=9)
                    axis.plot([low, high], [place, place], color=colors[name], linewidth=2)
                else:
                    axis.barh(place, figures["median"], color=colors[name], height=0.62)
                    axis.plot([low, high], [place, place], color="black", linewidth=1)
                axis.annotate(
                    f"{figures['median']:,.0f}",
                    (max(high, figures["median"]), place),
                    xytext=(5, 0),
                    textcoords="offset points",
                    va="center",
                )
            axis.set_yticks(range(len(names)), names)
            axis.set_xlabel(f"{unit} (log)" if log else unit)
            axis.set_title(case["name"], fontsize=11)
            if log:
                axis.set_xscale("log")
                axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 3)))
                axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
                axis.xaxis.set_minor_locator(ticker.NullLocator())
                axis.grid(axis="x", alpha=0.25)
                axis.set_ylim(-0.6, len(names) - 0.4)
            low, high = axis.get_xlim()
            axis.set_xlim(low, high * 2.2 if log else high * 1.12)
        figure.tight_layout(w_pad=2)
        return figure

    return drawn


def _lines(axis: Any, points: dict[str, list[tuple[float, float]]], unit: str, across: str) -> None:
    from matplotlib import ticker

    colors = _colors(list(points))
    for name, pairs in points.items():
        axis.plot(*zip(*pairs), marker="o", markersize=4, color=colors[name], label=name)
    axis.set_xscale("log", base=2 if across == "replicas" else 10)
    axis.set_yscale("log")
    ticks = sorted({x for pairs in points.values() for x, _ in pairs})
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 3)))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_xlabel(across)
    axis.set_title(unit, fontsize=11)
    axis.grid(alpha=0.25)


def growth_with_replicas(result: Result, pyplot: Any) -> Any:
    panels = {
        "first step, seconds": "first_step_s",
        "traces of the function": "traces",
        "host time of a step, us": "median",
        "memory of the process, MiB": "peak_bytes",
    }
    figure, axes = pyplot.subplots(1, len(panels), figsize=(15, 3.4))
    for axis, (title, key) in zip(axes, panels.items()):
        points: dict[str, list[tuple[float, float]]] = {}
        for case in result["cases"]:
            for name, figures in case["contenders"].items():
                if key in figures:
                    value = figures[key] / 2**20 if key == "peak_bytes" else figures[key]
                    pairs = points.setdefault(name, [])
                    pairs.append((int(case["name"].split()[-1]), value))
        _lines(axis, points, title, "replicas")
    axes[0].legend(frameon=False, fontsize=9)
    figure.tight_layout()
    return figure


def growth_with_variables(result: Result, pyplot: Any) -> Any:
    figure, axes = pyplot.subplots(1, 2, figsize=(9.5, 3.4), sharey=True)
    for axis, replicas in zip(axes, (1, 2)):
        points: dict[str, list[tuple[float, float]]] = {}
        for case in result["cases"]:
            count, devices = (int(word) for word in case["name"].split() if word.isdigit())
            if devices == replicas:
                for name, figures in case["contenders"].items():
                    points.setdefault(name, []).append((count, figures["median"]))
        _lines(axis, points, f"host time of a step, us; R = {replicas}", "variables")
    axes[0].legend(frameon=False, fontsize=9)
    figure.tight_layout()
    return figure


def accuracy_over_time(result: Result, pyplot: Any) -> Any:
    figure, axis = pyplot.subplots(figsize=(7.5, 3.8))
    (case,) = result["cases"]
    colors = _colors(list(case["contenders"]))
    for name, figures in case["contenders"].items():
        seconds, passed = 0.0, []
        for took in [figures["first_epoch_s"], *figures["rounds"]]:
            seconds += took
            passed.append(seconds)
        right = [100 * share for share in figures["accuracies"]]
        axis.plot(passed, right, marker="o", markersize=4, color=colors[name], label=name)
    axis.axhline(100 * case["target"], color="black", linewidth=0.8, linestyle="--")
    axis.set_xlim(left=0)
    axis.set_xlabel("seconds of training (a point an epoch)")
    axis.set_ylabel("% of the test images right")
    axis.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1, 1))
    axis.grid(alpha=0.25)
    figure.tight_layout()
    return figure


_US = "us a step"
DRAWN_BY: dict[str, Callable[[Result, Any], Any]] = {
    "custom-loop": bars(_US, log=True),
    "keras-fit": bars(_US, log=True),
    "growth-replicas": growth_with_replicas,
    "growth-variables": growth_with_variables,
    "nnx": bars(_US),
    "reductions": bars(_US),
    "several-workers": bars(_US),
    "parameter-servers": bars(_US, log=True),
    "fashion": accuracy_over_time,
    "gpu-gpt2": bars(_US),
    "gpu-resnet50": bars(_US),
    "gpu-loop": bars(_US),
}
