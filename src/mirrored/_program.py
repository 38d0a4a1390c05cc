"""Programs: Python that reads and writes Variables, compiled into one XLA call.

Owns tracing with the variables held in Refs, the cache of compiled programs and
why each was traced, donation, and writing the new values back. It knows nothing
of replicas.
"""

from __future__ import annotations

import collections
import functools
import logging
from collections.abc import Callable
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from mirrored import _compat, _context, _objects
from mirrored._captures import ByIdentity, Captures
from mirrored._errors import OwnershipError
from mirrored._placement import Placement
from mirrored._variable import Variable, live_variables, return_lent

_LOGGER = logging.getLogger("mirrored")

# Python numbers are traced, as jax.jit does; a bool is a flag more often than a
# number, and stays Python so that `if training:` works.
_TRACED_NUMBERS = (int, float, complex)
_MOST_PROGRAMS = 128


def is_array_like(leaf: Any) -> bool:
    """Says whether a leaf is data (traced) rather than a Python constant."""
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        return not (isinstance(leaf, np.ndarray) and leaf.dtype == object)
    return isinstance(leaf, _TRACED_NUMBERS) and not isinstance(leaf, bool)


def _signature(leaf: Any) -> Any:
    # The same for NumPy and JAX arrays: only shapes and dtypes make a new trace.
    if isinstance(leaf, jax.Array):
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


@final
class Objects:
    """The stateful objects among the arguments of one call."""

    def __init__(self, leaves: list[Any], places: list[int]) -> None:
        self.places = places
        self._taken = None
        if places:
            self._taken = _objects.take([leaves[index] for index in places])
            for index in places:
                leaves[index] = None
        self.signature = self._taken.signature if self._taken else None

    def shapes(self) -> list[Any]:
        """What to trace with in place of the objects' arrays."""
        arrays = self._taken.arrays if self._taken else []
        return [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]

    def inside(self, arrays: list[Any]) -> _objects.Inner | None:
        """Makes the objects anew in the running trace."""
        return self._taken.inside(arrays, None) if self._taken else None

    def arrays(
        self, changed: list[int], unchanged: list[int], placement: Placement | None
    ) -> tuple[list[Any], list[Any]]:
        """Returns the arrays to donate and those to keep, on the devices of ``placement``."""
        taken = self._taken
        if taken is None:
            return [], []
        if placement is not None:
            elsewhere = {
                number: placement.mirror(array)
                for number, array in enumerate(taken.arrays)
                if array.sharding is not placement.mirrored
                and array.sharding != placement.mirrored
            }
            if elsewhere:
                taken.write(elsewhere)
        arrays = taken.arrays
        donated = [
            jnp.copy(arrays[number]) if taken.is_shared(number) else arrays[number]
            for number in changed
        ]
        return donated, [arrays[number] for number in unchanged]

    def write(self, numbers: list[int], arrays: list[Any]) -> None:
        """Writes new arrays on the caller's objects."""
        if self._taken is not None:
            self._taken.write(dict(zip(numbers, arrays, strict=True)))


