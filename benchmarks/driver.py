"""Contenders in processes of their own, driven in turn: the frame of all benchmarks with peers.

Owns how a contender is asked (a line of JSON, answered by a line of JSON), how rounds alternate,
what a ratio is, and the form of a result. A script of a contender calls ``serve``; a benchmark
starts it as a ``Process`` and calls ``check_losses`` and ``time_rounds``. Nothing here needs more
than Python, so that it runs in every peer's environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

# Packages whose versions are told, where a contender's environment has them.
PACKAGES = ("jax", "jaxlib", "optax", "keras", "flax", "numpy", "tensorflow", "torch", "ray")


class ContenderError(RuntimeError):
    """A contender said that a request failed, or ended."""


# --- in the contender's process ---------------------------------------------------------------


def serve(
    make: Callable[[str], Callable[[], Any]],
    wait: Callable[[Any], Any],
    announce: Callable[[int, bool], Any] = lambda count, with_losses: None,
    more: Mapping[str, Callable[[Any], dict[str, Any]]] | None = None,
) -> None:
    """Answers requests from standard input until it is closed.

    Before it trains it announces how many steps come, and whether their losses will be looked at:
    the first one of several processes passes that on to the others.

    - ``{"make": name}``: ``make(name)`` gives a step, a function of no arguments that returns the
      loss; it is called once. Answers with ``seconds`` and ``loss``.
    - ``{"losses": n, "of": name}``: the losses of n further steps.
    - ``{"time": n, "of": name}``: microseconds a step of n further steps: ``wall`` until the last
      loss is there, ``host`` until the last call has returned, ``thread`` the processor time of
      the calling thread.
    - ``{"single": n, "of": name}``: medians over n steps, each waited for: ``host`` of the call
      alone and ``thread`` of the call alone.
    - ``{"memory": 1}``: the most memory the process ever had, in bytes.
    - ``{key: value}`` of a key in ``more``: what ``more[key](value)`` returns.
    """
    # Libraries print to standard output; the answers keep the real one to themselves.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    made: dict[str, Callable[[], Any]] = {}
    say({"versions": versions()})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "make" in request:
                start = time.perf_counter()
                step = made[request["make"]] = make(request["make"])
                announce(1, True)
                loss = float(step())
                say({"seconds": time.perf_counter() - start, "loss": loss})
            elif more and (known := more.keys() & request.keys()):
                (key,) = known
                say(more[key](request[key]))
            elif "memory" in request:
                say({"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024})
            else:
                looked_at = "losses" in request
                extra = 1 if "time" in request else 0
                announce(extra + next(iter(request.values())), looked_at)
                say(_trained(request, made[request["of"]], wait))
        except Exception as error:  # noqa: BLE001 -- told to whoever asked; others go on
            traceback.print_exc()
            say({"error": f"{type(error).__name__}: {str(error)[:500]}"})


def _trained(request: dict[str, Any], step: Any, wait: Any) -> dict[str, Any]:
    if "losses" in request:
        return {"losses": [float(step()) for _ in range(request["losses"])]}
    if "single" in request:
        hosts, threads = [], []
        for _ in range(request["single"]):
            worked, start = time.thread_time(), time.perf_counter()
            result = step()
            hosts.append((time.perf_counter() - start) * 1e6)
            threads.append((time.thread_time() - worked) * 1e6)
            wait(result)
        return {"host": statistics.median(hosts), "thread": statistics.median(threads)}
    count = request["time"]
    wait(step())
    worked, start = time.thread_time(), time.perf_counter()
    for _ in range(count):
        result = step()
    returned, work = time.perf_counter(), time.thread_time() - worked
    wait(result)
    scale = 1e6 / count
    wall = (time.perf_counter() - start) * scale
    return {"wall": wall, "host": (returned - start) * scale, "thread": work * scale}


# --- in the benchmark's process ---------------------------------------------------------------


class Process:
    """A contender's process, started and waiting for requests."""

    def __init__(self, name: str, command: list[str], **environment: str) -> None:
        self.name = name
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"} | environment,
            # A process that starts others ends together with them.
            start_new_session=True,
        )
        self.versions: dict[str, str] = self._answer()["versions"]

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer will say that it ended
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ContenderError(f"{self.name} ended with {self._process.wait()}")
        found = json.loads(line)
        if "error" in found:
            raise ContenderError(f"{self.name}: {found['error']}")
        return found

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)
        self._process.wait()


