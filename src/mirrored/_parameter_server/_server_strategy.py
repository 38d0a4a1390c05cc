"""ServerStrategy: what the strategy object is, in the coordinator and in workers.

Owns ``run``, ``reduce`` and the scope where variables live on servers. Who starts the
servers is in ``_strategy``.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from mirrored import _context
from mirrored._errors import ContextError
from mirrored._parameter_server._server_home import ServerHome, load_strategy
from mirrored._parameter_server._steps import Steps
from mirrored._placement import Placement
from mirrored._reduce import reduce_value
from mirrored._strategy import Strategy
from mirrored._types import ReduceOp
from mirrored._values import PerReplica, is_leaf


class ServerStrategy(Strategy):
    """A strategy whose variables live on servers; each worker has one replica."""

    def __init__(self) -> None:
        super().__init__()
        # Compiled steps, which the workers of a process share.
        self.steps = Steps(self)

    @property
    @abc.abstractmethod
    def home(self) -> ServerHome:
        """Where its variables live."""

    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Makes this strategy current: variables and optimizers made inside live on servers."""
        with (
            _context.scope(self, self.placement, self.home),
            _context.companions(self),
        ):
            yield self

    def run(self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None) -> Any:
        """Runs ``fn`` as one compiled step of this worker.

        It asks the servers for the variables that ``fn`` reads, runs ``fn`` on the worker's
        device, and sends what ``fn`` assigns and the gradients it applies. Called outside a
        closure, the coordinator does so itself.

        Args:
          fn: the step; traced once for arguments of the same shapes.
          args: a tuple or list of positional arguments.
          kwargs: a dictionary of keyword arguments.

        Returns:
          What ``fn`` returns, as plain arrays: a worker has one replica.
        """
        args, kwargs = _context.require_argument_nest(args, kwargs)
        _context.require_run(self, self.placement, fn)
        if _context.current().replica is not None:
            raise ContextError(
                fact="strategy.run was called inside a replica function.",
                expected="strategy.run in cross-replica context.",
                hint="call the inner function directly.",
            )
        with _context.entered(strategy=self, placement=self.placement, home=self.home):
            return self.home.participant.run(self, fn, args, kwargs, replica=True)

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: Any = None) -> Any:
        """Reduces the values of a step: of one replica, since each worker has one.

        With ``axis`` the axes of the value itself are reduced too, as by other strategies.
        """
        _context.require_cross_replica("strategy.reduce")
        op = ReduceOp.parse(reduce_op)

        def of(leaf: Any) -> Any:
            if isinstance(leaf, PerReplica):
                return reduce_value(self.placement, op, leaf, axis)
            return _over_axes(op, leaf, axis)

        return jax.tree.map(of, value, is_leaf=is_leaf)

    @contextlib.contextmanager
    def debug(self) -> Iterator[Strategy]:
        """Runs steps uncompiled."""
        with jax.disable_jit():
            yield self

    def __reduce__(self) -> Any:
        return load_strategy, ()


def _over_axes(op: ReduceOp, leaf: Any, axis: Any) -> Any:
    array = jnp.asarray(leaf)
    if op is ReduceOp.MEAN and not jnp.issubdtype(array.dtype, jnp.inexact):
        array = array.astype(jnp.float32)
    if axis is None:
        return array
    reduction = {
        ReduceOp.SUM: jnp.sum,
        ReduceOp.MEAN: jnp.mean,
        ReduceOp.MIN: jnp.min,
        ReduceOp.MAX: jnp.max,
    }[op]
    return reduction(array, axis=axis)


def worker_placement(device: Any, name: str) -> Placement:
    """The placement of one worker, or of the coordinator."""
    return Placement([device], name)
