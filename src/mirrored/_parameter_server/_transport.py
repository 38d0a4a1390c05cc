"""Transport: what all ways for bytes between processes have in common.

Owns the keys of a cluster, the handling of one question by a service, and the futures
of answers, which are read by whoever waits for them: a thread of its own between the
wire and a worker would cost a change of threads for each message.
"""

from __future__ import annotations

import abc
import concurrent.futures
import dataclasses
import itertools
import secrets
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np

from mirrored._errors import MirroredError, ServerError
from mirrored._parameter_server._channel import (
    Channel,
    Fields,
    Reply,
    Service,
    describe_error,
    gone,
    rebuild_error,
    silent,
)
from mirrored._parameter_server._wire import ANSWER, ERROR, Header, refused


@final
@dataclasses.dataclass(frozen=True)
class Keys:
    """What the processes of one strategy know, and nobody else: it travels through Ray.

    Args:
      token: says on one host that the asker belongs to the strategy.
      server_public: ZeroMQ CURVE keys, in Z85; None where nothing leaves the host.
      server_secret: likewise.
      client_public: likewise, of all who ask.
      client_secret: likewise.
    """

    token: bytes
    server_public: bytes | None = None
    server_secret: bytes | None = None
    client_public: bytes | None = None
    client_secret: bytes | None = None

    def __repr__(self) -> str:
        # Not for logs.
        return "<Keys>"


def make_token() -> bytes:
    """A new secret."""
    return secrets.token_bytes(32)


def answered(
    service: Service, lock: threading.Lock, header: Header, arrays: list[np.ndarray]
) -> tuple[str, Fields, list[np.ndarray]]:
    """Lets a service answer a question; whatever goes wrong is an answer, too."""
    try:
        with lock:
            # A list of its own, which it may keep.
            fields, found = service.handle(header.word, header.fields, list(arrays))
        return ANSWER, fields, found
    except MirroredError as error:
        return ERROR, describe_error(error), []
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        # Fields of another form than the operation's: the asker's mistake, not the end.
        wrong = refused(
            found=f"{header.word!r} with fields that do not fit ({type(error).__name__}: {error})",
            expected="the fields of this operation",
        )
        return ERROR, describe_error(wrong), []
    except Exception as error:  # noqa: BLE001 (one question must not end all others)
        traceback.print_exc()
        return ERROR, describe_error(error), []


class Connection(abc.ABC):
    """One thread's way to a peer: sends, and reads what comes when asked to."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[str, Answer]] = {}
        self.lost = False

    @abc.abstractmethod
    def send(self, number: int, operation: str, fields: Fields, arrays: Any) -> None:
        """Sends a question; raises OSError if the peer is gone."""

    @abc.abstractmethod
    def receive(self, timeout: float | None) -> None:
        """Reads what comes within so many seconds and calls ``arrived``; OSError: gone."""

    @abc.abstractmethod
    def hang_up(self) -> None:
        """Makes the peer seem gone to whoever reads; from any thread, without the lock."""

    @abc.abstractmethod
    def close(self) -> None:
        """Lets go; under the lock."""

    def ask(
        self, operation: str, fields: Fields, arrays: Sequence[np.ndarray], timeout: float | None
    ) -> Answer:
        """Sends a question; the answer comes to who waits for it."""
        answer = Answer(self, operation, timeout)
        with self.lock:
            if self.lost:
                answer.set_exception(gone(self.peer, operation))
                return answer
            number = next(self._numbers)
            self._waiting[number] = operation, answer
            try:
                self.send(number, operation, fields, arrays)
            except OSError:
                self.fail()
            except MirroredError:
                del self._waiting[number]
                raise
        return answer

    def arrived(self, header: Header, arrays: list[np.ndarray]) -> None:
        """Notes an answer."""
        found = self._waiting.pop(header.number, None)
        if found is None:
            return
        if header.word == ANSWER:
            found[1].set_result((header.fields, arrays))
        else:
            found[1].set_exception(rebuild_error(header.fields))

    def fail(self) -> None:
        """The peer is gone, and with it every answer."""
        self.lost = True
        waiting, self._waiting = self._waiting, {}
        for operation, answer in waiting.values():
            answer.set_exception(gone(self.peer, operation))
        self.close()

    def wait(self, answer: Answer, timeout: float | None) -> None:
        """Reads until an answer is there, or the time is over."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not answer.done():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError
            # Another thread may read for all meanwhile; it lets go from time to time.
            if not self.lock.acquire(timeout=-1 if left is None else left):
                raise TimeoutError
            try:
                if not answer.done() and not self.lost:
                    self.receive(_SLICE if left is None else min(left, _SLICE))
            except OSError:
                self.fail()
            finally:
                self.lock.release()


_SLICE = 1.0


@final
class Answer(concurrent.futures.Future[Reply]):
    """The answer to a question; whoever waits for it reads it from the wire."""

    def __init__(self, connection: Connection, operation: str, timeout: float | None) -> None:
        super().__init__()
        self._connection = connection
        self._operation = operation
        self._limit = timeout

    def result(self, timeout: float | None = None) -> Reply:
        """Waits for the answer."""
        if not self.done():
            limit = self._limit if timeout is None else timeout
            try:
                self._connection.wait(self, limit)
            except TimeoutError:
                if timeout is None:
                    raise silent(self._connection.peer, self._operation, limit) from None
                raise
        return super().result(0)


@final
class ConnectedChannel(Channel):
    """A channel with a connection for each thread that uses it.

    Args:
      peer: who is at the other end.
      connect: makes a connection; raises OSError if nobody is there.
    """

    def __init__(self, peer: str, connect: Callable[[], Connection]) -> None:
        self._peer = peer
        self._connect = connect
        self._own = threading.local()
        self._all: list[Connection] = []
        self._closed = False
        # Whether a connection broke, or could not be made.
        self._broken = False

    @property
    def peer(self) -> str:
        return self._peer

    @property
    def is_lost(self) -> bool:
        """Whether the peer went away, as far as this channel knows."""
        return self._broken or any(connection.lost for connection in self._all)

    def submit(
        self,
        operation: str,
        fields: Fields,
        arrays: Sequence[np.ndarray] = (),
        *,
        timeout: float | None = None,
    ) -> concurrent.futures.Future[Reply]:
        connection = getattr(self._own, "connection", None)
        if connection is None:
            if self._closed:
                raise gone(self._peer, operation)
            try:
                connection = self._connect()
            except OSError as error:
                self._broken = True
                raise _nobody(self._peer, error) from error
            self._own.connection = connection
            self._all.append(connection)
        return connection.ask(operation, fields, arrays, timeout)

    def close(self) -> None:
        self._closed = True
        for connection in self._all:
            connection.hang_up()
            with connection.lock:
                connection.fail()


def _nobody(peer: str, error: OSError) -> ServerError:
    return ServerError(
        fact=f"{peer} is gone: it cannot be reached ({error}).",
        expected="a peer that lives until the strategy is closed.",
        hint='with on_server_failure="restore" servers come back from their checkpoint.',
    )


class Listener(abc.ABC):
    """One way for others to reach a service of this process."""

    @property
    @abc.abstractmethod
    def address(self) -> str:
        """Where it is reached."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends it."""
