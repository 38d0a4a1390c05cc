"""``reduce``, ``gather`` and ``local_results`` wherever they are called.

Owns telling the cases apart, outside the replicas or in a merge_call, dense or sparse;
the arithmetic is in the layers below.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from mirrored import _context, _replica
from mirrored._collectives import reduce_components
from mirrored._errors import ArgumentError, ContextError, PaddingError
from mirrored._placement import Placement
from mirrored._reduction import (
    check_gather,
    gather_nest,
    normalized_axes,
    reduce_nest,
    refuse_plain_gather,
)
from mirrored._sparse import IndexedSlices, all_reduce_slices, is_reducible, reduce_slices
from mirrored._types import ReduceOp
from mirrored._values import PerReplica, flatten, flattened, map_nest


def reduce_value(placement: Placement, op: ReduceOp, value: Any, axis: Any) -> Any:
    """Reduces every leaf of a nest; see ``Strategy.reduce``."""
    axes = _parsed_axis(axis)
    replica = _merging_replica()
    leaves, structure = flattened(value, is_reducible)
    if replica is not None:
        return structure.unflatten([_reduce_merged(op, leaf, axes, replica) for leaf in leaves])
    slices = [index for index, leaf in enumerate(leaves) if _has_slices(leaf)]
    dense = [leaf for index, leaf in enumerate(leaves) if index not in slices]
    results = iter(reduce_nest(placement, op, dense, axes))
    return structure.unflatten(
        [
            reduce_slices(placement, op, leaf) if index in slices else next(results)
            for index, leaf in enumerate(leaves)
        ]
    )


def gather_value(placement: Placement, value: Any, axis: int) -> Any:
    """Concatenates the components of every leaf; see ``Strategy.gather``."""
    replica = _merging_replica()
    if replica is None:
        return gather_nest(placement, value, axis)

    def gather(leaf: Any) -> Any:
        if not isinstance(leaf, PerReplica) and not _may_be_own(replica):
            raise refuse_plain_gather(leaf)
        component = _component(leaf)
        check_gather([jax.numpy.shape(component)], axis)
        rank = jax.numpy.ndim(component)
        return replica.communicator.gather(component, axis % rank, tiled=True)

    return map_nest(gather, value)


def local_components(placement: Placement, value: Any) -> tuple[Any, ...]:
    """Takes a nest apart into one for each local replica; see ``Strategy.local_results``."""
    leaves, structure = flatten(value)
    replica = _merging_replica()
    if not any(isinstance(leaf, PerReplica) for leaf in leaves):
        return (value,)
    parts = [
        None
        if not isinstance(leaf, PerReplica)
        else leaf.components()
        if replica is None
        else _merged_components(placement, leaf, replica)
        for leaf in leaves
    ]
    count = next(len(part) for part in parts if part is not None)
    return tuple(
        structure.unflatten(
            [
                leaf if part is None else part[index]
                for leaf, part in zip(leaves, parts, strict=True)
            ]
        )
        for index in range(count)
    )


def _merged_components(
    placement: Placement, leaf: PerReplica, replica: _replica.ReplicaContext
) -> tuple[Any, ...]:
    if placement.spans_processes:
        raise ContextError(
            fact="local_results was called inside merge_call in a cluster of several processes.",
            expected="what all processes compute alike, since they run one program.",
            hint="use strategy.gather there, or strategy.local_results outside of run.",
        )
    gathered = replica.communicator.gather(_component(leaf), 0, tiled=False)
    return tuple(gathered[index] for index in range(placement.replica_count))


def _component(leaf: Any) -> Any:
    return leaf.stacked[0] if isinstance(leaf, PerReplica) else jax.numpy.asarray(leaf)


def _may_be_own(replica: _replica.ReplicaContext) -> bool:
    """Says whether a value that is not a PerReplica may still belong to one replica.

    So it may where there is one replica only, and in debug mode, which takes values that
    happen to be equal for the same.
    """
    return replica.num_replicas_in_sync == 1 or not replica.communicator.is_typed


def _merging_replica() -> _replica.ReplicaContext | None:
    """The replica whose program runs a merge_call; None outside the replicas."""
    context = _context.current()
    if context.replica is None and context.merging:
        return _replica.default_replica_context()
    return context.replica


def _parsed_axis(axis: Any) -> tuple[int, ...] | None:
    if axis is None:
        return None
    axes = tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)
    if not axes or not all(
        isinstance(item, (int, np.integer)) and not isinstance(item, bool) for item in axes
    ):
        raise ArgumentError(
            fact=f"reduce was given axis={axis!r}.",
            expected="None, an integer or a tuple of integers.",
            hint="axis=None reduces elementwise over replicas; axis=0 also sums the rows.",
        )
    return tuple(int(item) for item in axes)


def _has_slices(leaf: Any) -> bool:
    if isinstance(leaf, PerReplica) and leaf.stacked is None:
        return any(isinstance(part, IndexedSlices) for part in leaf.components())
    return isinstance(leaf, IndexedSlices)


def _reduce_merged(
    op: ReduceOp, leaf: Any, axes: tuple[int, ...] | None, replica: _replica.ReplicaContext
) -> Any:
    """Reduces inside merge_call, where the program's replicas are still in sight."""
    if isinstance(leaf, IndexedSlices) and isinstance(leaf.values, PerReplica):
        own = map_nest(lambda value: value.stacked[0], leaf)
        return all_reduce_slices(op, own, replica.communicator)
    if not isinstance(leaf, PerReplica) and not _may_be_own(replica):
        if op is ReduceOp.SUM or axes is not None:
            raise ArgumentError(
                fact=f"reduce({op.name}) inside merge_call was given a value that is the same on "
                "every replica.",
                expected="a value that may differ between replicas.",
                hint="use the value itself.",
            )
        return leaf
    if axes is not None and replica.rows is not None and replica.rows.padded:
        raise PaddingError(
            fact=f"reduce(axis={axes}) inside merge_call was given rows of a batch of which some "
            "may be padding.",
            expected="a reduction that knows which rows are real.",
            hint="use mirrored.mean in the replica function, or strategy.reduce outside run.",
        )
    component = _component(leaf)
    axis = normalized_axes(axes, component.ndim)
    return reduce_components(op, [(component, None)], [axis], replica.communicator)[0]
