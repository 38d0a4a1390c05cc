"""Partitioners: into how many shards a variable is cut along its first axis.

Owns tf.distribute's three rules and where the cuts are. Which server gets a shard is
decided in ``_catalog``.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

import numpy as np

from mirrored._errors import ArgumentError

AnyPartitioner: TypeAlias = Callable[[tuple[int, ...], Any], Sequence[int]]


class Partitioner(abc.ABC):
    """Says into how many shards variables are cut; any function of (shape, dtype) does too."""

    @abc.abstractmethod
    def __call__(self, shape: Sequence[int], dtype: Any) -> list[int]:
        """Returns the number of shards along each axis; only the first may have several."""


@final
class FixedShardsPartitioner(Partitioner):
    """As many shards as asked for, or as there are rows.

    >>> import mirrored
    >>> mirrored.FixedShardsPartitioner(2)((13, 4), "float32")
    [2, 1]
    """

    def __init__(self, num_shards: int) -> None:
        self._num_shards = _positive("num_shards", num_shards)

    def __call__(self, shape: Sequence[int], dtype: Any) -> list[int]:
        return _along_rows(shape, min(self._num_shards, shape[0]) if shape else 1)


@final
class MinSizePartitioner(Partitioner):
    """As many shards as there can be with ``min_shard_bytes`` each, ``max_shards`` at most.

    >>> import mirrored
    >>> mirrored.MinSizePartitioner(min_shard_bytes=4, max_shards=2)((6, 1), "float32")
    [2, 1]
    """

    def __init__(self, min_shard_bytes: int = 256 << 10, max_shards: int = 1) -> None:
        self._min_shard_bytes = _positive("min_shard_bytes", min_shard_bytes)
        self._max_shards = _positive("max_shards", max_shards)

    def __call__(self, shape: Sequence[int], dtype: Any) -> list[int]:
        if not shape:
            return []
        wanted = math.ceil(_byte_count(shape, dtype) / self._min_shard_bytes)
        return _along_rows(shape, max(1, min(shape[0], self._max_shards, wanted)))


@final
class MaxSizePartitioner(Partitioner):
    """As few shards as there can be with ``max_shard_bytes`` at most, one row at least.

    >>> import mirrored
    >>> mirrored.MaxSizePartitioner(max_shard_bytes=4)((6, 1), "float32")
    [6, 1]
    """

    def __init__(self, max_shard_bytes: int, max_shards: int | None = None) -> None:
        self._max_shard_bytes = _positive("max_shard_bytes", max_shard_bytes)
        self._max_shards = None if max_shards is None else _positive("max_shards", max_shards)

    def __call__(self, shape: Sequence[int], dtype: Any) -> list[int]:
        if not shape or not shape[0]:
            return _along_rows(shape, 1)
        row_bytes = _byte_count(shape, dtype) / shape[0]
        rows = max(1, math.floor(self._max_shard_bytes / row_bytes)) if row_bytes else shape[0]
        shards = math.ceil(shape[0] / rows)
        return _along_rows(shape, min(shards, self._max_shards or shards))


def row_ranges(shape: tuple[int, ...], dtype: Any, partitioner: Any) -> list[tuple[int, int]]:
    """The rows of each shard of an array; one range for an array without rows.

    >>> row_ranges((13, 2), "float32", FixedShardsPartitioner(5))
    [(0, 3), (3, 6), (6, 9), (9, 11), (11, 13)]
    """
    rows = shape[0] if shape else 1
    if partitioner is None or not shape:
        return [(0, rows)]
    partitions = list(partitioner(shape, np.dtype(dtype)))
    if len(partitions) != len(shape) or any(count != 1 for count in partitions[1:]):
        raise ArgumentError(
            fact=f"the partitioner returned {partitions} for shape {shape}.",
            expected="a number for each axis, 1 for all but the first.",
            hint="variables are cut along their rows only.",
        )
    count = int(partitions[0])
    if not 1 <= count <= max(rows, 1):
        raise ArgumentError(
            fact=f"the partitioner asked for {count} shards of {rows} rows.",
            expected="at least one shard, and at least one row in each.",
            hint="write min(shards, shape[0]).",
        )
    # The first shards get one row more where they do not divide evenly.
    least, more = divmod(rows, count)
    ends = [least * (index + 1) + min(index + 1, more) for index in range(count)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _along_rows(shape: Sequence[int], count: int) -> list[int]:
    return [int(count), *[1] * (len(shape) - 1)] if shape else []


def _byte_count(shape: Sequence[int], dtype: Any) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize


def _positive(name: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ArgumentError(
            fact=f"a partitioner was given {name}={value!r}.",
            expected="a number, 1 or more.",
            hint="see the class for what it counts.",
        )
    return value
