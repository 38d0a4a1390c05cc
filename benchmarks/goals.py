"""What the figures must show: each goal a number of one case, and whether it is met.

Owns the limits and nothing of how they are measured. Goals whose figures need a machine that is
not here are listed as well, so that a report says that they are missing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Goal:
    """A ratio of a case (or a figure of a contender), and its limit."""

    result: str
    case: str
    what: str
    limit: float
    # A figure that is no ratio: the contender's name; `what` is the figure's.
    contender: str = ""
    at_least: bool = False
    # `what` is how the ratio's name begins: the best one of several peers stands behind it.
    first_words: bool = False
    unit: str = ""

    def value(self, found: Mapping[str, Any]) -> float | None:
        """The number in a result; None where it is missing."""
        for case in found["cases"]:
            if case["name"] == self.case:
                if self.contender:
                    return case["contenders"].get(self.contender, {}).get(self.what)
                return next((v for key, v in case["ratios"].items() if self.fits(key)), None)
        return None

    def fits(self, key: str) -> bool:
        """Says whether a ratio is the one meant: by its whole name, or by its first words."""
        return key == self.what or (self.first_words and key.startswith(self.what))

    def verdict(self, value: float | None) -> str:
        if value is None:
            return "not measured"
        met = value >= self.limit if self.at_least else value <= self.limit
        return "met" if met else "MISSED"

    def text(self, value: float | None) -> str:
        """What is measured, what came out, and the limit."""
        name = f"{self.contender}: {self.what}" if self.contender else self.what
        figure = "" if value is None else f" {value:.3f}{self.unit},"
        return f"{name}:{figure} {self.bound}"

    @property
    def bound(self) -> str:
        return f"{'at least' if self.at_least else 'at most'} {self.limit:.4g}{self.unit}"


def _everywhere(result: str, cases: list[str], what: str, limit: float, **more: Any) -> list[Goal]:
    return [Goal(result, case, what, limit, **more) for case in cases]


_REPLICAS = (1, 2, 4, 8, 16, 32, 64)
_BOTH = ["R = 1", "R = 2"]
_FITS = ["mlp, R = 1", "mlp, R = 2"]
_STOCK = "stock Keras DataParallel fit"
_EACH = [f"R = {count}" for count in _REPLICAS]

GOALS = (
    *_everywhere("custom-loop", _BOTH, "mirrored / hand-written JAX", 1.02),
    *_everywhere(
        "custom-loop", _BOTH, "extra_host_us", 15, contender="mirrored", unit=" us a call"
    ),
    *_everywhere("keras-fit", _FITS, "mirrored fit / hand-written JAX, scan", 1.05),
    *_everywhere("keras-fit", _FITS, f"mirrored fit / {_STOCK}", 1 / 1.5),
    *_everywhere("keras-fit", _FITS, "mirrored fit / TensorFlow MirroredStrategy fit", 0.1),
    *_everywhere(
        "keras-fit",
        _FITS,
        "mirrored fit, batch callback / stock Keras fit, batch callback",
        1.0,
    ),
    *_everywhere("keras-fit", _FITS, f"mirrored fit / {_STOCK}, thread", 0.25),
    Goal("keras-fit", "cnn, R = 2", f"mirrored fit / {_STOCK}", 1.0),
    *_everywhere("growth-replicas", _EACH, "mirrored / hand-written JAX, host", 1.05),
    # One to learn the types of the results, and the real one.
    *_everywhere("growth-replicas", _EACH, "traces", 2, contender="mirrored"),
    *_everywhere(
        "growth-variables",
        ["400 variables, R = 1", "400 variables, R = 2"],
        "mirrored / hand-written JAX, host",
        1.15,
    ),
    *_everywhere(
        "nnx",
        ["R = 2", "R = 8"],
        "mirrored / by hand, split and merged each step",
        1.1,
    ),
    Goal("several-workers", "2 processes", "mirrored / PyTorch DDP", 1.0),
    Goal("several-workers", "2 processes", "collectives", 1, contender="mirrored"),
    *(
        Goal(
            "parameter-servers",
            case,
            f"mirrored, {steps} a closure / TensorFlow",
            limit,
            first_words=True,
        )
        for case, limit in (("mlp", 1 / 3), ("embedding", 1 / 2), ("embedding-adagrad", 1 / 2))
        for steps in (1, 50)
    ),
    *(
        Goal(f"gpu-{workload}", "1 GPU", f"{style} / jax, {what}", limit)
        for workload in ("gpt2", "resnet50")
        for style in ("functional", "variables")
        for what, limit in (("time", 1.005), ("memory", 1.0))
    ),
    Goal("gpu-gpt2", "1 GPU", "functional / torch, time", 1.0),
    Goal("gpu-resnet50", "1 GPU", "functional / torch, time", 1.0),
)


def standing(found: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[Goal, float | None]]:
    """Each goal of these results, and its number."""
    for goal in GOALS:
        if goal.result in found:
            yield goal, goal.value(found[goal.result])
