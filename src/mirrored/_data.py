"""Distributed data sets: global batches in, one part for each replica out.

Owns the objects a training loop holds: the data set, its iterators, their position.
What a source is, how a batch is split and what the thread does is in the modules
beside this one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, final

from mirrored._data_batches import BatchPlacer
from mirrored._data_elements import Start
from mirrored._data_iterator import DistributedIterator, Pipeline, Position
from mirrored._data_sources import PieceSource, StepSource, make_source, require_iterable
from mirrored._errors import ArgumentError, ArgumentTypeError, DataError, require_callable
from mirrored._placement import Placement, device_name


@final
class InputContext:
    """What ``distribute_datasets_from_function`` tells its function about a process.

    Args:
      num_input_pipelines: how many processes read data.
      input_pipeline_id: which of them this is, from 0.
      num_replicas_in_sync: how many replicas there are in all processes together.

    >>> import mirrored
    >>> context = mirrored.InputContext(num_replicas_in_sync=4)
    >>> context.get_per_replica_batch_size(64)
    16
    """

    def __init__(
        self,
        num_input_pipelines: int = 1,
        input_pipeline_id: int = 0,
        num_replicas_in_sync: int = 1,
    ) -> None:
        self.num_input_pipelines = num_input_pipelines
        self.input_pipeline_id = input_pipeline_id
        self.num_replicas_in_sync = num_replicas_in_sync

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Divides a global batch size by the number of replicas.

        Raises:
          ArgumentError: a ValueError, if it does not divide evenly.
        """
        rows, rest = divmod(global_batch_size, self.num_replicas_in_sync)
        if rest:
            raise ArgumentError(
                fact=f"the global batch size {global_batch_size} does not divide by the "
                f"{self.num_replicas_in_sync} replicas in sync.",
                expected=f"a multiple of {self.num_replicas_in_sync}.",
                hint="use strategy.distribute_dataset, which splits any batch, or a multiple "
                f"such as {(rows + 1) * self.num_replicas_in_sync}.",
            )
        return rows

    def __repr__(self) -> str:
        return (
            f"InputContext(num_input_pipelines={self.num_input_pipelines}, "
            f"input_pipeline_id={self.input_pipeline_id}, "
            f"num_replicas_in_sync={self.num_replicas_in_sync})"
        )


