"""Functions on their way to workers, pickled once for as long as they stay what they are.

Owns the question whether a function would be pickled to the same bytes again. Pickling one
takes longer than a closure of one step, most of it to find which modules it uses; so it is
not done again while everything the function captured is the same and cannot have changed
in place. A function that holds anything else (an array of NumPy, an object of the user's)
is pickled for every closure, since nobody can see whether that has changed.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import sys
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import jax
import numpy as np

from mirrored._captures import Captures, fingerprint
from mirrored._function import Function
from mirrored._optimizer import Optimizer
from mirrored._parameter_server._embedding import EmbeddingTable
from mirrored._parameter_server._server_strategy import ServerStrategy
from mirrored._parameter_server._travel import pickled
from mirrored._variable import Variable

_MOST_KEPT = 512
_MOST_CONTENTS = 1000
_CONSTANTS = (
    *(bool, int, float, complex, str, bytes, type(None), type(...), np.generic, np.dtype),
    *(type, types.ModuleType, types.BuiltinFunctionType, jax.Array),
    # These are pickled as names: what they hold is on the servers.
    *(ServerStrategy, EmbeddingTable),
)


class SentFunction(NamedTuple):
    """A function as a worker gets it."""

    digest: str
    """by which it is known there"""
    content: bytes


class _Kept(NamedTuple):
    sent: SentFunction
    captures: Captures
    containers: list[tuple[Any, tuple[Any, ...]]]
    """lists and dictionaries among what it captured, and what was in them"""

    def holds(self) -> bool:
        """Whether pickling would give the same again."""
        return self.captures.changed() is None and all(
            _same(_contents(container), before) for container, before in self.containers
        )


@final
class SentFunctions:
    """The functions of one coordinator."""

    def __init__(self) -> None:
        self._kept: collections.OrderedDict[Any, _Kept] = collections.OrderedDict()
        self._lock = threading.Lock()

    def find(self, function: Callable[..., Any], what: str) -> SentFunction:
        """The function as bytes; ``what`` is its name for errors."""
        key = fingerprint(function)
        with self._lock:
            kept = self._kept.get(key)
        if kept is not None and kept.holds():
            return kept.sent
        # Looked at before it is pickled: what changes meanwhile is seen the next time.
        captures = Captures(function)
        containers = _containers(function, captures)
        content = pickled(function, what)
        sent = SentFunction(hashlib.blake2b(content, digest_size=16).hexdigest(), content)
        if containers is not None:
            with self._lock:
                self._kept[key] = _Kept(sent, captures, containers)
                if len(self._kept) > _MOST_KEPT:
                    self._kept.popitem(last=False)
        return sent


def _containers(function: Any, captures: Captures) -> list[tuple[Any, tuple[Any, ...]]] | None:
    """The containers that a function captured; None if something else in it may change."""
    if not captures.is_complete:
        return None
    found: list[tuple[Any, tuple[Any, ...]]] = []
    while isinstance(function, functools.partial):
        function = function.func
    # What the functions among them captured is among the captures, too.
    known = [function, *captures.values()]
    pending = collections.deque((value, True) for value in known)
    seen = 0
    while pending:
        value, followed = pending.popleft()
        if isinstance(value, (list, tuple, dict)):
            contents = _contents(value)
            found.append((value, contents))
            seen += len(contents) + 1
            # One that holds itself ends here, too.
            if seen > _MOST_CONTENTS:
                return None
            pending.extend((item, False) for item in contents)
        elif isinstance(value, types.FunctionType):
            if not _is_importable(value):
                if not followed or value.__dict__:
                    return None
                defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
                pending.extend((default, False) for default in defaults)
        elif isinstance(value, Function):
            if not followed:
                return None
            pending.append((value.__wrapped__, True))
        elif isinstance(value, (Variable, Optimizer)):
            if value.home is None:
                return None
        elif not isinstance(value, _CONSTANTS):
            return None
    return found


def _is_importable(function: types.FunctionType) -> bool:
    """Whether it is pickled as a name, which means the same as long as its module does."""
    if function.__module__ == "__main__":
        return False
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function


def _contents(container: Any) -> tuple[Any, ...]:
    if isinstance(container, dict):
        return (*container.keys(), *container.values())
    return tuple(container)


def _same(now: Sequence[Any], before: Sequence[Any]) -> bool:
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))
