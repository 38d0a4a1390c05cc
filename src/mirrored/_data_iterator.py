"""One epoch of a distributed data set: the batches in order, and where one stands.

Owns the position: what a user has taken, as opposed to what has been read ahead.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from typing import Any, final

from mirrored import _workers
from mirrored._data_agreement import Agreement
from mirrored._data_batches import BatchPlacer, spec_of
from mirrored._data_elements import Start
from mirrored._data_prefetch import Items, Turns, ahead
from mirrored._data_sources import StepSource
from mirrored._errors import ArgumentError, DataError
from mirrored._placement import Placement


@final
class Position:
    """Where an iterator stands: what its user has taken, not what is ready."""

    def __init__(self, start: Start) -> None:
        self.epoch, self.batch, self.saved = start
        self.finished = False

    def next_start(self) -> Start:
        """Where one who takes over from here begins."""
        if self.finished:
            return Start(self.epoch + 1)
        return Start(self.epoch, self.batch, self.saved)


@final
class Pipeline:
    """From source to placed batches, for any number of iterators."""

    def __init__(self, placement: Placement, source: StepSource, prefetch: int) -> None:
        self.placement = placement
        self.source = source
        self.prefetch = prefetch
        self.element_spec: Any = None
        self._turns = Turns()
        workers = _workers.connected()
        self._agreement: Agreement | None = None
        if workers is not None and placement.spans_processes and source.is_common:
            self._agreement = Agreement(workers, source.describe())

    def items(self, start: Start) -> Items:
        """Reads from ``start``, some batches ahead."""
        batches = self.batches(start, BatchPlacer(self.placement), self._agreement)
        return ahead(batches, self.prefetch, self._turns)

    def batches(
        self, start: Start, placer: BatchPlacer, agreement: Agreement | None = None
    ) -> Generator[tuple[Any, dict[str, Any]], None, None]:
        """Yields placed batches, each with what to save to go on after it."""
        number = start.batch
        for step, saved in self.source.read(start):
            if agreement is not None:
                agreement.look(start.epoch, start.batch, number, step)
            batch = self.source.place(placer, step, number)
            if self.element_spec is None:
                self.element_spec = spec_of(batch)
            number += 1
            yield batch, saved
            # While the source takes its time, a batch that was taken is not kept here.
            del batch
        if number == 0:
            raise self._empty()

    def _empty(self) -> DataError:
        dropped = self.source.remainder == "drop" and self.source.global_batch_size is not None
        return DataError(
            fact=f"there is no batch in {self.source.describe()}"
            + (", since remainder='drop' leaves the partial batch out." if dropped else "."),
            expected="at least one batch in every epoch.",
            hint="use a smaller batch_size or remainder='pad'."
            if dropped
            else "a generator that has been used up before yields nothing: pass the function "
            "that makes it, or a list.",
        )

    def state(self, start: Start) -> dict[str, Any]:
        """Writes a position as plain Python values."""
        return {
            "epoch": start.epoch,
            "batch": start.batch,
            "source": dict(start.saved or {}),
            "data": self.source.identity(),
        }

    def start(self, state: Mapping[str, Any]) -> Start:
        """Reads a position, and refuses one of other data."""
        if not (isinstance(state, Mapping) and {"epoch", "batch"} <= state.keys()):
            raise ArgumentError(
                fact=f"set_state was given {state!r}.",
                expected="what get_state returned: a dictionary with epoch and batch.",
                hint="save state = iterator.get_state() with the checkpoint.",
            )
        saved, own = state.get("data", {}), self.source.identity()
        different = [key for key in own if key in saved and saved[key] != own[key]]
        if different:
            shown = ", ".join(f"{key} {saved[key]} (now {own[key]})" for key in different)
            raise DataError(
                fact=f"the saved position belongs to other data: {shown}.",
                expected="the same rows in the same batches and order, or examples would be "
                "repeated or missed.",
                hint="resume with the data and arguments of the saved run.",
            )
        return Start(int(state["epoch"]), int(state["batch"]), state.get("source") or None)


@final
class DistributedIterator(Iterator[Any]):
    """One epoch of a DistributedDataset.

    The next batches are read, split and put on the devices by a thread while the
    current one is in use. The thread ends with the epoch, when the iterator is closed,
    or when nothing refers to it any more.

    >>> import numpy as np
    >>> import mirrored
    >>> strategy = mirrored.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> dataset = strategy.distribute_dataset(np.arange(8), batch_size=4)
    >>> iterator = iter(dataset)
    >>> next(iterator)
    PerReplica[[0 1] | [2 3]]
    >>> state = iterator.get_state()
    >>> resumed = iter(dataset)
    >>> resumed.set_state(state)
    >>> next(resumed)
    PerReplica[[4 5] | [6 7]]
    """

    def __init__(self, pipeline: Pipeline, position: Position) -> None:
        self._pipeline = pipeline
        self._position = position
        self._items: Items | None = None
        self._closed = False

    def __next__(self) -> Any:
        items = self._items
        if items is None:
            items = self._items = self._open()
        position = self._position
        try:
            batch, position.saved = next(items)
        except StopIteration:
            position.finished = True
            raise
        position.batch += 1
        return batch

    def get_next(self) -> Any:
        """The same as ``next(iterator)``, as tf.distribute spells it."""
        return next(self)

    def _open(self) -> Items:
        if self._closed:
            raise DataError(
                fact="this iterator was closed.",
                expected="an open iterator.",
                hint="start another one with iter(dataset).",
            )
        return self._pipeline.items(self._position.next_start())

    def get_state(self) -> dict[str, Any]:
        """Returns the position after the last batch taken, as values JSON can hold.

        Batches that are read ahead but were not taken do not count.
        """
        return self._pipeline.state(self._position.next_start())

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes to a position that ``get_state`` returned, in this process or another.

        Arrays and Grain's iterators go there directly. Other sources are read again
        from the start of the epoch and must yield the same batches; a sample of the
        last one is compared.
        """
        start = self._pipeline.start(state)
        self._let_go()
        self._position.epoch, self._position.batch, self._position.saved = start
        self._position.finished = False

    def close(self) -> None:
        """Stops reading ahead; waits until the source is no longer in use."""
        self._let_go()
        self._closed = True

    def _let_go(self) -> None:
        items, self._items = self._items, None
        if items is not None:
            items.close()

    def __repr__(self) -> str:
        position = self._position
        return (
            f"<DistributedIterator in epoch {position.epoch} after {position.batch} batches of "
            f"{self._pipeline.source.describe()}>"
        )
