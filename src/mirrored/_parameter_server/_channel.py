"""A way to ask one peer: the seam between parameter servers and how bytes reach them.

Owns what a message is (an operation, plain fields, arrays), what an answer is, and how
an error crosses; the channel inside one process. Transports between processes are in
modules of their own and know nothing of what is asked. Nothing here unpickles anything.
"""

from __future__ import annotations

import abc
import concurrent.futures
import threading
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, final

import numpy as np

from mirrored import _errors
from mirrored._errors import MirroredError, ServerError

# Fields are what JSON can say: None, bools, numbers, strings, and lists and dictionaries
# (with string keys) of them.
Fields: TypeAlias = dict[str, Any]
Reply: TypeAlias = tuple[Fields, list[np.ndarray]]


class Service(Protocol):
    """What stands behind a channel and answers.

    A service is asked by one thread at a time, unless it says otherwise itself: whoever
    serves it holds its ``lock`` around ``handle``. Arrays in both directions are
    C-contiguous NumPy arrays of any dtype, ml_dtypes' included; neither side changes an
    array after it handed it over, so a channel need not copy. A service raises
    MirroredError for what the asker did wrong; the channel raises the same there.
    """

    def handle(self, operation: str, fields: Fields, arrays: list[np.ndarray]) -> Reply:
        """Answers one message."""
        ...


class Channel(abc.ABC):
    """A way to one peer, used by any number of threads.

    What the service raises is raised at the asker, by class name and text. A peer that
    is gone, or silent for longer than the timeout, is a ServerError that names it; the
    message may then have been handled or not, and the asker sends it again with the
    same step id where that matters.
    """

    @property
    @abc.abstractmethod
    def peer(self) -> str:
        """Who is at the other end, for messages: "server 1", say."""

    @abc.abstractmethod
    def submit(
        self,
        operation: str,
        fields: Fields,
        arrays: Sequence[np.ndarray] = (),
        *,
        timeout: float | None = None,
    ) -> concurrent.futures.Future[Reply]:
        """Sends a message and returns at once; messages of one thread arrive in order."""

    def request(
        self,
        operation: str,
        fields: Fields,
        arrays: Sequence[np.ndarray] = (),
        *,
        timeout: float | None = None,
    ) -> Reply:
        """Sends a message and waits for its answer, ``timeout`` seconds at most."""
        future = self.submit(operation, fields, arrays, timeout=timeout)
        try:
            return future.result(timeout)
        except TimeoutError:
            raise silent(self.peer, operation, timeout) from None

    @abc.abstractmethod
    def close(self) -> None:
        """Lets go of the connection; what is still waited for fails."""


def silent(peer: str, operation: str, timeout: float | None) -> ServerError:
    """The error for a peer that did not answer in time."""
    return ServerError(
        fact=f"{peer} did not answer {operation!r} within {timeout} s.",
        expected="an answer.",
        hint="see whether it still runs; a longer timeout= helps only if it is merely slow.",
    )


def gone(peer: str, operation: str) -> ServerError:
    """The error for a peer that is not there any more."""
    return ServerError(
        fact=f"{peer} is gone: {operation!r} had no answer.",
        expected="a peer that lives until the strategy is closed.",
        hint='with on_server_failure="restore" servers come back from their checkpoint.',
    )


def describe_error(error: Exception) -> Fields:
    """Says an error in fields, to be raised again at the other end by ``rebuild_error``."""
    if isinstance(error, MirroredError):
        return {
            "class": type(error).__name__,
            "fact": error.fact,
            "expected": error.expected,
            "hint": error.hint,
        }
    return {
        "class": ServerError.__name__,
        "fact": f"{type(error).__name__} while a message was handled: {error}",
        "expected": "no such error.",
        "hint": "its traceback is in the log of the process that raised it.",
    }


def rebuild_error(fields: Fields) -> MirroredError:
    """Makes an error of what ``describe_error`` said; an unknown class is a MirroredError."""
    kind = getattr(_errors, str(fields.get("class")), None)
    if not (isinstance(kind, type) and issubclass(kind, MirroredError)):
        kind = MirroredError
    return kind(
        fact=str(fields.get("fact")),
        expected=str(fields.get("expected")),
        hint=str(fields.get("hint")),
    )


@final
class InProcessChannel(Channel):
    """Asks a service of this process, in the asking thread.

    Args:
      service: who answers.
      peer: its name for messages.
      lock: held around ``handle``; the same object in every channel to one service.
    """

    def __init__(self, service: Service, peer: str, lock: threading.Lock) -> None:
        self._service = service
        self._peer = peer
        self._lock = lock
        self._closed = False

    @property
    def peer(self) -> str:
        return self._peer

    def submit(
        self,
        operation: str,
        fields: Fields,
        arrays: Sequence[np.ndarray] = (),
        *,
        timeout: float | None = None,
    ) -> concurrent.futures.Future[Reply]:
        future: concurrent.futures.Future[Reply] = concurrent.futures.Future()
        if not self._lock.acquire(timeout=-1 if timeout is None else timeout):
            future.set_exception(silent(self._peer, operation, timeout))
            return future
        try:
            if self._closed:
                raise gone(self._peer, operation)
            future.set_result(self._service.handle(operation, fields, list(arrays)))
        except MirroredError as error:
            # The asker raises it with its own traceback: an error object is not shared.
            future.set_exception(rebuild_error(describe_error(error)))
        finally:
            self._lock.release()
        return future

    def close(self) -> None:
        self._closed = True
