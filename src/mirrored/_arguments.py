"""The arguments of ``run`` by what becomes of them inside a replica.

Owns telling per-replica values, mirrored arrays and Python constants apart, and
what the rows of the batches among them are.
"""

from __future__ import annotations

import copy
from typing import Any, final

import jax
import jax.numpy as jnp

from mirrored import _compat, _replica
from mirrored._placement import Placement
from mirrored._signature import is_array_like
from mirrored._values import PerReplica, flatten


@final
class Arguments:
    """The arguments of ``run`` by what becomes of them inside a replica."""

    def __init__(self, placement: Placement, args: Any, kwargs: Any) -> None:
        leaves, self._treedef = flatten((args, kwargs))
        self._leaves = leaves
        self.per_replica: dict[int, PerReplica] = {}
        self.mirrored: dict[int, Any] = {}
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, PerReplica):
                self.per_replica[index] = leaf.placed(placement)
            elif is_array_like(leaf) or _compat.is_traced(leaf):
                self.mirrored[index] = leaf

    def with_one_more_row(self) -> Arguments:
        """The same arguments with one more padded row in each batch, for shapes only."""
        longer = copy.copy(self)
        longer.per_replica = {
            index: _one_row_longer(value) if value.row_counts is not None else value
            for index, value in self.per_replica.items()
        }
        return longer

    def are_batches(self) -> list[bool]:
        """Says of each per-replica value whether its rows are those of a batch."""
        return [
            value.stacked.ndim > 1 and (value.is_batch or value.row_counts is not None)
            for value in self.per_replica.values()
        ]

    def rebuild(self, values: dict[int, Any]) -> tuple[Any, Any]:
        """Puts this replica's values in place of the leaves."""
        leaves = list(self._leaves)
        for index, value in values.items():
            leaves[index] = value
        return self._treedef.unflatten(leaves)

    def rows(self, counts: list[Any]) -> _replica.RowValidity | None:
        """Describes the rows of the batches among the arguments, seen from a replica."""
        batches = [value for value in self.per_replica.values() if value.is_batch]
        if not batches:
            return None
        lengths = {value.stacked.shape[1] for value in batches if value.stacked.ndim > 1}
        padded = [value.row_counts is not None for value in batches]
        if any(padded):
            conflicting = len(lengths) != 1 or not all(padded)
            return _replica.RowValidity(max(lengths), counts[0], conflicting=conflicting)
        return _replica.RowValidity(lengths.pop(), None) if len(lengths) == 1 else None

    @property
    def row_counts(self) -> Any:
        """The real rows of the (first) padded batch, or None."""
        counts = self._all_row_counts()
        return counts[0] if counts else None

    def row_counts_agree(self) -> Any:
        """Whether all padded batches have the same real rows; None if there is one array.

        The parts of one batch share one array of counts; inside a trace each part
        brings its own, and only their values can tell.
        """
        counts = self._all_row_counts()
        others = [count for count in counts[1:] if count is not counts[0]]
        if not others:
            return None
        return jnp.stack([jnp.all(counts[0] == other) for other in others]).all()

    def _all_row_counts(self) -> list[Any]:
        batches = (value for value in self.per_replica.values() if value.is_batch)
        return [value.row_counts for value in batches if value.row_counts is not None]


def _one_row_longer(value: PerReplica) -> PerReplica:
    shape = list(value.stacked.shape)
    shape[1] += 1
    stacked = jax.ShapeDtypeStruct(tuple(shape), value.stacked.dtype)
    return PerReplica.from_stacked(stacked, value.row_counts, is_batch=value.is_batch)
