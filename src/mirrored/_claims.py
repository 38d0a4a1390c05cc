"""Claims: results that a replica function says are the same on all replicas.

Owns ``as_mirrored`` and what it marks. Whether a claim holds is found out by ``_run``,
which has the whole program in sight.
"""

from __future__ import annotations

import dataclasses
from typing import Any, final

import jax

from mirrored import _context
from mirrored._errors import MirroredError, PaddingError, VariableError

_HINT = 'reduce what it is computed from first, with ctx.all_reduce("mean", value).'


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Claim:
    """A value with the words in which its claim is refused."""

    value: Any
    label: str
    hint: str = _HINT
    # What must leave padded rows out, if it is computed from a batch.
    basis: Any = None
    padding_hint: str = ""

    def refusal(self) -> MirroredError:
        """The error if the value may differ between replicas."""
        return VariableError(
            fact=f"{self.label} would differ between replicas.",
            expected="a value that is provably the same on all replicas.",
            hint=self.hint,
        )

    def padding_refusal(self) -> MirroredError:
        """The error if the value counts padded rows."""
        return PaddingError(
            fact=f"{self.label} was computed from a batch with padded rows, and does not depend on "
            "which rows are real.",
            expected="padded rows left out.",
            hint=self.padding_hint,
        )


def as_mirrored(nest: Any) -> Any:
    """Marks results of a replica function that are the same on all replicas.

    What enters ``strategy.run`` belongs to the replica from there on, so parameters
    updated inside would come back as PerReplica values, although every replica
    computed the same. Marked by this function, in the return statement, they come
    back as plain mirrored arrays. It is checked while tracing: a value that depends on
    anything that differs between replicas (data, gradients before the all-reduce, the
    replica's number or random keys) is an error that names it.

    Args:
      nest: arrays, or a nest of them.

    Returns:
      The marked nest, to be returned from the function given to ``run``.

    >>> import jax, jax.numpy as jnp
    >>> import mirrored
    >>> strategy = mirrored.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> def train_step(weight, batch):
    ...     gradient = jax.grad(lambda w: jnp.mean((w * batch) ** 2))(weight)
    ...     gradient = mirrored.get_replica_context().all_reduce("mean", gradient)
    ...     return mirrored.as_mirrored(weight - 0.5 * gradient)
    >>> float(strategy.run(train_step, args=(1.0, mirrored.PerReplica([[1.0], [2.0]]))))
    -1.5
    """
    context = _context.current()
    if context.replica is None or context.merging:
        return nest

    def mark(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        place = jax.tree_util.keystr(path)
        return Claim(leaf, f"the value marked by as_mirrored{f' at {place}' if place else ''}")

    return jax.tree_util.tree_map_with_path(mark, nest)
