"""Transport on one host: shared memory for arrays, a local socket for the rest.

Owns the way from a process to another of the same user. The socket has an address but no
file (Linux's abstract names), the kernel says whose process is at the other end, and a
peer that is killed is noticed at once, because its socket closes.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import selectors
import socket
import sys
import threading
from typing import Any, final

from mirrored._errors import MirroredError
from mirrored._parameter_server._blocks import MOST_PACKET_BYTES, Packets, peer_user
from mirrored._parameter_server._channel import Fields, Service, describe_error
from mirrored._parameter_server._transport import Connection, Keys, Listener, answered
from mirrored._parameter_server._wire import ERROR, Header

# A peer that reads no answers for this long is let go: others wait behind it.
_SEND_SECONDS = 10.0
# Whether somebody is there may be asked without the token.
_KNOCK, _HERE = b"knock", b"here"
_KNOCK_SECONDS = 0.5


def is_possible() -> bool:
    """Whether this system has what it takes."""
    return sys.platform == "linux"


def host_name() -> str:
    """Tells hosts apart; containers that cannot reach each other's sockets count as several."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}/{os.getuid()}"


def knock(address: str) -> None:
    """Raises OSError if nobody is at an address of this host; who is busy is there.

    That a connection is accepted says little: a process that ends closes its sockets one
    after another, and whoever saw the first of them close asks before the last one does.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(_KNOCK_SECONDS)
        try:
            connection.connect("\0" + address)
            connection.send(_KNOCK)
            if not connection.recv(len(_HERE)):
                raise ConnectionResetError
        except (BlockingIOError, TimeoutError):
            return


@final
class SharedMemoryConnection(Connection):
    """A connection to a peer on this host."""

    def __init__(self, peer: str, address: str, keys: Keys) -> None:
        super().__init__(peer)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect("\0" + address)
            if peer_user(connection) != os.getuid():
                what = "somebody else listens there"
                raise PermissionError(what)
            connection.send(keys.token)
        except OSError:
            connection.close()
            raise
        self._packets = Packets(connection)

    def send(self, number: int, operation: str, fields: Fields, arrays: Any) -> None:
        self._packets.socket.settimeout(_SEND_SECONDS)
        self._packets.send(number, operation, fields, arrays)

    def receive(self, timeout: float | None) -> None:
        self._packets.socket.settimeout(timeout)
        try:
            found = self._packets.receive()
        except TimeoutError:
            return
        if found is None:
            raise ConnectionResetError
        self.arrived(*found)

    def hang_up(self) -> None:
        try:
            self._packets.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            # It is closed already.
            return

    def close(self) -> None:
        self._packets.close()


@final
class SharedMemoryListener(Listener):
    """Serves questions of processes on this host, on a thread of its own."""

    def __init__(self, service: Service, lock: threading.Lock, keys: Keys, name: str) -> None:
        self._service = service
        self._lock = lock
        self._keys = keys
        self._address = f"mirrored-{secrets.token_hex(16)}"
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listening.bind("\0" + self._address)
        self._listening.listen(128)
        self._listening.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        threading.Thread(target=self._serve, name=f"mirrored-{name}-local", daemon=True).start()

    @property
    def address(self) -> str:
        return self._address

    def close(self) -> None:
        self._wake.close()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._woken:
                    self._end()
                    return
                if key.fileobj is self._listening:
                    self._accept()
                elif key.data is None:
                    self._introduce(key.fileobj)
                else:
                    self._answer(key.data)

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except OSError:
            # It went away before it was accepted.
            return
        if peer_user(connection) != os.getuid():
            connection.close()
            return
        connection.settimeout(_SEND_SECONDS)
        self._selector.register(connection, selectors.EVENT_READ)

    def _introduce(self, connection: Any) -> None:
        """Reads the first packet, which must be the token."""
        try:
            token = connection.recv(MOST_PACKET_BYTES)
        except OSError:
            token = b""
        if hmac.compare_digest(token, self._keys.token):
            self._selector.modify(connection, selectors.EVENT_READ, Packets(connection))
            return
        if token == _KNOCK:
            with contextlib.suppress(OSError):
                connection.send(_HERE)
        self._selector.unregister(connection)
        connection.close()

    def _answer(self, packets: Packets) -> None:
        try:
            message = packets.receive()
            if message is None:
                self._forget(packets)
                return
            self._reply(packets, *message)
        except MirroredError as error:
            self._refuse(packets, error)
        except OSError:
            self._forget(packets)

    def _reply(self, packets: Packets, header: Header, arrays: list[Any]) -> None:
        word, fields, found = answered(self._service, self._lock, header, arrays)
        found = list(found)
        # With them the blocks they lie in are given back, in the packet that goes out now.
        arrays.clear()
        packets.send(header.number, word, fields, found)

    def _refuse(self, packets: Packets, error: MirroredError) -> None:
        """Says why, and hangs up: what comes next may not begin where a message does."""
        try:
            packets.send(0, ERROR, describe_error(error), [])
        except OSError:
            # It did not wait for the reason.
            self._forget(packets)
            return
        self._forget(packets)

    def _forget(self, packets: Packets) -> None:
        self._selector.unregister(packets.socket)
        packets.close()

    def _end(self) -> None:
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, Packets):
                key.data.close()
            else:
                key.fileobj.close()  # pyright: ignore[reportAttributeAccessIssue]
        self._selector.close()
