"""Program: Python that reads and writes Variables, compiled into one XLA call.

Owns tracing with the variables held in Refs, donation, and writing the new values back. It
knows nothing of replicas; which program fits a call is for ``_program_cache`` to say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from mirrored import _context, _objects, _workers
from mirrored._errors import DeviceError, OwnershipError
from mirrored._placement import Placement
from mirrored._signature import is_array_like, is_python_number
from mirrored._values import flattened, is_object_leaf, refuse_other_devices
from mirrored._variable import Variable, live_variables, return_lent


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
    returns_one_array: bool


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
        outputs, out_treedef = flattened(result, is_object_leaf)
        # Python numbers that come out are constants of the program.
        result_places = [
            place
            for place, leaf in enumerate(outputs)
            if is_array_like(leaf) and not is_python_number(leaf)
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
                result_places == [0] and jax.tree_util.treedef_is_leaf(out_treedef),
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
class Program:
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
        self._compiled = _compile(jaxpr, variables, outline, name)

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

    def data_among(self, leaves: list[Any]) -> list[Any]:
        """Picks those leaves of the arguments that are data of the program."""
        return [leaves[place] for place in self._places]

    def lower(self, data: list[Any], objects: _objects.Held) -> Any:
        """Lowers the program with its variables' current values, for inspection."""
        return self._compiled.lower(*self._inputs(data, objects))

    def run(self, data: list[Any], objects: _objects.Held) -> Any:
        """Runs the program, puts its variables' new values in place, and returns its results."""
        outline = self._outline
        _workers.pulse()
        return_lent(outline.written)
        (new_values, replaced), results, flags = self._compiled(*self._inputs(data, objects))
        objects.write(outline.changed, replaced)
        for variable, array in zip(outline.written, new_values, strict=True):
            variable.storage = array
        if flags:
            for check, flag in zip(outline.checks, flags, strict=True):
                check(np.asarray(flag))
        if outline.returns_one_array:
            return results[0]
        outputs = list(outline.constants)
        for place, result in zip(outline.result_places, results, strict=True):
            outputs[place] = result
        return outline.out_treedef.unflatten(outputs)

    def _inputs(self, data: list[Any], objects: _objects.Held) -> tuple[Any, Any, list[Any]]:
        outline = self._outline
        placement = outline.placement
        if placement is not None and not placement.only_compiles:
            split = placement.split
            for index, value in enumerate(data):
                sharding = getattr(value, "sharding", None)
                if sharding is not split and sharding is not None:
                    data[index] = _moved(value, placement)
        replaced, read = objects.arrays(outline.changed, outline.unchanged, placement)
        donated = [variable.storage for variable in outline.written]
        kept = [variable.storage for variable in outline.read_only]
        return (donated, replaced), (kept, read), data


def _moved(array: jax.Array, placement: Placement) -> jax.Array:
    """Puts an array of other devices on those of the program, if it may go there."""
    if not array.committed or array.sharding.device_set == placement.device_set:
        return array
    if getattr(array.sharding, "spec", None) == placement.split.spec:
        refuse_other_devices(array, placement)
    if placement.spans_processes and array.is_fully_addressable:
        # Every process passes its own, as to jax.jit; nobody compares them.
        return placement.lift(array)
    return jax.device_put(array, placement.mirrored)
