"""The exception tree and the one form every message has.

A message says the fact with its values, what was expected, and a ``hint:`` line
with what to do. Each class also derives from the builtin that tf.distribute
raises in the same place, so ``except ValueError`` keeps working.
"""

from __future__ import annotations

import concurrent.futures
from typing import Any


class MirroredError(Exception):
    """The root of everything this library raises on purpose."""

    def __init__(self, *, fact: str, expected: str, hint: str) -> None:
        self.fact = fact
        self.expected = expected
        self.hint = hint
        super().__init__(f"{fact}\nexpected: {expected}\nhint: {hint}")

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions cross process boundaries (launcher, Ray); keyword-only
        # constructors need this to be rebuilt there.
        return (_rebuild, (type(self), self.fact, self.expected, self.hint))


def _rebuild(kind: type[MirroredError], fact: str, expected: str, hint: str) -> MirroredError:
    return kind(fact=fact, expected=expected, hint=hint)


class ContextError(MirroredError, RuntimeError):
    """A call in a context where it has no meaning."""


class ArgumentError(MirroredError, ValueError):
    """An argument whose value cannot be used."""


class ArgumentTypeError(MirroredError, TypeError):
    """An argument of the wrong type."""


class DeviceError(MirroredError, ValueError):
    """A device that does not exist, is named twice, or does not fit the others."""


class ShapeError(MirroredError, ValueError):
    """Components whose shapes cannot be combined."""


class PaddingError(MirroredError, ValueError):
    """A batch with padded rows went where nobody asked which rows are real."""


class VariableError(MirroredError, ValueError):
    """A read or write that would leave a variable different between replicas."""


class OwnershipError(MirroredError, ValueError):
    """An object of one strategy (or of none) used in another."""


class GradientError(MirroredError, ValueError):
    """A gradient that would be reduced twice, or not at all."""


class TracingError(MirroredError, TypeError):
    """Python asked for the value of something known only when the program runs."""


class NonFiniteError(MirroredError, FloatingPointError):
    """A NaN or an infinity where a check was asked for."""


class DataError(MirroredError, ValueError):
    """A source of data that cannot be split over replicas as it is."""


class ClusterError(MirroredError, RuntimeError):
    """A description of a cluster that makes no sense, or workers that did not come."""


class WorkerError(MirroredError, RuntimeError):
    """Another worker died, stopped or failed, or did not come where it was waited for."""


class ServerError(MirroredError, RuntimeError):
    """A parameter server that died, is silent, or was asked for what it does not have."""


class CancelledError(MirroredError, concurrent.futures.CancelledError):
    """A closure that was cancelled before it ran, because another one failed."""


class CheckpointError(MirroredError, ValueError):
    """A checkpoint that does not exist, is damaged, or does not fit the program."""


class MissingDependencyError(MirroredError, ImportError):
    """An optional dependency that is not installed."""


def require_callable(what: str, given: Any, hint: str) -> None:
    """Refuses what cannot be called where a function belongs."""
    if not callable(given):
        raise ArgumentError(
            fact=f"{what} was given {given!r}, which cannot be called.",
            expected="a function.",
            hint=hint,
        )
