"""The programs of one function: which of them fits a call.

Owns the cache by the arguments' signature, why each program was traced, and finding the
latest one again without a search. What a program is and does is in ``_program``.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable
from typing import Any, final

import jax

from mirrored import _compat, _context, _objects
from mirrored._captures import ByIdentity, Captures
from mirrored._program import Program
from mirrored._signature import shown, signature_of
from mirrored._values import PerReplica
from mirrored._variable import Variable

_LOGGER = logging.getLogger("mirrored")
_MOST_PROGRAMS = 128

NOT_REPEATED: Any = object()
"""What ``Programs.repeated`` returns for a call that is not like the latest one."""


@final
class _Latest:
    """The latest call, remembered so that the next like it is found without a search.

    For calls whose arguments are arrays and unpadded PerReplica values, as in a
    training loop: looking at their types is all the Python that is left to do then.
    """

    def __init__(
        self,
        expected: list[tuple[type, Any, bool]],
        program: Program,
        captures: Captures,
    ) -> None:
        self._expected = expected
        self._context = _context.current()
        self.program = program
        self.captures = captures

    @classmethod
    def of(cls, args: tuple[Any, ...], program: Program, captures: Captures) -> _Latest | None:
        """Remembers a call, or returns None if it is not of the simple kind."""
        expected = []
        for arg in args:
            kind = type(arg)
            if kind is PerReplica and arg.stacked is not None and arg.row_counts is None:
                array = arg.stacked
            elif isinstance(arg, jax.Array) and not _compat.is_traced(arg):
                array = arg
            else:
                return None
            expected.append((kind, array.aval, getattr(arg, "is_batch", False)))
        return cls(expected, program, captures)

    def stands_here(self) -> bool:
        """Whether the code running now stands where the latest call was made."""
        context = _context.current()
        if context is not self._context:
            if not context.is_like(self._context):
                return False
            # Another block of the same scope: from here on it is this one.
            self._context = context
        return _compat.no_trace_is_open()

    def arrays_of(self, args: tuple[Any, ...]) -> list[Any] | None:
        """Returns the arrays among ``args`` if they are like those remembered."""
        if len(args) != len(self._expected):
            return None
        arrays = []
        for arg, (kind, aval, is_batch) in zip(args, self._expected, strict=True):
            if type(arg) is not kind:
                return None
            array = arg
            if kind is PerReplica:
                if arg.row_counts is not None or arg.is_batch is not is_batch:
                    return None
                array = arg.stacked
                if array is None:
                    return None
            found = array.aval
            if found is not aval and (
                found.shape != aval.shape
                or found.dtype != aval.dtype
                or found.weak_type != aval.weak_type
            ):
                return None
            arrays.append(array)
        return arrays


@final
class Programs:
    """The compiled forms of one function, by signature of its arguments."""

    def __init__(self, function: Callable[..., Any], watched: Callable[..., Any]) -> None:
        self._function = function
        self._watched = watched
        self._entries: collections.OrderedDict[Any, tuple[Program, Captures]] = (
            collections.OrderedDict()
        )
        self._last_key: Any = None
        self._latest: _Latest | None = None
        self.reasons: list[str] = []

    def repeated(self, args: tuple[Any, ...]) -> Any:
        """Runs the latest program again if this call is like the latest, else NOT_REPEATED."""
        latest = self._latest
        if latest is None or not latest.stands_here():
            return NOT_REPEATED
        arrays = latest.arrays_of(args)
        if arrays is None or not latest.captures.unchanged():
            return NOT_REPEATED
        return latest.program.run(arrays, _objects.NONE)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the program for these arguments, tracing it first if it must be."""
        leaves, treedef, objects = _objects.taken_from((args, kwargs))
        program, captures = self._find(leaves, treedef, objects)
        program.require_devices(getattr(self._watched, "__name__", type(self._watched).__name__))
        result = program.run(program.data_among(leaves), objects)
        self._latest = None if kwargs else _Latest.of(args, program, captures)
        return result

    def lower(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Lowers the program for these arguments without running it."""
        leaves, treedef, objects = _objects.taken_from((args, kwargs))
        program, _ = self._find(leaves, treedef, objects)
        return program.lower(program.data_among(leaves), objects)

    def variables_used(self, args: tuple[Any, ...]) -> list[Variable]:
        """Lists the variables that the program for these arguments reads or writes."""
        leaves, treedef, objects = _objects.taken_from((args, {}))
        return self._find(leaves, treedef, objects)[0].variables

    def _find(
        self, leaves: list[Any], treedef: Any, objects: _objects.Held
    ) -> tuple[Program, Captures]:
        strategy = _context.current().strategy
        key = (treedef, tuple(map(signature_of, leaves)), ByIdentity(strategy), objects.signature)
        entry = self._entries.get(key)
        reason = None
        if entry is not None:
            reason = entry[1].changed()
            if reason is None:
                return entry
        reason = reason or self._reason(key)
        objects.watch_captures(Captures(self._watched).objects())
        name = getattr(self._watched, "__name__", type(self._watched).__name__)
        program = Program(self._function, treedef, leaves, objects, name)
        # The snapshot is taken after the trace: a counter that the function itself
        # advances while it is traced must not look like a change.
        entry = self._entries[key] = (program, Captures(self._watched))
        self._entries.move_to_end(key)
        if len(self._entries) > _MOST_PROGRAMS:
            self._entries.popitem(last=False)
        self._last_key = key
        self.reasons.append(reason)
        name = getattr(self._watched, "__qualname__", repr(self._watched))
        if len(self.reasons) > 1:
            _LOGGER.info("traced %s again: %s", name, reason)
        return entry

    def _reason(self, key: Any) -> str:
        before = self._last_key
        if before is None:
            return "first call"
        if key[0] != before[0]:
            return f"the structure of the arguments changed from {before[0]} to {key[0]}"
        for index, (old, new) in enumerate(zip(before[1], key[1], strict=True)):
            if old != new:
                return f"array {index} of the arguments changed: {shown(old)} -> {shown(new)}"
        if key[3] != before[3]:
            return "the structure of an object among the arguments changed"
        return "the current strategy changed"
