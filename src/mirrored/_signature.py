"""What of an argument is data, and what is part of the program.

Owns telling the two apart, and what the arguments of two calls must share to be given to
one compiled program.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from mirrored._captures import ByIdentity

# Python numbers are traced, as jax.jit does; a bool is a flag more often than a
# number, and stays Python so that `if training:` works.
_TRACED_NUMBERS = (int, float, complex)


def is_python_number(leaf: Any) -> bool:
    """Says whether a leaf is a Python number that becomes data of a program."""
    return isinstance(leaf, _TRACED_NUMBERS) and not isinstance(leaf, bool)


def is_array_like(leaf: Any) -> bool:
    """Says whether a leaf is data (traced) rather than a Python constant."""
    # A shape stands for an array where a program is lowered and not called.
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)):
        return not (isinstance(leaf, np.ndarray) and leaf.dtype == object)
    return is_python_number(leaf)


def signature_of(leaf: Any) -> Any:
    """What two leaves must share to be given to one compiled program."""
    # The same for NumPy and JAX arrays: only shapes and dtypes make a new trace.
    if isinstance(leaf, jax.Array):
        return (leaf.shape, leaf.dtype, leaf.aval.weak_type)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return (leaf.shape, leaf.dtype, leaf.weak_type)
    if isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype != object:
        return (leaf.shape, _canonical(leaf.dtype), False)
    if is_python_number(leaf):
        return type(leaf)
    if isinstance(leaf, (bool, str, bytes)):
        return ("constant", leaf)
    return ByIdentity(leaf)


@functools.cache
def _canonical(dtype: Any) -> Any:
    return jax.dtypes.canonicalize_dtype(dtype)


def shown(signature: Any) -> str:
    """Writes a signature for people."""
    if isinstance(signature, tuple):
        if signature[0] == "constant":
            return repr(signature[1])
        return f"{signature[1]}{list(signature[0])}"
    if isinstance(signature, type):
        return f"a Python {signature.__name__}"
    return "another object"
