"""What people hand to distribute_dataset, read as a stream of batches.

Owns where a source stands: its order in an epoch, how it is taken up again in the
middle, when it ends. Grain, tf.data, torch and Keras are known by what their objects
can do, never imported.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Iterator
from typing import Any, final

import jax
import numpy as np

from mirrored._data_batches import BatchPlacer, HostBatch, Remainder, is_array, is_data_leaf
from mirrored._data_elements import NOTHING, Cursor, Elements, Start, is_iterable
from mirrored._errors import ArgumentError, DataError


class StepSource(abc.ABC):
    """Gives the batches of an epoch, one a step, and places them."""

    # The rows of a full global batch, once known.
    global_batch_size: int | None = None
    # Whether every process reads the same, and keeps its own rows of it.
    is_common = True

    @abc.abstractmethod
    def read(self, start: Start) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Yields what each step takes, and what to save to go on after it."""

    @abc.abstractmethod
    def place(self, placer: BatchPlacer, step: Any, number: int) -> Any:
        """Puts what ``read`` yielded on the devices."""

    @abc.abstractmethod
    def step_count(self) -> int | None:
        """The number of steps in an epoch, if it can be known."""

    @abc.abstractmethod
    def identity(self) -> dict[str, Any]:
        """What must be the same when a saved position is taken up again."""

    @abc.abstractmethod
    def describe(self) -> str:
        """Names the source, for messages."""

    @property
    @abc.abstractmethod
    def can_be_read_again(self) -> bool:
        """Whether a second epoch is possible."""

    @property
    @abc.abstractmethod
    def remainder(self) -> Remainder:
        """What becomes of batches that do not split evenly."""


@final
class ArraySource(StepSource):
    """Whole arrays in host memory, cut into global batches."""

    def __init__(
        self, nest: Any, batch_size: int, remainder: Remainder, *, shuffle: bool, seed: int
    ) -> None:
        # What is asked of the leaves of a batch is asked of those of a data set.
        whole = HostBatch.of(nest, "the data set", may_be_empty=True)
        self._arrays = whole.leaves
        self._structure = whole.structure
        self._row_count = whole.row_count
        self._remainder: Remainder = remainder
        self._shuffle = shuffle
        self._seed = seed
        self._batch_size = batch_size
        self.global_batch_size = batch_size

    def read(self, start: Start) -> Iterator[tuple[HostBatch, dict[str, Any]]]:
        """Yields slices, or rows gathered in the order of the epoch."""
        size, total = self._batch_size, self._row_count
        order = self._order(start.epoch) if self._shuffle else None
        for number in range(start.batch, self.step_count()):
            rows = slice(number * size, min((number + 1) * size, total))
            count = rows.stop - rows.start
            if order is None:
                leaves = [array[rows] for array in self._arrays]
                yield HostBatch(leaves, self._structure, count), {}
            else:
                yield HostBatch(self._arrays, self._structure, count, order[rows]), {}

    def _order(self, epoch: int) -> np.ndarray:
        # RandomState, because NumPy promises never to change its stream: a run resumed
        # under another NumPy still sees every row once.
        seeds = np.random.SeedSequence((self._seed, epoch))
        return np.random.RandomState(np.random.MT19937(seeds)).permutation(self._row_count)

    def place(self, placer: BatchPlacer, step: HostBatch, number: int) -> Any:
        """Splits a global batch."""
        return placer.split(step, name=f"batch {number}", even=self._remainder == "error")

    def step_count(self) -> int:
        """The number of batches."""
        size = self._batch_size
        extra = 0 if self._remainder == "drop" else size - 1
        return (self._row_count + extra) // size

    def identity(self) -> dict[str, Any]:
        """The rows and their order."""
        return {
            "rows": self._row_count,
            "batch_size": self._batch_size,
            "shuffle": self._shuffle,
            "seed": self._seed if self._shuffle else None,
        }

    def describe(self) -> str:
        """Says how many rows in which order."""
        order = f"shuffled with seed {self._seed}" if self._shuffle else "in order"
        return f"arrays of {self._row_count} rows, {order}, batches of {self._batch_size}"

    @property
    def can_be_read_again(self) -> bool:
        """Always."""
        return True

    @property
    def remainder(self) -> Remainder:
        """As given."""
        return self._remainder


