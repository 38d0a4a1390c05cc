"""Deployment: the servers and workers of one strategy, and what they were given.

Owns who lives, under which lease and epoch, and making a server again that was lost.
Queues and closures are unknown here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, final

import numpy as np

from mirrored._errors import ServerError
from mirrored._parameter_server._catalog import Catalog, OptimizerSpec, VariableSpec
from mirrored._parameter_server._channel import Fields
from mirrored._parameter_server._engine import Engine, ServerSpec, WorkerSpec
from mirrored._parameter_server._links import Links
from mirrored._parameter_server._sharing import Sharing
from mirrored._parameter_server._staleness import Staleness
from mirrored._parameter_server._status import ServerStatus


@final
class Deployment:
    """Servers and workers.

    Args:
      engine: where they live.
      worker_count: how many workers to start with.
      server_count: how many servers.
      staleness: how updates of different workers are combined.
      timeout: how long to wait for an answer or a turn, in seconds.
      partitioner: cuts variables, or None.
      sharing: with which other processes the servers are shared, or None.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        worker_count: int,
        server_count: int,
        staleness: Staleness,
        timeout: float,
        partitioner: Any,
        sharing: Sharing | None = None,
    ) -> None:
        self.engine = engine
        self.sharing = sharing
        self.staleness = staleness
        self.server_count = server_count
        self.catalog = Catalog(server_count, partitioner)
        self.links = Links(engine.connect, server_count, timeout)
        self.epoch = 0
        # By the worker's number.
        self.leases: dict[int, int] = {}
        # Whether something is on the servers that no checkpoint has.
        self.unsaved = True
        self._next_lease = itertools.count()
        self._next_worker = itertools.count()
        self._when_closed: list[Callable[[], None]] = []
        for index in range(server_count):
            engine.start_server(self._server_spec(index))
        for _ in range(worker_count):
            self.add_worker()

    def _server_spec(self, index: int) -> ServerSpec:
        return ServerSpec(index, self.server_count, self.staleness)

    # --- workers -----------------------------------------------------------------

    def add_worker(self) -> int:
        """Starts one more worker; returns its number."""
        index = next(self._next_worker)
        self.start_worker(index)
        return index

    def start_worker(self, index: int) -> None:
        """Starts a worker, under a lease of its own."""
        lease = next(self._next_lease)
        self.engine.start_worker(
            WorkerSpec(index, lease, self.server_count, self.staleness, self.links.timeout)
        )
        self.leases[index] = lease

    def give_up_worker(self, index: int) -> None:
        """Refuses all further updates of a worker, dead or not."""
        lease = self.leases.pop(index, None)
        if lease is None:
            return
        for server in range(self.server_count):
            if self.engine.server_is_alive(server):
                self._control_if_alive(server, "end_lease", lease)

    def remove_worker(self, index: int) -> None:
        """Ends a worker for good."""
        self.give_up_worker(index)
        self.engine.stop_worker(index)

    def join(self, indexes: list[int]) -> None:
        """Makes workers take turns with each other, all from now on."""
        leases = [self.leases[index] for index in indexes if index in self.leases]
        if leases and self.staleness.kind != "async":
            self.links.request(0, "join", {"leases": leases})

    def leave(self, index: int) -> None:
        """Lets the others no longer wait for a worker that has nothing to do."""
        if index in self.leases and self.staleness.kind != "async":
            self.links.request(0, "leave", {"lease": self.leases[index]})

    # --- what is on the servers --------------------------------------------------

    def create(self, spec: VariableSpec, value: np.ndarray) -> None:
        """Puts a new variable's initial value on its servers."""
        self.once(lambda: self._create(spec, value), spec.name)

    def once(self, action: Callable[[], Any], what: str) -> Any:
        """Acts, for all processes that share the servers; all get the result."""
        return action() if self.sharing is None else self.sharing.by_first(action, what)

    def _create(self, spec: VariableSpec, value: np.ndarray) -> None:
        self.unsaved = True
        for part in spec.parts:
            piece = part.piece
            rows = value if not piece.shape else value[piece.start : piece.start + piece.shape[0]]
            described = {"number": piece.number, "name": piece.name, "start": piece.start}
            # In a copy: nobody may change an array that was handed over.
            self.links.request(part.server, "create", {"pieces": [described]}, [rows.copy()])

    def create_table(self, spec: VariableSpec, make: Callable[[int, int], Any]) -> None:
        """Lets servers make the first rows of a new table."""
        self.catalog.makers[spec.number] = make
        self.once(lambda: self._create_table(spec, make), spec.name)

    def _create_table(self, spec: VariableSpec, make: Callable[[int, int], Any]) -> None:
        self.unsaved = True
        for part in spec.parts:
            self.engine.control(part.server, "table", part.piece, make)

    def add_optimizer(self, name: str, rule: Any) -> OptimizerSpec:
        """Gives the servers an optimizer's rule."""
        spec = self.catalog.add_optimizer(name, rule)
        self.once(lambda: self._control_all("optimizer", spec.number, rule), name)
        return spec

    def replace_rule(self, optimizer: OptimizerSpec, rule: Any) -> None:
        """Gives the servers another rule for an optimizer, which keeps its state."""
        self.unsaved = True
        self.catalog.rules[optimizer.number] = rule
        self.once(lambda: self._control_all("rule", optimizer.number, rule), optimizer.name)

    def _control_all(self, operation: str, *objects: Any) -> None:
        for server in range(self.server_count):
            self.engine.control(server, operation, *objects)

    def settle_rounds(self) -> None:
        """Tells all servers of closed rounds: who was to tell them may have died."""
        if self.staleness.kind == "sync":
            closed = self.engine.control(0, "closed")
            for server in range(1, self.server_count):
                self.engine.control(server, "close", closed)

    def set_number(self, optimizer: OptimizerSpec, path: str, value: Any) -> None:
        """Sets a number in an optimizer's state on all servers: its learning rate, say."""
        self.once(lambda: self._control_all("number", optimizer.number, path, value), path)

    # --- faults ------------------------------------------------------------------

    def dead_servers(self) -> list[int]:
        """The servers that do not live any more."""
        return [
            index for index in range(self.server_count) if not self.engine.server_is_alive(index)
        ]

    def new_epoch(self) -> None:
        """Refuses all updates under way: their closures will run again."""
        self.epoch += 1
        for server in range(self.server_count):
            self._control_if_alive(server, "epoch", self.epoch)

    def follow_epoch(self) -> None:
        """Another process has brought the servers, which it shares with this one, elsewhere."""
        self.epoch += 1
        self.links.renew(self.epoch)

    def restore(self, directory: str, manifest: Fields) -> None:
        """Brings all servers, those that were lost anew, to the state of a checkpoint."""
        for server in self.dead_servers():
            self.engine.start_server(self._server_spec(server))
            for number, rule in self.catalog.rules.items():
                self.engine.control(server, "optimizer", number, rule)
            self.engine.control(server, "pieces", self.catalog.pieces_of(server, tables=False))
            for piece in self.catalog.pieces_of(server, tables=True):
                self.engine.control(server, "table", piece, None)
        for server in range(self.server_count):
            self.engine.control(server, "epoch", self.epoch)
            self.engine.control(server, "restore", directory, manifest)
        self.links.renew(self.epoch)
        self.unsaved = False

    def _control_if_alive(self, server: int, operation: str, *objects: Any) -> None:
        try:
            if self.engine.server_is_alive(server):
                self.engine.control(server, operation, *objects)
        except ServerError:
            # It died between the question and the call; that is found out elsewhere.
            return

    def status(self) -> list[ServerStatus | None]:
        """What each server says of itself; None for those that do not answer."""
        found: list[ServerStatus | None] = []
        for server in range(self.server_count):
            try:
                found.append(ServerStatus(**self.links.request(server, "status", {})[0]))
            except ServerError:
                found.append(None)
        return found

    def when_closed(self, action: Callable[[], None]) -> None:
        """Calls ``action`` when everything ends."""
        self._when_closed.append(action)

    def close(self) -> None:
        """Ends all workers and servers."""
        for action in self._when_closed:
            action()
        self.links.close()
        self.engine.stop()
