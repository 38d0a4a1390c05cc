"""What Ray runs: a process that is a server, and one that is a worker.

Owns the two actors and what of their process must be set before JAX looks at it. Ray
brings them their specification, functions and keys, and takes back what only a pickle can
say; all else comes through their endpoints. They take everything in the constructor, and
nothing from Ray's object store.
"""

from __future__ import annotations

import collections
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import ray

from mirrored._errors import ServerError, WorkerError
from mirrored._parameter_server._channel import Channel, Fields, Reply
from mirrored._parameter_server._endpoint import Address, Endpoint, Network, open_channel
from mirrored._parameter_server._engine import (
    ClosureCall,
    ClosureOutcome,
    Resource,
    ServerSpec,
    WorkerSpec,
)
from mirrored._parameter_server._nests import NotPlainError, Said, understood
from mirrored._parameter_server._server import Server
from mirrored._parameter_server._travel import dumps, in_pickle, loads
from mirrored._parameter_server._worker import Worker

# Functions kept by a worker; the coordinator sends one again that was forgotten.
_MOST_FUNCTIONS = 1024
# What a worker answers to a closure whose function it does not have.
UNKNOWN = "unknown"


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
        self._server = Server(spec)
        self._endpoint = Endpoint(
            self._server, self._server.lock, network, _interface(network), spec.name
        )

    def address(self) -> Address:
        """Where it is reached."""
        return self._endpoint.address

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
    """One worker. Answers the operation ``execute`` of the coordinator."""

    def __init__(
        self,
        spec: WorkerSpec,
        network: Network,
        paths: list[str],
        platform: str | None,
        threads: int | None,
    ) -> None:
        prepare_process(paths, platform, threads)
        self._spec = spec
        self._network = network
        self._addresses: list[Address] = []
        self._worker = Worker(spec, self._connect)
        self._functions: collections.OrderedDict[str, Any] = collections.OrderedDict()
        self._makers: dict[int, Callable[[int], Any]] = {}
        self._staged: dict[int, Any] = {}
        self._outcomes: dict[int, bytes] = {}
        self._endpoint = Endpoint(self, threading.Lock(), network, _interface(network), spec.name)

    def _connect(self, server: int) -> Channel:
        return open_channel(self._addresses[server], f"server {server}", self._network.keys)

    # --- through Ray -------------------------------------------------------------

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
                self._functions[digest] = loads(content)
            if len(self._functions) > _MOST_FUNCTIONS:
                self._functions.popitem(last=False)

        return in_pickle(act)

    def load_resource(self, number: int, content: bytes) -> bytes:
        """Takes in what makes a per-worker value."""

        def act() -> None:
            with self._worker.loading():
                self._makers[number] = loads(content)

        return in_pickle(act)

    def stage(self, closure: int, content: bytes) -> bytes:
        """Takes in arguments that the wire cannot carry."""

        def act() -> None:
            with self._worker.loading():
                self._staged[closure] = loads(content)

        return in_pickle(act)

    def outcome(self, closure: int) -> bytes:
        """Hands out a result that the wire cannot carry."""
        return self._outcomes.pop(closure)

    def ping(self) -> None:
        """Answers."""

    def until_end(self) -> None:
        """Never answers: the call fails when the process ends."""
        threading.Event().wait()

    # --- through its endpoint ----------------------------------------------------

    def handle(self, operation: str, fields: Fields, arrays: list[np.ndarray]) -> Reply:
        """Runs a closure."""
        if operation != "execute":
            raise ServerError(
                fact=f"{self._spec.name} was asked for {operation!r}.",
                expected="'execute'.",
                hint="all processes must run the same version of mirrored.",
            )
        digest = fields["function"]
        function = self._functions.get(digest)
        if function is None:
            return {UNKNOWN: True}, []
        self._functions.move_to_end(digest)
        closure = fields["closure"]
        if fields["staged"]:
            args, kwargs = self._staged.pop(closure)
        else:
            args, kwargs = understood(fields["arguments"], arrays, self._resource)
        call = ClosureCall(closure, function, args, kwargs, fields["epoch"], fields["floor"])
        return self._told(closure, self._worker.execute(call))

    def _resource(self, number: int) -> Resource:
        return Resource(number, self._makers[number])

    def _told(self, closure: int, outcome: ClosureOutcome) -> Reply:
        if outcome.error is None:
            said = Said()
            try:
                value = said.say(outcome.value)
            except NotPlainError:
                return self._kept(closure, outcome)
            return {"steps": outcome.steps, "value": value}, said.arrays
        return self._kept(closure, outcome)

    def _kept(self, closure: int, outcome: ClosureOutcome) -> Reply:
        error = outcome.error
        if error is not None:
            text = "".join(traceback.format_exception(error))
            error.add_note(f"on {self._spec.name}:\n{text}")
            # Frames cannot travel, and hold what the closure held.
            error = error.with_traceback(None)
        try:
            self._outcomes[closure] = dumps((outcome.value, error))
            loads(self._outcomes[closure])
        except Exception as problem:  # noqa: BLE001 (whatever the user's objects raise)
            what = "raised" if error is not None else "returned"
            found = error if error is not None else outcome.value
            lost = WorkerError(
                fact=f"closure {closure} {what} {type(found).__name__}: {str(found)[:500]!r}, "
                f"which cannot travel to the coordinator ({type(problem).__name__}: {problem}).",
                expected="values and errors that can be pickled.",
                hint="return arrays and numbers; give errors arguments they can be made of again.",
            )
            for note in getattr(error, "__notes__", []):
                lost.add_note(note)
            self._outcomes[closure] = dumps((None, lost))
        return {"steps": outcome.steps, "kept": True}, []
