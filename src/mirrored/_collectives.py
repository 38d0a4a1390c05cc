"""What crosses replicas inside a replica function, and the arithmetic of reductions.

Owns the Communicator (how a replica reaches the others) and SUM, MEAN, MIN and
MAX over replicas, rows and empty components. Inside a compiled replica function
a collective's result has a type that cannot differ between replicas, which is
what makes drift impossible.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mirrored import _compat
from mirrored._errors import ShapeError
from mirrored._types import ReduceOp

_AXIS = _compat.REPLICA_AXIS

Axes = tuple[int, ...]


class Communicator(abc.ABC):
    """How one replica reaches the others."""

    replica_count: int
    # Whether is_own answers by types, rather than by comparing the replicas' values.
    is_typed = True

    @property
    @abc.abstractmethod
    def replica_id(self) -> Any:
        """This replica's number; traced inside a compiled program."""

    @abc.abstractmethod
    def sum(self, values: list[Any]) -> list[Any]:
        """Sums each array over the replicas, in one combined collective."""

    @abc.abstractmethod
    def extreme(self, op: ReduceOp, values: list[Any]) -> list[Any]:
        """Takes the elementwise minimum or maximum of each array over the replicas."""

    @abc.abstractmethod
    def gather(self, value: Any, axis: int, *, tiled: bool) -> Any:
        """Concatenates (tiled) or stacks an array of all replicas."""

    @abc.abstractmethod
    def own(self, value: Any) -> Any:
        """Gives ``value`` the type of a value that belongs to this replica."""

    @abc.abstractmethod
    def is_own(self, value: Any) -> bool:
        """Says whether ``value`` may differ from the other replicas' value."""

    def came_from_one(self, value: Any) -> bool:
        """Says whether ``value`` counts as this replica's own, even if equal to the others'."""
        return self.is_own(value)

    def scatter_sum(self, rows: Any) -> Any:
        """Sums an array with one row for each replica; each keeps its own row."""
        return self.own(self.sum([rows])[0][self.replica_id])

    def tree_sum(self, value: Any) -> Any:
        """Sums an array over the replicas in a fixed order: neighbours, then pairs of pairs.

        The order is that of a balanced binary tree over the replicas' numbers, whose
        number is a power of two.
        """
        parts = list(self.gather(value, 0, tiled=False))
        while len(parts) > 1:
            parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    def loss_is_own(self, loss: Any) -> bool:
        """Says whether a loss is this replica's mean, rather than the global loss.

        The gradients of the first are averaged, those of the second are contributions
        and summed.
        """
        return self.is_own(loss)

    def agree(self, value: Any) -> Any:
        """Notes that ``value`` was computed from collectives alone, so is the same everywhere."""
        return value


