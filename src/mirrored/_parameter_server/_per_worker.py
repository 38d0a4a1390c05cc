"""What each worker has one of: datasets, their iterators, other values.

Owns how they are made on a worker, once, and made again on the one that takes its place.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any, final

from mirrored import _context
from mirrored._data import InputContext
from mirrored._errors import ArgumentError, ContextError
from mirrored._parameter_server._engine import Resource
from mirrored._values import NestLeaf

_NUMBERS = itertools.count()


@final
class PerWorkerValues(NestLeaf):
    """A value that each worker makes for itself.

    Made by ``ClusterCoordinator.create_per_worker_value``; among the arguments of
    ``schedule`` it becomes the worker's own.
    """

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.resource = Resource(next(_NUMBERS), make)


@final
class PerWorkerDataset(NestLeaf):
    """A dataset of which each worker has one; ``iter`` gives an iterator for each."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self._make = make
        self.resource = Resource(next(_NUMBERS), make)

    def __iter__(self) -> Iterator[Any]:
        # Not an iterator of this process: schedule gives each worker its own.
        return _PerWorkerIterator(_IteratorOf(self._make))


@final
class _PerWorkerIterator(NestLeaf):
    """An iterator of which each worker has one."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.resource = Resource(next(_NUMBERS), make)

    def __iter__(self) -> _PerWorkerIterator:
        return self

    def __next__(self) -> Any:
        raise ContextError(
            fact="next was called on an iterator over a per-worker dataset.",
            expected="next in the function given to schedule, on the worker's own iterator.",
            hint="pass the iterator in args= of schedule.",
        )


@final
class _IteratorOf:
    """Makes an iterator over what makes a dataset; travels with closures."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self._make = make

    def __call__(self, index: int) -> Any:
        return iter(self._make(index))


@final
class _DatasetOf:
    """Makes a worker's dataset of what the user gave; travels with closures."""

    def __init__(self, dataset_or_fn: Any, worker_count: int) -> None:
        self._given = dataset_or_fn
        self._worker_count = worker_count

    def __call__(self, index: int) -> Any:
        if not callable(self._given):
            return self._given
        if _takes_context(self._given):
            context = InputContext(
                num_input_pipelines=max(self._worker_count, index + 1),
                input_pipeline_id=index,
                num_replicas_in_sync=max(self._worker_count, index + 1),
            )
            return self._given(context)
        return self._given()


def per_worker_dataset(dataset_or_fn: Any, worker_count: int) -> PerWorkerDataset:
    """Checks what the user gave and wraps it."""
    if isinstance(dataset_or_fn, Iterator):
        raise ArgumentError(
            fact=f"create_per_worker_dataset was given an iterator, {dataset_or_fn!r}.",
            expected="something each worker can iterate over from the beginning, or a function "
            "that makes it.",
            hint="pass the function that makes it.",
        )
    return PerWorkerDataset(_DatasetOf(dataset_or_fn, worker_count))


def current_worker_index() -> int | None:
    """The number of the worker that runs the calling closure; None outside closures.

    >>> import mirrored
    >>> mirrored.current_worker_index() is None
    True
    """
    participant = _context.current().participant
    return None if participant is None else participant.index


def _takes_context(function: Any) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(
        parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        for parameter in parameters
    )
