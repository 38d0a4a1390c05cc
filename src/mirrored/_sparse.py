"""IndexedSlices: some rows of a larger array, as embedding gradients are.

Owns how such rows are combined over replicas without making them dense.
"""

from __future__ import annotations

from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from mirrored._collectives import Communicator
from mirrored._errors import ArgumentError
from mirrored._placement import Placement
from mirrored._reduction import gather_nest
from mirrored._types import ReduceOp
from mirrored._values import PerReplica


@final
@jax.tree_util.register_pytree_node_class
class IndexedSlices:
    """Rows ``values`` at ``indices`` of an array of shape ``dense_shape``; the rest is zero.

    An index may stand several times: its rows are added. An index outside the array
    is ignored, so rows can be padded with ``dense_shape[0]``.

    >>> import mirrored
    >>> rows = mirrored.IndexedSlices([[1.0, 2.0]], [1], (3, 2))
    >>> rows.to_dense().tolist()
    [[0.0, 0.0], [1.0, 2.0], [0.0, 0.0]]
    """

    def __init__(self, values: Any, indices: Any, dense_shape: tuple[int, ...]) -> None:
        self.values = _as_array(values)
        self.indices = _as_array(indices)
        self.dense_shape = tuple(int(size) for size in dense_shape)
        if isinstance(self.values, PerReplica) or isinstance(self.indices, PerReplica):
            return
        rows, places = np.shape(self.values), np.shape(self.indices)
        if len(places) != 1 or rows[:1] != places or rows[1:] != self.dense_shape[1:]:
            raise ArgumentError(
                fact=f"IndexedSlices was given values of shape {rows}, indices of shape {places} "
                f"and dense_shape {self.dense_shape}.",
                expected="one index for each row, and rows of shape dense_shape[1:].",
                hint="reshape indices to one axis and values to (len(indices), ...).",
            )

    def to_dense(self) -> Any:
        """Returns the whole array."""
        zeros = jnp.zeros(self.dense_shape, jnp.result_type(self.values))
        # Negative indices would wrap around; they are outside like any other.
        places = jnp.where(self.indices < 0, self.dense_shape[0], self.indices)
        return zeros.at[places].add(self.values, mode="drop")

    def tree_flatten(self) -> tuple[tuple[Any, Any], tuple[int, ...]]:
        """Splits into arrays and structure, for JAX."""
        return (self.values, self.indices), self.dense_shape

    @classmethod
    def tree_unflatten(cls, dense_shape: tuple[int, ...], children: Any) -> IndexedSlices:
        """Rebuilds from what tree_flatten gave; the children may be any objects."""
        slices = cls.__new__(cls)
        slices.values, slices.indices = children
        slices.dense_shape = dense_shape
        return slices

    def __repr__(self) -> str:
        return f"IndexedSlices({self.values!r}, {self.indices!r}, {self.dense_shape})"


def _as_array(value: Any) -> Any:
    return value if isinstance(value, PerReplica) else jnp.asarray(value)


def is_slices(value: Any) -> bool:
    """Says whether ``value`` is an IndexedSlices; the ``is_leaf`` of nest walks."""
    return isinstance(value, IndexedSlices)


def is_reducible(value: Any) -> bool:
    """Says whether ``value`` is one leaf of a reduction."""
    return isinstance(value, (PerReplica, IndexedSlices))


def all_reduce_slices(op: ReduceOp, slices: IndexedSlices, communicator: Communicator) -> Any:
    """Combines this replica's rows with those of the others; the same on all."""
    _check_op(op)
    values = communicator.gather(slices.values, 0, tiled=True)
    indices = communicator.gather(slices.indices, 0, tiled=True)
    return IndexedSlices(
        _scaled(op, values, communicator.replica_count), indices, slices.dense_shape
    )


def reduce_slices(placement: Placement, op: ReduceOp, slices: Any) -> IndexedSlices:
    """Combines the rows of all replicas, seen from outside."""
    _check_op(op)
    if isinstance(slices, PerReplica):
        parts = slices.components()
        slices = IndexedSlices(
            PerReplica([part.values for part in parts]),
            PerReplica([part.indices for part in parts]),
            parts[0].dense_shape,
        )
    if not isinstance(slices.values, PerReplica) or not isinstance(slices.indices, PerReplica):
        raise ArgumentError(
            fact=f"reduce was given {slices!r}, whose rows are the same on every replica.",
            expected="rows that belong to a replica each, as strategy.run returns.",
            hint="use the value itself.",
        )
    values, indices = gather_nest(placement, (slices.values, slices.indices), 0)
    return IndexedSlices(_scaled(op, values, placement.replica_count), indices, slices.dense_shape)


def _scaled(op: ReduceOp, values: Any, replica_count: int) -> Any:
    return values / replica_count if op is ReduceOp.MEAN else values


def _check_op(op: ReduceOp) -> None:
    if op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise ArgumentError(
            fact=f"reduce({op.name}) was given IndexedSlices.",
            expected="SUM or MEAN: rows that are not there count as zeros.",
            hint="call to_dense() first.",
        )
