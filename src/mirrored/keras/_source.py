"""Batches of an epoch, in Keras's order, gathered into chunks that run in one call.

Owns reading ahead: which batches go together, and that each is read once and in order.
Where they are put is decided in ``_chunk``.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any, final

import jax
import numpy as np

from mirrored import _workers
from mirrored._data import DistributedDataset
from mirrored._data_iterator import DistributedIterator
from mirrored._errors import ArgumentError
from mirrored._placement import Placement
from mirrored._workers import Workers
from mirrored.keras import _private
from mirrored.keras._chunk import Chunk, RowRange, place_batches, place_rows, place_whole

_MOST_STEPS = 128
_MOST_BYTES = 16 * 2**20
# A chunk of a slow source is closed early, so that the first step need not wait for it.
_PATIENCE_SECONDS = 0.05
_END = object()


@final
class ArrayRows:
    """The rows of plain arrays in this epoch's order; gathered only when they are placed."""

    def __init__(
        self,
        arrays: Any,
        row_count: int,
        batch_size: int,
        shuffle: bool,
        workers: Workers | None = None,
    ) -> None:
        self.arrays = arrays
        self._workers = workers
        self._row_count = row_count
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._next_row = 0
        self._order: Any = None

    def __iter__(self) -> ArrayRows:
        return self

    def __next__(self) -> Any:
        rows = self.range()
        if rows is None:
            raise StopIteration
        index = rows.index()
        return jax.tree.map(lambda array: array[index], self.arrays)

    def range(self) -> RowRange | None:
        """The rows of the next batch, or None at the end."""
        if self._next_row >= self._row_count:
            return None
        if self._shuffle and self._order is None:
            # Drawn when the first batch is asked for, as Keras does: the same seed then
            # gives the same order with and without a strategy.
            self._order = np.random.permutation(self._row_count)
            if self._workers is not None:
                # Each worker has drawn its own; of different orders, rows would be read twice
                # and others not at all.
                kind = np.uint32 if self._row_count < 2**32 else np.int64
                order = self._order.astype(kind)
                self._order = self._workers.broadcast(order, "the order of the rows")
        start = self._next_row
        self._next_row = min(start + self._batch_size, self._row_count)
        return RowRange(self.arrays, self._order, start, self._next_row)


@final
class Source(_private.EpochIterator):
    """Keras's own reading of any data it takes, with plain arrays read as row numbers."""

    # The processes that read the same rows in the same order; set by whoever feeds them.
    workers: Workers | None = None

    def __init__(self, x: Any = None, **others: Any) -> None:
        if isinstance(x, (DistributedDataset, DistributedIterator)):
            raise ArgumentError(
                fact=f"Keras was given {x!r}, which is split over the replicas already.",
                expected="the data itself: fit, evaluate and predict split it.",
                hint="pass what was given to distribute_dataset.",
            )
        super().__init__(x=x, **others)

    def _get_iterator(self) -> Any:
        rows = _private.array_rows(self.data_adapter)
        if rows is not None:
            return ArrayRows(*rows, self.workers)
        return self.data_adapter.get_jax_iterator()

    def __next__(self) -> Any:
        return _private.next_step(self)

    def read_epoch(self) -> None:
        """Reads an epoch to its end and leaves it out."""
        with self.catch_stop_iteration():
            for _, _, iterator in self:
                for _ in range(self.group_size):
                    if _read(iterator) is _END:
                        break

    @property
    def group_size(self) -> int:
        """How many batches go between two calls of batch callbacks."""
        return self.steps_per_execution


