"""What of an argument is data, and what is part of the program.

Owns telling the two apart, and what the arguments of two calls must share to be given to
one compiled program.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirrored import _compat
from mirrored._captures import ByIdentity

# Python numbers are traced, as jax.jit does; a bool is a flag more often than a
# number, and stays Python so that `if training:` works.
_TRACED_NUMBERS = (int, float, complex)
_MOST_OF_32_BITS = 2**31


def is_python_number(leaf: Any) -> bool:
    """Says whether a leaf is a Python number that becomes data of a program.

    An integer that fits no array of JAX stays Python, as a seed may well be one.
    """
    if not isinstance(leaf, _TRACED_NUMBERS) or isinstance(leaf, bool):
        return False
    if not isinstance(leaf, int) or -_MOST_OF_32_BITS <= leaf < _MOST_OF_32_BITS:
        return True
    return _compat.keeps_64_bits() and -(2**63) <= leaf < 2**63


def is_array(leaf: Any) -> bool:
    """Says whether a leaf is an array, or one number of NumPy, that JAX can compute with."""
    # A shape stands for an array where a program is lowered and not called.
    if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        return True
    return isinstance(leaf, (np.ndarray, np.generic)) and _canonical(leaf.dtype) is not None


def is_array_like(leaf: Any) -> bool:
    """Says whether a leaf is data (traced) rather than a Python constant."""
    return is_array(leaf) or is_python_number(leaf)


def signature_of(leaf: Any) -> Any:
    """What two leaves must share to be given to one compiled program."""
    # The same for NumPy and JAX arrays: only shapes and dtypes make a new trace.
    if isinstance(leaf, jax.Array):
        return (leaf.shape, leaf.dtype, leaf.aval.weak_type)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return (leaf.shape, leaf.dtype, leaf.weak_type)
    if isinstance(leaf, (np.ndarray, np.generic)) and is_array(leaf):
        return (leaf.shape, _canonical(leaf.dtype), False)
    if is_python_number(leaf):
        return type(leaf)
    return _signature_of_constant(leaf)


def _signature_of_constant(value: Any) -> Any:
    """Equal values of one type are one constant; what has no hash is equal to itself only."""
    if isinstance(value, (set, bytearray)):
        # Whoever changes one expects the change to be seen.
        return (
            "constant",
            type(value),
            frozenset(value) if isinstance(value, set) else bytes(value),
        )
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return ("constant", value.shape, value.dtype.str, value.tobytes())
    try:
        hash(value)
    except TypeError:
        return ByIdentity(value)
    return ("constant", type(value), value)


@functools.cache
def _canonical(dtype: Any) -> Any:
    """The dtype as JAX keeps it; None for strings, dates, records and objects."""
    known = dtype == np.bool_ or jnp.issubdtype(dtype, jnp.number)
    return jax.dtypes.canonicalize_dtype(dtype) if known else None


def shown(signature: Any) -> str:
    """Writes a signature for people."""
    if isinstance(signature, tuple):
        if signature[0] == "constant":
            return repr(signature[-1])
        return f"{signature[1]}{list(signature[0])}"
    if isinstance(signature, type):
        return f"a Python {signature.__name__}"
    return "another object"
