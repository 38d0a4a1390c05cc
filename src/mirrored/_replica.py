"""ReplicaContext: what a replica function may ask, and how it reaches the others.

Owns the context object handed to users, which rows of a batch are real, and the
random keys that differ between replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from mirrored import _compat
from mirrored._collectives import (
    Communicator,
    SingleCommunicator,
    all_gather,
    all_reduce,
    fold_in_replica,
)
from mirrored._context import current, entered
from mirrored._errors import ArgumentError, ArgumentTypeError, ContextError, PaddingError
from mirrored._sparse import all_reduce_slices, is_slices
from mirrored._types import ReduceOp
from mirrored._values import PerReplica, flattened, map_nest, mapped


@final
class ReplicaContext:
    """What a replica function may ask about its replica, and how it reaches the others.

    Returned by ``mirrored.get_replica_context()`` inside a function given to
    ``strategy.run``.

    >>> import mirrored
    >>> strategy = mirrored.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> def replica_function():
    ...     context = mirrored.get_replica_context()
    ...     return context.all_reduce("sum", context.replica_id_in_sync_group + 1)
    >>> int(strategy.run(replica_function))
    3
    """

    def __init__(
        self,
        strategy: Any,
        communicator: Communicator,
        rows: RowValidity | None = None,
        trace: Any = None,
    ) -> None:
        self._trace = trace
        self._strategy = strategy
        self._communicator = communicator
        self._rows = rows

    def is_in_inner_trace(self) -> bool:
        """Says whether code is traced for something inside the replica's own program."""
        return self._trace is not None and _compat.current_trace() is not self._trace

    def adopt(self, strategy: Any) -> None:
        """Sets the strategy of the default context; for the library's own modules."""
        self._strategy = strategy

    @property
    def strategy(self) -> Any:
        """The strategy this replica belongs to."""
        return self._strategy

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas run in lockstep."""
        return self._communicator.replica_count

    @property
    def replica_id_in_sync_group(self) -> Any:
        """This replica's number, from 0.

        One program runs on all replicas, so the number is traced: use
        ``jnp.where`` or ``jax.lax.cond`` instead of Python's ``if``.
        """
        return self._communicator.replica_id

    @property
    def replica_id(self) -> Any:
        """The same as ``replica_id_in_sync_group``."""
        return self._communicator.replica_id

    @property
    def communicator(self) -> Communicator:
        """The replica's way to the others; for the library's own modules."""
        return self._communicator

    @property
    def rows(self) -> RowValidity | None:
        """Which rows of the batch are real; for the library's own modules."""
        return self._rows

    @property
    def example_weights(self) -> Any:
        """The weight of each row of this replica's batch: 1 for real rows, 0 for padding.

        None where no batch of ``distribute_dataset`` was given to ``run``.
        """
        return None if self._rows is None else self._rows.weights()

    def own(self, value: Any) -> Any:
        """Marks ``value`` (a nest) as this replica's own, which may differ from the others'.

        Needed where JAX wants one type from the start: the initial carry of a
        ``jax.lax.scan`` that adds up this replica's data, say.
        """
        return mapped(self._communicator.own, value)

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any) -> Any:
        """Reduces ``value`` (a nest) elementwise over the replicas.

        The result is the same on every replica, and its type says so.
        """
        op = ReduceOp.parse(reduce_op)
        with jax.named_scope(f"mirrored.all_reduce_{op.name.lower()}"):
            leaves, structure = flattened(value, is_slices)
            dense = [_array("all_reduce", leaf) for leaf in leaves if not is_slices(leaf)]
            reduced = iter(all_reduce(op, dense, self._communicator))
            return structure.unflatten(
                [
                    all_reduce_slices(op, leaf, self._communicator)
                    if is_slices(leaf)
                    else next(reduced)
                    for leaf in leaves
                ]
            )

    def all_gather(self, value: Any, axis: int = 0) -> Any:
        """Concatenates ``value`` (a nest) of all replicas along ``axis``; scalars are stacked."""
        with jax.named_scope("mirrored.all_gather"):
            leaves, structure = flattened(value)
            arrays = [_array("all_gather", leaf) for leaf in leaves]
            for array in arrays:
                _require_axis(array, axis)
            return structure.unflatten(all_gather(arrays, axis, self._communicator))

    def merge_call(self, merge_fn: Callable[..., Any], args: Any = (), kwargs: Any = None) -> Any:
        """Calls ``merge_fn(strategy, *args)`` in cross-replica context, in the same program.

        Values that may differ between replicas arrive as PerReplica values;
        variables read inside are the stored, mirrored ones.
        """
        context = current()
        if not isinstance(args, (tuple, list)):
            raise ArgumentError(
                fact=f"merge_call was given args of type {type(args).__name__}.",
                expected="a tuple or a list of positional arguments.",
                hint="for a single argument write args=(x,).",
            )
        if context.merging:
            raise ContextError(
                fact="merge_call was called inside merge_call.",
                expected="merge_call in replica context.",
                hint="call the inner function directly: it already runs in cross-replica context.",
            )
        args, kwargs = map_nest(self._to_merge, (tuple(args), dict(kwargs or {})))
        with entered(merging=True):
            result = merge_fn(self._strategy, *args, **kwargs)
        return map_nest(self._from_merge, result)

    def _to_merge(self, value: Any) -> Any:
        is_array = isinstance(value, (jax.Array, np.ndarray, np.generic))
        if is_array and self._communicator.came_from_one(value):
            return PerReplica.from_stacked(jnp.expand_dims(jnp.asarray(value), 0))
        return value

    def _from_merge(self, value: Any) -> Any:
        return value.stacked[0] if isinstance(value, PerReplica) else value

    def random_key(self, key_or_seed: Any, step: Any = None) -> Any:
        """Returns a random key that is a pure function of seed, step and replica.

        Args:
          key_or_seed: an integer seed or a JAX key, the same on every replica.
          step: the step's number, if keys should differ between steps.
        """
        key = key_or_seed
        if not (_compat.is_typed_key(key) or getattr(key, "ndim", 0) == 1):
            key = jax.random.key(key)
        if step is not None:
            key = jax.random.fold_in(key, step)
        return fold_in_replica(key, self._communicator)


