"""What a variable can hold: values become arrays of its shape and dtype, or are refused.

Owns the conversion of what users write; where the array goes is the rules of ``_variable``.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirrored import _variable_errors as errors
from mirrored._errors import MirroredError
from mirrored._types import VariableAggregation
from mirrored._values import PerReplica


def array_of(name: str, action: str, value: Any, dtype: Any = None) -> Any:
    """Makes an array of a value."""
    if isinstance(value, PerReplica):
        raise errors.given_per_replica(name, action)
    if isinstance(value, (str, bytes)):
        raise errors.no_array(name, action, value, dtype)
    try:
        return jnp.asarray(value, dtype=dtype)
    except MirroredError:
        # The value reads a variable, say, that cannot be read here.
        raise
    except (TypeError, ValueError) as error:
        raise errors.no_array(name, action, value, dtype) from error


def shape_of(initial_value: Any, dtype: Any) -> Any:
    """What a variable needs to know of its value where nothing is ever computed."""
    if callable(initial_value):
        return jax.eval_shape(lambda: jnp.asarray(initial_value(), dtype=dtype))
    if isinstance(initial_value, (list, tuple)):
        initial_value = np.asarray(initial_value)
    return jax.eval_shape(lambda value: jnp.asarray(value, dtype=dtype), initial_value)


def storable(name: str, shape: tuple[int, ...], dtype: Any, action: str, value: Any) -> Any:
    """Makes an array of a value that is written, if it fits the variable."""
    value = array_of(name, action, value)
    fits = value.shape == shape
    if action != "assign" and not fits:
        try:
            fits = np.broadcast_shapes(value.shape, shape) == shape
        except ValueError:
            fits = False
    if not fits:
        raise errors.other_shape(name, shape, action, value.shape)
    keys = [jnp.issubdtype(kind, jax.dtypes.prng_key) for kind in (value.dtype, dtype)]
    inexact = [jnp.issubdtype(kind, jnp.inexact) for kind in (value.dtype, dtype)]
    if inexact == [True, False] or (any(keys) and value.dtype != dtype):
        raise errors.other_dtype(name, dtype, action, value.dtype)
    return cast(value, dtype)


def cast(value: Any, dtype: Any) -> Any:
    """Converts an array; keys, which cannot be, have the dtype already."""
    return value if value.dtype == dtype else value.astype(dtype)


def require_reducible(
    name: str, aggregation: VariableAggregation, on_read: bool, dtype: Any
) -> None:
    """Refuses an aggregation that has no meaning for the dtype."""
    if aggregation is VariableAggregation.MEAN and not jnp.issubdtype(dtype, jnp.inexact):
        raise errors.mean_of_integers(name, dtype)
    is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if is_key and (on_read or aggregation is VariableAggregation.SUM):
        raise errors.key_of_components(name)
