"""Home: where variables live that are not on the devices of the strategy.

Owns the interface between variables, optimizers and compiled functions on one side and
a place they can be read from and sent to on the other (parameter servers). Who made the
scope handed it over; nothing here knows what it is.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any


class Home(abc.ABC):
    """A place that keeps variables and applies what optimizers compute."""

    @abc.abstractmethod
    def adopt(self, variable: Any, value: Any) -> None:
        """Takes in a variable just made, with its initial value."""

    @abc.abstractmethod
    def read(self, variable: Any) -> Any:
        """Returns a variable's value as the running code sees it."""

    @abc.abstractmethod
    def write(self, variable: Any, action: str, value: Any) -> None:
        """Does ``assign``, ``assign_add`` or ``assign_sub``; the value was checked."""

    @abc.abstractmethod
    def adopt_optimizer(self, optimizer: Any, tx: Any) -> None:
        """Takes in an optimizer just made."""

    @abc.abstractmethod
    def apply_gradients(self, optimizer: Any, pairs: list[tuple[Any, Any]]) -> None:
        """Updates variables by one step of an optimizer."""

    @abc.abstractmethod
    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls a function that was given to ``mirrored.function``."""

    @abc.abstractmethod
    def pickled(self, thing: Any) -> tuple[Any, ...]:
        """What ``__reduce_ex__`` of a variable or optimizer returns."""


class Remote(abc.ABC):
    """Something besides variables that a home keeps and gradients can be taken of."""

    name: str
    dtype: Any

    @abc.abstractmethod
    def read(self, *, lend: bool = True) -> Any:
        """Returns what stands for it in the running code."""
