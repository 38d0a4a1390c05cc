"""How the gradients of several replicas become one: by which sum, in which dtype and order.

Owns the combined all-reduce of gradients and what may be asked of it. Which gradients
are averaged and which summed is up to others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import jax
import jax.numpy as jnp

from mirrored._collectives import Communicator, packed, reduce_components
from mirrored._errors import ArgumentError
from mirrored._sparse import IndexedSlices, all_reduce_slices
from mirrored._types import ReduceOp


@final
class GradientReduction:
    """What an optimizer was told about reducing gradients.

    Args:
      reduce: SUM or MEAN, or None to refuse gradients that differ between replicas.
      dtype: what to reduce floating gradients in; their own dtype if None.
      reduction: "fast", or "reproducible" for one fixed order of summation.
    """

    def __init__(self, reduce: ReduceOp | str | None, dtype: Any, reduction: str) -> None:
        self.op = None if reduce is None else ReduceOp.parse(reduce)
        if self.op in (ReduceOp.MIN, ReduceOp.MAX):
            raise ArgumentError(
                fact=f"Optimizer was given reduce={reduce!r}.",
                expected='"mean", "sum" or None.',
                hint="gradients are averaged over replicas by default.",
            )
        if reduction not in ("fast", "reproducible"):
            raise ArgumentError(
                fact=f"Optimizer was given reduction={reduction!r}.",
                expected='"fast" or "reproducible".',
                hint="leave it out unless the same bits are needed on other numbers of replicas.",
            )
        self.dtype = dtype
        self.reproducible = reduction == "reproducible"

    def __call__(
        self,
        gradients: Sequence[Any],
        names: Sequence[str],
        owner: str,
        communicator: Communicator,
    ) -> list[Any]:
        """Reduces the gradients that still differ between replicas, in one collective.

        Args:
          gradients: arrays or IndexedSlices.
          names: what each is the gradient of, for messages.
          owner: who asks, for messages.
          communicator: the replica's way to the others.
        """
        reduced = list(gradients)
        varying = []
        for index, gradient in enumerate(gradients):
            sample = gradient.values if isinstance(gradient, IndexedSlices) else gradient
            if not communicator.is_own(jnp.asarray(sample)):
                continue
            if self.op is None:
                raise ArgumentError(
                    fact=f"the gradient of variable {names[index]!r} differs between "
                    "replicas, and the optimizer was created with reduce=None.",
                    expected="reduced gradients.",
                    hint="use mirrored.value_and_grad, or ctx.all_reduce them first.",
                )
            if isinstance(gradient, IndexedSlices):
                reduced[index] = all_reduce_slices(self.op, gradient, communicator)
            else:
                varying.append(index)
        options = self.dtype is not None or self.reproducible
        if options and not varying and communicator.replica_count > 1:
            raise ArgumentError(
                fact=f"optimizer {owner!r} was asked for a way to reduce gradients, and was "
                "given gradients that are reduced already.",
                expected="this replica's own gradients.",
                hint="use jax.value_and_grad, or mirrored.value_and_grad(..., reduce=False).",
            )
        if varying:
            assert self.op is not None
            with jax.named_scope(f"mirrored.gradients_{self.op.name.lower()}"):
                results = reduce_gradients(
                    [gradients[index] for index in varying],
                    self.op,
                    communicator,
                    dtype=self.dtype,
                    reproducible=self.reproducible,
                )
            for index, result in zip(varying, results, strict=True):
                reduced[index] = result
        return reduced


def reduce_gradients(
    gradients: Any,
    op: ReduceOp,
    communicator: Communicator,
    *,
    dtype: Any = None,
    reproducible: bool = False,
) -> Any:
    """Reduces all gradients in one collective.

    Args:
      gradients: a nest of this replica's gradients.
      op: SUM or MEAN.
      communicator: the replica's way to the others.
      dtype: what to reduce floating gradients in; their own dtype if None.
      reproducible: whether to sum in one fixed order, whatever the number of replicas.
    """
    leaves, structure = jax.tree.flatten(gradients)
    if dtype is not None or reproducible:
        return structure.unflatten(_reduced_as_asked(leaves, op, communicator, dtype, reproducible))
    components = [(jnp.asarray(leaf), None) for leaf in leaves]
    axes = [None] * len(leaves)
    return structure.unflatten(reduce_components(op, components, axes, communicator))


def _reduced_as_asked(
    leaves: list[Any], op: ReduceOp, communicator: Communicator, dtype: Any, reproducible: bool
) -> list[Any]:
    count = communicator.replica_count
    sent = [jnp.asarray(leaf) for leaf in leaves]
    if dtype is not None:
        sent = [
            leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
            for leaf in sent
        ]
    # In float16 a sum may be infinite although the mean is not, so it is divided first.
    early = [op is ReduceOp.MEAN and leaf.dtype == jnp.float16 for leaf in sent]
    sent = [leaf / count if first else leaf for leaf, first in zip(sent, early, strict=True)]
    totals = tree_sums(sent, communicator) if reproducible else communicator.sum(sent)
    results = []
    for leaf, total, divided in zip(leaves, totals, early, strict=True):
        if op is ReduceOp.MEAN and not divided:
            total = total / count
        results.append(total.astype(jnp.asarray(leaf).dtype))
    return results


def tree_sums(arrays: list[Any], communicator: Communicator) -> list[Any]:
    """Sums arrays in one fixed tree over the replicas, all arrays of a dtype together."""
    count = communicator.replica_count
    if count & (count - 1):
        raise ArgumentError(
            fact=f"a reproducible sum was asked for over {count} replicas.",
            expected="1, 2, 4, 8, ... replicas, which share one binary tree.",
            hint="use a power of two, or leave the reproducible reduction out.",
        )
    return packed(communicator.tree_sum, arrays)
