"""Programs: Python that reads and writes Variables, compiled into one XLA call.

Owns tracing with the variables held in Refs, the cache of compiled programs and
why each was traced, donation, and writing the new values back. It knows nothing
of replicas.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from mirrored import _compat, _context, _objects, _workers
from mirrored._captures import ByIdentity, Captures
from mirrored._errors import DeviceError, OwnershipError
from mirrored._placement import Placement
from mirrored._values import PerReplica, is_object_leaf, refuse_other_devices
from mirrored._variable import Variable, live_variables, return_lent

_LOGGER = logging.getLogger("mirrored")

# Python numbers are traced, as jax.jit does; a bool is a flag more often than a
# number, and stays Python so that `if training:` works.
_TRACED_NUMBERS = (int, float, complex)
_MOST_PROGRAMS = 128


def is_array_like(leaf: Any) -> bool:
    """Says whether a leaf is data (traced) rather than a Python constant."""
    # A shape stands for an array where a program is lowered and not called.
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)):
        return not (isinstance(leaf, np.ndarray) and leaf.dtype == object)
    return isinstance(leaf, _TRACED_NUMBERS) and not isinstance(leaf, bool)


def signature_of(leaf: Any) -> Any:
    """What two leaves must share to be given to one compiled program."""
    # The same for NumPy and JAX arrays: only shapes and dtypes make a new trace.
    if isinstance(leaf, jax.Array):
        return (leaf.shape, leaf.dtype, leaf.aval.weak_type)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return (leaf.shape, leaf.dtype, leaf.weak_type)
    if isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype != object:
        return (leaf.shape, _canonical(leaf.dtype), False)
    if isinstance(leaf, _TRACED_NUMBERS) and not isinstance(leaf, bool):
        return type(leaf)
    if isinstance(leaf, (bool, str, bytes)):
        return ("constant", leaf)
    return ByIdentity(leaf)


@functools.cache
def _canonical(dtype: Any) -> Any:
    return jax.dtypes.canonicalize_dtype(dtype)


def _shown(signature: Any) -> str:
    if isinstance(signature, tuple):
        if signature[0] == "constant":
            return repr(signature[1])
        return f"{signature[1]}{list(signature[0])}"
    if isinstance(signature, type):
        return f"a Python {signature.__name__}"
    return "another object"


@dataclasses.dataclass
class _Outline:
    """What a trace learned besides its equations."""

    out_treedef: Any
    # Python values that come out as they are; None in the places of arrays.
    constants: list[Any]
    result_places: list[int]
    written: list[Variable]
    read_only: list[Variable]
    checks: list[Callable[[Any], None]]
    # Arrays of stateful objects among the arguments, by number: replaced, or only read.
    changed: list[int]
    unchanged: list[int]
    placement: Placement | None


def _trace(
    function: Callable[..., Any],
    treedef: Any,
    leaves: list[Any],
    places: list[int],
    objects: _objects.Held,
) -> tuple[Any, list[Variable], _Outline]:
    """Traces ``function`` with every living variable as a possible input."""
    variables = live_variables(None)
    outlines: list[_Outline] = []

    def staged(stored: list[Any], dynamic: list[Any], held: list[Any]) -> Any:
        slots = {
            variable: _context.Slot(jax.new_ref(array))
            for variable, array in zip(variables, stored, strict=True)
        }
        frame = _context.Frame(slots, None)
        filled = list(leaves)
        for place, value in zip(places, dynamic, strict=True):
            filled[place] = value
        inner = objects.fill(filled, held)
        args, kwargs = treedef.unflatten(filled)
        with _context.entered(frame=frame):
            result = function(*args, **kwargs)
        outputs, out_treedef = jax.tree.flatten(result, is_leaf=is_object_leaf)
        # Python numbers that come out are constants of the program.
        result_places = [
            place
            for place, leaf in enumerate(outputs)
            if is_array_like(leaf) and not isinstance(leaf, _TRACED_NUMBERS)
        ]
        constants = [None if place in result_places else leaf for place, leaf in enumerate(outputs)]
        written = [variable for variable, slot in slots.items() if slot.written]
        read_only = [v for v, slot in slots.items() if slot.read and not slot.written]
        changed = inner.changed() if inner else {}
        outlines.append(
            _Outline(
                out_treedef,
                constants,
                result_places,
                written,
                read_only,
                [check for _, check in frame.checks],
                sorted(changed),
                [number for number in range(len(held)) if number not in changed],
                frame.placement or _common_placement([*written, *read_only]),
            )
        )
        final_values = [slots[variable].ref[...] for variable in written]
        results = [outputs[place] for place in result_places]
        replaced = [changed[number] for number in sorted(changed)]
        return final_values, results, [flag for flag, _ in frame.checks], replaced

    stored = [
        jax.ShapeDtypeStruct(variable.storage.shape, variable.storage.dtype)
        for variable in variables
    ]
    dynamic = [leaves[place] for place in places]
    jaxpr = jax.make_jaxpr(staged)(stored, dynamic, objects.shapes())
    objects.refuse_captures(jaxpr.consts)
    return jaxpr, variables, outlines[0]


def _common_placement(variables: list[Variable]) -> Placement | None:
    placements = {id(variable.placement): variable for variable in variables}
    if len(placements) > 1:
        first, second, *_ = placements.values()
        raise OwnershipError(
            fact=f"one compiled function uses variable {first.name!r} of "
            f"{first.placement.describe()} and variable {second.name!r} of "
            f"{second.placement.describe()}.",
            expected="variables of one strategy in one compiled function.",
            hint=f"create both in the same scope ({first.created_at}, {second.created_at}).",
        )
    for variable in placements.values():
        return variable.placement
    return None


def _compile(jaxpr: Any, variables: list[Variable], outline: _Outline, name: str) -> Any:
    """Makes the jitted program: (written, read, arguments) -> (new values, results, flags)."""
    evaluate = jaxpr_as_fun(jaxpr)
    written = {variable: index for index, variable in enumerate(outline.written)}
    read_only = {variable: index for index, variable in enumerate(outline.read_only)}
    written_count, result_count = len(outline.written), len(outline.result_places)
    # Variables the code never touched are inputs of the trace only; the program gets
    # zeros in their place, which XLA removes, and keeps no reference to them.
    sources: list[tuple[str, Any]] = [
        ("written", written[variable])
        if variable in written
        else ("read", read_only[variable])
        if variable in read_only
        else ("zeros", (variable.storage.shape, variable.storage.dtype))
        for variable in variables
    ]

    def program(donated: Any, kept: Any, dynamic: list[Any]) -> Any:
        (donated, replaced), (kept, read) = donated, kept
        numbers = [*outline.changed, *outline.unchanged]
        held = dict(zip(numbers, [*replaced, *read], strict=True))
        stored = [
            donated[source]
            if kind == "written"
            else kept[source]
            if kind == "read"
            else jnp.zeros(*source)
            for kind, source in sources
        ]
        flat = evaluate(*stored, *dynamic, *[held[number] for number in range(len(held))])
        results_end = written_count + result_count
        flags_end = results_end + len(outline.checks)
        new_state = (flat[:written_count], flat[flags_end:])
        return new_state, flat[written_count:results_end], flat[results_end:flags_end]

    # What traces, logs and XLA call it.
    program.__name__ = program.__qualname__ = name
    shardings = [variable.storage_sharding for variable in outline.written]
    replaced_sharding = None if outline.placement is None else outline.placement.mirrored
    out_shardings = ((shardings, replaced_sharding), None, None)
    return jax.jit(program, donate_argnums=0, out_shardings=out_shardings)


@final
class _Compiled:
    """One traced and compiled form of a function, for one signature."""

    def __init__(
        self,
        function: Callable[..., Any],
        treedef: Any,
        leaves: list[Any],
        objects: _objects.Held,
        name: str,
    ) -> None:
        self._places = [place for place, leaf in enumerate(leaves) if is_array_like(leaf)]
        while True:
            try:
                jaxpr, variables, outline = _trace(function, treedef, leaves, self._places, objects)
            except _context.RetraceWith as request:
                request.prepare()
                continue
            break
        self._outline = outline
        self._program = _compile(jaxpr, variables, outline, name)

    @property
    def variables(self) -> list[Variable]:
        """The variables the program reads or writes."""
        return [*self._outline.written, *self._outline.read_only]

    def require_devices(self, name: str) -> None:
        """Refuses to be called where nothing can run."""
        placement = self._outline.placement
        if placement is not None and placement.only_compiles:
            raise DeviceError(
                fact=f"{name!r} was called on {placement.describe()}, which is there to compile "
                "for.",
                expected="mirrored.plan.plan(strategy, step, *args), which runs nothing.",
                hint="to train, make strategy and variables over devices that are there.",
            )

    def lower(self, leaves: list[Any], objects: _objects.Held) -> Any:
        """Lowers the program with its variables' current values, for inspection."""
        return self._program.lower(*self._arguments(leaves, objects))

    def _arguments(self, leaves: list[Any], objects: _objects.Held) -> tuple[Any, Any, list[Any]]:
        dynamic = [leaves[place] for place in self._places]
        placement = self._outline.placement
        if placement is not None:
            for index, leaf in enumerate(dynamic):
                sharding = getattr(leaf, "sharding", None)
                if sharding is None or sharding is placement.split or placement.only_compiles:
                    continue
                if leaf.committed and sharding.device_set != placement.device_set:
                    if getattr(sharding, "spec", None) == placement.split.spec:
                        refuse_other_devices(leaf, placement)
                    dynamic[index] = _on_all_devices(leaf, placement)
        outline = self._outline
        replaced, read = objects.arrays(outline.changed, outline.unchanged, placement)
        donated = [variable.storage for variable in outline.written]
        kept = [variable.storage for variable in outline.read_only]
        return (donated, replaced), (kept, read), dynamic

    def __call__(self, leaves: list[Any], objects: _objects.Held) -> Any:
        outline = self._outline
        _workers.pulse()
        return_lent(outline.written)
        (new_values, replaced), results, flags = self._program(*self._arguments(leaves, objects))
        objects.write(outline.changed, replaced)
        for variable, array in zip(outline.written, new_values, strict=True):
            variable.storage = array
        outputs = list(outline.constants)
        for place, result in zip(outline.result_places, results, strict=True):
            outputs[place] = result
        if flags:
            for check, flag in zip(outline.checks, flags, strict=True):
                check(np.asarray(flag))
        return outline.out_treedef.unflatten(outputs)