@final
class DistributedDataset:
    """Global batches, split over the replicas of a strategy.

    Made by ``strategy.distribute_dataset``. Each ``for`` loop over it is an epoch. An
    element has the structure of the source's batches, with a PerReplica for each array:
    consecutive pieces of ceil(n/R) rows, the last ones shorter or empty, kept padded to
    one length together with the number of real rows.

    Sources are arrays or nests of arrays with ``batch_size``, or anything that yields
    global batches: lists, functions that return generators, Grain and ``tf.data`` data
    sets, torch and Keras loaders. A generator or another iterator can be read once.

    What ``remainder`` makes of batches that do not split evenly:

    - ``"pad"``: every row is there exactly once; replicas are padded where they differ.
    - ``"drop"``: the last batch is left out if it is shorter than the others (shorter
      than ``batch_size``, or than the source's first batch). Nothing else is: full
      batches that do not split evenly are padded, and a source whose batches differ in
      size before the last one is refused.
    - ``"error"``: a batch whose rows are no multiple of the number of replicas is refused.

    With ``shuffle``, arrays have another order in each epoch, which depends on ``seed``
    and the epoch only, not on the number of replicas. 64-bit numbers become what JAX
    keeps of them, but integers that would change are refused.

    ``get_state`` and ``set_state`` save and restore the position. In several processes
    each reads every batch of the source and keeps the rows of its replicas, so all must
    see the same batches, and an error tells one that does not; of
    ``distribute_datasets_from_function`` each reads its own,
    and all must yield as many.

    >>> import numpy as np
    >>> import mirrored
    >>> strategy = mirrored.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> dataset = strategy.distribute_dataset((np.ones((5, 3)), np.arange(5)), batch_size=4)
    >>> len(dataset)
    2
    >>> for images, labels in dataset:
    ...     print(labels)
    PerReplica[[0 1] | [2 3]]
    PerReplica[[4] | []]
    """

    def __init__(self, placement: Placement, source: StepSource, prefetch: int) -> None:
        if not isinstance(prefetch, int) or isinstance(prefetch, bool) or prefetch < 0:
            raise ArgumentError(
                fact=f"prefetch={prefetch!r}.",
                expected="how many batches to have ready ahead of time: an integer from 0.",
                hint="leave it out for 2; 0 reads without a thread.",
            )
        self._pipeline = Pipeline(placement, source, prefetch)
        # The position of the newest iterator, or where the next one begins.
        self._position = Position(Start())
        self._is_next = True

    def __iter__(self) -> DistributedIterator:
        if not self._is_next:
            self._position = Position(Start(self._position.epoch + 1))
        self._is_next = False
        return DistributedIterator(self._pipeline, self._position)

    def __len__(self) -> int:
        count = self._pipeline.source.step_count()
        if count is None:
            raise ArgumentTypeError(
                fact=f"the number of batches of {self._pipeline.source.describe()} is not known.",
                expected="arrays, or a source that knows its length (and, with "
                "remainder='drop', whether its last batch is partial).",
                hint="count while iterating.",
            )
        return count

    def __bool__(self) -> bool:
        # Python would ask for the length, which may be unknown.
        return True

    @property
    def global_batch_size(self) -> int | None:
        """The rows of a full global batch; None until the first, if the source decides."""
        return self._pipeline.source.global_batch_size

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas the batches are split over."""
        return self._pipeline.placement.replica_count

    @property
    def element_spec(self) -> Any:
        """What one replica gets of the first batch, as a nest of jax.ShapeDtypeStruct.

        >>> import numpy as np
        >>> import mirrored
        >>> strategy = mirrored.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> strategy.distribute_dataset(np.ones((9, 3), "f4"), batch_size=8).element_spec
        ShapeDtypeStruct(shape=(4, 3), dtype=float32)
        """
        pipeline = self._pipeline
        if pipeline.element_spec is None:
            if not pipeline.source.can_be_read_again:
                raise DataError(
                    fact=f"what {pipeline.source.describe()} yields is not known before its "
                    "first batch, and looking would use that up.",
                    expected="element_spec after the first batch, or a source that can be read "
                    "again.",
                    hint="pass the function that makes the iterator.",
                )
            batches = pipeline.batches(Start(), BatchPlacer(pipeline.placement))
            next(batches)
            batches.close()
        return pipeline.element_spec

    def get_state(self) -> dict[str, Any]:
        """Returns the position of the newest iterator: epoch, batches taken, and its source's.

        >>> import numpy as np
        >>> import mirrored
        >>> strategy = mirrored.OneDeviceStrategy("cpu:0")
        >>> dataset = strategy.distribute_dataset(np.arange(6), batch_size=2, shuffle=True)
        >>> for batch in dataset:
        ...     break
        >>> state = dataset.get_state()
        >>> state["epoch"], state["batch"]
        (0, 1)
        """
        return self._pipeline.state(self._position.next_start())

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Lets the next ``for`` loop begin where ``get_state`` was called."""
        self._position = Position(self._pipeline.start(state))
        self._is_next = True

    def explain_input(self) -> str:
        """Says which process reads what, and which rows of a batch go to which replica.

        >>> import numpy as np
        >>> import mirrored
        >>> strategy = mirrored.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> print(strategy.distribute_dataset(np.arange(9), batch_size=4).explain_input())
        arrays of 9 rows, in order, batches of 4; remainder='pad'
        process 0 (this one) reads every batch and keeps
          replica 0 on cpu:0: rows 0 to 1 of 4
          replica 1 on cpu:1: rows 2 to 3 of 4
        """
        placement, source = self._pipeline.placement, self._pipeline.source
        own = _process_of(placement)
        lines = [f"{source.describe()}; remainder={source.remainder!r}"]
        pieces = isinstance(source, PieceSource)
        for process in sorted({device.process_index for device in placement.devices}):
            who = f"process {process}" + (" (this one)" if process == own else "")
            what = "its own pipeline, batch by batch for" if pieces else "every batch and keeps"
            lines.append(f"{who} reads {what}")
            lines.extend(
                f"  replica {index} on {device_name(device)}"
                + ("" if pieces else ": " + self._rows_of(index))
                for index, device in enumerate(placement.devices)
                if device.process_index == process
            )
        return "\n".join(lines)

    def _rows_of(self, replica: int) -> str:
        size, replicas = self.global_batch_size, self.num_replicas_in_sync
        if size is None:
            return f"piece {replica + 1} of {replicas}, ceil(n/{replicas}) of n rows each"
        rows = -(-size // replicas)
        start, stop = min(replica * rows, size), min((replica + 1) * rows, size)
        return f"rows {start} to {stop - 1} of {size}" if stop > start else f"no row of {size}"

    def __repr__(self) -> str:
        pipeline = self._pipeline
        return (
            f"<DistributedDataset of {pipeline.source.describe()}, "
            f"remainder={pipeline.source.remainder!r}, on {pipeline.placement.describe()}>"
        )


def distribute_arrays_or_batches(
    placement: Placement,
    dataset: Any,
    *,
    batch_size: int | None = None,
    remainder: str = "pad",
    prefetch: int = 2,
    shuffle: bool = False,
    seed: int = 0,
) -> DistributedDataset:
    """Distributes global batches: those of a source, or those cut from arrays."""
    _refuse_distributed(dataset)
    source = make_source(dataset, batch_size, remainder, shuffle=shuffle, seed=seed)
    return DistributedDataset(placement, source, prefetch)


def distribute_from_function(
    placement: Placement, dataset_fn: Callable[[InputContext], Any], *, prefetch: int = 2
) -> DistributedDataset:
    """Distributes per-replica batches of the data set that ``dataset_fn`` makes."""
    require_callable(
        "distribute_datasets_from_function",
        dataset_fn,
        "for a data set that is there already use strategy.distribute_dataset.",
    )
    processes = sorted({device.process_index for device in placement.devices})
    context = InputContext(
        len(processes), processes.index(_process_of(placement)), placement.replica_count
    )
    dataset = dataset_fn(context)
    if inspect.isgenerator(dataset):
        # It gives its batches once, and none of its lines has run: a new one for each epoch.
        def dataset() -> Any:
            return dataset_fn(context)

    _refuse_distributed(dataset)
    local = len(placement.local_replica_ids)
    source = PieceSource(require_iterable(dataset), local, len(processes))
    return DistributedDataset(placement, source, prefetch)


def _process_of(placement: Placement) -> int:
    return placement.devices[0].client.process_index()


def _refuse_distributed(dataset: Any) -> None:
    if isinstance(dataset, DistributedDataset):
        raise ArgumentError(
            fact=f"{dataset!r} is distributed already.",
            expected="a data set of plain batches.",
            hint="iterate over it as it is.",
        )
