"""Engine: who starts, watches, replaces and stops the workers and servers.

Owns the interface between the coordinator and the place where processes (or threads)
live, and what is handed over with a closure. It knows nothing of queues, variables or
optimizers. Code travels through the engine's own trusted way (a Python reference, or
Ray); tensors travel through channels.

What an engine builds where:

* a server's process makes one ``Server(ServerSpec)`` (a Service), serves ``handle``
  under the server's ``lock``, and passes ``control`` calls on, under the same lock;
* a worker's process makes one ``Worker(WorkerSpec, connect)``, where ``connect(server)``
  opens a new channel to the server as it is now, and calls ``execute(ClosureCall)``.
  Functions and arguments that were pickled are unpickled inside ``worker.loading()``, by
  which variables, optimizers and the strategy among them find their worker. The same
  function must come back as the same object (keep it by a digest of its bytes), since
  compiled steps are kept by the function they came from.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias, final

from mirrored._parameter_server._channel import Channel
from mirrored._parameter_server._staleness import Staleness

# Opens a channel to a server, by its number.
Connect: TypeAlias = Callable[[int], Channel]


@final
@dataclasses.dataclass(frozen=True)
class ServerSpec:
    """All a server needs to be made, and made again in another process.

    Args:
      index: its number, from 0.
      server_count: how many servers there are.
      staleness: how updates of different workers are combined.
    """

    index: int
    server_count: int
    staleness: Staleness

    @property
    def name(self) -> str:
        """What it is called in messages."""
        return f"server {self.index}"


@final
@dataclasses.dataclass(frozen=True)
class WorkerSpec:
    """All a worker needs to be made, and made again in another process.

    Args:
      index: its number, from 0; kept by the worker that takes its place.
      lease: a number that no other worker and no earlier incarnation has. Servers
        refuse updates under a lease that was ended.
      server_count: how many servers there are.
      staleness: how updates of different workers are combined.
      timeout: how long it waits for an answer or its turn, in seconds.
    """

    index: int
    lease: int
    server_count: int
    staleness: Staleness
    timeout: float

    @property
    def name(self) -> str:
        """What it is called in messages."""
        return f"worker {self.index}"


@final
@dataclasses.dataclass(frozen=True)
class ClosureCall:
    """One closure on its way to a worker.

    Args:
      closure: its number, the same wherever and however often it runs.
      function: what to call.
      args: positional arguments; a Resource in them becomes the worker's own object.
      kwargs: keyword arguments, likewise.
      epoch: changes when a server was replaced: channels opened before are stale.
      floor: all closures with a lower number are over.
    """

    closure: int
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    epoch: int
    floor: int


@final
@dataclasses.dataclass(frozen=True)
class Resource:
    """An object that each worker makes for itself and keeps: a dataset's iterator, say.

    Args:
      number: which one.
      make: called with the worker's index once on each worker.
    """

    number: int
    make: Callable[[int], Any]


@final
@dataclasses.dataclass(frozen=True)
class ClosureOutcome:
    """What became of a closure on a worker that lived to tell.

    Args:
      value: what it returned, arrays in it as NumPy arrays.
      error: what it raised, if it did.
      steps: how many updates it sent.
    """

    value: Any
    error: Exception | None
    steps: int


class Engine(abc.ABC):
    """Starts, watches, replaces and stops workers and servers.

    Its methods may be called from any thread; ``execute`` from one thread a worker.
    """

    @abc.abstractmethod
    def start_server(self, spec: ServerSpec) -> None:
        """Starts a server, empty; in place of the one of its number if there was one."""

    @abc.abstractmethod
    def start_worker(self, spec: WorkerSpec) -> None:
        """Starts a worker; in place of the one of its number if there was one."""

    @abc.abstractmethod
    def stop_worker(self, index: int) -> None:
        """Ends a worker; of no consequence if it is gone already."""

    @abc.abstractmethod
    def connect(self, server: int) -> Channel:
        """Opens a channel from the coordinator to a server as it is now."""

    @abc.abstractmethod
    def control(self, server: int, operation: str, *objects: Any) -> Any:
        """Calls ``Server.control(operation, *objects)``; objects may be any Python.

        Raises ServerError if the server is gone.
        """

    @abc.abstractmethod
    def execute(self, worker: int, call: ClosureCall) -> ClosureOutcome:
        """Runs a closure on a worker and waits for it.

        Raises WorkerError, naming the worker, if it is gone before the outcome came.
        """

    @abc.abstractmethod
    def server_is_alive(self, index: int) -> bool:
        """Says whether a server runs."""

    @abc.abstractmethod
    def worker_is_alive(self, index: int) -> bool:
        """Says whether a worker runs."""

    @abc.abstractmethod
    def kill_server(self, index: int) -> None:
        """Ends a server as a lost machine would: for tests of failures."""

    @abc.abstractmethod
    def kill_worker(self, index: int) -> None:
        """Ends a worker as a lost machine would: for tests of failures."""

    @abc.abstractmethod
    def stop(self) -> None:
        """Ends all workers and servers."""
