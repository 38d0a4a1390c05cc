"""Reductions and gathers as seen from outside the replicas.

Owns ``strategy.reduce`` and ``strategy.gather`` for every nest, axis and uneven
or empty component; the arithmetic itself is in ``_collectives``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec

from mirrored import _compat
from mirrored._collectives import (
    Axes,
    ProgramCommunicator,
    SingleCommunicator,
    as_mean_dtype,
    no_element,
    reduce_components,
)
from mirrored._errors import ArgumentError, ShapeError
from mirrored._placement import Placement
from mirrored._types import ReduceOp
from mirrored._values import PerReplica, flatten, map_nest

_AXIS = _compat.REPLICA_AXIS


def reduce_nest(placement: Placement, op: ReduceOp, nest: Any, axis: Axes | None) -> Any:
    """Reduces every PerReplica leaf of ``nest`` to one mirrored array.

    All leaves go through one program with one combined collective.
    """
    leaves, structure = flatten(nest)
    results: list[Any] = [None] * len(leaves)
    split: list[int] = []
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, PerReplica):
            results[index] = _reduce_plain(placement, op, leaf, axis)
        else:
            split.append(index)
    for index in [index for index in split if _is_ragged(leaves[index])]:
        results[index] = placement.mirror(_reduce_ragged(op, leaves[index], axis))
        split.remove(index)
    values = [_ready_to_reduce(placement, leaves[index], axis) for index in split]
    if values:
        arrays = [(value.stacked, value.row_counts) for value in values]
        axes = [normalized_axes(axis, value.stacked.ndim - 1) for value in values]
        reduced = _reduce_program(placement, op, tuple(axes))(arrays)
        for index, result in zip(split, reduced, strict=True):
            results[index] = result
    return structure.unflatten(results)


def _reduce_plain(placement: Placement, op: ReduceOp, leaf: Any, axis: Axes | None) -> Any:
    if placement.spans_processes and axis is None and not isinstance(leaf, jax.Array):
        return placement.lift(_reduce_over_processes(op, np.asarray(leaf)))
    if op is ReduceOp.SUM or axis is not None:
        shown = f"axis={axis}" if op is not ReduceOp.SUM else "SUM"
        raise ArgumentError(
            fact=f"reduce({op.name}, axis={axis}) was given {leaf!r}, which is not a per-replica "
            "value: it is the same on every replica.",
            expected="a PerReplica value, as strategy.run returns where replicas may differ.",
            hint=f"{shown} would count it once for each replica; use the value itself, or "
            "jnp.sum / jnp.mean for its own axes.",
        )
    return leaf


def _reduce_over_processes(op: ReduceOp, value: np.ndarray) -> Any:
    """Reduces a host value of which each process has its own."""
    everyone = multihost_utils.process_allgather(value)
    if op is ReduceOp.SUM:
        return everyone.sum(axis=0, dtype=everyone.dtype)
    if op is ReduceOp.MEAN:
        return np.asarray(as_mean_dtype(everyone)).mean(axis=0)
    return everyone.min(axis=0) if op is ReduceOp.MIN else everyone.max(axis=0)


def _ready_to_reduce(placement: Placement, value: PerReplica, axis: Axes | None) -> PerReplica:
    """Checks that the components can be combined under ``axis`` and places them."""
    shapes = _component_shapes(value)
    if shapes is not None:
        _check_kept_shapes(shapes, axis)
    return value.placed(placement)


def _check_kept_shapes(shapes: Sequence[tuple[int, ...]], axis: Axes | None) -> None:
    if len(set(shapes)) == 1:
        return
    if axis is None or len({_kept_shape(shape, axis) for shape in shapes}) > 1:
        shown = " | ".join(str(shape) for shape in shapes)
        raise ShapeError(
            fact=f"reduce with axis={_shown(axis)} was given components of shapes {shown}.",
            expected="equal shapes once the reduced axes are left out.",
            hint="reduce over the axis in which they differ, for example axis=0, which "
            "weights every row equally.",
        )


def _is_ragged(value: PerReplica) -> bool:
    """Says whether host components differ in a later axis than the first."""
    if value.stacked is not None:
        return False
    return len({np.shape(part)[1:] for part in value.components()}) > 1


def _reduce_ragged(op: ReduceOp, value: PerReplica, axis: Axes | None) -> Any:
    """Reduces host components that no stacked array can hold, each by itself first."""
    parts = [jnp.asarray(part) for part in value.components()]
    _check_kept_shapes([part.shape for part in parts], axis)
    alone = SingleCommunicator()
    local_op = ReduceOp.SUM if op is ReduceOp.MEAN else op
    dtype = as_mean_dtype(parts[0]).dtype
    if op is ReduceOp.MEAN:
        # Half floats are added up in float32, here as everywhere.
        parts = [part.astype(jnp.promote_types(dtype, jnp.float32)) for part in parts]
    elif op is not ReduceOp.SUM:
        # Nothing is neither the least nor the greatest.
        parts = [part for part in parts if part.size]
        if not parts:
            raise no_element(what=f"the {op.name.lower()}")
    reduced = []
    for part in parts:
        axes = [normalized_axes(axis, part.ndim)]
        reduced.append(reduce_components(local_op, [(part, None)], axes, alone)[0])
    stacked = jnp.stack(reduced)
    if op is ReduceOp.MIN:
        return stacked.min(axis=0)
    if op is ReduceOp.MAX:
        return stacked.max(axis=0)
    total = stacked.sum(axis=0, dtype=stacked.dtype)
    if op is ReduceOp.SUM:
        return total
    kept = max(int(np.prod(total.shape, dtype=int)), 1)
    elements = sum(part.size for part in parts) // kept
    if not elements:
        raise no_element(what="the mean")
    return (total / elements).astype(dtype)


def _component_shapes(value: PerReplica) -> list[tuple[int, ...]] | None:
    if value.stacked is None:
        return [np.shape(part) for part in value.components()]
    if value.row_counts is None:
        return None
    rest = value.stacked.shape[2:]
    counts = value.row_counts
    if _compat.is_traced(counts) or (
        isinstance(counts, jax.Array) and not counts.is_fully_addressable
    ):
        most = value.stacked.shape[1]
        return [(most, *rest), (-1, *rest)]
    return [(int(count), *rest) for count in np.asarray(counts)]


def _kept_shape(shape: tuple[int, ...], axis: Axes) -> tuple[int, ...]:
    reduced = {index % max(len(shape), 1) for index in axis}
    return tuple(size for index, size in enumerate(shape) if index not in reduced)


def normalized_axes(axis: Axes | None, rank: int) -> Axes | None:
    """Makes axes positive and sorted, refusing those a component does not have."""
    if axis is None:
        return None
    for index in axis:
        if not -rank <= index < rank:
            raise ArgumentError(
                fact=f"reduce was given axis={_shown(axis)} for a value whose components have "
                f"{rank} axes.",
                expected=f"axes between {-rank} and {rank - 1}, or axis=None."
                if rank
                else "axis=None, since the components are scalars.",
                hint="axis=None reduces elementwise over replicas only.",
            )
    return tuple(sorted({index % rank for index in axis}))


def _shown(axis: Axes | None) -> str:
    if axis is not None and len(axis) == 1:
        return str(axis[0])
    return str(axis)


def _reduce_program(placement: Placement, op: ReduceOp, axes: tuple[Axes | None, ...]) -> Any:
    program = _reduce_body(placement, op, axes)
    return program if not _compat.no_trace_is_open() else _compiled_reduce(placement, op, axes)


@functools.lru_cache(maxsize=256)
def _compiled_reduce(placement: Placement, op: ReduceOp, axes: tuple[Axes | None, ...]) -> Any:
    return jax.jit(_reduce_body(placement, op, axes))


def _reduce_body(placement: Placement, op: ReduceOp, axes: tuple[Axes | None, ...]) -> Any:
    def body(arrays: list[tuple[Any, Any]]) -> list[Any]:
        with jax.named_scope(f"mirrored.reduce_{op.name.lower()}"):
            locals_ = [
                (stacked[0], None if counts is None else counts[0]) for stacked, counts in arrays
            ]
            communicator = ProgramCommunicator(
                placement.replica_count, packs=placement.sends_one_by_one
            )
            return reduce_components(op, locals_, axes, communicator)

    return jax.shard_map(
        body,
        mesh=placement.mesh,
        in_specs=(PartitionSpec(_AXIS),),
        out_specs=PartitionSpec(),
        check_vma=True,
    )


def gather_nest(placement: Placement, nest: Any, axis: int) -> Any:
    """Concatenates the components of every leaf along ``axis`` into one mirrored array."""
    return map_nest(lambda leaf: _gather(placement, leaf, axis), nest)


def refuse_plain_gather(value: Any) -> ArgumentError:
    """The error for a gather of what is the same on every replica."""
    return ArgumentError(
        fact=f"gather was given {value!r}, which is not a per-replica value.",
        expected="a PerReplica value.",
        hint="a mirrored value is already whole: use it as it is.",
    )


def _gather(placement: Placement, value: Any, axis: int) -> Any:
    if not isinstance(value, PerReplica):
        raise refuse_plain_gather(value)
    if value.stacked is not None:
        value = value.placed(placement)
    if value.stacked is not None and value.row_counts is None:
        check_gather([value.stacked.shape[1:]], axis)
        program = _gather_even(placement, axis % (value.stacked.ndim - 1))
        return program(value.stacked)
    parts = [jnp.asarray(part) for part in _all_components(value)]
    check_gather([part.shape for part in parts], axis)
    whole = jnp.concatenate([jax.device_put(part, placement.mirrored) for part in parts], axis)
    return jax.device_put(whole, placement.mirrored)


def _all_components(value: PerReplica) -> Sequence[Any]:
    """Returns the components of all processes, for the uneven case."""
    stacked = value.stacked
    if stacked is None or _compat.is_traced(stacked) or stacked.is_fully_addressable:
        return value.components()
    whole = multihost_utils.process_allgather(stacked, tiled=True)
    counts = value.row_counts
    if isinstance(counts, jax.Array):
        counts = multihost_utils.process_allgather(counts, tiled=True)
    return [part[:count] for part, count in zip(whole, counts, strict=True)]


@functools.lru_cache(maxsize=64)
def _gather_even(placement: Placement, axis: int) -> Any:
    def concatenate(stacked: Any) -> Any:
        merged = jnp.moveaxis(stacked, 0, axis)
        shape = list(stacked.shape[1:])
        shape[axis] *= stacked.shape[0]
        return merged.reshape(shape)

    return jax.jit(concatenate, out_shardings=placement.mirrored)


def check_gather(shapes: Sequence[tuple[int, ...]], axis: int) -> None:
    """Refuses components that cannot be concatenated along ``axis``."""
    rank = len(shapes[0])
    is_integer = isinstance(axis, (int, np.integer))
    if rank == 0 or not is_integer or not -rank <= axis < rank:
        raise ArgumentError(
            fact=f"gather(axis={axis}) was given components of shape {shapes[0]}.",
            expected="components that have this axis.",
            hint="use strategy.local_results for scalars, or ctx.all_gather inside run.",
        )
    others = {shape[: axis % rank] + shape[axis % rank + 1 :] for shape in shapes}
    if len(others) > 1:
        raise ShapeError(
            fact=f"gather(axis={axis}) was given components of shapes "
            f"{' | '.join(str(shape) for shape in shapes)}.",
            expected=f"components that differ in axis {axis} only.",
            hint="pad the other axes to one size, or gather along the axis in which they differ.",
        )
