"""The programs of one function: which of them fits a call.

Owns the cache by the arguments' signature, why each program was traced, and finding the
latest one again without a search. What a program is and does is in ``_program``.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Callable
from typing import Any, final

import jax

from mirrored import _compat, _context, _objects
from mirrored._captures import ByIdentity, Captures
from mirrored._errors import ArgumentError
from mirrored._program import Program
from mirrored._signature import shown, signature_of
from mirrored._values import PerReplica
from mirrored._variable import Variable

_LOGGER = logging.getLogger("mirrored")
_MOST_PROGRAMS = 128

NOT_REPEATED: Any = object()
"""What ``Programs.repeated`` returns for a call that is not like the latest one."""


@final
@dataclasses.dataclass(frozen=True)
class _Form:
    """What one argument, or one entry of a nest of them, was like.

    Attributes:
      kind: its type.
      aval: shape and dtype of an array; None for a nest.
      is_batch: whether a PerReplica value was a batch.
      keys: the keys of a dictionary, in the order in which JAX takes its entries.
      entries: the forms of what stands in a nest.
    """

    kind: type
    aval: Any = None
    is_batch: bool = False
    keys: tuple[Any, ...] | None = None
    entries: tuple[_Form, ...] = ()


def _form_of(value: Any) -> _Form | None:
    """Returns None where more than types would have to be looked at."""
    kind = type(value)
    if kind is PerReplica and value.stacked is not None and value.row_counts is None:
        return _Form(kind, value.stacked.aval, value.is_batch)
    if isinstance(value, jax.Array) and not _compat.is_traced(value):
        return _Form(kind, value.aval)
    keys = None
    if kind is dict:
        try:
            keys = tuple(sorted(value))
        except TypeError:
            return None
        value = [value[key] for key in keys]
    elif kind is not tuple and kind is not list:
        return None
    entries = []
    for entry in value:
        form = _form_of(entry)
        if form is None:
            return None
        entries.append(form)
    return _Form(kind, keys=keys, entries=tuple(entries))


def _take(values: Any, forms: tuple[_Form, ...], arrays: list[Any]) -> bool:
    """Adds the arrays among ``values`` to ``arrays`` if all are of these forms."""
    if len(values) != len(forms):
        return False
    for value, form in zip(values, forms, strict=True):
        kind = form.kind
        if type(value) is not kind:
            return False
        aval = form.aval
        if aval is None:
            if form.keys is not None:
                if len(value) != len(form.keys):
                    return False
                try:
                    value = [value[key] for key in form.keys]
                except KeyError:
                    return False
            if not _take(value, form.entries, arrays):
                return False
            continue
        if kind is PerReplica:
            if value.row_counts is not None or value.is_batch is not form.is_batch:
                return False
            value = value.stacked
            if value is None:
                return False
        found = value.aval
        if found is not aval and (
            found.shape != aval.shape
            or found.dtype != aval.dtype
            or found.weak_type != aval.weak_type
        ):
            return False
        arrays.append(value)
    return True


@final
class _Latest:
    """The latest call, remembered so that the next like it is found without a search.

    For calls whose arguments are arrays, unpadded PerReplica values and plain nests of
    them, as in a training loop: looking at their types is all the Python that is left
    to do then.
    """

    def __init__(self, form: _Form, program: Program, captures: Captures) -> None:
        self._forms = form.entries
        self._context = _context.current()
        self.program = program
        self.captures = captures

    @classmethod
    def of(cls, args: tuple[Any, ...], program: Program, captures: Captures) -> _Latest | None:
        """Remembers a call, or returns None if it is not of the simple kind."""
        form = _form_of(args)
        return None if form is None else cls(form, program, captures)

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
        arrays: list[Any] = []
        return arrays if _take(args, self._forms, arrays) else None


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
        data = program.data_among(leaves)
        for value in data:
            if isinstance(value, jax.ShapeDtypeStruct):
                raise ArgumentError(
                    fact=f"a compiled function was called with {value}, which has no values.",
                    expected="arrays.",
                    hint="to see its program without running it, use .lower(...) or mirrored.plan.",
                )
        result = program.run(data, objects)
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
