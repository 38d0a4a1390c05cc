"""What a Python function captures, and whether it has changed since it was traced.

A compiled program freezes the values its function took from closures and
globals. Rebinding one (a new model in a notebook, a new learning rate) must lead
to a new trace, not to a program that silently goes on with the old value.
"""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, final

_MISSING = object()
_NUMBERS = (int, float, complex, str, bytes, type(None))
_MOST_WATCHES = 256
_MOST_PARTS = 2000


@final
class Captures:
    """A snapshot of everything a function (and the functions it calls) captured."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._bound = list(_bound(function))
        self._watches: list[tuple[Any, str, Any]] = []
        for holder, name in _holders(function):
            self._watches.append((holder, name, _look(holder, name)))
        # The same, ready to be looked at in every call.
        self._cells = [(h, value) for h, _, value in self._watches if not isinstance(h, dict)]
        self._globals = [watch for watch in self._watches if isinstance(watch[0], dict)]

    def objects(self) -> list[Any]:
        """The values captured when the snapshot was taken, and what these hold.

        A method captures its object, and with it the model among the object's attributes.
        """
        captured = [value for _, _, value in self._watches if value is not _MISSING]
        return list(_parts([*self._bound, *captured]))

    def unchanged(self) -> bool:
        """Whether everything is as it was; ``changed`` says what is not."""
        try:
            for cell, before in self._cells:
                if cell.cell_contents is not before:
                    return self.changed() is None
        except ValueError:
            # An empty cell.
            return self.changed() is None
        for names, name, before in self._globals:
            if names.get(name, _MISSING) is not before:
                return self.changed() is None
        return True

    @property
    def is_complete(self) -> bool:
        """Whether all there is to watch is watched; of functions that use too much, some is not."""
        return len(self._watches) < _MOST_WATCHES

    def values(self) -> list[Any]:
        """What was captured or bound, without what these hold."""
        return [*self._bound, *(value for _, _, value in self._watches if value is not _MISSING)]

    def changed(self) -> str | None:
        """Returns what was rebound since the snapshot, in words, or None."""
        for holder, name, before in self._watches:
            now = _look(holder, name)
            if now is before:
                continue
            if isinstance(now, _NUMBERS) and type(now) is type(before) and now == before:
                continue
            return f"captured {name!r} was rebound"
        return None


def _bound(function: Any) -> Iterator[Any]:
    """Yields what is bound to a function: a partial's arguments, a method's object."""
    while isinstance(function, functools.partial):
        yield from function.args
        yield from function.keywords.values()
        function = function.func
    if isinstance(function, types.MethodType):
        yield function.__self__


def _parts(values: list[Any]) -> Iterator[Any]:
    """Yields values, and what they hold as attributes or in containers, nearest first."""
    pending = collections.deque(values)
    visited: set[int] = set()
    while pending and len(visited) < _MOST_PARTS:
        value = pending.popleft()
        if isinstance(value, (*_NUMBERS, type, types.ModuleType, types.FunctionType)):
            continue
        if id(value) in visited:
            continue
        visited.add(id(value))
        yield value
        if isinstance(value, dict):
            pending.extend(value.values())
        elif isinstance(value, (list, tuple)):
            pending.extend(value)
        else:
            pending.extend(getattr(value, "__dict__", {}).values())


def _look(holder: Any, name: str) -> Any:
    if isinstance(holder, dict):
        return holder.get(name, _MISSING)
    try:
        return holder.cell_contents
    except ValueError:
        # An empty cell: the enclosing function has not assigned the name yet.
        return _MISSING


def _holders(function: Callable[..., Any]) -> Iterator[tuple[Any, str]]:
    """Yields (cell or globals dictionary, name) of what the function refers to."""
    pending = [function]
    visited: set[int] = set()
    count = 0
    while pending:
        plain = _plain_function(pending.pop())
        if plain is None or id(plain) in visited:
            continue
        visited.add(id(plain))
        for holder, name in _own_holders(plain):
            value = _look(holder, name)
            if isinstance(value, types.ModuleType):
                continue
            if _is_users_function(value):
                pending.append(value)
            count += 1
            if count > _MOST_WATCHES:
                return
            yield holder, name


def _own_holders(function: types.FunctionType) -> Iterator[tuple[Any, str]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield cell, name
    for name in sorted(_global_names(function.__code__)):
        if name in function.__globals__:
            yield function.__globals__, name


def _global_names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _global_names(constant)
    return names


def _plain_function(function: Any) -> types.FunctionType | None:
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    function = getattr(function, "__wrapped__", function)
    return function if isinstance(function, types.FunctionType) else None


def _is_users_function(value: Any) -> bool:
    plain = _plain_function(value) if callable(value) else None
    if plain is None:
        return False
    file_name = plain.__code__.co_filename
    is_ours = plain.__module__ is not None and plain.__module__.split(".")[0] == "mirrored"
    return "site-packages" not in file_name and "lib/python" not in file_name and not is_ours


@final
class ByIdentity:
    """Makes any object a dictionary key that is equal only to itself."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


def fingerprint(function: Any) -> Any:
    """Returns a key equal for functions that do the same thing with the same captures.

    A lambda written inside a training loop is a new object in every iteration; its
    code and what it captured are the same, so its compiled program can be too.
    """
    if isinstance(function, functools.partial):
        arguments = (*function.args, *sorted(function.keywords.items()))
        return ("partial", fingerprint(function.func), tuple(map(_key_of, arguments)))
    if isinstance(function, types.MethodType):
        return ("method", function.__func__.__code__, ByIdentity(function.__self__))
    if not isinstance(function, types.FunctionType):
        return ByIdentity(function)
    cells = tuple(_cell_key(cell) for cell in function.__closure__ or ())
    defaults = tuple(map(_key_of, function.__defaults__ or ()))
    keyword_defaults = tuple(
        (name, _key_of(value)) for name, value in sorted((function.__kwdefaults__ or {}).items())
    )
    return (function.__code__, id(function.__globals__), cells, defaults, keyword_defaults)


def _cell_key(cell: Any) -> Any:
    value = _look(cell, "")
    # A number in a cell may be a counter that the function itself advances; the
    # cell is the key, and Captures sees whether the number is another one.
    return ByIdentity(cell) if isinstance(value, _NUMBERS) else _key_of(value)


def _key_of(value: Any) -> Any:
    if isinstance(value, _NUMBERS):
        return (type(value), value)
    if isinstance(value, types.FunctionType):
        return fingerprint(value)
    if isinstance(value, tuple):
        return tuple(map(_key_of, value))
    return ByIdentity(value)
