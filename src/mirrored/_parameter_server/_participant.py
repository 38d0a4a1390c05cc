"""Participant: a worker, or the coordinator, as the code that it runs sees it.

Owns what reading, writing and running mean there: eagerly a message each; in a step one
message to each server. The words of the messages are in ``_exchange``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

import jax
import numpy as np

from mirrored import _compat, _context, _variable_errors
from mirrored._errors import ArgumentError, ContextError
from mirrored._parameter_server._catalog import OptimizerSpec, VariableSpec
from mirrored._parameter_server._exchange import Exchange, Reads, RowsQuestion, Values
from mirrored._parameter_server._ids import UsedRows, used_rows
from mirrored._parameter_server._layout import ReadLayout, UpdateLayout, split_rows
from mirrored._parameter_server._recording import Recording, check_pairs
from mirrored._parameter_server._sharing import Sharing
from mirrored._parameter_server._steps import Step, Steps, run_in_replica
from mirrored._parameter_server._tables import aligned_empty, bucket
from mirrored._sparse import IndexedSlices
from mirrored._values import PerReplica, is_object_leaf

_NOTHING: Reads = {}
# What was asked of the servers, and for each where its rows belong: table and place.
RowsAsked: TypeAlias = tuple[RowsQuestion, dict[int, list[tuple[int, slice]]]]


@final
class Participant:
    """Someone who reads and updates what is on the servers.

    Args:
      exchange: its talk with the servers.
      steps: the compiled steps of its process.
      device: where it computes.
      index: the worker's number; None for the coordinator.
      sent: called after updates were sent, if given.
      sharing: with which other processes in lockstep it shares the servers, or None.
    """

    def __init__(
        self,
        exchange: Exchange,
        steps: Steps,
        device: Any,
        index: int | None = None,
        *,
        sent: Callable[[], None] | None = None,
        sharing: Sharing | None = None,
    ) -> None:
        self.exchange = exchange
        self.index = index
        self.device = device
        self._steps = steps
        self._sent = sent
        self.sharing = sharing
        self._usual = 0
        self._here = {device}
        self._must_place = device != jax.local_devices()[0]

    # --- one at a time -----------------------------------------------------------

    def read(self, spec: VariableSpec) -> Any:
        """Reads a variable."""
        recording = recording_of(spec.name, "read")
        if recording is not None:
            return recording.value(spec)
        return jax.device_put(self.fetch([spec])[0], self.device)

    def fetch(self, specs: Sequence[VariableSpec]) -> list[np.ndarray]:
        """Reads variables as NumPy arrays, in one message to each server."""
        layout = ReadLayout([specs])
        flats = layout.flats(self.exchange.values(layout.reads))
        return [layout.assemble(spec, flats, np) for spec in specs]

    def write(self, spec: VariableSpec, action: str, value: Any) -> None:
        """Writes a variable."""
        recording = recording_of(spec.name, "written")
        if recording is not None:
            recording.write(spec, action, value)
            return
        host = np.asarray(value)
        layout = UpdateLayout()
        if action == "assign":
            layout.write("assign", spec, host, np)
        else:
            layout.write("add", spec, -host if action == "assign_sub" else host, np)
        self._send(layout)

    def apply(self, optimizer: OptimizerSpec, pairs: list[tuple[Any, VariableSpec]]) -> None:
        """Sends gradients to an optimizer."""
        recording = recording_of(optimizer.name, "applied")
        if recording is not None:
            check_pairs(optimizer.name, pairs, rows=True)
            recording.apply(optimizer, pairs)
            return
        layout = UpdateLayout()
        dense = []
        for gradient, spec in pairs:
            if spec.is_table and isinstance(gradient, IndexedSlices):
                used = used_rows(spec, [np.asarray(gradient.indices)])
                total = np.zeros((len(used.rows), *spec.shape[1:]), spec.dtype)
                np.add.at(total, used.places[0], np.asarray(gradient.values))
                layout.rows(optimizer, spec, used.rows, total)
            elif spec.is_table:
                raise ArgumentError(
                    fact=f"table {spec.name!r} was given a gradient of shape "
                    f"{np.shape(gradient)} outside a compiled step.",
                    expected="the gradients of value_and_grad in strategy.run or a "
                    "mirrored.function, or IndexedSlices.",
                    hint="call the step with strategy.run.",
                )
            else:
                if isinstance(gradient, IndexedSlices):
                    gradient = gradient.to_dense()
                dense.append((np.asarray(gradient), spec))
        check_pairs(optimizer.name, dense, rows=False)
        if dense:
            layout.gradients(optimizer, dense, np)
        self._send(layout)

    def _send(self, layout: UpdateLayout) -> None:
        """Sends updates and waits until they have arrived."""
        if not self._may_send(layout):
            return
        gradients = layout.is_step
        while not self.exchange.push(layout.parts(), _NOTHING, is_step=gradients):
            # Refused as too old. They were computed outside a step, from values nobody
            # here knows, so they cannot be computed again: they are sent as they are.
            gradients = False
        self.exchange.values(_NOTHING)
        if self._sent is not None:
            self._sent()

    def _may_send(self, layout: UpdateLayout) -> bool:
        """Whether this process is the one to send what all of a group would."""
        if self.sharing is None:
            return True
        self.sharing.before_write()
        self.sharing.writes.update(layout.fields.keys())
        return self.sharing.is_first

    # --- rows of tables ----------------------------------------------------------

    def lookup(self, spec: VariableSpec, ids: Any, differentiated: Any) -> Any:
        """Looks rows of a table up."""
        recording = recording_of(spec.name, "looked up")
        if recording is not None:
            rows = recording.rows(spec) if differentiated is None else differentiated
            return recording.lookup(spec, ids, rows)
        host = np.asarray(ids)
        used = used_rows(spec, [host])
        return jax.device_put(self.fetch_rows([used])[0][used.places[0]], self.device)

    def take(self, spec: VariableSpec, ids: np.ndarray) -> np.ndarray:
        """Reads rows, in the order of the ids."""
        self._refuse_in_step(spec, "read")
        used = used_rows(spec, [ids])
        return self.fetch_rows([used])[0][used.places[0]]

    def put(self, spec: VariableSpec, ids: np.ndarray, values: np.ndarray) -> None:
        """Sets rows, all different and sorted."""
        self._refuse_in_step(spec, "written")
        used = used_rows(spec, [ids])
        layout = UpdateLayout()
        layout.set_rows(spec, used.rows, values)
        self._send(layout)

    def _refuse_in_step(self, spec: VariableSpec, action: str) -> None:
        if recording_of(spec.name, action) is not None:
            raise ContextError(
                fact=f"table {spec.name!r} was {action} as a whole inside a compiled step.",
                expected="lookup and apply_gradients in steps.",
                hint="call numpy and assign outside strategy.run.",
            )

    def rows(self, spec: VariableSpec) -> Any:
        """What stands for the used rows of a table in the step being traced."""
        recording = recording_of(spec.name, "differentiated")
        if recording is None:
            raise ContextError(
                fact=f"a gradient of table {spec.name!r} was asked for outside a compiled step.",
                expected="value_and_grad in strategy.run or in a mirrored.function, where the "
                "rows used are known.",
                hint="call the step with strategy.run.",
            )
        return recording.rows(spec)

    def fetch_rows(self, used: Sequence[UsedRows]) -> list[np.ndarray]:
        """Reads rows of several tables, in one message to each server."""
        return self._rows_asked_for(used, self._ask_for_rows(used))

    def _ask_for_rows(self, used: Sequence[UsedRows]) -> RowsAsked:
        wanted: dict[int, tuple[list[int], list[np.ndarray]]] = {}
        targets: dict[int, list[tuple[int, slice]]] = {}
        for index, (spec, rows, _) in enumerate(used):
            for part, chosen in split_rows(spec, rows):
                tables, numbers = wanted.setdefault(part.server, ([], []))
                tables.append(part.piece.number)
                numbers.append(rows[chosen] - part.piece.start)
                targets.setdefault(part.server, []).append((index, chosen))
        return self.exchange.ask_for_rows(wanted), targets

    def _rows_asked_for(self, used: Sequence[UsedRows], asked: RowsAsked) -> list[np.ndarray]:
        question, targets = asked
        results = [
            aligned_empty((bucket(len(rows)), *spec.shape[1:]), spec.dtype)
            for spec, rows, _ in used
        ]
        for result, (_, rows, _) in zip(results, used, strict=True):
            result[len(rows) :] = 0
        for server, arrays in self.exchange.rows(question).items():
            for (index, chosen), array in zip(targets[server], arrays, strict=True):
                results[index][chosen] = array
        return results

    # --- steps -------------------------------------------------------------------

    def run(
        self, strategy: Any, function: Callable[..., Any], args: Any, kwargs: Any, *, replica: bool
    ) -> Any:
        """Runs a function as one compiled step."""
        if _context.current().frame is not None:
            call = run_in_replica if replica else _call
            return call(strategy, function, args, kwargs)
        leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=_is_leaf)
        leaves = [_component(leaf) for leaf in leaves]
        outline = self._steps.find(function, leaves, structure, replica=replica)
        dynamic = [leaves[place] for place in outline.places]
        used: list[UsedRows] = [] if outline.ids is None else outline.ids(dynamic)
        places = [] if outline.ids is None else outline.ids.places(used)
        with self._steps.lock:
            step = outline.step(tuple(found.bucket for found in used))
        while True:
            # Asked for before the values are waited for: both come in one go.
            asked = self._ask_for_rows(used)
            values = self.exchange.values(step.reads.reads) if step.reads.reads else {}
            rows = self._rows_asked_for(used, asked)
            results, accepted = self._attempt(step, values, rows, used, places, dynamic)
            if accepted:
                return step.results(results)

    def _attempt(
        self,
        step: Step,
        values: Values,
        rows: list[np.ndarray],
        used: Sequence[UsedRows],
        places: Sequence[np.ndarray],
        dynamic: Sequence[Any],
    ) -> tuple[list[Any], bool]:
        inputs = step.reads.flats(values), rows, list(places), list(dynamic)
        if self._must_place or any(self._is_elsewhere(leaf) for leaf in dynamic):
            inputs = jax.device_put(inputs, self.device)
        # Otherwise the program takes NumPy's arrays as they are. On the CPU those that lie well,
        # as in shared memory, are not copied at all, and placing each first took as long as a
        # small step.
        results, dense, row_gradients = step.program(*inputs)
        if not step.updates and not step.row_updates:
            # The caller may change its batch once it has the results.
            return jax.block_until_ready(results), True
        updates = step.updates.with_arrays([np.asarray(array) for array in dense])
        by_table = {found.spec.number: found for found in used}
        for (optimizer, spec), gradient in zip(step.row_updates, row_gradients, strict=True):
            numbers = by_table[spec.number].rows
            updates.rows(optimizer, spec, numbers, np.asarray(gradient)[: len(numbers)])
        return results, self._push(updates, step)

    def _is_elsewhere(self, leaf: Any) -> bool:
        return isinstance(leaf, jax.Array) and leaf.devices() != self._here

    def _push(self, updates: UpdateLayout, step: Step) -> bool:
        # After the last step of a closure nobody needs values; closures that come one
        # after another mostly have as many steps as the one before.
        last = self.exchange.steps + 1 == self._usual
        reads = _NOTHING if last else step.reads.reads
        if not self._may_send(updates):
            return True
        if self._sent is not None:
            self._sent()
        return self.exchange.push(updates.parts(), reads, is_step=updates.is_step)

    def finish(self) -> int:
        """Ends a closure: waits for what it sent; returns how many updates there were."""
        self._usual = self.exchange.steps
        self.exchange.end()
        return self._usual


def recording_of(name: str, action: str) -> Recording | None:
    """The trace that code stands in; None where it runs eagerly."""
    frame = _context.current().frame
    if frame is not None:
        if frame.remote is None:
            raise ContextError(
                fact=f"{name!r}, which is on parameter servers, was {action} in a program of "
                "another strategy.",
                expected="one strategy at a time.",
                hint="read it first, and give its value to the program as an argument.",
            )
        return frame.remote
    if _compat.a_program_is_being_staged():
        raise _variable_errors.frozen(name, action)
    return None


def _call(strategy: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _is_leaf(value: Any) -> bool:
    return isinstance(value, PerReplica) or is_object_leaf(value)


def _component(leaf: Any) -> Any:
    if not isinstance(leaf, PerReplica):
        return leaf
    if leaf.replica_count != 1:
        raise ArgumentError(
            fact=f"a PerReplica with {leaf.replica_count} components was given to a worker.",
            expected="one component: each worker has one replica.",
            hint="use plain batches, or datasets of create_per_worker_dataset.",
        )
    return leaf.components()[0]