@final
class Feed:
    """One epoch of a source as placed chunks."""

    def __init__(self, source: Source, placement: Placement, *, whole: bool, ahead: bool) -> None:
        self._source = source
        self._placement = placement
        self._whole = whole
        self.ahead = ahead
        self._capacities: dict[Any, int] = {}
        # Over several processes chunks must not depend on how long reading took.
        self._is_patient = placement.spans_processes
        source.workers = _workers.connected() if placement.spans_processes else None

    def chunks(self, skipped: int = 0) -> Iterator[Chunk]:
        """Yields chunks of batches of one shape; what is read is placed at once.

        Args:
          skipped: how many batches to read and leave out: they were trained on already.
        """
        pending: list[Any] = []
        numbers: list[tuple[int | None, int | None]] = []
        signature: Any = None
        began = 0.0
        try:
            for batch, begin, end in itertools.islice(batches_of(self._source), skipped, None):
                found = _signature(batch)
                if pending and found != signature:
                    yield self._place(pending, numbers, signature)
                    pending, numbers = [], []
                if not pending:
                    signature, began = found, time.perf_counter()
                pending.append(batch)
                numbers.append((begin, end))
                full = len(pending) >= self._capacity(batch, signature)
                slow = not (self._is_patient or isinstance(batch, RowRange)) and (
                    time.perf_counter() - began > _PATIENCE_SECONDS
                )
                if full or slow:
                    yield self._place(pending, numbers, signature)
                    pending, numbers = [], []
        except Exception:
            # The steps before the data failed are taken, as in Keras. Over several processes
            # the others would wait for steps that do not come.
            if pending and not self._is_patient:
                yield self._place(pending, numbers, signature)
            raise
        if pending:
            yield self._place(pending, numbers, signature)

    def _capacity(self, batch: Any, signature: Any) -> int:
        known = self._capacities.get(signature)
        if known is not None:
            return known
        if self._whole or signature[0] == "sparse":
            capacity = 1
        elif not self.ahead and not isinstance(batch, RowRange):
            # A callback may change what a generator yields next: read no further than asked.
            capacity = 1
        elif self._capacities:
            # Not the shape of most batches: the last one, usually.
            capacity = 1
        else:
            most = max(1, min(_MOST_STEPS, _MOST_BYTES // max(1, _byte_count(batch))))
            steps = self._source.num_batches
            capacity = most if steps is None else min(most, _power_of_two_from(steps))
        self._capacities[signature] = capacity
        return capacity

    def _place(
        self, batches: list[Any], numbers: list[tuple[int | None, int | None]], signature: Any
    ) -> Chunk:
        if self._whole or signature[0] == "sparse":
            return place_whole(self._placement, read_rows(batches[0]), numbers)
        capacity = self._capacities[signature]
        if isinstance(batches[0], RowRange):
            return place_rows(self._placement, batches, numbers, capacity)
        return place_batches(self._placement, batches, numbers, capacity)


def batches_of(source: Source) -> Iterator[tuple[Any, int | None, int | None]]:
    """Yields batches with the numbers Keras gives the first and last of each group."""
    with source.catch_stop_iteration():
        for begin, end, iterator in source:
            group = []
            for _ in range(source.group_size):
                batch = _read(iterator)
                if batch is _END:
                    break
                group.append(batch)
            if not group:
                raise StopIteration
            last = len(group) - 1
            for position, batch in enumerate(group):
                yield (
                    batch,
                    begin if position == 0 else None,
                    end if position == last else None,
                )


def _read(iterator: Any) -> Any:
    if isinstance(iterator, ArrayRows):
        rows = iterator.range()
        return _END if rows is None else rows
    return next(iterator, _END)


def read_rows(batch: Any) -> Any:
    """The arrays of a batch, gathered if it is rows of arrays."""
    if isinstance(batch, RowRange):
        index = batch.index()
        return jax.tree.map(lambda array: array[index], batch.arrays)
    return batch


def _signature(batch: Any) -> Any:
    if isinstance(batch, RowRange):
        return ("rows", batch.stop - batch.start)
    leaves, structure = jax.tree.flatten(batch, is_leaf=_private.is_sparse)
    if any(_private.is_sparse(leaf) for leaf in leaves):
        return ("sparse", structure)
    return ("batch", structure, tuple((np.shape(leaf), _dtype_of(leaf)) for leaf in leaves))


def _dtype_of(leaf: Any) -> Any:
    # NumPy may no longer take a JAX array for a dtype.
    return leaf.dtype if isinstance(leaf, (jax.Array, np.ndarray)) else np.result_type(leaf)


def _byte_count(batch: Any) -> int:
    if isinstance(batch, RowRange):
        rows = batch.stop - batch.start
        return sum(rows * array[:1].nbytes for array in jax.tree.leaves(batch.arrays))
    return sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(batch))


def _power_of_two_from(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()
