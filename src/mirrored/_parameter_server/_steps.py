"""Steps: functions compiled into programs that run between two messages.

Owns tracing a function with what it reads from the servers as inputs and what it sends
as outputs, and the cache of compiled programs, which the workers of a process share. The
numbers of a step's rows are known before the rows are, so a program that looks rows up
has a small one before it, which computes the ids from the arguments.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun

from mirrored import _compat, _context
from mirrored._captures import ByIdentity, Captures, fingerprint
from mirrored._collectives import SingleCommunicator
from mirrored._errors import ContextError
from mirrored._parameter_server._catalog import OptimizerSpec, VariableSpec
from mirrored._parameter_server._ids import IdsProgram
from mirrored._parameter_server._layout import ReadLayout, UpdateLayout
from mirrored._parameter_server._recording import Recording
from mirrored._replica import ReplicaContext
from mirrored._signature import is_array_like, signature_of
from mirrored._values import is_object_leaf

_MOST_PROGRAMS = 256
_MOST_LATEST = 16
_PLACEHOLDER_ROWS = 16


@final
@dataclasses.dataclass
class Step:
    """One compiled step, for arguments of one signature and one bucket for each table.

    Args:
      reads: what to ask the servers for.
      updates: what to send; its arrays stand in the order the program returns them.
      row_updates: the gradients of rows among the program's results.
      program: (flat arrays, rows, places of ids, arguments) -> (results, updates, rows).
      results: puts the results into the structure the function returned.
    """

    reads: ReadLayout
    updates: UpdateLayout
    row_updates: list[tuple[OptimizerSpec, VariableSpec]]
    program: Callable[..., Any]
    results: Callable[[list[Any]], Any]


@final
class Outline:
    """A function for arguments of one signature: its lookups, and its compiled steps."""

    def __init__(self, function: Any, structure: Any, leaves: list[Any], strategy: Any) -> None:
        self._function = function
        self._structure = structure
        self._leaves = leaves
        self.places = [place for place, leaf in enumerate(leaves) if is_array_like(leaf)]
        self._strategy = strategy
        self._shapes = [_shape_of(leaves[place]) for place in self.places]
        # Kept, they would keep a batch alive.
        for place in self.places:
            self._leaves[place] = None
        self._steps: dict[tuple[int, ...], Step] = {}
        self.tables: list[VariableSpec] = []
        self.ids: IdsProgram | None = None
        self._first: Step | None = None
        self._discover()

    def step(self, buckets: tuple[int, ...]) -> Step:
        """The step for tables whose used rows are padded to these sizes."""
        found = self._steps.get(buckets)
        if found is None:
            found = self._steps[buckets] = self._trace(dict(zip(self.tables, buckets, strict=True)))
        return found

    def _discover(self) -> None:
        """Traces once to find what is looked up; without lookups that is the step."""
        tables = [spec for spec in self._strategy.home.specs() if spec.is_table]
        lookups: list[tuple[VariableSpec, Any]] = []
        if tables:
            jaxpr, recording, _ = self._traced(dict.fromkeys(tables, _PLACEHOLDER_ROWS), None)
            lookups = recording.lookups
            if lookups:
                self.ids = IdsProgram(jaxpr, lookups, len(self.places))
        used = {spec.number: spec for spec, _ in lookups}
        self.tables = [used[number] for number in sorted(used)]
        if not lookups:
            self._steps[()] = self._trace({})

    def _trace(self, rows: dict[VariableSpec, int]) -> Step:
        shapes = self.ids.shapes if self.ids is not None else []
        jaxpr, recording, said = self._traced(rows, shapes)
        specs, out_structure, constants, result_places, updates = said
        reads = ReadLayout(recording.groups())
        index = {spec.number: place for place, spec in enumerate(specs)}
        evaluate = jaxpr_as_fun(jaxpr)
        read = {spec.number for spec in reads.specs}
        result_count, update_count = len(result_places), len(updates.flat_arrays())

        def program(flats: Any, rows: Any, inverses: Any, dynamic: Any) -> Any:
            values: list[Any] = [None] * len(specs)
            for spec in specs:
                values[index[spec.number]] = (
                    reads.assemble(spec, flats)
                    if spec.number in read
                    else jax.numpy.zeros(spec.shape, spec.dtype)
                )
            flat = evaluate(*values, *rows, *inverses, *dynamic)
            end = result_count + update_count
            return flat[:result_count], flat[result_count:end], flat[end:]

        def results(arrays: list[Any]) -> Any:
            outputs = list(constants)
            for place, array in zip(result_places, arrays, strict=True):
                outputs[place] = array
            return out_structure.unflatten(outputs)

        row_updates = [(optimizer, spec) for optimizer, spec, _ in recording.row_updates()]
        # The recording's arrays belong to the trace: only what is said of them is kept.
        kept = updates.with_arrays([None] * update_count)
        return Step(reads, kept, row_updates, jax.jit(program), results)

    def _traced(
        self, rows: dict[VariableSpec, int], inverses: Sequence[Any] | None
    ) -> tuple[Any, Recording, Any]:
        specs = [spec for spec in self._strategy.home.specs() if not spec.is_table]
        recordings: list[Recording] = []
        said: list[Any] = []

        def staged(values: Any, tables: Any, places: Any, dynamic: Any) -> Any:
            held = {spec.number: array for spec, array in zip(rows, tables, strict=True)}
            recording = Recording(specs, values, held, None if inverses is None else places)
            recordings.append(recording)
            frame = _context.Frame({}, self._strategy.placement, remote=recording)
            leaves = list(self._leaves)
            for place, value in zip(self.places, dynamic, strict=True):
                leaves[place] = value
            args, kwargs = self._structure.unflatten(leaves)
            with _context.entered(frame=frame):
                result = self._function(*args, **kwargs)
            outputs, structure = jax.tree.flatten(result, is_leaf=is_object_leaf)
            # Python numbers that come out are constants of the program.
            arrays = [
                place
                for place, leaf in enumerate(outputs)
                if is_array_like(leaf) and type(leaf) not in (int, float, complex)
            ]
            constants = [None if place in arrays else leaf for place, leaf in enumerate(outputs)]
            updates = recording.dense_updates()
            said.append((specs, structure, constants, arrays, updates))
            found = [ids for _, ids in recording.lookups] if inverses is None else []
            return (
                [jax.numpy.asarray(outputs[place]) for place in arrays],
                updates.flat_arrays(),
                [gradient for _, _, gradient in recording.row_updates()],
                found,
            )

        shapes = [jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec in specs]
        tables = [
            jax.ShapeDtypeStruct((size, *spec.shape[1:]), spec.dtype) for spec, size in rows.items()
        ]
        places = [jax.ShapeDtypeStruct(shape, np.int32) for shape in inverses or []]
        try:
            jaxpr = jax.make_jaxpr(staged)(shapes, tables, places, self._shapes)
        except jax.errors.UnexpectedTracerError as error:
            raise ContextError(
                fact="a step looked rows up, or applied gradients, inside jax.lax.scan, cond, "
                "while_loop or another function that JAX traces on its own.",
                expected="lookups and apply_gradients in the step itself.",
                hint="look up all rows before the loop, and apply the gradients after it.",
            ) from error
        return jaxpr, recordings[-1], said[-1]


@final
class Steps:
    """The compiled steps of one process."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._outlines: collections.OrderedDict[Any, tuple[Outline, Captures]] = (
            collections.OrderedDict()
        )
        # Of functions that came twice in a row, to be found without looking into them.
        self._latest: dict[Any, tuple[Outline, Captures]] = {}
        self._once: ByIdentity | None = None
        # Threads of one process trace one after another: each finds what another made.
        self.lock = threading.RLock()
        self.traces = 0

    def find(
        self, function: Callable[..., Any], leaves: list[Any], structure: Any, *, replica: bool
    ) -> Outline:
        """Finds or traces a function for these arguments."""
        # Of a function that is the same object only its captures may have changed.
        asked = (
            ByIdentity(function),
            structure,
            tuple(map(signature_of, leaves)),
            replica,
            self._strategy.home.generation,
        )
        with self.lock:
            entry = self._latest.get(asked)
            if entry is not None and entry[1].changed() is None:
                return entry[0]
            key = (fingerprint(function), *asked[1:])
            entry = self._outlines.get(key)
            if entry is None or entry[1].changed() is not None:
                traced = self._in_replica(function) if replica else function
                self.traces += 1
                outline = Outline(traced, structure, list(leaves), self._strategy)
                entry = self._outlines[key] = (outline, Captures(function))
                if len(self._outlines) > _MOST_PROGRAMS:
                    self._outlines.popitem(last=False)
            if self._once == asked[0]:
                if len(self._latest) >= _MOST_LATEST:
                    self._latest.clear()
                # Its own captures: another function may be the same today and not tomorrow.
                self._latest[asked] = entry[0], Captures(function)
            self._once = asked[0]
            return entry[0]

    def _in_replica(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def replicated(*args: Any, **kwargs: Any) -> Any:
            return run_in_replica(self._strategy, function, args, kwargs)

        return replicated


def run_in_replica(strategy: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls a function as the one replica of a worker."""
    replica = ReplicaContext(strategy, SingleCommunicator(), trace=_compat.current_trace())
    with _context.entered(replica=replica):
        return function(*args, **kwargs)


def _shape_of(leaf: Any) -> Any:
    if type(leaf) in (int, float, complex):
        return leaf
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
    weak = isinstance(leaf, jax.Array) and leaf.aval.weak_type
    return jax.ShapeDtypeStruct(leaf.shape, dtype, weak_type=weak)