@final
class BatchSource(StepSource):
    """Anything that yields global batches."""

    def __init__(self, source: Any, remainder: Remainder) -> None:
        self._elements = Elements(source)
        self._remainder: Remainder = remainder

    def read(self, start: Start) -> Iterator[tuple[HostBatch, dict[str, Any]]]:
        """Yields the elements as they come; under "drop" all but a shorter last one."""
        full = None if start.saved is None else start.saved.get("rows")
        with self._elements.opened(start, each=1) as cursor:
            if full is None and cursor.first is not None:
                full = HostBatch.of(cursor.first, "batch 0").row_count
            for number, element in enumerate(cursor, start.batch):
                batch = HostBatch.of(element, f"batch {number}")
                full = self.global_batch_size = full or batch.row_count
                if self._remainder == "drop" and batch.row_count != full:
                    _require_last(cursor, batch.row_count, full, number)
                    return
                yield batch, {"rows": full, **cursor.state(batch)}

    def place(self, placer: BatchPlacer, step: HostBatch, number: int) -> Any:
        """Splits a global batch."""
        return placer.split(step, name=f"batch {number}", even=self._remainder == "error")

    def step_count(self) -> int | None:
        """The length of the source; unknown where a last one may be dropped."""
        return None if self._remainder == "drop" else self._elements.count()

    def identity(self) -> dict[str, Any]:
        """Nothing is known of the source's data."""
        return {}

    def describe(self) -> str:
        """Names the type of the source."""
        return self._elements.describe("global batches")

    @property
    def can_be_read_again(self) -> bool:
        """Not if the source is an iterator."""
        return not self._elements.one_shot

    @property
    def remainder(self) -> Remainder:
        """As given."""
        return self._remainder


