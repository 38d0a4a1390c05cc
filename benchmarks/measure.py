"""Side-by-side timing: the same work, equal losses first, alternating rounds, medians."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass
class Contender:
    """One implementation of a workload."""

    name: str
    step: Callable[[], Any]


def check_equal_losses(contenders: list[Contender], steps: int, rtol: float = 1e-5) -> None:
    """Runs every contender for some steps and compares its losses with the first one's."""
    curves = [[float(contender.step()) for _ in range(steps)] for contender in contenders]
    for contender, curve in zip(contenders[1:], curves[1:]):
        np.testing.assert_allclose(curve, curves[0], rtol=rtol, err_msg=contender.name)


def measure(contenders: list[Contender], rounds: int, steps: int) -> dict[str, dict[str, float]]:
    """Times rounds of steps in alternating order.

    Returns:
      By name, microseconds a step: ``wall`` (until the last result is there) and
      ``host`` (until the last call has returned), medians over rounds.
    """
    walls: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    hosts: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for number in range(rounds):
        order = contenders if number % 2 == 0 else contenders[::-1]
        for contender in order:
            jax.block_until_ready(contender.step())
            start = time.perf_counter()
            for _ in range(steps):
                result = contender.step()
            returned = time.perf_counter()
            jax.block_until_ready(result)
            ended = time.perf_counter()
            walls[contender.name].append((ended - start) / steps * 1e6)
            hosts[contender.name].append((returned - start) / steps * 1e6)
    return {
        name: {
            "wall": statistics.median(walls[name]),
            "host": statistics.median(hosts[name]),
            "spread": (max(walls[name]) - min(walls[name])) / statistics.median(walls[name]),
        }
        for name in walls
    }


def ratios(walls_of: dict[str, dict[str, float]], name: str, base: str) -> dict[str, float]:
    """Compares two contenders."""
    return {
        "wall_ratio": walls_of[name]["wall"] / walls_of[base]["wall"],
        "extra_host_us": walls_of[name]["host"] - walls_of[base]["host"],
    }
