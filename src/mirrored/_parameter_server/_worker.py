"""Worker: runs closures, one at a time, in the name of one worker.

Owns the context closures run in, a worker's own resources (iterators over its data), and
what becomes of a closure's result. Where it runs is the engine's business.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, final

import jax
import numpy as np
import optax

from mirrored import _context
from mirrored._optimizer import Optimizer
from mirrored._parameter_server._catalog import OptimizerSpec, VariableSpec
from mirrored._parameter_server._embedding import EmbeddingTable
from mirrored._parameter_server._engine import (
    ClosureCall,
    ClosureOutcome,
    Connect,
    Resource,
    WorkerSpec,
)
from mirrored._parameter_server._exchange import Exchange
from mirrored._parameter_server._links import Links
from mirrored._parameter_server._participant import Participant
from mirrored._parameter_server._server_home import ServerHome
from mirrored._parameter_server._server_strategy import ServerStrategy, worker_placement
from mirrored._placement import Placement
from mirrored._values import PerReplica, is_leaf
from mirrored._variable import Variable


@final
class Worker:
    """One worker.

    Args:
      spec: who it is.
      connect: opens a channel to a server.
      strategy: the strategy of its process, if the coordinator lives there too; a worker
        with a process of its own makes one.
      device: where it computes; the first local device if left out.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        connect: Connect,
        strategy: ServerStrategy | None = None,
        device: Any = None,
    ) -> None:
        self.spec = spec
        device = device if device is not None else jax.local_devices()[0]
        self._strategy = strategy or WorkerStrategy(worker_placement(device, spec.name))
        self._links = Links(connect, spec.server_count, spec.timeout)
        exchange = Exchange(self._links, spec.lease, spec.staleness)
        self._participant = Participant(exchange, self._strategy.steps, device, spec.index)
        self._resources: dict[int, Any] = {}

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Lets what is unpickled inside find its variables, optimizers and strategy."""
        strategy = self._strategy
        with _context.entered(
            strategy=strategy,
            placement=strategy.placement,
            home=strategy.home,
            participant=self._participant,
            frame=None,
            replica=None,
            merging=False,
        ):
            yield

    def execute(self, call: ClosureCall) -> ClosureOutcome:
        """Runs a closure; what it raises is in the outcome."""
        self._links.renew(call.epoch)
        exchange = self._participant.exchange
        exchange.begin(call.closure, call.floor)
        try:
            with self.loading():
                args, kwargs = jax.tree.map(
                    self._own, (call.args, call.kwargs), is_leaf=_is_resource
                )
                value = jax.tree.map(_on_host, call.function(*args, **kwargs), is_leaf=is_leaf)
            return ClosureOutcome(value, None, self._participant.finish())
        except Exception as error:  # noqa: BLE001 (whatever the user's code raises is told)
            return ClosureOutcome(None, error, exchange.steps)

    def close(self) -> None:
        """Lets go of its channels."""
        self._links.close()

    def _own(self, argument: Any) -> Any:
        if not isinstance(argument, Resource):
            return argument
        if argument.number not in self._resources:
            self._resources[argument.number] = argument.make(self.spec.index)
        return self._resources[argument.number]


@final
class WorkerStrategy(ServerStrategy):
    """The strategy object in a worker's own process."""

    def __init__(self, placement: Placement) -> None:
        super().__init__()
        self._placement = placement
        self._home = WorkerHome(self)

    @property
    def placement(self) -> Placement:
        return self._placement

    @property
    def home(self) -> ServerHome:
        return self._home


@final
class WorkerHome(ServerHome):
    """Variables on servers, in a worker's own process: known by what was unpickled."""

    def __init__(self, strategy: WorkerStrategy) -> None:
        super().__init__(strategy)
        self.strategy = strategy
        self._things: dict[int, Any] = {}
        self._loaded_optimizers: dict[int, Any] = {}
        self._arriving: VariableSpec | None = None
        self._arriving_optimizer: OptimizerSpec | None = None

    @property
    def participant(self) -> Participant:
        return _context.current().participant

    def loaded_variable(self, spec: VariableSpec) -> Any:
        """The object that stands for a variable or table here; always the same."""
        found = self._things.get(spec.number)
        if found is None:
            self._arriving = spec
            if spec.is_table:
                found = EmbeddingTable(
                    spec.shape[0], spec.shape[1], dtype=spec.dtype, name=spec.name
                )
            else:
                found = Variable(np.zeros((), spec.dtype), trainable=spec.trainable, name=spec.name)
            self._things[spec.number] = found
        return found

    def loaded_optimizer(self, spec: OptimizerSpec) -> Any:
        """The object that stands for an optimizer here; always the same."""
        found = self._loaded_optimizers.get(spec.number)
        if found is None:
            self._arriving_optimizer = spec
            # Its rule is on the servers; here it only takes gradients.
            found = Optimizer(optax.identity(), name=spec.name)
            self._loaded_optimizers[spec.number] = found
        return found

    def adopt(self, variable: Any, value: Any) -> None:
        spec, self._arriving = self._arriving, None
        if spec is None:
            super().adopt(variable, value)
            return
        variable.shape, variable.dtype = spec.shape, spec.dtype
        self.know(variable, spec)

    def adopt_table(self, table: Any, make: Any) -> None:
        spec, self._arriving = self._arriving, None
        if spec is None:
            super().adopt_table(table, make)
            return
        self.know(table, spec)

    def adopt_optimizer(self, optimizer: Any, tx: Any) -> None:
        spec, self._arriving_optimizer = self._arriving_optimizer, None
        if spec is None:
            super().adopt_optimizer(optimizer, tx)
            return
        self.know_optimizer(optimizer, spec)


def _is_resource(value: Any) -> bool:
    return isinstance(value, Resource) or is_leaf(value)


def _on_host(leaf: Any) -> Any:
    """Takes a result off the device: it may travel, and the device is the worker's."""
    if isinstance(leaf, jax.Array):
        return np.asarray(leaf)
    if isinstance(leaf, PerReplica):
        return np.asarray(leaf.components()[0])
    if isinstance(leaf, Variable):
        return leaf.numpy()
    return leaf