@final
class _Compiled:
    """One traced and compiled form of a function, for one signature."""

    def __init__(
        self,
        function: Callable[..., Any],
        treedef: Any,
        leaves: list[Any],
        objects: Objects,
    ) -> None:
        self._dynamic = [index for index, leaf in enumerate(leaves) if is_array_like(leaf)]
        examples = [leaves[index] for index in self._dynamic]
        while True:
            variables = live_variables(None)
            try:
                jaxpr = self._trace(function, treedef, leaves, examples, variables, objects)
            except _context.RetraceWith as request:
                request.prepare()
                continue
            break
        self._jit(jaxpr, variables)

    def _trace(
        self,
        function: Callable[..., Any],
        treedef: Any,
        leaves: list[Any],
        examples: list[Any],
        variables: list[Variable],
        objects: Objects,
    ) -> Any:
        def staged(stored: list[Any], dynamic: list[Any], held: list[Any]) -> Any:
            slots = {
                variable: _context.Slot(jax.new_ref(array))
                for variable, array in zip(variables, stored, strict=True)
            }
            frame = _context.Frame(slots, None)
            filled = list(leaves)
            for index, value in zip(self._dynamic, dynamic, strict=True):
                filled[index] = value
            inside = objects.inside(held)
            for index, value in zip(objects.places, inside.objects if inside else (), strict=True):
                filled[index] = value
            args, kwargs = treedef.unflatten(filled)
            with _context.entered(frame=frame):
                result = function(*args, **kwargs)
            outputs, self._out_treedef = jax.tree.flatten(result)
            # Python numbers that come out are constants of the program.
            is_result = [
                is_array_like(leaf) and not isinstance(leaf, _TRACED_NUMBERS) for leaf in outputs
            ]
            self._constants = [
                None if result else leaf for leaf, result in zip(outputs, is_result, strict=True)
            ]
            self._out_dynamic = [index for index, result in enumerate(is_result) if result]
            self._written = [v for v, slot in slots.items() if slot.written]
            self._read_only = [v for v, slot in slots.items() if slot.read and not slot.written]
            self._checks = [check for _, check in frame.checks]
            self._placement = frame.placement or self._variables_placement()
            final_values = [slots[variable].ref[...] for variable in self._written]
            results = [outputs[index] for index in self._out_dynamic]
            changed = inside.changed() if inside else {}
            self._changed = sorted(changed)
            self._unchanged = [n for n in range(len(held)) if n not in changed]
            final_held = [changed[number] for number in self._changed]
            return final_values, results, [flag for flag, _ in frame.checks], final_held

        stored = [
            jax.ShapeDtypeStruct(variable.storage.shape, variable.storage.dtype)
            for variable in variables
        ]
        return jax.make_jaxpr(staged)(stored, examples, objects.shapes())

    def _variables_placement(self) -> Placement | None:
        placements = {id(v.placement): v for v in [*self._written, *self._read_only]}
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

    def _jit(self, jaxpr: Any, variables: list[Variable]) -> None:
        evaluate = jaxpr_as_fun(jaxpr)
        written = {variable: index for index, variable in enumerate(self._written)}
        read_only = {variable: index for index, variable in enumerate(self._read_only)}
        # Variables the code never touched are inputs of the trace only; the
        # compiled program gets a constant in their place, which XLA removes.
        untouched = {
            variable: (variable.storage.shape, variable.storage.dtype)
            for variable in variables
            if variable not in written and variable not in read_only
        }
        order = [
            (0, written[v]) if v in written else (1, read_only[v]) if v in read_only else (2, v)
            for v in variables
        ]
        result_count = len(self._out_dynamic)
        written_count = len(self._written)

        check_count = len(self._checks)
        changed, unchanged = self._changed, self._unchanged

        def program(donated: Any, kept: Any, dynamic: list[Any]) -> Any:
            donated, donated_held = donated
            kept, kept_held = kept
            numbered = dict(zip([*changed, *unchanged], [*donated_held, *kept_held], strict=True))
            held = [numbered[number] for number in range(len(numbered))]
            stored = [
                donated[index] if kind == 0 else kept[index] if kind == 1 else None
                for kind, index in order
            ]
            stored = [
                jnp.zeros(*untouched[variable]) if value is None else value
                for value, variable in zip(stored, variables, strict=True)
            ]
            flat = iter(evaluate(*stored, *dynamic, *held))
            new_values = [next(flat) for _ in range(written_count)]
            results = [next(flat) for _ in range(result_count)]
            flags = [next(flat) for _ in range(check_count)]
            return (new_values, list(flat)), results, flags

        shardings = [variable.storage_sharding for variable in self._written]
        held_sharding = None if self._placement is None else self._placement.mirrored
        self._program = jax.jit(
            program, donate_argnums=0, out_shardings=((shardings, held_sharding), None, None)
        )

    def lower(self, leaves: list[Any], objects: Objects) -> Any:
        """Lowers the program with its variables' current values, for inspection."""
        return self._program.lower(*self._arguments(leaves, objects))

    def _arguments(self, leaves: list[Any], objects: Objects) -> tuple[Any, Any, list[Any]]:
        dynamic = [leaves[index] for index in self._dynamic]
        placement = self._placement
        if placement is not None:
            for index, leaf in enumerate(dynamic):
                if isinstance(leaf, jax.Array) and leaf.committed:
                    sharding = leaf.sharding
                    if (
                        getattr(sharding, "mesh", None) is not placement.mesh
                        and sharding.device_set != placement.device_set
                    ):
                        dynamic[index] = jax.device_put(leaf, placement.mirrored)
        donated_held, kept_held = objects.arrays(self._changed, self._unchanged, placement)
        donated = [variable.storage for variable in self._written]
        kept = [variable.storage for variable in self._read_only]
        return (donated, donated_held), (kept, kept_held), dynamic

    def __call__(self, leaves: list[Any], objects: Objects) -> Any:
        return_lent(self._written)
        (new_values, new_held), results, flags = self._program(*self._arguments(leaves, objects))
        objects.write(self._changed, new_held)
        for variable, array in zip(self._written, new_values, strict=True):
            variable.storage = array
        outputs = list(self._constants)
        for index, result in zip(self._out_dynamic, results, strict=True):
            outputs[index] = result
        for check, flag in zip(self._checks, flags, strict=True):
            check(np.asarray(flag))
        return self._out_treedef.unflatten(outputs)


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
        self.reasons: list[str] = []

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the program for these arguments, tracing it first if it must be."""
        leaves, treedef, places = _objects.flatten_arguments((args, kwargs))
        objects = Objects(leaves, places)
        return self._find(leaves, treedef, objects)(leaves, objects)

    def lower(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Lowers the program for these arguments without running it."""
        leaves, treedef, places = _objects.flatten_arguments((args, kwargs))
        objects = Objects(leaves, places)
        return self._find(leaves, treedef, objects).lower(leaves, objects)

    def _find(self, leaves: list[Any], treedef: Any, objects: Objects) -> _Compiled:
        strategy = _context.current().strategy
        key = (treedef, tuple(map(_signature, leaves)), id(strategy), objects.signature)
        entry = self._entries.get(key)
        reason = None
        if entry is not None:
            compiled, captures = entry
            reason = captures.changed()
            if reason is None:
                return compiled
        reason = reason or self._reason(key)
        compiled = _Compiled(self._function, treedef, leaves, objects)
        # The snapshot is taken after the trace: a counter that the function itself
        # advances while it is traced must not look like a change.
        self._entries[key] = (compiled, Captures(self._watched))
        self._entries.move_to_end(key)
        if len(self._entries) > _MOST_PROGRAMS:
            self._entries.popitem(last=False)
        self._last_key = key
        self.reasons.append(reason)
        name = getattr(self._watched, "__qualname__", repr(self._watched))
        if len(self.reasons) > 1:
            _LOGGER.info("traced %s again: %s", name, reason)
        return compiled

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


@final
class Function:
    """What ``mirrored.function`` returns: a compiled function that may use Variables."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__wrapped__ = function
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self.__qualname__ = getattr(function, "__qualname__", self.__name__)
        self.__doc__ = function.__doc__
        self.__module__ = function.__module__
        self._programs = Programs(function, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _runs_in_place():
            return self.__wrapped__(*args, **kwargs)
        return self._programs.call(args, kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        # Makes @mirrored.function work on methods: one Function for each object.
        if instance is None:
            return self
        bound = Function(self.__wrapped__.__get__(instance, owner))
        name = self.__name__
        if hasattr(instance, "__dict__"):
            instance.__dict__[name] = bound
        return bound

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

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lowers the program for these arguments; see ``jax.jit(...).lower``."""
        return self._programs.lower(args, kwargs)


def _runs_in_place() -> bool:
    """Says whether a compiled function called now becomes part of an outer program."""
    context = _context.current()
    if context.frame is not None or context.replica is not None:
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
    return Function(fn)