def check_losses(
    runners: Mapping[str, Process], count: int, tolerance: float
) -> dict[str, list[float]]:
    """Makes every contender and refuses to go on with one that trains something else."""
    curves: dict[str, list[float]] = {}
    for name, process in runners.items():
        first = process.ask(make=name)["loss"]
        curves[name] = [first, *process.ask(losses=count, of=name)["losses"]]
    compare_curves(curves, tolerance)
    return curves


def compare_curves(curves: Mapping[str, list[float]], tolerance: float) -> None:
    """Refuses curves of losses that are not the first one's."""
    base = next(iter(curves))
    for name in curves:
        worst = max(abs(a - b) / abs(b) for a, b in zip(curves[name], curves[base]))
        if not worst <= tolerance:
            text = (
                f"the losses of {name} are {worst:.2e} off those of {base}, more than {tolerance}"
            )
            raise ContenderError(f"{text}: {curves[name]} and {curves[base]}")


def time_rounds(
    runners: Mapping[str, Process], rounds: int, steps: int | Mapping[str, int]
) -> dict[str, dict[str, Any]]:
    """Times the contenders in turn: by name the medians, and the rounds they come from."""
    timed: dict[str, list[dict[str, float]]] = {name: [] for name in runners}
    for number in range(rounds):
        names = list(runners) if number % 2 == 0 else list(runners)[::-1]
        for name in names:
            count = steps if isinstance(steps, int) else steps[name]
            timed[name].append(runners[name].ask(time=count, of=name))
    return {
        name: {
            "median": statistics.median(item["wall"] for item in rounds_of),
            "unit": "us a step",
            "rounds": [round(item["wall"], 2) for item in rounds_of],
            "host": statistics.median(item["host"] for item in rounds_of),
            "thread": statistics.median(item["thread"] for item in rounds_of),
        }
        for name, rounds_of in timed.items()
    }


def single_rounds(
    runners: Mapping[str, Process], rounds: int, steps: int
) -> dict[str, dict[str, Any]]:
    """Times calls one by one, with idle devices, in turn: the host time of a step by name."""
    timed: dict[str, list[dict[str, float]]] = {name: [] for name in runners}
    for number in range(rounds):
        for name in list(runners) if number % 2 == 0 else list(runners)[::-1]:
            timed[name].append(runners[name].ask(single=steps, of=name))
    return {
        name: {
            "median": statistics.median(item["host"] for item in rounds_of),
            "unit": "us of host time a step",
            "rounds": [round(item["host"], 2) for item in rounds_of],
            "thread": statistics.median(item["thread"] for item in rounds_of),
        }
        for name, rounds_of in timed.items()
    }


def ratio(contenders: Mapping[str, Mapping[str, Any]], name: str, base: str) -> float:
    """The median over rounds of the ratio within a round."""
    pairs = zip(contenders[name]["rounds"], contenders[base]["rounds"])
    return statistics.median(ours / theirs for ours, theirs in pairs)


def spread(rounds: list[float]) -> float:
    """How far the middle half of the rounds is apart, as a share of their median."""
    low, _, high = statistics.quantiles(rounds, n=4)
    return (high - low) / statistics.median(rounds)


def show(case: Mapping[str, Any]) -> None:
    """Prints a case, ratios first."""
    print(case["name"])
    for key, value in case["ratios"].items():
        print(f"    {key}: {value:.3f}")
    for name, figures in case["contenders"].items():
        text = f"    {name:28} {figures['median']:10.1f} {figures['unit']}"
        if len(figures.get("rounds", ())) > 1:
            text += f", middle half {spread(figures['rounds']):.0%} apart"
        if "host" in figures:
            text += f", host {figures['host']:.1f}"
        print(text, flush=True)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    if "tensorflow" not in found:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found["tensorflow"] = metadata.version("tensorflow-cpu")
    return found


def machine() -> dict[str, Any]:
    model = platform.machine()
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
        model = names[0] if names else model
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "memory": f"{memory:.0f} GiB",
        "system": platform.system(),
    }


def write_result(
    path: str | None,
    name: str,
    cases: list[dict[str, Any]],
    versions_of: dict[str, dict[str, str]],
    caveats: list[str],
) -> None:
    """Writes a result in the form that the report and the comparison read."""
    if not path:
        return
    result = {
        "name": name,
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": versions_of,
        "caveats": caveats,
        "cases": cases,
    }
    with open(path, "w") as file:
        json.dump(result, file, indent=1)
        file.write("\n")
