"""Nests as fields and arrays: arguments and results of closures that need no pickle.

Owns which nests can be said so (lists, tuples, dictionaries with string keys, numbers,
strings, arrays, per-worker resources) and saying them. What cannot takes the engine's own
way, which may pickle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from mirrored import _compat
from mirrored._parameter_server._channel import Fields
from mirrored._parameter_server._engine import Resource
from mirrored._parameter_server._wire import is_known_dtype

_MOST_DEPTH = 50
_PLAIN = (bool, float, str, type(None))


@final
class NotPlainError(Exception):
    """A nest that has something in it that cannot be said without a pickle."""


@final
class Said:
    """A nest being said.

    Attributes:
      arrays: the arrays in it, in order.
      resources: the resources in it.
    """

    def __init__(self) -> None:
        self.arrays: list[np.ndarray] = []
        self.resources: list[Resource] = []

    def say(self, value: Any, depth: int = 0) -> Any:
        """Says one value; raises NotPlainError."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is int and abs(value) < 1 << 63:
            return value
        if depth > _MOST_DEPTH:
            raise NotPlainError
        if kind in (list, tuple):
            return {kind.__name__: [self.say(item, depth + 1) for item in value]}
        if kind is dict and all(type(key) is str for key in value):
            return {"dict": [[key, self.say(item, depth + 1)] for key, item in value.items()]}
        if kind is Resource:
            self.resources.append(value)
            return {"resource": value.number}
        return self._array(value)

    def _array(self, value: Any) -> Fields:
        if isinstance(value, jax.Array) and not _compat.is_typed_key(value):
            said = "jax"
        elif type(value) is np.ndarray:
            said = "numpy"
        elif isinstance(value, np.generic):
            said = "scalar"
        else:
            raise NotPlainError
        array = np.asarray(value)
        if not is_known_dtype(array.dtype):
            raise NotPlainError
        self.arrays.append(array)
        return {said: len(self.arrays) - 1}


def understood(
    said: Any, arrays: Sequence[np.ndarray], resource: Callable[[int], Any] | None = None
) -> Any:
    """Makes the nest that was said.

    Args:
      said: what ``Said.say`` returned.
      arrays: the arrays that came with it; those in the nest are copies, which may be kept
        and changed.
      resource: finds a resource by its number.
    """
    if not isinstance(said, dict):
        return said
    ((kind, content),) = said.items()
    if kind in ("list", "tuple"):
        items = [understood(item, arrays, resource) for item in content]
        return items if kind == "list" else tuple(items)
    if kind == "dict":
        return {key: understood(item, arrays, resource) for key, item in content}
    if kind == "resource" and resource is not None:
        return resource(content)
    array = arrays[content]
    if kind == "scalar":
        return array[()]
    return jnp.array(array) if kind == "jax" else array.copy()
