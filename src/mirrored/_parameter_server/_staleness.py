"""Staleness: how far workers may run apart, as asked for.

Owns the words and their checks; who waits for whom is in ``_turns``.
"""

from __future__ import annotations

import dataclasses
from typing import Any, final

from mirrored._errors import ArgumentError


@final
@dataclasses.dataclass(frozen=True)
class Staleness:
    """How updates of different workers are combined.

    Args:
      kind: "async", "bounded" or "sync".
      bound: under "bounded", how many steps a worker may run ahead of the slowest.
      backup_workers: under "sync", how many gradients of a step are not waited for.
    """

    kind: str = "async"
    bound: int = 0
    backup_workers: int = 0

    def __str__(self) -> str:
        if self.kind == "bounded":
            return f"bounded({self.bound})"
        if self.backup_workers:
            return f"{self.kind} with {self.backup_workers} backup workers"
        return self.kind


def bounded(steps: int) -> Staleness:
    """No worker runs more than ``steps`` steps ahead of the slowest living one.

    >>> import mirrored
    >>> mirrored.bounded(4).bound
    4
    """
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
        raise ArgumentError(
            fact=f"bounded was given {steps!r} steps.",
            expected="a number of steps, 0 or more.",
            hint="0 keeps all workers at the same step; 4 is a usual bound.",
        )
    return Staleness("bounded", steps)


def parse_staleness(staleness: Any, backup_workers: int) -> Staleness:
    """Reads what the strategy was given as ``staleness`` and ``backup_workers``."""
    parsed = None
    if isinstance(staleness, Staleness):
        parsed = staleness
    elif staleness in ("async", "sync"):
        parsed = Staleness(staleness)
    elif isinstance(staleness, tuple) and len(staleness) == 2 and staleness[0] == "bounded":
        parsed = bounded(staleness[1])
    if parsed is None:
        raise ArgumentError(
            fact=f"ParameterServerStrategy was given staleness={staleness!r}.",
            expected='"async", mirrored.bounded(k) or "sync".',
            hint="leave it out for asynchronous training.",
        )
    if not isinstance(backup_workers, int) or backup_workers < 0:
        raise ArgumentError(
            fact=f"ParameterServerStrategy was given backup_workers={backup_workers!r}.",
            expected="a number of workers, 0 or more.",
            hint="1 or 2 are usual.",
        )
    if backup_workers and parsed.kind != "sync":
        raise ArgumentError(
            fact=f"backup_workers={backup_workers} was given with staleness {parsed.kind!r}.",
            expected='staleness="sync", where steps wait for gradients.',
            hint="leave backup_workers out: other workers are not waited for.",
        )
    return dataclasses.replace(parsed, backup_workers=backup_workers)
