"""Python's operators for objects that hold an array to be read.

Owns arithmetic, comparison and conversion, which are those of the value read.
"""

from __future__ import annotations

import abc
import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mirrored._errors import ArgumentTypeError


def _binary(function: Callable[[Any, Any], Any]) -> Any:
    def method(self: ReadsAsArray, other: Any) -> Any:
        right = other.read(lend=False) if isinstance(other, ReadsAsArray) else other
        return function(self.read(lend=False), right)

    return method


def _reflected(function: Callable[[Any, Any], Any]) -> Any:
    def method(self: ReadsAsArray, other: Any) -> Any:
        return function(other, self.read(lend=False))

    return method


def _in_place(sign: str, name: str) -> Any:
    def method(self: ReadsAsArray, other: Any) -> Any:
        raise ArgumentTypeError(
            fact=f"`variable {sign}= value` would leave {self!r} as it is and make the name "
            "stand for an array.",
            expected="a write, or a new name for the result.",
            hint=f"write variable.{name}, or result = variable {sign} value.",
        )

    return method


class ReadsAsArray(abc.ABC):
    """An object that stands for the array its ``read`` returns."""

    # NumPy leaves operators between its arrays and such an object to the object, and
    # takes it for an array in its functions.
    __array_priority__ = 1000

    @abc.abstractmethod
    def read(self, *, lend: bool = True) -> Any:
        """Returns the array; ``lend=False`` where it is used up at once."""

    def numpy(self) -> np.ndarray:
        """The value as a NumPy array, in a copy."""
        return np.array(self.read(lend=False))

    def __jax_array__(self) -> Any:
        return self.read()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def __getitem__(self, index: Any) -> Any:
        return self.read(lend=False)[index]

    def __len__(self) -> int:
        return len(self.read(lend=False))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.read(lend=False))

    def __float__(self) -> float:
        return float(self.read(lend=False))

    def __int__(self) -> int:
        return int(self.read(lend=False))

    def __index__(self) -> int:
        return operator.index(self.read(lend=False))

    def __bool__(self) -> bool:
        return bool(self.read(lend=False))

    def __neg__(self) -> Any:
        return -self.read(lend=False)

    def __abs__(self) -> Any:
        return abs(self.read(lend=False))

    @property
    def T(self) -> Any:  # noqa: N802 (NumPy's name)
        """The transposed value."""
        return self.read(lend=False).T

    __add__, __radd__ = _binary(operator.add), _reflected(operator.add)
    __sub__, __rsub__ = _binary(operator.sub), _reflected(operator.sub)
    __mul__, __rmul__ = _binary(operator.mul), _reflected(operator.mul)
    __truediv__, __rtruediv__ = _binary(operator.truediv), _reflected(operator.truediv)
    __floordiv__, __rfloordiv__ = _binary(operator.floordiv), _reflected(operator.floordiv)
    __mod__, __rmod__ = _binary(operator.mod), _reflected(operator.mod)
    __pow__, __rpow__ = _binary(operator.pow), _reflected(operator.pow)
    __matmul__, __rmatmul__ = _binary(operator.matmul), _reflected(operator.matmul)
    __lt__, __le__ = _binary(operator.lt), _binary(operator.le)
    __gt__, __ge__ = _binary(operator.gt), _binary(operator.ge)
    __eq__, __ne__ = _binary(operator.eq), _binary(operator.ne)

    __iadd__, __isub__ = _in_place("+", "assign_add(value)"), _in_place("-", "assign_sub(value)")
    __imul__ = _in_place("*", "assign(variable * value)")
    __itruediv__ = _in_place("/", "assign(variable / value)")
    __ifloordiv__ = _in_place("//", "assign(variable // value)")
    __imod__, __ipow__ = (
        _in_place("%", "assign(variable % value)"),
        _in_place("**", "assign(variable ** value)"),
    )
    __imatmul__ = _in_place("@", "assign(variable @ value)")

    __hash__ = object.__hash__
