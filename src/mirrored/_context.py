"""Where the running code stands: default, cross-replica or replica context.

Owns the one ContextVar of the library and the Frame in which a program being
traced keeps the variables it touches. It holds the strategy and the replica
context only to hand them back to those who ask.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

from mirrored._errors import ArgumentError, ContextError, require_callable
from mirrored._home import Home
from mirrored._late_import import when_imported
from mirrored._placement import Placement


@final
class Slot:
    """A variable's storage inside one trace."""

    __slots__ = ("read", "ref", "written")

    def __init__(self, ref: Any) -> None:
        self.ref = ref
        self.read = False
        self.written = False


@final
class Frame:
    """The variables of a program while it is traced, each held in a JAX Ref.

    Refs make writes inside ``lax.scan``, ``cond`` and ``while_loop`` work; they
    exist only inside the trace, the program's arguments are plain arrays. Variables that
    live elsewhere are the business of ``remote``, which only their home knows.
    """

    def __init__(
        self,
        slots: dict[Any, Slot],
        placement: Placement | None,
        adopt: Callable[[Any], Slot | None] | None = None,
        remote: Any = None,
    ) -> None:
        self.slots = slots
        self.remote = remote
        self.placement = placement
        self._adopt = adopt
        self.checks: list[tuple[Any, Callable[[Any], None]]] = []

    @property
    def is_concrete(self) -> bool:
        """Whether it holds concrete values (debug mode) rather than a trace's."""
        return self._adopt is not None

    def slot(self, variable: Any) -> Slot | None:
        """Finds a variable's storage; debug mode makes it when it is first asked for."""
        found = self.slots.get(variable)
        if found is None and self._adopt is not None:
            found = self._adopt(variable)
            if found is not None:
                self.slots[variable] = found
        return found

    def touched(self) -> list[Any]:
        """The variables the traced code has read or written, in creation order."""
        return [variable for variable, slot in self.slots.items() if slot.read or slot.written]


class RetraceWith(BaseException):
    """Leaves a trace to do something that must happen outside it, then trace again.

    Derives from BaseException so that no ``except Exception`` of user code stops it.
    """

    def __init__(self, prepare: Callable[[], None]) -> None:
        super().__init__()
        self.prepare = prepare


@dataclasses.dataclass(frozen=True)
class Context:
    """What code running now may ask for."""

    strategy: Any = None
    placement: Placement | None = None
    frame: Frame | None = None
    replica: Any = None
    merging: bool = False
    differentiated: Mapping[Any, Any] = dataclasses.field(default_factory=dict)
    denominators: list[Any] | None = None
    reduces_gradients: bool = False
    home: Home | None = None
    participant: Any = None
    # The strategy whose replicas run one after another, uncompiled.
    debugged: Any = None

    def is_like(self, other: Context) -> bool:
        """Whether a program traced in the other context is right in this one."""
        return (
            self.strategy is other.strategy
            and self.home is other.home
            and self.debugged is None
            and self.frame is None
            and self.replica is None
        )


_OUTSIDE = Context()
_CURRENT: contextvars.ContextVar[Context] = contextvars.ContextVar("mirrored_context")


def current() -> Context:
    """Returns the context of the running code."""
    return _CURRENT.get(_OUTSIDE)


@contextlib.contextmanager
def entered(**changes: Any) -> Iterator[Context]:
    """Runs a block in the current context with ``changes`` applied."""
    context = dataclasses.replace(current(), **changes)
    token = _CURRENT.set(context)
    try:
        yield context
    finally:
        _CURRENT.reset(token)


@contextlib.contextmanager
def scope(strategy: Any, placement: Placement, home: Home | None = None) -> Iterator[None]:
    """Makes ``strategy`` the current one; the same strategy nests, another does not.

    Args:
      strategy: who is asked from now on.
      placement: its devices.
      home: where variables live, if not on these devices.
    """
    context = current()
    if context.replica is not None and not context.merging:
        raise ContextError(
            fact="scope() was entered inside a replica function.",
            expected="scope() in cross-replica context.",
            hint="create variables before strategy.run, inside `with strategy.scope():`.",
        )
    if context.strategy is not None and context.strategy is not strategy:
        raise ContextError(
            fact="Mixing different strategies: the scope of "
            f"{placement.describe()} was entered inside the scope of "
            f"{context.placement.describe() if context.placement else context.strategy!r}.",
            expected="one strategy at a time.",
            hint="leave the outer scope first, or use the same strategy object in both places.",
        )
    with entered(strategy=strategy, placement=placement, home=home):
        yield


# Modules above that take part in every scope, by the name of the library they are
# for: they join once that library is imported, before the scope or inside it.
_COMPANIONS: dict[str, str] = {}


def add_companion(library: str, module: str) -> None:
    """Lets ``module`` take part in scopes once ``library`` is imported.

    The module has a function ``companion_scope(strategy)`` that returns a context
    manager. This is how Keras models made in a scope learn of it, without the core
    importing Keras.
    """
    _COMPANIONS[library] = module


@contextlib.contextmanager
def companions(strategy: Any) -> Iterator[None]:
    """Enters the scopes of all companions whose library is in use, or comes into use."""
    with contextlib.ExitStack() as stack:

        def join(module: str) -> None:
            companion = importlib.import_module(module)
            stack.enter_context(companion.companion_scope(strategy))

        for library, module in _COMPANIONS.items():
            if library in sys.modules:
                join(module)
            else:
                stack.enter_context(when_imported(library, functools.partial(join, module)))
        yield


def has_strategy() -> bool:
    """Says whether a strategy other than the default one is current.

    >>> import mirrored
    >>> mirrored.has_strategy()
    False
    """
    return current().strategy is not None


def require_cross_replica(what: str) -> None:
    """Raises unless ``what`` is called in cross-replica (or default) context."""
    context = current()
    if context.replica is not None and not context.merging:
        raise ContextError(
            fact=f"{what} was called inside a replica function.",
            expected=f"{what} in cross-replica context: outside the function given to run.",
            hint="inside a replica function use "
            "mirrored.get_replica_context().all_reduce or .merge_call.",
        )


def require_run(strategy: Any, placement: Placement, fn: Any) -> None:
    """Checks what ``run`` is given to run, and that no other strategy is current."""
    require_callable("run", fn, "write strategy.run(fn, args=(x,)), not strategy.run(fn(x)).")
    if current().strategy not in (None, strategy):
        raise ContextError(
            fact=f"Mixing different strategies: {placement.describe()}.run was called "
            "inside the scope of another one.",
            expected="one strategy at a time.",
            hint="leave the other scope first.",
        )


def require_argument_nest(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Checks the ``args`` and ``kwargs`` of ``run``."""
    if not isinstance(args, (tuple, list)):
        raise ArgumentError(
            fact=f"run was given args of type {type(args).__name__}.",
            expected="a tuple or a list of positional arguments.",
            hint="for a single argument write args=(x,).",
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise ArgumentError(
            fact=f"run was given kwargs of type {type(kwargs).__name__}.",
            expected="a dictionary of keyword arguments.",
            hint='write kwargs={"name": value}.',
        )
    if kwargs is not None and not all(isinstance(name, str) for name in kwargs):
        raise ArgumentError(
            fact=f"run was given kwargs with the keys {', '.join(map(repr, kwargs))}.",
            expected="names of arguments, which are strings.",
            hint='write kwargs={"name": value}.',
        )
    return tuple(args), dict(kwargs or {})