@final
class PieceSource(StepSource):
    """Anything that yields batches for one replica each."""

    is_common = False

    def __init__(self, source: Any, replicas: int, processes: int) -> None:
        self._elements = Elements(source)
        self._replicas = replicas
        self._processes = processes
        self._rows: int | None = None

    def read(self, start: Start) -> Iterator[tuple[list[HostBatch], dict[str, Any]]]:
        """Yields as many consecutive elements as there are local replicas."""
        self._rows = (start.saved or {}).get("rows", self._rows)
        with self._elements.opened(start, each=self._replicas) as cursor:
            for number in itertools.count(start.batch):
                pieces = [
                    HostBatch.of(
                        element,
                        f"batch {number} of replica {index} of this process",
                        may_be_empty=True,
                    )
                    for index, element in enumerate(itertools.islice(cursor, self._replicas))
                ]
                if not pieces:
                    return
                total = sum(piece.row_count for piece in pieces)
                if total == 0:
                    raise DataError(
                        fact=f"the batches of step {number} have no rows.",
                        expected="at least one example in every step.",
                        hint="leave empty batches out in the source.",
                    )
                if self._rows is None:
                    # In several processes every piece is padded to this, see BatchPlacer.stack.
                    self._rows = pieces[0].row_count
                    self.global_batch_size = total * self._processes
                yield pieces, {"rows": self._rows, **cursor.state(pieces[-1])}

    def place(self, placer: BatchPlacer, step: list[HostBatch], number: int) -> Any:
        """Puts one batch on each local replica."""
        rows = self._rows if self._processes > 1 else None
        return placer.stack(step, name=f"batch {number}", fixed_rows=rows)

    def step_count(self) -> int | None:
        """The length of the source over the replicas, rounded up."""
        count = self._elements.count()
        return None if count is None else -(-count // self._replicas)

    def identity(self) -> dict[str, Any]:
        """How many elements a step takes."""
        return {"batches_per_step": self._replicas}

    def describe(self) -> str:
        """Names the type of the source."""
        return self._elements.describe("batches for one replica each")

    @property
    def can_be_read_again(self) -> bool:
        """Not if the source is an iterator."""
        return not self._elements.one_shot

    @property
    def remainder(self) -> Remainder:
        """A last group that is incomplete is filled with empty replicas."""
        return "pad"


def make_source(
    source: Any, batch_size: Any, remainder: Any, *, shuffle: bool, seed: Any
) -> StepSource:
    """Finds out what ``source`` is, or says what is missing."""
    if remainder not in ("pad", "drop", "error"):
        raise ArgumentError(
            fact=f"remainder={remainder!r} is not known.",
            expected='"pad" (keep every row), "drop" (leave the last partial batch out) or '
            '"error" (refuse batches that do not split evenly).',
            hint='leave it out for "pad".',
        )
    if batch_size is not None:
        _require_positive(batch_size)
        source = jax.tree.map(_array_of_numbers, source, is_leaf=_is_numbers_or_leaf)
        _require_arrays(source, batch_size)
        if not isinstance(seed, (int, np.integer)) or seed < 0:
            raise ArgumentError(
                fact=f"seed={seed!r} cannot seed a shuffle.",
                expected="an integer from 0.",
                hint="leave it out for 0.",
            )
        return ArraySource(
            source, int(batch_size), remainder, shuffle=bool(shuffle), seed=int(seed)
        )
    if shuffle:
        raise ArgumentError(
            fact=f"shuffle=True was given with a {type(source).__name__}, whose rows cannot be "
            "reached one by one.",
            expected="shuffle=True with arrays and batch_size only.",
            hint="shuffle in the source: dataset.shuffle(...) or DataLoader(..., shuffle=True).",
        )
    return BatchSource(require_iterable(source), remainder)


def require_iterable(source: Any) -> Any:
    """Returns ``source`` if it can yield batches; otherwise says why not."""
    if is_array(source) or not (source is None or isinstance(source, list) or _is_one_leaf(source)):
        kind = "an array" if is_array(source) else f"a {type(source).__name__} of arrays"
        raise ArgumentError(
            fact=f"the data set is {kind} and no batch_size was given.",
            expected="batch_size=, the number of rows of a global batch.",
            hint="write strategy.distribute_dataset(data, batch_size=64); if the parts are "
            "batches already, put them in a list.",
        )
    if isinstance(source, (str, bytes)) or not (is_iterable(source) or callable(source)):
        raise ArgumentError(
            fact=f"{source!r} ({type(source).__name__}) is not a source of data.",
            expected="arrays with batch_size=, or an iterable of batches: a list, a generator, a "
            "Grain or tf.data dataset, a torch DataLoader.",
            hint="to read files, pass a generator function that yields batches.",
        )
    return source


def _require_positive(batch_size: Any) -> None:
    if (
        not isinstance(batch_size, (int, np.integer))
        or isinstance(batch_size, bool)
        or batch_size <= 0
    ):
        raise ArgumentError(
            fact=f"batch_size={batch_size!r}.",
            expected="a positive integer, the rows of a global batch.",
            hint="the global batch is split over the replicas: for 32 rows on each of 8 "
            "replicas write batch_size=256.",
        )


def _require_arrays(source: Any, batch_size: int) -> None:
    leaves = jax.tree.leaves(source, is_leaf=is_data_leaf)
    if leaves and all(is_array(leaf) for leaf in leaves):
        return
    odd = next((leaf for leaf in leaves if not is_array(leaf)), source)
    if odd is source and callable(getattr(source, "batch", None)):
        hint = f"write distribute_dataset(dataset.batch({batch_size}))."
    elif isinstance(odd, (bool, int, float, complex, np.generic)):
        hint = "turn lists of numbers into an array first: np.asarray(data)."
    else:
        hint = (
            "if it yields batches already, leave batch_size out; if it yields examples, batch "
            f"them in the source (dataset.batch({batch_size}), DataLoader(..., "
            f"batch_size={batch_size}))."
        )
    raise ArgumentError(
        fact=f"batch_size={batch_size} was given with a {type(source).__name__}"
        + ("." if odd is source else f" that holds a {type(odd).__name__}."),
        expected="batch_size with arrays or a nest of arrays only; everything else yields "
        "batches itself.",
        hint=hint,
    )


def _require_last(cursor: Cursor, row_count: int, full: int, number: int) -> None:
    """Checks that the batch with another size is the last, partial one."""
    if row_count < full and next(cursor, NOTHING) is NOTHING:
        return
    more = "and more batches follow" if row_count < full else "more than the first"
    raise DataError(
        fact=f"batch {number} has {row_count} rows, {more}; the first has {full}.",
        expected="batches of one size, except that the last may be shorter and is left out, "
        "since remainder='drop' was asked for.",
        hint="use remainder='pad' for batches of different sizes.",
    )


def _is_numbers(source: Any) -> bool:
    """Says whether ``source`` is a range or a list of Python numbers, however deep."""
    if isinstance(source, range):
        return True
    number = (bool, int, float, complex, np.generic)
    return (
        isinstance(source, list)
        and bool(source)
        and all(isinstance(item, number) or _is_numbers(item) for item in source)
    )


def _is_numbers_or_leaf(source: Any) -> bool:
    return _is_numbers(source) or is_data_leaf(source)


def _array_of_numbers(source: Any) -> Any:
    return np.asarray(source) if _is_numbers(source) else source


def _is_one_leaf(source: Any) -> bool:
    return jax.tree_util.all_leaves([source], is_leaf=is_data_leaf)
