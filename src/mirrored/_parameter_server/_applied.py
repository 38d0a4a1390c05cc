"""Which updates a server has applied, so that none is applied twice.

Owns the steps of each closure that is not over. A closure that runs again, because its
worker was lost, sends the same numbers again.
"""

from __future__ import annotations

from typing import final

from mirrored._parameter_server._channel import Fields


@final
class Applied:
    """The last step of each closure that was applied."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}
        self._floor = 0

    def has(self, closure: int, step: int) -> bool:
        """Says whether an update was applied before."""
        return closure < self._floor or step <= self._last.get(closure, -1)

    def note(self, closure: int, step: int) -> None:
        """Notes an update; steps of one closure come in order."""
        self._last[closure] = max(step, self._last.get(closure, -1))

    def forget_below(self, floor: int) -> None:
        """Forgets closures that are over: nobody runs them again."""
        if floor > self._floor:
            self._floor = floor
            self._last = {closure: step for closure, step in self._last.items() if closure >= floor}

    def as_fields(self) -> Fields:
        """What to keep in a checkpoint."""
        return {"floor": self._floor, "last": sorted(self._last.items())}

    def restore(self, fields: Fields) -> None:
        """Takes up what a checkpoint kept."""
        self._floor = fields["floor"]
        self._last = {closure: step for closure, step in fields["last"]}
