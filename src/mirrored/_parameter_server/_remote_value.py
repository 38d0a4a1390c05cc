"""RemoteValue: what a closure will have returned.

Owns waiting for it.
"""

from __future__ import annotations

import threading
from typing import Any, final

from mirrored._errors import WorkerError
from mirrored._values import NestLeaf


@final
class RemoteValue(NestLeaf):
    """The result of a closure, which may not have run yet.

    Returned by ``ClusterCoordinator.schedule``.

    >>> import mirrored
    >>> strategy = mirrored.ParameterServerStrategy(worker_count=1)
    >>> coordinator = mirrored.ClusterCoordinator(strategy)
    >>> coordinator.schedule(lambda x: x + 1, args=(2,)).fetch()
    3
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._ready = threading.Event()
        self._value: Any = None
        self._error: Exception | None = None

    def fetch(self, timeout: float | None = None) -> Any:
        """Waits for the closure and returns what it returned, arrays as NumPy arrays.

        Raises what it raised, or CancelledError if it never ran because another failed.
        """
        if not self._ready.wait(timeout):
            raise WorkerError(
                fact=f"{self._name} was not over within {timeout} s.",
                expected="its result.",
                hint="fetch again, or leave timeout out.",
            )
        if self._error is not None:
            raise self._error
        return self._value

    def get(self, timeout: float | None = None) -> Any:
        """The same as ``fetch``: results are brought here when the closure is over."""
        return self.fetch(timeout)

    def set(self, value: Any) -> None:
        """Notes the value; the first one counts."""
        if not self._ready.is_set():
            self._value = value
            self._ready.set()

    def fail(self, error: Exception) -> None:
        """Notes an error."""
        if not self._ready.is_set():
            self._error = error
            self._ready.set()

    def __repr__(self) -> str:
        state = "waiting"
        if self._ready.is_set():
            state = "failed" if self._error is not None else "ready"
        return f"<RemoteValue of {self._name}, {state}>"
