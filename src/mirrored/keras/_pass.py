"""One pass over the data: an epoch of training, an evaluation, a prediction.

Owns the order of things in it: state out of the variables, steps, state back into them,
the next chunk placed while the devices work, callbacks told. Between two calls the
model's variables always hold its values, so whatever interrupts a pass leaves a usable
model, and callbacks read and write what they like.
"""

from __future__ import annotations

import time
from typing import Any, final

import jax
import numpy as np

from mirrored import _workers
from mirrored.keras import _private
from mirrored.keras._backup import Backup
from mirrored.keras._callbacks import BatchCalls, batch_calls, common_calls
from mirrored.keras._chunk import Chunk
from mirrored.keras._flight import Flight
from mirrored.keras._interrupts import Interrupts
from mirrored.keras._program import Program, program_for
from mirrored.keras._source import Feed, Source

_STOP_FLAGS = {"train": "stop_training", "test": "stop_evaluating", "predict": "stop_predicting"}


@final
class Pass:
    """Runs a model's steps of one kind over a source; ``run`` is one epoch of it."""

    def __init__(
        self,
        model: Any,
        kind: str,
        strategy: Any,
        source: Source,
        callbacks: Any,
        interrupts: Interrupts,
    ) -> None:
        self._model = model
        self._kind = kind
        self._placement = strategy.placement
        self._source = source
        self._interrupts = interrupts
        workers = _workers.connected() if self._placement.spans_processes else None
        self._calls = common_calls(batch_calls(callbacks, kind), workers)
        self._begin = getattr(callbacks, f"on_{kind}_batch_begin")
        self._end = getattr(callbacks, f"on_{kind}_batch_end")
        self._flight = Flight(self._placement)
        self._keeps_all = False
        self._loops = False
        self._outputs = Outputs() if kind == "predict" else None

    def run(self, backup: Backup | None = None, skipped: int = 0) -> Any:
        """Runs one epoch; returns its logs, or all rows' predictions.

        Args:
          backup: is told after each call how many batches of the epoch have been run, and
            whether that is all; the model's variables hold what they are then.
          skipped: how many batches at its beginning were run before.
        """
        program = program_for(self._model, self._kind, self._placement)
        feed = Feed(
            self._source,
            self._placement,
            whole=not program.compiled,
            ahead=self._calls is not BatchCalls.EVERYTHING,
        )
        if self._outputs is not None:
            self._outputs.program = program
            self._outputs.lists = _private.variable_lists(self._model, self._kind)
        lists = _private.variable_lists(self._model, self._kind)
        chunks = feed.chunks(skipped)
        chunk = next(chunks, None)
        done = skipped
        logs: Any = {}
        while chunk is not None:
            position = 0
            self._loops = self._may_loop(program, lists, chunk)
            upcoming: Chunk | None = None
            while position < chunk.filled:
                start, count = position, self._count(program, chunk, position)
                if backup is not None:
                    count = min(count, backup.batches_until_save(done))
                position += count
                if self._calls is not BatchCalls.LOGS:
                    self._tell_begin(chunk, start, count)
                returned = self._call(program, lists, chunk, start, count)
                ahead = feed.ahead or chunk.from_rows
                if position >= chunk.filled and ahead:
                    try:
                        upcoming = next(chunks, None)
                    except Exception:
                        # What was run before the data failed is told first.
                        self._tell_end(chunk, start, count, returned)
                        raise
                logs = self._tell_end(chunk, start, count, returned)
                if getattr(self._model, _STOP_FLAGS[self._kind]):
                    self._flight.settle()
                    return self._result(logs)
                if position >= chunk.filled and not ahead:
                    upcoming = next(chunks, None)
                done += count
                if backup is not None:
                    backup.after_batches(done, position >= chunk.filled and upcoming is None)
            chunk = upcoming
        self._flight.settle()
        return self._result(logs)

    def _result(self, logs: Any) -> Any:
        if self._outputs is not None:
            return self._outputs.rows()
        untouched = self._calls is not BatchCalls.EVERYTHING
        return _private.metrics_or_logs(self._model, logs, self._kind, untouched=untouched)

    def _may_loop(self, program: Program, lists: list[list[Any]], chunk: Chunk) -> bool:
        if self._calls is BatchCalls.EVERYTHING and self._source.group_size == 1:
            return False
        state = tuple(_private.values_of(variables) for variables in lists)
        return program.may_loop(state, chunk)

    def _count(self, program: Program, chunk: Chunk, position: int) -> int:
        """How many steps the next call runs: to the end of its group if callbacks may act."""
        if not self._loops or getattr(self._model, _STOP_FLAGS[self._kind]):
            # Asked to stop before it began, an epoch ends after its first step, as in Keras.
            return 1
        if self._calls is not BatchCalls.EVERYTHING:
            return program.pace.next_count(_pace_key(chunk, True), chunk.filled - position)
        for index in range(position, chunk.filled):
            if chunk.numbers[index][1] is not None:
                return index - position + 1
        return chunk.filled - position

    def _call(
        self, program: Program, lists: list[list[Any]], chunk: Chunk, start: int, count: int
    ) -> Any:
        self._keeps_all = program.compiled and (
            self._outputs is not None or self._calls is BatchCalls.LOGS
        )
        with self._flight.turn():
            state = tuple(_private.values_of(variables) for variables in lists)
            began = time.perf_counter()
            self._interrupts.hold()
            try:
                returned, state, token = program.run(
                    state, chunk, start, count, looped=self._loops, keep_all=self._keeps_all
                )
                for variables, values in zip(lists, state, strict=True):
                    _private.set_values(variables, values)
                if token is not None:
                    pace, key = program.pace, _pace_key(chunk, self._loops)
                    self._flight.started(token, lambda: pace.measured(key, count, began))
            finally:
                self._interrupts.release()
        return returned

    def _tell_begin(self, chunk: Chunk, start: int, count: int) -> None:
        if self._calls is BatchCalls.NO_CALLS:
            return
        for begin, _ in chunk.numbers[start : start + count]:
            if begin is not None:
                self._begin(begin)
                return

    def _tell_end(self, chunk: Chunk, start: int, count: int, returned: Any) -> Any:
        """Tells callbacks what they want to know; returns the logs of the last step."""
        if self._calls is BatchCalls.EVERYTHING and self._flight.one_by_one:
            # A callback may run programs of its own on these devices.
            self._flight.settle()
        if self._outputs is not None:
            self._outputs.add(returned, chunk, start if self._loops else 0, count)
        if self._calls is BatchCalls.NO_CALLS:
            return returned
        if self._outputs is not None:
            self._tell_predictions(self._outputs, chunk, start, count)
            return None
        if self._calls is BatchCalls.LOGS and returned is not None:
            return self._tell_each(chunk, start, count, returned)
        end = chunk.numbers[start + count - 1][1]
        if end is not None:
            self._end(end, returned)
        return returned

    def _tell_each(self, chunk: Chunk, start: int, count: int, returned: Any) -> Any:
        first = start if self._loops else 0
        host = jax.tree.map(np.asarray, returned)
        logs: Any = {}
        for index in range(count):
            begin, end = chunk.numbers[start + index]
            logs = (
                jax.tree.map(lambda leaf, at=first + index: leaf[at], host)
                if self._keeps_all
                else returned
            )
            if begin is not None:
                self._begin(begin)
            if end is not None:
                self._end(end, logs)
        return logs

    def _tell_predictions(self, outputs: Outputs, chunk: Chunk, start: int, count: int) -> None:
        if self._calls is BatchCalls.NOTHING:
            end = chunk.numbers[start + count - 1][1]
            if end is not None:
                self._end(end, {})
            return
        for index in range(count):
            begin, end = chunk.numbers[start + index]
            if begin is not None and self._calls is BatchCalls.LOGS:
                self._begin(begin)
            if end is not None:
                self._end(end, {"outputs": outputs.group(count - 1 - index)})


