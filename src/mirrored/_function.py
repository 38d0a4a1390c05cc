"""``mirrored.function``: a Python function as one compiled program.

Owns what users hold in their hands; the programs themselves are in ``_program``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from mirrored import _compat, _context
from mirrored._errors import require_callable
from mirrored._program_cache import NOT_REPEATED, Programs
from mirrored._variable import Variable


@final
class Function:
    """What ``mirrored.function`` returns: a compiled function that may use Variables."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__wrapped__ = function
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self.__qualname__ = getattr(function, "__qualname__", self.__name__)
        self.__doc__ = function.__doc__
        self.__module__ = getattr(function, "__module__", type(function).__module__)
        self._programs = Programs(function, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not kwargs:
            result = self._programs.repeated(args)
            if result is not NOT_REPEATED:
                return result
        if _runs_in_place():
            return self.__wrapped__(*args, **kwargs)
        home = _context.current().home
        if home is not None:
            return home.call(self.__wrapped__, args, kwargs)
        return self._programs.call(args, kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        # Makes @mirrored.function work on methods: one Function for each object.
        if instance is None:
            return self
        bound = Function(self.__wrapped__.__get__(instance, owner))
        name = self.__name__
        # Objects with __slots__ have no place for it, and get a new one each time.
        getattr(instance, "__dict__", {})[name] = bound
        return bound

    def __reduce__(self) -> Any:
        # Programs belong to a process; what they are made of can travel.
        return Function, (self.__wrapped__,)

    @property
    def trace_count(self) -> int:
        """How many times the Python function was compiled for new arguments."""
        return len(self._programs.reasons)

    @property
    def retrace_reasons(self) -> tuple[str, ...]:
        """Why each trace happened, oldest first.

        Also logged at INFO level by the logger "mirrored" from the second on.
        """
        return tuple(self._programs.reasons)

    def variables_used(self, *args: Any) -> list[Variable]:
        """Lists the variables that the program for these arguments reads or writes."""
        return self._programs.variables_used(args)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lowers the program for these arguments; see ``jax.jit(...).lower``."""
        return self._programs.lower(args, kwargs)


def _runs_in_place() -> bool:
    """Says whether a call now is that of the Python: in an outer program, or to be debugged."""
    context = _context.current()
    if context.frame is not None or context.replica is not None or context.debugged is not None:
        return True
    return _compat.a_program_is_being_staged()


def function(fn: Callable[..., Any] | None = None) -> Any:
    """Compiles a Python function that may read and write Variables.

    The whole function, ``strategy.run`` and ``strategy.reduce`` included, becomes
    one XLA program; the variables it writes are updated in place (their buffers
    are donated). It is traced again only if shapes, dtypes, Python flags or
    captured objects change; ``retrace_reasons`` of the result tells which.

    >>> import mirrored
    >>> counter = mirrored.Variable(0)
    >>> @mirrored.function
    ... def count(step):
    ...     counter.assign_add(step)
    ...     return counter.value
    >>> int(count(2)), int(count(3)), count.trace_count
    (2, 5, 1)
    """
    if fn is None:
        return function
    require_callable(
        "mirrored.function", fn, "write mirrored.function(step), not mirrored.function(step(x))."
    )
    return Function(fn)
