"""The form of a result: cases with contenders and ratios, the machine, the versions.

Owns what is written, how it is printed, and how two results of the same benchmark compare. Nothing
here needs more than Python, so that it runs in every peer's environment.

A case has a ``name``, ``contenders`` (by name: ``median``, ``unit``, ``rounds`` and whatever else
was read) and ``ratios``, whose keys read "ours / theirs" or "ours / theirs, of what".
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

# Packages whose versions are told, where a contender's environment has them.
PACKAGES = (
    "jax",
    "jaxlib",
    "optax",
    "keras",
    "flax",
    "numpy",
    "tensorflow",
    "torch",
    "torchvision",
    "ray",
)
# Read when a benchmark starts.
_LOAD = os.getloadavg()[0]
# What may get worse by so much is not worth a word; a single reading is less certain.
WORSE, WORSE_ONCE = 1.05, 1.25


def ratio(contenders: Mapping[str, Mapping[str, Any]], name: str, base: str) -> float:
    """The median over rounds of the ratio within a round."""
    return statistics.median(_round_ratios(contenders, name, base))


def _round_ratios(contenders: Mapping[str, Mapping[str, Any]], name: str, base: str) -> list[float]:
    pairs = zip(contenders[name]["rounds"], contenders[base]["rounds"])
    return [ours / theirs for ours, theirs in pairs]


def quartiles(rounds: list[float]) -> tuple[float, float]:
    """Between which values the middle half of the rounds lies."""
    low, _, high = statistics.quantiles(rounds, n=4, method="inclusive")
    return low, high


def spread(rounds: list[float]) -> float:
    """How far the middle half of the rounds is apart, as a share of their median."""
    low, high = quartiles(rounds)
    return (high - low) / statistics.median(rounds)


def middle_half(case: Mapping[str, Any], key: str) -> tuple[float, float] | None:
    """Between which values half of a ratio's rounds lie; None where it is no ratio of rounds."""
    contenders = case["contenders"]
    name, _, rest = key.partition(" / ")
    base = max((other for other in contenders if rest.startswith(other)), key=len, default="")
    with contextlib.suppress(KeyError):
        found = _round_ratios(contenders, name, base)
        # The key of a ratio of something else than rounds has another value.
        if len(found) > 2 and abs(statistics.median(found) - case["ratios"][key]) < 1e-6:
            return quartiles(found)
    return None


def show(case: Mapping[str, Any]) -> None:
    """Prints a case, ratios first."""
    print(case["name"])
    for key, value in case["ratios"].items():
        print(f"    {key}: {value:.3f}")
    for name, figures in case["contenders"].items():
        if "median" not in figures:
            continue
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
        # Of the last minute, without what is measured: it should be close to nothing.
        "load": round(_LOAD, 1),
    }


def write_result(
    path: str | None,
    name: str,
    cases: list[dict[str, Any]],
    versions_of: Mapping[str, Mapping[str, str]],
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
    # Whole or not at all: an interruption leaves the file that was there.
    unfinished = pathlib.Path(f"{path}.unfinished")
    unfinished.write_text(json.dumps(result, indent=1) + "\n")
    unfinished.replace(path)


def what_got_worse(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """Says each ratio that rose by more than 5 % and further than its rounds are apart."""
    cases_before = {case["name"]: case for case in old["cases"]}
    for case in new["cases"]:
        before = cases_before.get(case["name"], {"ratios": {}})
        for key, value in case["ratios"].items():
            was = before["ratios"].get(key)
            if not was:
                continue
            now_half, old_half = middle_half(case, key), middle_half(before, key)
            certain = now_half is not None and old_half is not None
            if certain and now_half[0] <= old_half[1]:
                continue
            if value > was * (WORSE if certain else WORSE_ONCE):
                yield f"{new['name']}, {case['name']}: {key} rose from {was:.3f} to {value:.3f}"
