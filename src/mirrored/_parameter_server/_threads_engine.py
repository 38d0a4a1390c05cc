"""Engine on threads: workers and servers in one process, for notebooks and tests.

Owns their threads and what a kill means where nothing can be killed: whoever is killed
sends and answers no more messages, and his result is thrown away.
"""

from __future__ import annotations

import concurrent.futures
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import numpy as np

from mirrored._errors import WorkerError
from mirrored._parameter_server._channel import Channel, Fields, InProcessChannel, Reply, gone
from mirrored._parameter_server._engine import (
    ClosureCall,
    ClosureOutcome,
    Engine,
    ServerSpec,
    WorkerSpec,
)
from mirrored._parameter_server._server import Server
from mirrored._parameter_server._server_strategy import ServerStrategy
from mirrored._parameter_server._worker import Worker

# Called before each message: who sends it (a worker's number, or None), and what.
Listener = Callable[[int | None, str], None]


@final
class ThreadsEngine(Engine):
    """Everything in this process.

    Args:
      strategy: the strategy whose workers these are.
      listener: told of every message before it is sent; for tests of failures.
    """

    def __init__(self, strategy: ServerStrategy, listener: Listener | None = None) -> None:
        self._strategy = strategy
        self._listener = listener
        self._servers: dict[int, _ServerHere] = {}
        self._workers: dict[int, _WorkerHere] = {}

    def start_server(self, spec: ServerSpec) -> None:
        self._servers[spec.index] = _ServerHere(Server(spec))

    def start_worker(self, spec: WorkerSpec) -> None:
        self.stop_worker(spec.index)
        here = _WorkerHere(spec)
        devices = jax.local_devices()
        # CPU devices of one process share its cores: one compiled step serves all workers.
        one = devices[0].platform == "cpu"
        device = devices[0] if one else devices[spec.index % len(devices)]

        def connect(server: int) -> Channel:
            return self._channel(server, here)

        here.start(Worker(spec, connect, self._strategy, device))
        self._workers[spec.index] = here

    def stop_worker(self, index: int) -> None:
        worker = self._workers.pop(index, None)
        if worker is not None:
            worker.stop()

    def connect(self, server: int) -> Channel:
        return self._channel(server, None)

    def _channel(self, server: int, sender: _WorkerHere | None) -> Channel:
        return _Watched(self._servers[server], sender, self._listener)

    def control(self, server: int, operation: str, *objects: Any) -> Any:
        here = self._servers[server]
        if here.dead:
            raise gone(here.server.spec.name, operation)
        with here.server.lock:
            return here.server.control(operation, *objects)

    def execute(self, worker: int, call: ClosureCall) -> ClosureOutcome:
        here = self._workers.get(worker)
        if here is None or here.dead.is_set():
            what = f"worker {worker}"
            raise _lost(what)
        return here.execute(call)

    def server_is_alive(self, index: int) -> bool:
        return index in self._servers and not self._servers[index].dead

    def worker_is_alive(self, index: int) -> bool:
        return index in self._workers and not self._workers[index].dead.is_set()

    def kill_server(self, index: int) -> None:
        self._servers[index].dead = True

    def kill_worker(self, index: int) -> None:
        worker = self._workers.get(index)
        if worker is not None:
            worker.kill()

    def stop(self) -> None:
        for index in list(self._workers):
            self.stop_worker(index)
        for server in self._servers.values():
            server.dead = True


@final
class _ServerHere:
    """A server of this process, which may be dead."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.dead = False


@final
class _Killed(BaseException):
    """Ends the thread of a worker that was killed; no user's code catches it."""


@final
class _WorkerHere:
    """A worker of this process and its thread."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.dead = threading.Event()
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._waiting: concurrent.futures.Future[ClosureOutcome] | None = None
        self._lock = threading.Lock()

    def start(self, worker: Worker) -> None:
        """Starts its thread."""
        thread = threading.Thread(
            target=self._serve, args=(worker,), name=f"mirrored-{self.spec.name}", daemon=True
        )
        thread.start()

    def execute(self, call: ClosureCall) -> ClosureOutcome:
        """Runs a closure on its thread."""
        future: concurrent.futures.Future[ClosureOutcome] = concurrent.futures.Future()
        with self._lock:
            if self.dead.is_set():
                raise _lost(self.spec.name)
            self._waiting = future
        self._calls.put((call, future))
        return future.result()

    def kill(self) -> None:
        """What a lost machine would look like to the coordinator."""
        with self._lock:
            self.dead.set()
            waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_exception(_lost(self.spec.name))

    def stop(self) -> None:
        """Ends its thread after the closure it runs."""
        self.kill()
        self._calls.put(None)

    def _serve(self, worker: Worker) -> None:
        while (work := self._calls.get()) is not None:
            call, future = work
            try:
                outcome = worker.execute(call)
            except _Killed:
                break
            with self._lock:
                if self.dead.is_set():
                    break
                self._waiting = None
            future.set_result(outcome)
        worker.close()


@final
class _Watched(Channel):
    """A channel that notices when either end is dead."""

    def __init__(
        self, here: _ServerHere, sender: _WorkerHere | None, listener: Listener | None
    ) -> None:
        self._here = here
        self._sender = sender
        self._listener = listener
        self._inner = InProcessChannel(here.server, here.server.spec.name, here.server.lock)

    @property
    def peer(self) -> str:
        return self._inner.peer

    def submit(
        self,
        operation: str,
        fields: Fields,
        arrays: Sequence[np.ndarray] = (),
        *,
        timeout: float | None = None,
    ) -> concurrent.futures.Future[Reply]:
        if self._listener is not None:
            self._listener(None if self._sender is None else self._sender.spec.index, operation)
        if self._sender is not None and self._sender.dead.is_set():
            raise _Killed
        if self._here.dead:
            future: concurrent.futures.Future[Reply] = concurrent.futures.Future()
            future.set_exception(gone(self.peer, operation))
            return future
        return self._inner.submit(operation, fields, arrays, timeout=timeout)

    def close(self) -> None:
        self._inner.close()


def _lost(name: str) -> WorkerError:
    return WorkerError(
        fact=f"{name} is gone.",
        expected="a worker that lives until it is stopped.",
        hint="its closure runs on another worker; nothing has to be done.",
    )
