"""Endpoint: where the service of a process is reached, and how others reach it best.

Owns the choice between the transports. Nothing but Linux's shared memory is there on one
host; ZeroMQ is added where peers on other hosts may ask, or where there is no such memory.
"""

from __future__ import annotations

import dataclasses
import socket
import threading
from typing import final

from mirrored._errors import ArgumentError, ServerError
from mirrored._parameter_server import _shared_memory
from mirrored._parameter_server._channel import Channel, Service
from mirrored._parameter_server._transport import ConnectedChannel, Connection, Keys, Listener
from mirrored._parameter_server._zeromq import ZeroMqConnection, ZeroMqListener

LOOPBACK = "127.0.0.1"
_KNOCK_SECONDS = 5.0
TRANSPORTS = ("shared memory", "zeromq")


@final
@dataclasses.dataclass(frozen=True)
class Network:
    """Where to listen and what to use.

    Args:
      keys: of the strategy.
      interface: the address to listen at; None for the host's own in its Ray cluster.
      transport: one of TRANSPORTS, or None for the best.
    """

    keys: Keys
    interface: str | None = LOOPBACK
    transport: str | None = None

    def check(self) -> None:
        """Refuses what cannot be used."""
        if self.transport is not None and self.transport not in TRANSPORTS:
            raise ArgumentError(
                fact=f"the engine was given transport={self.transport!r}.",
                expected=f"one of {', '.join(map(repr, TRANSPORTS))}.",
                hint="leave it out: shared memory on one host, ZeroMQ between hosts.",
            )
        if self.transport == "shared memory" and not _shared_memory.is_possible():
            raise ArgumentError(
                fact="the engine was given transport='shared memory'.",
                expected="Linux, whose anonymous memory it needs.",
                hint="leave transport out.",
            )


@final
@dataclasses.dataclass(frozen=True)
class Address:
    """Where a service is reached; no secret is in it.

    Args:
      host: the host it is on, where shared memory can be used; otherwise None.
      local: its address on this host.
      remote: its ZeroMQ address.
      encrypted: whether ZeroMQ asks for CURVE.
    """

    host: str | None
    local: str | None
    remote: str | None
    encrypted: bool


@final
class Endpoint:
    """The listeners of one service.

    Args:
      service: who answers.
      lock: held around each answer.
      network: where to listen.
      interface: what ``network.interface`` means on this host.
      name: of the service.
    """

    def __init__(
        self,
        service: Service,
        lock: threading.Lock,
        network: Network,
        interface: str,
        name: str,
    ) -> None:
        self._listeners: list[Listener] = []
        local = remote = host = None
        encrypted = interface != LOOPBACK
        by_memory = network.transport != "zeromq" and _shared_memory.is_possible()
        if by_memory:
            listener = _shared_memory.SharedMemoryListener(service, lock, network.keys, name)
            self._listeners.append(listener)
            local, host = listener.address, _shared_memory.host_name()
        if network.transport != "shared memory" and (encrypted or not by_memory):
            reached = ZeroMqListener(
                service, lock, network.keys, name, interface=interface, encrypted=encrypted
            )
            self._listeners.append(reached)
            remote = reached.address
        self.address = Address(host, local, remote, encrypted)

    def close(self) -> None:
        """Ends the listeners."""
        for listener in self._listeners:
            listener.close()


def is_reachable(address: Address) -> bool:
    """Whether somebody listens at an address; a process that is stopped still does."""
    try:
        if address.local is not None and address.host == _shared_memory.host_name():
            _shared_memory.knock(address.local)
        elif address.remote is not None:
            host, _, port = address.remote.removeprefix("tcp://").rpartition(":")
            with socket.create_connection((host, int(port)), _KNOCK_SECONDS) as connection:
                # ZeroMQ says who it is at once, on a thread of its own.
                if not connection.recv(1):
                    return False
    except OSError:
        return False
    return True


def open_channel(address: Address, peer: str, keys: Keys) -> Channel:
    """Opens the best channel from this process to a service."""

    def connect() -> Connection:
        if (
            address.local is not None
            and _shared_memory.is_possible()
            and address.host == _shared_memory.host_name()
        ):
            return _shared_memory.SharedMemoryConnection(peer, address.local, keys)
        if address.remote is None:
            raise ServerError(
                fact=f"{peer} runs on another host and listens on its own host only.",
                expected="all processes on one host, or servers that other hosts reach.",
                hint='give the strategy engine_options={"interface": None} to listen at the '
                "hosts' own addresses, authenticated and encrypted.",
            )
        return ZeroMqConnection(peer, address.remote, keys, encrypted=address.encrypted)

    return ConnectedChannel(peer, connect)