@final
class Outputs:
    """Predictions of all batches, in order, without the rows that were padding."""

    def __init__(self) -> None:
        self._structure: Any = None
        self._batches: list[list[np.ndarray]] = []
        self._told = 0
        self._waiting: tuple[Any, Chunk, int, int] | None = None
        self.program: Program | None = None
        self.lists: list[list[Any]] = []

    def add(self, returned: Any, chunk: Chunk, first: int, count: int) -> None:
        """Takes what a call returned; it is read when the next one is under way."""
        self._read()
        self._waiting = (returned, chunk, first, count)

    def group(self, after: int) -> Any:
        """The predictions since the last group, up to ``after`` batches before the last one."""
        self._read()
        stop = len(self._batches) - after
        batches, self._told = self._batches[self._told : stop], stop
        return self._joined(batches)

    def rows(self) -> Any:
        """All predictions, one row for each row of the data."""
        self._read()
        return self._joined(self._batches) if self._batches else None

    def _joined(self, batches: list[list[np.ndarray]]) -> Any:
        columns = zip(*batches, strict=True)
        return self._structure.unflatten([np.concatenate(column) for column in columns])

    def _read(self) -> None:
        if self._waiting is None or self.program is None:
            return
        returned, chunk, first, count = self._waiting
        self._waiting = None
        leaves, self._structure = jax.tree.flatten(returned)
        hosts = [np.asarray(leaf) for leaf in leaves]
        if not self.program.compiled:
            self._batches.append(hosts)
            return
        for index in range(first, first + count):
            batch = [host[index] for host in hosts]
            self._batches.append(self.program.true_rows(self.lists, chunk, batch))


def _pace_key(chunk: Chunk, loops: bool) -> Any:
    return chunk.rows, chunk.capacity, loops
