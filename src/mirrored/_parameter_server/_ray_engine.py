"""Engine on Ray: each worker and each server is a process, wherever Ray places it.

Owns starting, finding, watching and ending the actors, and what goes to a worker with a
closure. Ray carries code and keys, and says who died; what is asked and answered goes
through endpoints, which Ray knows nothing of. An actor is never restarted in place: who
takes over is a new one, under a new lease, and the old one is ended for certain.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, final

from mirrored._errors import MirroredError, ServerError, WorkerError
from mirrored._parameter_server._channel import Channel, gone, silent
from mirrored._parameter_server._engine import (
    ClosureCall,
    ClosureOutcome,
    Engine,
    ServerSpec,
    WorkerSpec,
)
from mirrored._parameter_server._nests import NotPlainError, Said, understood
from mirrored._parameter_server._ray_session import NAMESPACE, RaySession, ray

# isort: split
# What follows needs what the session has found to be there.
from ray.exceptions import GetTimeoutError, RayActorError

from mirrored._parameter_server._closures import UNKNOWN
from mirrored._parameter_server._endpoint import (
    LOOPBACK,
    Address,
    Network,
    is_reachable,
    open_channel,
)
from mirrored._parameter_server._guest_engine import Introduction, server_name
from mirrored._parameter_server._ray_actors import ServerProcess, WorkerProcess
from mirrored._parameter_server._sent_functions import SentFunction, SentFunctions
from mirrored._parameter_server._transport import ConnectedChannel, Keys, make_token
from mirrored._parameter_server._travel import loads, opened, pickled
from mirrored._parameter_server._zeromq import make_curve_keys

# How long nothing is asked while a closure runs.
_QUIET_SECONDS = 5.0
_START_SECONDS = 180.0
_MOST_KNOWN = 4096
# Besides the call that watches, those that control and those that ask whether it lives.
_CALLS_AT_ONCE = 8
_ServerActor = ray.remote(ServerProcess)
_WorkerActor = ray.remote(WorkerProcess)


@final
class RayEngine(Engine):
    """Workers and servers as Ray actors.

    Args:
      address: of a Ray cluster ("auto" for the one this machine belongs to); None to start
        Ray on this machine.
      interface: the address that processes listen at; "127.0.0.1" for this machine alone,
        None for each host's own in the cluster, where ZeroMQ authenticates and encrypts.
        By default the first without ``address``, the second with it.
      transport: "shared memory" or "zeromq"; chosen for each pair of processes if left out.
      worker_options: how Ray places workers: ``{"num_gpus": 1}``, say, or any other
        argument of an actor's ``options``.
      server_options: the same of servers.
      platform: where workers compute, as in JAX_PLATFORMS; the CPU, unless
        ``worker_options`` asks for accelerators, which are then found by JAX.
      worker_threads: how many threads XLA has on a worker's CPU; without ``address`` a quarter
        of this machine's cores, if left out, since its processes share them.
      server_threads: the same of servers.
      ray_options: further arguments of ``ray.init``.
      name: of the servers in their cluster, if other processes are to find them there.
    """

    def __init__(
        self,
        *,
        address: str | None = None,
        interface: str | None = "",
        transport: str | None = None,
        worker_options: Mapping[str, Any] | None = None,
        server_options: Mapping[str, Any] | None = None,
        platform: str | None = None,
        worker_threads: int | None = None,
        server_threads: int | None = None,
        ray_options: Mapping[str, Any] | None = None,
        name: str | None = None,
    ) -> None:
        if interface == "":
            interface = LOOPBACK if address is None else None
        self._network = Network(_make_keys(interface), interface, transport)
        self._network.check()
        # On one machine processes are placed whatever Ray makes of its cores.
        usual = {"num_cpus": 0 if address is None else 1}
        self._worker_options = {**usual, **(worker_options or {})}
        self._server_options = {**usual, **(server_options or {})}
        accelerated = any(self._worker_options.get(key) for key in ("num_gpus", "resources"))
        self._platform = platform or (None if accelerated else "cpu")
        # Processes that share a machine are in each other's way with as many threads as it has
        # cores each: on two cores two threads took three times the processor time of one.
        shared = max(1, (os.cpu_count() or 1) // 4) if address is None else None
        self._worker_threads = worker_threads or shared
        self._server_threads = server_threads or shared
        self._patience = _START_SECONDS
        self._servers: dict[int, _Actor] = {}
        self._workers: dict[int, _Actor] = {}
        self._functions = SentFunctions()
        # Changes when a server is replaced: workers are told where it is now.
        self._version = 0
        self._name = name
        self._session = RaySession(address, dict(ray_options or {}))

    def introductions(self) -> list[Introduction]:
        """What other processes of the program need to reach the servers."""
        return [
            Introduction(self._address(self._servers[index]), self._network.keys)
            for index in sorted(self._servers)
        ]

    # --- starting and stopping ---------------------------------------------------

    def start_server(self, spec: ServerSpec) -> None:
        old = self._servers.pop(spec.index, None)
        if old is not None:
            old.end()
        named = {}
        if self._name is not None:
            named = {"name": server_name(self._name, spec.index), "namespace": NAMESPACE}
        make = _ServerActor.options(**_OPTIONS, **named, **self._server_options)
        handle = make.remote(spec, self._network, list(sys.path), self._server_threads)
        self._servers[spec.index] = _Actor(handle, spec.name)
        self._version += 1

    def start_worker(self, spec: WorkerSpec) -> None:
        self.stop_worker(spec.index)
        self._patience = spec.timeout
        make = _WorkerActor.options(**_OPTIONS, **self._worker_options)
        handle = make.remote(
            spec, self._network, list(sys.path), self._platform, self._worker_threads
        )
        self._workers[spec.index] = _Actor(handle, spec.name)

    def stop_worker(self, index: int) -> None:
        worker = self._workers.pop(index, None)
        if worker is not None:
            worker.end()

    def stop(self) -> None:
        for actors in (self._workers, self._servers):
            for index in list(actors):
                actors.pop(index).end()
        self._session.close()

    def kill_server(self, index: int) -> None:
        self._servers[index].end()

    def kill_worker(self, index: int) -> None:
        worker = self._workers.get(index)
        if worker is not None:
            worker.end()

    def process_of_server(self, index: int) -> int:
        """The process of a server; for tests of failures."""
        server = self._servers[index]
        return self._result(server, server.handle.process.remote(), "process")

    def process_of_worker(self, index: int) -> int:
        """The process of a worker; for tests of failures."""
        worker = self._workers[index]
        return self._result(worker, worker.handle.process.remote(), "process")

    # --- who lives ---------------------------------------------------------------

    def server_is_alive(self, index: int) -> bool:
        server = self._servers.get(index)
        return server is not None and server.is_alive()

    def worker_is_alive(self, index: int) -> bool:
        # Not asked as servers are: it answers nothing while it runs a closure.
        worker = self._workers.get(index)
        return worker is not None and not worker.dead.is_set()

    def _result(self, actor: _Actor, reference: Any, operation: str) -> Any:
        """Waits for what was asked of an actor through Ray, as long as it lives.

        Raises ServerError if it is gone, or stopped.
        """
        while True:
            try:
                result = ray.get(reference, timeout=_QUIET_SECONDS)
            except GetTimeoutError:
                self._require_answering(actor, operation)
            except RayActorError:
                actor.dead.set()
                raise gone(actor.name, operation) from None
            else:
                actor.started = True
                return result

    def _require_answering(self, actor: _Actor, operation: str) -> None:
        """Raises ServerError if an actor that has much to do does not even say so."""
        patience = self._patience if actor.started else _START_SECONDS
        try:
            ray.get(actor.handle.ping.remote(), timeout=patience)
        except GetTimeoutError:
            raise silent(actor.name, operation, patience) from None
        except RayActorError:
            actor.dead.set()
            raise gone(actor.name, operation) from None

    def _address(self, actor: _Actor) -> Address:
        if actor.address is None:
            actor.address = self._result(actor, actor.handle.address.remote(), "address")
        assert actor.address is not None
        return actor.address

    # --- servers -----------------------------------------------------------------

    def connect(self, server: int) -> Channel:
        actor = self._servers[server]
        return open_channel(self._address(actor), actor.name, self._network.keys)

    def control(self, server: int, operation: str, *objects: Any) -> Any:
        actor = self._servers[server]
        content = pickled(objects, f"what {actor.name} needs for {operation!r}")
        reference = actor.handle.control.remote(operation, content)
        return opened(self._result(actor, reference, operation))

    # --- closures ----------------------------------------------------------------

    def execute(self, worker: int, call: ClosureCall) -> ClosureOutcome:
        actor = self._workers.get(worker)
        if actor is None or actor.dead.is_set():
            raise _worker_lost(name=f"worker {worker}", why="it is gone")
        try:
            return self._execute(actor, call)
        except _WorkerGoneError as error:
            # Not to be used again, were it only stopped: its lease ends now.
            actor.end()
            raise _worker_lost(name=actor.name, why=str(error)) from None

    def _execute(self, actor: _Actor, call: ClosureCall) -> ClosureOutcome:
        try:
            self._tell_servers(actor)
            what = getattr(call.function, "__name__", "a callable")
            sent = self._functions.find(call.function, f"closure {call.closure} ({what})")
            said = Said()
            try:
                arguments, staged = said.say([call.args, call.kwargs]), None
            except NotPlainError:
                said = Said()
                arguments = None
                staged = pickled((call.args, call.kwargs), f"the arguments of {what}")
            for resource in said.resources:
                self._load_resource(actor, resource.number, resource.make)
            fields = {
                "closure": call.closure,
                "function": sent.digest,
                "arguments": arguments,
                "staged": staged is not None,
                "epoch": call.epoch,
                "floor": call.floor,
            }
            while True:
                self._load(actor, sent)
                if staged is not None:
                    self._tell(actor, "stage", call.closure, staged)
                reply, arrays = self._ask(actor, fields, said.arrays)
                if UNKNOWN not in reply:
                    break
                actor.functions.discard(sent.digest)
            if "kept" in reply:
                kept = self._of_worker(actor, "outcome", call.closure)
                value, error = loads(kept)
            else:
                value, error = understood(reply["value"], arrays), None
            return ClosureOutcome(value, error, reply["steps"])
        except _WorkerGoneError:
            raise
        except Exception as error:  # noqa: BLE001 (the closure's error, whatever it is)
            return ClosureOutcome(None, error, 0)

    def _tell_servers(self, actor: _Actor) -> None:
        version = self._version
        if actor.version != version:
            addresses = [self._address(self._servers[index]) for index in sorted(self._servers)]
            self._of_worker(actor, "set_servers", addresses)
            actor.version = version

    def _load(self, actor: _Actor, sent: SentFunction) -> None:
        if sent.digest in actor.functions:
            return
        self._tell(actor, "load", sent.digest, sent.content)
        if len(actor.functions) >= _MOST_KNOWN:
            actor.functions.clear()
        actor.functions.add(sent.digest)

    def _load_resource(self, actor: _Actor, number: int, make: Callable[[int], Any]) -> None:
        if number not in actor.resources:
            self._tell(actor, "load_resource", number, pickled(make, "a per-worker value"))
            actor.resources.add(number)

    def _tell(self, actor: _Actor, operation: str, *arguments: Any) -> None:
        """Gives a worker something to unpickle; raises what that raised there."""
        opened(self._of_worker(actor, operation, *arguments))

    def _of_worker(self, actor: _Actor, operation: str, *arguments: Any) -> Any:
        reference = getattr(actor.handle, operation).remote(*arguments)
        try:
            return self._result(actor, reference, operation)
        except ServerError as error:
            raise _WorkerGoneError(error.fact) from None

    def _ask(self, actor: _Actor, fields: Any, arrays: Any) -> Any:
        """Runs a closure and waits, however long, as long as the worker lives."""
        try:
            channel = actor.channel(lambda: self._address(actor), self._network.keys)
            answer = channel.submit("execute", fields, arrays)
            while True:
                try:
                    return answer.result(_QUIET_SECONDS)
                except TimeoutError:
                    self._require_answering(actor, "execute")
        except MirroredError as error:
            if actor.is_lost() or isinstance(error, ServerError):
                raise _WorkerGoneError(error.fact) from None
            raise


_OPTIONS: dict[str, Any] = {
    "max_concurrency": _CALLS_AT_ONCE,
    "max_restarts": 0,
    "max_task_retries": 0,
}


@final
class _WorkerGoneError(Exception):
    """A worker died, or is stopped; the text says which."""


@final
class _Actor:
    """An actor, and what is known of it."""

    def __init__(self, handle: Any, name: str) -> None:
        self.handle = handle
        self.name = name
        self.dead = threading.Event()
        # Whether it has ever answered: importing takes a while.
        self.started = False
        self.address: Address | None = None
        # Of a worker: what it was given.
        self.version = -1
        self.functions: set[str] = set()
        self.resources: set[int] = set()
        self._channel: Channel | None = None
        # Answered only by the end of the process.
        self._watch = handle.until_end.remote()
        self._watch.future().add_done_callback(self._ended)

    def _ended(self, future: Any) -> None:
        self.dead.set()

    def channel(self, address: Callable[[], Address], keys: Keys) -> Channel:
        """The channel to it."""
        if self._channel is None:
            self._channel = open_channel(address(), self.name, keys)
        return self._channel

    def is_lost(self) -> bool:
        """Whether its connection broke."""
        return isinstance(self._channel, ConnectedChannel) and self._channel.is_lost

    def is_alive(self) -> bool:
        """Whether its process runs; asks it, since Ray learns of an end a little later."""
        if self.dead.is_set():
            return False
        if self.address is not None and not is_reachable(self.address):
            self.dead.set()
        return not self.dead.is_set()

    def end(self) -> None:
        """Ends its process, whatever it does."""
        self.dead.set()
        if ray.is_initialized():
            ray.kill(self.handle, no_restart=True)
        if self._channel is not None:
            self._channel.close()


def _make_keys(interface: str | None) -> Keys:
    if interface == LOOPBACK:
        return Keys(make_token())
    server_public, server_secret = make_curve_keys()
    client_public, client_secret = make_curve_keys()
    return Keys(make_token(), server_public, server_secret, client_public, client_secret)


def _worker_lost(*, name: str, why: str) -> WorkerError:
    return WorkerError(
        fact=f"{name} is lost: {why}",
        expected="a worker that lives until it is stopped.",
        hint="its closure runs on another worker; nothing has to be done.",
    )
