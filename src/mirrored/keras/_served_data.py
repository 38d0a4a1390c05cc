"""Data that does not come from Keras's adapters.

That is what workers make for themselves (a function given to ``fit`` as ``x``), and single
batches.

Owns each worker's iterator, which begins again when it ends, and what stands for the data
here, where only its first batch is looked at.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, final

import jax
import numpy as np

from mirrored._data import InputContext
from mirrored._errors import ArgumentError, DataError


@final
class WorkerData:
    """What ``fit`` was given in place of data.

    Args:
      make: takes an InputContext and returns something to iterate over, of batches.
      steps_per_epoch: how many batches all workers together take in an epoch.
      worker_count: how many workers there are.
    """

    def __init__(
        self, make: Callable[[Any], Any], steps_per_epoch: int | None, worker_count: int
    ) -> None:
        if not isinstance(steps_per_epoch, int) or steps_per_epoch < 1:
            raise ArgumentError(
                fact=f"fit was given a function that makes data, and steps_per_epoch="
                f"{steps_per_epoch!r}.",
                expected="a number of batches: nobody sees where an epoch of all workers ends.",
                hint="write fit(make_dataset, steps_per_epoch=1000).",
            )
        self._make = make
        self.num_batches = steps_per_epoch
        self._worker_count = worker_count
        self._iterator: Any = None

    def reset(self) -> None:
        """Data of workers goes on where it was."""

    def first(self) -> Any:
        """A batch, made here."""
        context = InputContext(self._worker_count, 0, self._worker_count)
        return next(_Endless(lambda: self._make(context)))

    def numbers(self) -> Iterator[tuple[None, int, int]]:
        """The batches of an epoch, which are not here."""
        for number in range(self.num_batches):
            yield None, number, number

    def iterator(self, coordinator: Any) -> Any:
        """Each worker's iterator."""
        if self._iterator is None:
            make = self._make

            def of_worker(context: Any) -> Any:
                return _Restarted(make, context)

            self._iterator = iter(coordinator.create_per_worker_dataset(of_worker))
        return self._iterator

    def closure(self, worker: Any, kind: str) -> Any:
        """A closure that takes its batches from the worker's iterator."""
        return functools.partial(_from_iterator, worker, kind)


@final
class OneBatch:
    """A batch that is given as it is."""

    num_batches = 1

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def numbers(self) -> Iterator[tuple[Any, int, int]]:
        """The batch."""
        yield self._batch, 0, 0


def _from_iterator(worker: Any, kind: str, *arguments: Any) -> Any:
    *rest, iterator, count = arguments
    return getattr(worker, kind)(*rest, [next(iterator) for _ in range(count)])


@final
class _Restarted:
    """What a worker iterates over."""

    def __init__(self, make: Callable[[Any], Any], context: Any) -> None:
        self._make = make
        self._context = context

    def __iter__(self) -> Any:
        return _Endless(lambda: self._make(self._context))


@final
class _Endless:
    """An iterator that begins again at the end, and says so if there is nothing."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._current: Iterator[Any] = iter(())

    def __iter__(self) -> _Endless:
        return self

    def __next__(self) -> Any:
        batch = next(self._current, _END)
        if batch is _END:
            self._current = iter(self._make())
            batch = next(self._current, _END)
        if batch is _END:
            raise DataError(
                fact="the function given to fit made data without a batch.",
                expected="batches for each worker.",
                hint="share out files or rows by input_pipeline_id so that each worker has some.",
            )
        return jax.tree.map(np.asarray, batch)


_END = object()
