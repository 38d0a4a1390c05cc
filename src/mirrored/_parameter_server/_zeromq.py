"""Transport between hosts: ZeroMQ, with CURVE wherever it leaves the host.

Owns its sockets, what becomes of frames that are no message, and noticing that the other
end went away. On the loopback interface the token says who belongs to the strategy; off
it nothing is exchanged before both ends have proved that they hold its keys, and all that
is sent is encrypted.
"""

from __future__ import annotations

import contextlib
import hmac
import threading
from collections.abc import Sequence
from typing import Any, final

import numpy as np
import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from mirrored._errors import MirroredError
from mirrored._parameter_server._channel import Fields, Service, describe_error
from mirrored._parameter_server._transport import Connection, Keys, Listener, answered
from mirrored._parameter_server._wire import (
    ERROR,
    MOST_ARRAYS,
    Header,
    as_array,
    packed,
    parsed,
    raw,
    refused,
)

# A peer that says nothing for so long is gone; ZeroMQ's own thread says something meanwhile.
_HEARTBEAT_MS = 2_000
_SILENCE_MS = 15_000
_GONE = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_CONNECT_RETRIED
# Larger arrays are handed to ZeroMQ as they are; of smaller ones a copy is cheaper.
_COPIED_BYTES = 64 << 10


def make_curve_keys() -> tuple[bytes, bytes]:
    """A new public and secret key, in Z85."""
    return zmq.curve_keypair()


def _socket(context: zmq.Context[Any], kind: int) -> Any:
    made = context.socket(kind)
    made.linger = 0
    made.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    made.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
    made.setsockopt(zmq.SNDHWM, 0)
    made.setsockopt(zmq.RCVHWM, 0)
    return made


def _frames(header: bytes, arrays: Sequence[np.ndarray]) -> list[Any]:
    return [header, *[raw(array) for array in arrays]]


def _send(to: Any, frames: Sequence[Any]) -> None:
    for index, frame in enumerate(frames):
        more = 0 if index == len(frames) - 1 else zmq.SNDMORE
        to.send(frame, zmq.NOBLOCK | more, copy=len(frame) < _COPIED_BYTES)


def _arrays(header: Header, frames: Sequence[Any]) -> list[np.ndarray]:
    if len(frames) != len(header.arrays):
        raise refused(found=f"{len(frames)} frames of arrays", expected=f"{len(header.arrays)}")
    return [
        as_array(described, frame.buffer)
        for described, frame in zip(header.arrays, frames, strict=True)
    ]


@final
class ZeroMqConnection(Connection):
    """A connection to a peer on any host."""

    def __init__(self, peer: str, address: str, keys: Keys, *, encrypted: bool) -> None:
        super().__init__(peer)
        self._token = keys.token
        self._socket = _socket(zmq.Context.instance(), zmq.DEALER)
        # One that is gone may come back as another: nobody waits for it here.
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, _SILENCE_MS)
        if encrypted:
            self._socket.curve_serverkey = keys.server_public
            self._socket.curve_publickey = keys.client_public
            self._socket.curve_secretkey = keys.client_secret
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED
            | zmq.EVENT_CLOSED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        )
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._ended = False
        self._socket.connect(address)

    def send(self, number: int, operation: str, fields: Fields, arrays: Any) -> None:
        if self._ended:
            raise ConnectionResetError
        frames = _frames(packed(number, operation, fields, arrays), arrays)
        try:
            _send(self._socket, [self._token, *frames])
        except zmq.ZMQError as error:
            raise ConnectionResetError(str(error)) from error

    def receive(self, timeout: float | None) -> None:
        ready = dict(self._poller.poll(None if timeout is None else int(timeout * 1000) + 1))
        if self._ended:
            raise ConnectionResetError
        if self._socket in ready:
            first, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            header = parsed(first.buffer)
            self.arrived(header, _arrays(header, frames))
        elif self._monitor in ready:
            event = recv_monitor_message(self._monitor)
            self._ended = True
            what = f"ZeroMQ event {event['event']}"
            raise ConnectionResetError(what)

    def hang_up(self) -> None:
        self._ended = True

    def close(self) -> None:
        self._ended = True
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close(0)


@final
class _OnlyThese:
    """Tells ZeroMQ which keys belong to the strategy."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether whoever has this key, in Z85, may connect."""
        return hmac.compare_digest(key, self._public)


@final
class ZeroMqListener(Listener):
    """Serves questions from any host, on a thread of its own.

    Args:
      service: who answers.
      lock: held around each answer.
      keys: of the strategy.
      name: for the thread.
      interface: the address of this host to listen at.
      encrypted: whether to ask for CURVE; anywhere but on loopback.
    """

    def __init__(
        self,
        service: Service,
        lock: threading.Lock,
        keys: Keys,
        name: str,
        *,
        interface: str,
        encrypted: bool,
        most_bytes: int = 8 << 30,
    ) -> None:
        self._service = service
        self._lock = lock
        self._keys = keys
        # Its own: authentication is a matter of a whole context.
        self._context: zmq.Context[Any] = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        self._socket = _socket(self._context, zmq.ROUTER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, most_bytes)
        if encrypted:
            assert keys.client_public is not None
            self._authenticator = ThreadAuthenticator(self._context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback(
                "*", credentials_provider=_OnlyThese(keys.client_public)
            )
            self._socket.curve_server = True
            self._socket.curve_publickey = keys.server_public
            self._socket.curve_secretkey = keys.server_secret
        port = self._socket.bind_to_random_port(f"tcp://{interface}")
        self._address = f"tcp://{interface}:{port}"
        self._waker = self._context.socket(zmq.PAIR)
        self._waker.bind(f"inproc://wake-{port}")
        self._woken = self._context.socket(zmq.PAIR)
        self._woken.connect(f"inproc://wake-{port}")
        threading.Thread(target=self._serve, name=f"mirrored-{name}-zeromq", daemon=True).start()

    @property
    def address(self) -> str:
        return self._address

    def close(self) -> None:
        with contextlib.suppress(zmq.ZMQError):
            self._waker.send(b"", zmq.NOBLOCK)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._woken in ready:
                break
            who, *frames = self._socket.recv_multipart(copy=False)
            try:
                self._answer(who, frames)
            except zmq.ZMQError:
                # Who asked is gone.
                continue
        if self._authenticator is not None:
            self._authenticator.stop()
        for used in (self._socket, self._waker, self._woken):
            used.close(0)
        self._context.term()

    def _answer(self, who: Any, frames: Sequence[Any]) -> None:
        if len(frames) < 2 or not hmac.compare_digest(frames[0].bytes, self._keys.token):
            # Not one of us: no word, so that it learns nothing.
            return
        number = 0
        try:
            if len(frames) > MOST_ARRAYS + 2:
                raise refused(found=f"{len(frames)} frames", expected=f"{MOST_ARRAYS + 2} at most")
            header = parsed(frames[1].buffer)
            number = header.number
            arrays = _arrays(header, frames[2:])
        except MirroredError as error:
            _send(self._socket, [who, packed(number, ERROR, describe_error(error), [])])
            return
        word, fields, found = answered(self._service, self._lock, header, arrays)
        _send(self._socket, [who, *_frames(packed(number, word, fields, found), found)])
