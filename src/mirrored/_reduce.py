"""``strategy.reduce`` wherever it is called: outside the replicas or in a merge_call.

Owns telling the cases apart, dense or sparse; the arithmetic is in the layers below.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from mirrored import _context, _replica
from mirrored._collectives import reduce_components
from mirrored._errors import ArgumentError, PaddingError
from mirrored._placement import Placement
from mirrored._reduction import reduce_nest
from mirrored._sparse import IndexedSlices, all_reduce_slices, is_reducible, reduce_slices
from mirrored._types import ReduceOp
from mirrored._values import PerReplica


def reduce_value(placement: Placement, op: ReduceOp, value: Any, axis: Any) -> Any:
    """Reduces every leaf of a nest; see ``Strategy.reduce``."""
    axes = _parsed_axis(axis)
    replica = _context.current().replica
    leaves, structure = jax.tree.flatten(value, is_leaf=is_reducible)
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


def _parsed_axis(axis: Any) -> tuple[int, ...] | None:
    if axis is None:
        return None
    axes = tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)
    if not axes or not all(isinstance(item, (int, np.integer)) for item in axes):
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
        own = jax.tree.map(lambda array: array[0], leaf)
        return all_reduce_slices(op, own, replica.communicator)
    if not isinstance(leaf, PerReplica):
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
    component = leaf.stacked[0]
    axis = None if axes is None else tuple(sorted(index % component.ndim for index in axes))
    return reduce_components(op, [(component, None)], [axis], replica.communicator)[0]
