"""Ctrl-C between steps, never inside one.

Owns the moment between giving a step the model's arrays and storing the new ones: an
interrupt there would leave a model without values.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, final


@final
class Interrupts:
    """Holds SIGINT back while a step's arrays change hands."""

    def __init__(self) -> None:
        self._previous: Any = None
        self._holding = False
        self._pending = False

    @contextlib.contextmanager
    def watched(self) -> Iterator[Interrupts]:
        """Takes SIGINT over for the block; only the main thread can."""
        previous = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not callable(previous):
            yield self
            return
        self._previous = previous
        signal.signal(signal.SIGINT, self._handle)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, previous)

    def hold(self) -> None:
        """From here on an interrupt waits for ``release``."""
        self._holding = True

    def release(self) -> None:
        """Lets a waiting interrupt happen."""
        self._holding = False
        if self._pending:
            self._pending = False
            self._previous(signal.SIGINT, None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._holding:
            self._pending = True
        else:
            self._previous(number, frame)
