"""The check for NaN and infinity, and the words in which it fails.

Owns naming the leaf that went bad; who asks for the check is up to others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirrored import _compat, _context
from mirrored._errors import ContextError, NonFiniteError
from mirrored._values import PerReplica, is_leaf
from mirrored._variable import Variable


def require_finite(nest: Any) -> None:
    """Raises NonFiniteError if a leaf of ``nest`` holds a NaN or an infinity.

    Inside a mirrored.function the program looks, and the call of it raises.
    """
    leaves = jax.tree_util.tree_flatten_with_path(nest, is_leaf=is_leaf)[0]
    names: list[str] = []
    arrays: list[Any] = []
    for path, leaf in leaves:
        label = f"the value at {jax.tree_util.keystr(path)}" if path else "the value"
        if isinstance(leaf, Variable):
            label = f"variable {leaf.name!r}"
        found = [part for part in _arrays_of(leaf) if _may_be_infinite(part)]
        names += [label] * len(found)
        arrays += found
    if not arrays:
        return
    check = raise_if_not_finite(names, "check_finite")
    frame = _context.current().frame
    if frame is not None and not frame.is_concrete:
        frame.checks.append((finite_flags(arrays), check))
        return
    if any(map(_compat.is_traced, arrays)):
        raise ContextError(
            fact="check_finite was called inside jax.jit (or another JAX transformation), where "
            "no value is known yet.",
            expected="check_finite in mirrored.function, or outside of compiled functions.",
            hint="replace @jax.jit by @mirrored.function, or check what the function returns.",
        )
    check(np.asarray(_all_finite(arrays)))


def _arrays_of(leaf: Any) -> Sequence[Any]:
    if isinstance(leaf, Variable):
        return [leaf.stored()]
    if isinstance(leaf, PerReplica):
        return leaf.components() if leaf.stacked is None else [leaf.stacked]
    return [leaf]


def _may_be_infinite(value: Any) -> bool:
    if isinstance(value, (float, complex)):
        return True
    dtype = getattr(value, "dtype", None)
    return dtype is not None and bool(jnp.issubdtype(dtype, jnp.inexact))


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