@final
class ProgramCommunicator(Communicator):
    """All replicas in one compiled program, as ``run`` traces them.

    Args:
      replica_count: how many replicas there are.
      packs: whether arrays that are summed together travel as one. To Gloo XLA gives the
        arrays of a combined all-reduce one after the other, each with its own round trips.
    """

    def __init__(self, replica_count: int, *, packs: bool = False) -> None:
        self.replica_count = replica_count
        self._packs = packs

    @property
    def replica_id(self) -> Any:
        return lax.axis_index(_AXIS)

    def sum(self, values: list[Any]) -> list[Any]:
        own = [to_varying(value) for value in values]
        if self._packs:
            return packed(lambda flat: lax.psum(flat, _AXIS), own)
        return lax.psum(own, _AXIS) if own else []

    def scatter_sum(self, rows: Any) -> Any:
        return lax.psum_scatter(to_varying(rows), _AXIS, scatter_dimension=0, tiled=False)

    def tree_sum(self, value: Any) -> Any:
        """Recursive halving: each step exchanges half of what is left with a partner.

        As much travels as in any reduce-scatter, and every element is summed in the
        order of the tree.
        """
        count = self.replica_count
        flat = to_varying(value).reshape(-1)
        flat = jnp.pad(flat, (0, -flat.size % count))
        distance = 1
        while distance < count:
            low, high = jnp.split(flat, 2)
            upper = (self.replica_id // distance) % 2 == 1
            partners = [(index, index ^ distance) for index in range(count)]
            other = lax.ppermute(jnp.where(upper, low, high), _AXIS, partners)
            flat = jnp.where(upper, high, low) + other
            distance *= 2
        rows = lax.all_gather(flat, _AXIS, axis=0, tiled=False, to="invarying")
        # Replica r holds the chunk whose number is r with its bits reversed.
        bits = count.bit_length() - 1
        order = [int(f"{index:0{bits}b}"[::-1], 2) if bits else 0 for index in range(count)]
        whole = rows[np.array(order)].reshape(-1)
        return whole[: value.size].reshape(value.shape)

    def extreme(self, op: ReduceOp, values: list[Any]) -> list[Any]:
        function = lax.pmin if op is ReduceOp.MIN else lax.pmax
        return [function(to_varying(value), _AXIS) for value in values]

    def gather(self, value: Any, axis: int, *, tiled: bool) -> Any:
        return lax.all_gather(to_varying(value), _AXIS, axis=axis, tiled=tiled, to="invarying")

    def own(self, value: Any) -> Any:
        return to_varying(value)

    def is_own(self, value: Any) -> bool:
        return _compat.varies_over_replicas(value)


@final
class SingleCommunicator(Communicator):
    """One replica alone: the default replica context, outside any scope."""

    replica_count = 1

    @property
    def replica_id(self) -> int:
        return 0

    def sum(self, values: list[Any]) -> list[Any]:
        return values

    def extreme(self, op: ReduceOp, values: list[Any]) -> list[Any]:
        return values

    def gather(self, value: Any, axis: int, *, tiled: bool) -> Any:
        return jnp.asarray(value) if tiled else jnp.expand_dims(value, axis)

    def own(self, value: Any) -> Any:
        return value

    def is_own(self, value: Any) -> bool:
        return False


def packed(function: Callable[[Any], Any], arrays: Sequence[Any]) -> list[Any]:
    """Applies an elementwise function to all arrays of a dtype as one flat array."""
    results: list[Any] = [None] * len(arrays)
    for dtype in {array.dtype: None for array in arrays}:
        places = [index for index, array in enumerate(arrays) if array.dtype == dtype]
        if len(places) == 1:
            results[places[0]] = function(arrays[places[0]])
            continue
        flat = function(jnp.concatenate([arrays[index].reshape(-1) for index in places]))
        first = 0
        for index in places:
            size, shape = arrays[index].size, arrays[index].shape
            results[index] = flat[first : first + size].reshape(shape)
            first += size
    return results


def to_varying(value: Any) -> Any:
    """Casts an array to the type of a replica's own value; a no-op if it is one."""
    value = value if _compat.is_typed_key(value) else jnp.asarray(value)
    if _compat.varies_over_replicas(value):
        return value
    return lax.pcast(value, _AXIS, to="varying")


def fold_in_replica(key: Any, communicator: Communicator) -> Any:
    """Makes this replica's key of one that all replicas share."""
    # The tag keeps a replica's stream apart from a user's own fold_in(key, small number).
    tagged = jax.random.fold_in(communicator.own(key), 0x6D697272)
    return jax.random.fold_in(tagged, communicator.replica_id)


def all_reduce(op: ReduceOp, nest: Any, communicator: Communicator) -> Any:
    """Reduces each leaf elementwise over the replicas; the result is the same on all."""
    leaves, structure = jax.tree.flatten(nest)
    components = [(jnp.asarray(leaf), None) for leaf in leaves]
    results = reduce_components(op, components, [None] * len(leaves), communicator)
    return structure.unflatten(results)


def all_gather(nest: Any, axis: int, communicator: Communicator) -> Any:
    """Concatenates (scalars: stacks) each leaf of all replicas; the same on all."""

    def gather(leaf: Any) -> Any:
        value = jnp.asarray(leaf)
        if value.ndim == 0:
            return communicator.gather(value, 0, tiled=False)
        return communicator.gather(value, axis, tiled=True)

    return jax.tree.map(gather, nest)


def from_first_replica(value: Any, communicator: Communicator) -> Any:
    """Gives every replica the value of replica 0."""
    value = jnp.asarray(value)
    summable = _summable(value)
    mine = communicator.replica_id == 0
    only_first = jnp.where(mine, summable, jnp.zeros_like(summable))
    return communicator.sum([only_first])[0].astype(value.dtype)


def _summable(value: Any) -> Any:
    value = jnp.asarray(value)
    return value.astype(jnp.int32) if value.dtype == jnp.bool_ else value


def as_mean_dtype(value: Any) -> Any:
    """Makes integers and booleans float32, in which a mean of them is expressed."""
    value = jnp.asarray(value)
    return value if jnp.issubdtype(value.dtype, jnp.inexact) else value.astype(jnp.float32)


def reduce_components(
    op: ReduceOp,
    components: Sequence[tuple[Any, Any]],
    axes: Sequence[Axes | None],
    communicator: Communicator,
) -> list[Any]:
    """Reduces, inside a replica, pairs of (component, its row count or None)."""
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        extremes = [
            _local_extreme(op, value, count, axis)
            for (value, count), axis in zip(components, axes, strict=True)
        ]
        results = communicator.extreme(op, extremes)
        return [
            result.astype(value.dtype)
            for result, (value, _) in zip(results, components, strict=True)
        ]
    sums = [
        _local_sum(op, value, count, axis)
        for (value, count), axis in zip(components, axes, strict=True)
    ]
    counts = [
        count for (_, count), axis in zip(components, axes, strict=True) if _rows(count, axis)
    ]
    # Sums and row counts travel together: one collective a reduction.
    combined = communicator.sum([*sums, *counts])
    totals, row_totals = combined[: len(sums)], combined[len(sums) :]
    if op is ReduceOp.SUM:
        return totals
    rows_left = iter(row_totals)
    means = []
    for total, (value, count), axis in zip(totals, components, axes, strict=True):
        if axis is None:
            elements: Any = communicator.replica_count
        else:
            other = int(np.prod([value.shape[index] for index in axis if index != 0], dtype=int))
            if _rows(count, axis):
                elements = next(rows_left) * other
            else:
                elements = communicator.replica_count * other * (value.shape[0] if 0 in axis else 1)
        means.append(_divide(total, elements).astype(as_mean_dtype(value).dtype))
    return means


def _rows(count: Any, axis: Axes | None) -> bool:
    return count is not None and axis is not None and 0 in axis


def _divide(total: Any, elements: Any) -> Any:
    if isinstance(elements, int) and elements == 0:
        raise no_element(what="the mean")
    return total / elements


def no_element(*, what: str) -> ShapeError:
    """The error for a reduction that has nothing to reduce."""
    return ShapeError(
        fact=f"{what} of a value without any element was asked for.",
        expected="at least one element on one replica.",
        hint="leave empty batches out.",
    )


def _real_rows(value: Any, count: Any) -> Any:
    rows = jnp.arange(value.shape[0]) < count
    return rows.reshape(rows.shape + (1,) * (value.ndim - 1))


def _local_sum(op: ReduceOp, value: Any, count: Any, axis: Axes | None) -> Any:
    value = as_mean_dtype(value) if op is ReduceOp.MEAN else _summable(value)
    if count is not None:
        value = jnp.where(_real_rows(value, count), value, jnp.zeros_like(value))
    if axis is None:
        # The sum of half floats may be infinite although their mean is one of them.
        narrow = op is ReduceOp.MEAN and value.dtype == jnp.float16
        return value.astype(jnp.float32) if narrow else value
    # Half floats are summed in float32, as one device sums a whole batch;
    # integers keep their dtype, as tf.distribute's do.
    wide = (
        jnp.float32
        if jnp.issubdtype(value.dtype, jnp.floating) and value.dtype.itemsize < 4
        else value.dtype
    )
    total = jnp.sum(value, axis=axis, dtype=wide)
    return total if op is ReduceOp.MEAN else total.astype(value.dtype)


def _local_extreme(op: ReduceOp, value: Any, count: Any, axis: Axes | None) -> Any:
    value = _summable(value)
    least = op is ReduceOp.MIN
    if jnp.issubdtype(value.dtype, jnp.inexact):
        neutral = jnp.array(jnp.inf if least else -jnp.inf, value.dtype)
    else:
        limits = jnp.iinfo(value.dtype)
        neutral = jnp.array(limits.max if least else limits.min, value.dtype)
    if count is not None:
        value = jnp.where(_real_rows(value, count), value, neutral)
    if axis is None:
        return value
    if any(value.shape[index] == 0 for index in axis):
        raise no_element(what=f"the {op.name.lower()}")
    return (jnp.min if least else jnp.max)(value, axis=axis, initial=neutral)
