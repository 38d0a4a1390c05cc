"""The check for NaN and infinity, and the words in which it fails.

Owns naming the leaf that went bad; who asks for the check is up to others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirrored._errors import NonFiniteError
from mirrored._values import PerReplica, is_leaf
from mirrored._variable import Variable


def require_finite(nest: Any) -> None:
    """Raises NonFiniteError if a leaf of ``nest`` holds a NaN or an infinity."""
    leaves = jax.tree_util.tree_flatten_with_path(nest, is_leaf=is_leaf)[0]
    names, arrays = [], []
    for path, leaf in leaves:
        label = f"the value at {jax.tree_util.keystr(path)}" if path else "the value"
        if isinstance(leaf, Variable):
            label, leaf = f"variable {leaf.name!r}", leaf.storage
        if isinstance(leaf, PerReplica):
            leaf = leaf.stacked if leaf.stacked is not None else np.stack(leaf.components())
        if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact):
            names.append(label)
            arrays.append(leaf)
    if arrays:
        raise_if_not_finite(names, "check_finite")(np.asarray(_all_finite(arrays)))


@jax.jit
def _all_finite(arrays: list[Any]) -> Any:
    return finite_flags(arrays)


def finite_flags(arrays: list[Any]) -> Any:
    """Returns one boolean for each array: whether all its elements are finite."""
    return jnp.stack([jnp.all(jnp.isfinite(array)) for array in arrays])


def raise_if_not_finite(names: list[str], where: str) -> Callable[[Any], None]:
    """Returns a check of ``finite_flags`` that raises and names the first bad leaf."""

    def check(flags: Any) -> None:
        bad = [name for name, finite in zip(names, flags, strict=True) if not finite]
        if bad:
            others = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
            raise NonFiniteError(
                fact=f"{where} found a NaN or an infinity in {bad[0]}{others}.",
                expected="finite numbers.",
                hint="look at the batch and the learning rate; clip gradients with "
                "optax.clip_by_global_norm; see the values with `with strategy.debug():`.",
            )

    return check