@final
class RowValidity:
    """Which rows of a replica's batch are real, and whether anybody asked.

    A batch of 7 rows on 2 replicas is 4 rows and 3 rows; all replicas run one
    program, so the second gets a fourth row of zeros. Code that never asks which
    rows are real would count it: ``asked`` lets ``run`` refuse such a program.
    """

    def __init__(self, row_count: int, real: Any, *, conflicting: bool = False) -> None:
        self.row_count = row_count
        # How many rows from the first are real, or a boolean for each row.
        self._real = real
        self._conflicting = conflicting
        self.asked = False

    @property
    def padded(self) -> bool:
        """Whether some rows of some replica are padding."""
        return self._real is not None

    def mask(self) -> Any:
        """A boolean for each row, or None if all rows are real."""
        self.asked = True
        if self._conflicting:
            raise PaddingError(
                fact="two batches with different numbers of real rows were given to one run.",
                expected="one batch, or batches whose rows belong together.",
                hint="run them one after the other, or pass remainder='drop' to "
                "distribute_dataset.",
            )
        if self._real is None:
            return None
        if jnp.ndim(self._real) == 1:
            return self._real
        return jnp.arange(self.row_count) < self._real

    def real_count(self) -> Any:
        """How many rows are real."""
        mask = self.mask()
        return self.row_count if mask is None else jnp.sum(mask)

    def weights(self) -> Any:
        """One float32 for each row: 1 for a real row, 0 for padding."""
        mask = self.mask()
        if mask is None:
            return jnp.ones(self.row_count, jnp.float32)
        return mask.astype(jnp.float32)


def _array(what: str, leaf: Any) -> Any:
    # JAX warns of strings before it refuses them.
    text = isinstance(leaf, (str, bytes)) or getattr(leaf, "dtype", np.dtype("f")).kind in "OSUMm"
    cause = None
    if not text:
        try:
            return jnp.asarray(leaf)
        except TypeError as error:
            cause = error
    raise ArgumentTypeError(
        fact=f"{what} was given {leaf!r} ({type(leaf).__name__}), which is no array.",
        expected="arrays, numbers, or nests of them.",
        hint="leave out of the nest what replicas need not exchange.",
    ) from cause


def _require_axis(array: Any, axis: Any) -> None:
    # Scalars are stacked whatever the axis is.
    if not isinstance(axis, (int, np.integer)) or (
        array.ndim and not -array.ndim <= axis < array.ndim
    ):
        raise ArgumentError(
            fact=f"all_gather(axis={axis!r}) was given an array of shape {array.shape}.",
            expected=f"an axis between {-array.ndim} and {max(array.ndim, 1) - 1}.",
            hint="axis=0 concatenates rows.",
        )


_DEFAULT_REPLICA = ReplicaContext(None, SingleCommunicator())


def default_replica_context() -> ReplicaContext:
    """Returns the context of the one replica there is outside every scope."""
    return _DEFAULT_REPLICA


def set_default_strategy(strategy: Any) -> None:
    """Tells the default replica context its strategy, which a higher layer owns."""
    _DEFAULT_REPLICA.adopt(strategy)


def get_replica_context() -> ReplicaContext | None:
    """Returns the ReplicaContext of the running replica function.

    None in cross-replica context (inside ``scope()`` or ``merge_call``). Outside
    any scope, the default context with one replica.

    >>> import mirrored
    >>> mirrored.get_replica_context().num_replicas_in_sync
    1
    """
    context = current()
    if context.merging:
        return None
    if context.replica is not None:
        return context.replica
    return None if context.strategy is not None else _DEFAULT_REPLICA


def in_cross_replica_context() -> bool:
    """Says whether the code stands in cross-replica context.

    >>> import mirrored
    >>> mirrored.in_cross_replica_context()
    False
    """
    return get_replica_context() is None
