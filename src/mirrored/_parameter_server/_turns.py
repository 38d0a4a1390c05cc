"""Turns: who waits for whom, so that no worker runs too far from the others.

Owns the count of steps of each worker and who belongs to the group at the moment. Server
0 keeps it for all. It holds no gradients and sends nothing: it answers questions, so a
worker that is gone can at worst stop asking.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import final

from mirrored._parameter_server._staleness import Staleness

# Each round is told to all servers by all who took part in it. A server has missed one if
# all of those died before; so many in a row it does not miss.
_ROUNDS_KEPT = 16


@final
class Turns:
    """How far the workers are, and which of them are waited for.

    Args:
      staleness: what was asked for.
      patience: how many seconds the others wait for a member that does not come; then
        they go on without it, until it comes.
      clock: tells the time.
    """

    def __init__(
        self,
        staleness: Staleness,
        patience: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._staleness = staleness
        self.patience = patience
        self._clock = clock
        # How many steps each member has done.
        self.steps: dict[int, int] = {}
        self._heard: dict[int, float] = {}
        # "sync": the number of the step that gradients are gathered for, and whose came.
        self.round = 0
        self._offered: set[int] = set()
        # The last of them: number, and whose gradients were taken.
        self.closed: list[tuple[int, list[int]]] = []
        self.suspended = 0
        # Under "bounded": how many steps ahead of the slowest a worker was in a step.
        self.farthest_ahead = 0

    def join(self, lease: int) -> int:
        """Makes a worker a member; it starts where the slowest member is, or later."""
        start = max(self.steps.get(lease, 0), min(self.steps.values(), default=self._last))
        self.steps[lease] = start
        self._heard[lease] = self._clock()
        return self.round if self._staleness.kind == "sync" else start

    _last = 0

    def leave(self, lease: int) -> None:
        """Waits for a worker no longer."""
        self._last = max(self._last, self.steps.pop(lease, 0))
        self._heard.pop(lease, None)
        self._offered.discard(lease)

    def is_member(self, lease: int) -> bool:
        """Says whether a worker is waited for."""
        return lease in self.steps

    def may_go(self, lease: int) -> bool:
        """Under "bounded": whether a worker may begin its next step."""
        if lease not in self.steps:
            self.join(lease)
        self._heard[lease] = self._clock()
        ahead = self.steps[lease] - min(self.steps.values())
        if ahead <= self._staleness.bound:
            return True
        slowest = [
            member
            for member, steps in self.steps.items()
            if self.steps[lease] - steps > self._staleness.bound
        ]
        self._suspend(slowest)
        return self.steps[lease] - min(self.steps.values()) <= self._staleness.bound

    def done(self, lease: int) -> None:
        """Under "bounded": a worker has done a step."""
        self.farthest_ahead = max(self.farthest_ahead, self.steps[lease] - min(self.steps.values()))
        self.steps[lease] += 1
        self._heard[lease] = self._clock()

    def offer(self, lease: int) -> None:
        """Under "sync": the gradient of a worker for this round is there."""
        if lease not in self.steps:
            self.join(lease)
        self._heard[lease] = self._clock()
        self._offered.add(lease)

    def close(self) -> list[int] | None:
        """Under "sync": whose gradients make the step, if enough are there."""
        waiting = len(self._offered)
        needed = max(1, len(self.steps) - self._staleness.backup_workers)
        if 0 < waiting < needed:
            self._suspend([member for member in self.steps if member not in self._offered])
            needed = max(1, len(self.steps) - self._staleness.backup_workers)
        if waiting < needed:
            return None
        leases = sorted(self._offered)
        self.closed = [*self.closed[1 - _ROUNDS_KEPT :], (self.round, leases)]
        self.round += 1
        self._offered.clear()
        return leases

    def heard(self, lease: int) -> None:
        """Notes that a worker still asks."""
        if lease in self._heard:
            self._heard[lease] = self._clock()

    def be_more_patient(self) -> None:
        """A worker was only slow: gives it more time, or it would never be waited for."""
        self.patience *= 2

    def _suspend(self, members: list[int]) -> None:
        now = self._clock()
        for member in members:
            if now - self._heard[member] > self.patience:
                self.leave(member)
                self.suspended += 1