def _on_all_devices(array: jax.Array, placement: Placement) -> jax.Array:
    if placement.spans_processes and array.is_fully_addressable:
        # Every process passes its own, as to jax.jit; nobody compares them.
        return placement.lift(array)
    return jax.device_put(array, placement.mirrored)


@final
class _Recent:
    """The latest call, remembered so that the next like it is found without a search.

    For calls whose arguments are arrays and unpadded PerReplica values, as in a
    training loop: looking at shapes is all the Python that is left to do then.
    """

    def __init__(
        self,
        expected: list[tuple[type, Any, Any, bool]],
        strategy: Any,
        compiled: _Compiled,
        captures: Captures,
    ) -> None:
        self._expected = expected
        self._strategy = strategy
        self.compiled = compiled
        self.captures = captures

    @classmethod
    def of(cls, args: tuple[Any, ...], compiled: _Compiled, captures: Captures) -> _Recent | None:
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
            expected.append((kind, array.shape, array.dtype, getattr(arg, "is_batch", False)))
        return cls(expected, _context.current().strategy, compiled, captures)

    def arrays_of(self, args: tuple[Any, ...]) -> list[Any] | None:
        """Returns the arrays among ``args`` if they are like those remembered."""
        if len(args) != len(self._expected) or _context.current().strategy is not self._strategy:
            return None
        arrays = []
        for arg, (kind, shape, dtype, is_batch) in zip(args, self._expected, strict=True):
            if type(arg) is not kind:
                return None
            array = arg
            if kind is PerReplica:
                if arg.row_counts is not None or arg.is_batch is not is_batch:
                    return None
                array = arg.stacked
            if array is None or array.shape != shape or array.dtype != dtype:
                return None
            arrays.append(array)
        return arrays


