"""Tally: what a server counts of what it did, for those who ask how it goes.

Owns numbers only; nothing is decided by them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import final

from mirrored._parameter_server._channel import Fields

# The rate of updates is that of so many whole seconds.
_WINDOW_SECONDS = 10


@final
class Tally:
    """Counts of one server.

    Args:
      clock: tells the time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self.messages = 0
        self.updates = 0
        self.duplicates = 0
        self.late = 0
        # By lease: how many updates there had been when it was last told values.
        self._told: dict[int, int] = {}
        self._steps = 0
        self._staleness = 0
        self._staleness_most = 0
        self._by_second: dict[int, int] = {}

    def told(self, lease: int | None) -> None:
        """Notes that a worker was given values as they are now."""
        if lease is not None:
            self._told[lease] = self.updates

    def came(self, lease: int | None) -> None:
        """Notes a worker's gradients, of values that others may have changed since."""
        if lease is not None and lease in self._told:
            missed = self.updates - self._told[lease]
            self._steps += 1
            self._staleness += missed
            self._staleness_most = max(self._staleness_most, missed)

    def updated(self) -> None:
        """Notes an update."""
        self.updates += 1
        second = int(self._clock())
        if second not in self._by_second:
            oldest = second - _WINDOW_SECONDS
            self._by_second = {at: n for at, n in self._by_second.items() if at >= oldest}
        self._by_second[second] = self._by_second.get(second, 0) + 1

    def forget(self, lease: int) -> None:
        """A worker is gone."""
        self._told.pop(lease, None)

    def as_fields(self) -> Fields:
        """What to say of it."""
        now = self._clock()
        since = max(self._began, int(now) - _WINDOW_SECONDS)
        recent = sum(n for at, n in self._by_second.items() if at + 1 > since)
        return {
            "seconds": now - self._began,
            "messages": self.messages,
            "updates": self.updates,
            "updates_a_second": recent / max(now - since, 1e-3),
            "duplicates": self.duplicates,
            "late": self.late,
            "staleness_mean": self._staleness / max(1, self._steps),
            "staleness_most": self._staleness_most,
        }
