"""Host batches on the devices: padded to equal shards, their true sizes remembered.

Owns the layout of a chunk: leaves of shape (capacity, padded rows, ...), split over the
replicas by rows. The step slices each batch back to its true size, so padding is never
seen by anything.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mirrored._compat import REPLICA_AXIS
from mirrored._placement import Placement

_ALIGNMENT = 64

Numbers = Sequence[tuple[int | None, int | None]]


@dataclasses.dataclass(frozen=True)
class RowRange:
    """The rows of one batch of plain arrays, before they are gathered."""

    arrays: Any
    order: Any
    start: int
    stop: int

    def index(self) -> Any:
        """What to index the arrays with."""
        rows = slice(self.start, self.stop)
        return rows if self.order is None else self.order[rows]


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Placed batches of one shape, and the numbers of their steps.

    Attributes:
      leaves: the placed arrays.
      structure: how a batch is put together from its leaves.
      rows: the true number of rows of each leaf in a batch, None for a leaf without rows.
      stacked: whether leaves hold several batches; else they are one batch as it is.
      capacity: for how many batches there is room.
      filled: how many there are.
      numbers: for each batch, Keras's numbers for the group it begins and ends, if it does.
      from_rows: whether it came from plain arrays, which no callback can change.
    """

    leaves: list[Any]
    structure: Any
    rows: tuple[int | None, ...]
    stacked: bool
    capacity: int
    filled: int
    numbers: Numbers
    from_rows: bool = False


def place_rows(
    placement: Placement, ranges: Sequence[RowRange], numbers: Numbers, capacity: int
) -> Chunk:
    """Gathers and places consecutive batches of plain arrays."""
    arrays, structure = jax.tree.flatten(ranges[0].arrays)
    order = ranges[0].order
    start, stop, size = ranges[0].start, ranges[-1].stop, ranges[0].stop - ranges[0].start
    count = len(ranges)

    def part_of(array: np.ndarray) -> Callable[[int, int, np.ndarray], None]:
        def fill(low: int, high: int, out: np.ndarray) -> None:
            if order is None:
                shaped = array[start:stop].reshape(count, size, *array.shape[1:])
                out[...] = shaped[:, low:high]
            elif out.flags.c_contiguous and out.dtype == array.dtype:
                rows = order[start:stop].reshape(count, size)[:, low:high]
                np.take(array, rows, axis=0, out=out, mode="clip")
            else:
                out[...] = array[order[start:stop].reshape(count, size)[:, low:high]]

        return fill

    leaves = [
        _place_leaf(placement, part_of(array), count, capacity, size, array.shape[1:], array.dtype)
        for array in arrays
    ]
    return Chunk(leaves, structure, (size,) * len(arrays), True, capacity, count, numbers, True)


def place_batches(
    placement: Placement, batches: Sequence[Any], numbers: Numbers, capacity: int
) -> Chunk:
    """Places consecutive batches of equal shapes."""
    structure = jax.tree.structure(batches[0])
    columns = zip(*(jax.tree.leaves(batch) for batch in batches), strict=True)
    leaves: list[Any] = []
    rows: list[int | None] = []
    for column in columns:
        parts = [np.asarray(leaf) for leaf in column]
        if parts[0].ndim == 0:
            stacked = np.zeros(capacity, parts[0].dtype)
            stacked[: len(parts)] = parts
            leaves.append(placement.mirror(stacked))
            rows.append(None)
            continue
        size = parts[0].shape[0]
        rows.append(size)

        def fill(low: int, high: int, out: np.ndarray, parts: list[Any] = parts) -> None:
            for position, part in enumerate(parts):
                out[position] = part[low:high]

        leaves.append(
            _place_leaf(
                placement,
                fill,
                len(parts),
                capacity,
                size,
                parts[0].shape[1:],
                parts[0].dtype,
            )
        )
    return Chunk(leaves, structure, tuple(rows), True, capacity, len(batches), numbers)


def place_whole(placement: Placement, batch: Any, numbers: Numbers) -> Chunk:
    """Gives every device the whole batch: for eager steps and sparse arrays.

    Every replica then computes the same, which is exact and needs no split.
    """
    placed = jax.device_put(batch, placement.mirrored)
    leaves, structure = jax.tree.flatten(placed)
    return Chunk(leaves, structure, (None,) * len(leaves), False, 1, 1, numbers)


def shard_rows(rows: int, replica_count: int) -> int:
    """How many rows each replica holds, padding included: tf.distribute's ceil(n/R)."""
    return -(-rows // replica_count)


def stacked_sharding(placement: Placement) -> NamedSharding:
    """Batches one after another, each split by rows."""
    return NamedSharding(placement.mesh, PartitionSpec(None, REPLICA_AXIS))


def _buffer(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Makes an array that XLA's CPU client takes as it is, without a copy.

    It does that where the memory starts at a multiple of 64 bytes.
    """
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _place_leaf(
    placement: Placement,
    fill: Callable[[int, int, np.ndarray], None],
    count: int,
    capacity: int,
    size: int,
    row_shape: tuple[int, ...],
    dtype: Any,
) -> jax.Array:
    """Fills one buffer for each local device and makes one array of them."""
    shard = shard_rows(size, placement.replica_count)
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    buffers = []
    for replica in placement.local_replica_ids:
        low = min(replica * shard, size)
        high = min(low + shard, size)
        buffer = _buffer((capacity, shard, *row_shape), np.dtype(dtype))
        # Room for further batches is never read, so it stays as the system gives it.
        used = buffer[:count]
        used[:, high - low :] = 0
        if high > low:
            fill(low, high, used[:, : high - low])
        buffers.append(buffer)
    devices = [placement.devices[replica] for replica in placement.local_replica_ids]
    return jax.make_array_from_single_device_arrays(
        (capacity, shard * placement.replica_count, *row_shape),
        stacked_sharding(placement),
        jax.device_put(buffers, devices),
    )