@final
class Programs:
    """The compiled forms of one function, by signature of its arguments."""

    def __init__(self, function: Callable[..., Any], watched: Callable[..., Any]) -> None:
        self._function = function
        self._watched = watched
        self._entries: collections.OrderedDict[Any, tuple[_Compiled, Captures]] = (
            collections.OrderedDict()
        )
        self._last_key: Any = None
        self._recent: _Recent | None = None
        self.reasons: list[str] = []

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the program for these arguments, tracing it first if it must be."""
        recent = self._recent
        if recent is not None and not kwargs:
            arrays = recent.arrays_of(args)
            if arrays is not None and recent.captures.changed() is None:
                return recent.compiled(arrays, _objects.NONE)
        leaves, treedef, objects = _objects.taken_from((args, kwargs))
        compiled, captures = self._find(leaves, treedef, objects)
        compiled.require_devices(getattr(self._watched, "__name__", type(self._watched).__name__))
        result = compiled(leaves, objects)
        self._recent = None if kwargs else _Recent.of(args, compiled, captures)
        return result

    def lower(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Lowers the program for these arguments without running it."""
        leaves, treedef, objects = _objects.taken_from((args, kwargs))
        return self._find(leaves, treedef, objects)[0].lower(leaves, objects)

    def variables_used(self, args: tuple[Any, ...]) -> list[Variable]:
        """Lists the variables that the program for these arguments reads or writes."""
        leaves, treedef, objects = _objects.taken_from((args, {}))
        return self._find(leaves, treedef, objects)[0].variables

    def _find(
        self, leaves: list[Any], treedef: Any, objects: _objects.Held
    ) -> tuple[_Compiled, Captures]:
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
        compiled = _Compiled(self._function, treedef, leaves, objects, name)
        # The snapshot is taken after the trace: a counter that the function itself
        # advances while it is traced must not look like a change.
        entry = self._entries[key] = (compiled, Captures(self._watched))
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
                return f"array {index} of the arguments changed: {_shown(old)} -> {_shown(new)}"
        if key[3] != before[3]:
            return "the structure of an object among the arguments changed"
        return "the current strategy changed"
