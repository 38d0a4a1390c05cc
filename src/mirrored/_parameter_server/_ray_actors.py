"""What Ray runs: a process that is a server, and one that is a worker.

Owns the two actors and what of their process must be set before JAX looks at it. Ray
brings them their specification, functions and keys, and takes back what only a pickle can
say; all else comes through their endpoints. They take everything in the constructor, and
nothing from Ray's object store.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from typing import Any

import jax
import ray

from mirrored._parameter_server._channel import Channel
from mirrored._parameter_server._closures import Closures
from mirrored._parameter_server._endpoint import Address, Endpoint, Network, open_channel
from mirrored._parameter_server._engine import (
    ServerSpec,
    WorkerSpec,
)
from mirrored._parameter_server._server import Server
from mirrored._parameter_server._transport import Keys
from mirrored._parameter_server._travel import in_pickle, loads
from mirrored._parameter_server._worker import Worker


def prepare_process(paths: list[str], platform: str | None, threads: int | None) -> None:
    """Sets what JAX reads when it is first used, and where modules are found.

    Args:
      paths: where the program finds its modules.
      platform: where this process computes ("cpu"); None for whatever Ray gave it.
      threads: how many threads XLA may use on the CPU.
    """
    sys.path += [path for path in paths if path not in sys.path]
    flags = os.environ.get("XLA_FLAGS", "")
    # Virtual devices of the program that started this process are not for this one.
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", flags)
    os.environ["XLA_FLAGS"] = flags.strip()
    os.environ.pop("NPROC", None)
    if threads is not None:
        os.environ["NPROC"] = str(threads)
    if platform is not None:
        os.environ["JAX_PLATFORMS"] = platform
        jax.config.update("jax_platforms", platform)
    # Nobody goes on here before a step's results are there: handing each program to another
    # thread would only add two changes of threads to each.
    jax.config.update("jax_cpu_enable_async_dispatch", False)


def _interface(network: Network) -> str:
    return network.interface or ray.util.get_node_ip_address()


class ServerProcess:
    """One server."""

    def __init__(
        self, spec: ServerSpec, network: Network, paths: list[str], threads: int | None
    ) -> None:
        prepare_process(paths, "cpu", threads)
        self._keys = network.keys
        self._server = Server(spec)
        self._endpoint = Endpoint(
            self._server, self._server.lock, network, _interface(network), spec.name
        )

    def address(self) -> Address:
        """Where it is reached."""
        return self._endpoint.address

    def introduction(self) -> tuple[Address, Keys]:
        """What another process of the same program needs to reach it."""
        return self._endpoint.address, self._keys

    def process(self) -> int:
        """Its process."""
        return os.getpid()

    def control(self, operation: str, content: bytes) -> bytes:
        """Does what the coordinator asks for."""

        def act() -> Any:
            objects = loads(content)
            with self._server.lock:
                return self._server.control(operation, *objects)

        return in_pickle(act)

    def ping(self) -> None:
        """Answers."""

    def until_end(self) -> None:
        """Never answers: the call fails when the process ends."""
        threading.Event().wait()


class WorkerProcess:
    """One worker."""

    def __init__(
        self,
        spec: WorkerSpec,
        network: Network,
        paths: list[str],
        platform: str | None,
        threads: int | None,
    ) -> None:
        prepare_process(paths, platform, threads)
        self._network = network
        self._addresses: list[Address] = []
        self._worker = Worker(spec, self._connect)
        # An object of its own: Ray wraps the methods of an actor's class.
        self._closures = Closures(self._worker)
        self._endpoint = Endpoint(
            self._closures, threading.Lock(), network, _interface(network), spec.name
        )

    def _connect(self, server: int) -> Channel:
        return open_channel(self._addresses[server], f"server {server}", self._network.keys)

    def address(self) -> Address:
        """Where it is reached."""
        return self._endpoint.address

    def process(self) -> int:
        """Its process."""
        return os.getpid()

    def set_servers(self, addresses: list[Address]) -> None:
        """Says where the servers are."""
        self._addresses = addresses

    def load(self, digest: str, content: bytes) -> bytes:
        """Takes in a function."""

        def act() -> None:
            with self._worker.loading():
                self._closures.keep_function(digest, loads(content))

        return in_pickle(act)

    def load_resource(self, number: int, content: bytes) -> bytes:
        """Takes in what makes a per-worker value."""

        def act() -> None:
            with self._worker.loading():
                self._closures.makers[number] = loads(content)

        return in_pickle(act)

    def stage(self, closure: int, content: bytes) -> bytes:
        """Takes in arguments that the wire cannot carry."""

        def act() -> None:
            with self._worker.loading():
                self._closures.staged[closure] = loads(content)

        return in_pickle(act)

    def outcome(self, closure: int) -> bytes:
        """Hands out a result that the wire cannot carry."""
        return self._closures.outcomes.pop(closure)

    def ping(self) -> None:
        """Answers."""

    def until_end(self) -> None:
        """Never answers: the call fails when the process ends."""
        threading.Event().wait()
