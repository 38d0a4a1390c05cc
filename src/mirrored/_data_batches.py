"""One batch, from what a source yields to arrays on the devices of the replicas.

Owns what counts as a batch, the split rule and the padding. Knows nothing of where
batches come from, nor of threads.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, MappingView, Sequence
from typing import Any, Literal, final

import jax
import numpy as np

from mirrored import _compat
from mirrored._errors import DataError
from mirrored._placement import Placement
from mirrored._values import PerReplica, is_leaf

Remainder = Literal["pad", "drop", "error"]

# XLA's CPU client uses host memory as it is, without a copy, if it starts here.
_ALIGNMENT = 64
# What JAX keeps of 64-bit types unless jax_enable_x64 is set.
_NARROWED = {
    np.dtype("int64"): np.dtype("int32"),
    np.dtype("uint64"): np.dtype("uint32"),
    np.dtype("float64"): np.dtype("float32"),
    np.dtype("complex128"): np.dtype("complex64"),
}
_BATCH_FIRST = (
    "batch in the source, for example dataset.batch(64) or DataLoader(..., batch_size=64); "
    "or pass arrays together with batch_size=."
)


@final
class HostBatch:
    """The rows of one batch in host memory: a nest of NumPy arrays of equal length."""

    __slots__ = ("leaves", "order", "row_count", "structure")

    def __init__(
        self, leaves: Sequence[np.ndarray], structure: Any, row_count: int, order: Any = None
    ) -> None:
        """Takes the leaves as they are.

        With ``order`` the leaves are whole data sets and the batch is their rows with
        these indices, so that a shuffled batch is gathered straight into its own memory.
        """
        self.leaves = leaves
        self.structure = structure
        self.row_count = row_count
        self.order = order

    @classmethod
    def of(cls, element: Any, name: str, *, may_be_empty: bool = False) -> HostBatch:
        """Checks one element of a source and turns its leaves into NumPy arrays.

        Args:
          element: what the source yielded.
          name: what messages call it, for example ``batch 3``.
          may_be_empty: whether it may have no rows.
        """
        leaves, structure = jax.tree.flatten(element, is_leaf=is_data_leaf)
        if not leaves:
            raise DataError(
                fact=f"{name} is {element!r}, which holds no array.",
                expected="a batch: an array, or a nest of arrays with one row an example.",
                hint="check what the source yields with next(iter(source)).",
            )
        arrays = [
            host_array(leaf, lambda index=index: f"{name}: {_path(element, index)}")
            for index, leaf in enumerate(leaves)
        ]
        row_count = _common_row_count(arrays, element, name)
        if row_count == 0 and not may_be_empty:
            raise DataError(
                fact=f"{name} has no rows: {_shapes(arrays, element)}.",
                expected="at least one example in every batch.",
                hint="leave empty batches out in the source.",
            )
        return cls(arrays, structure, row_count)

    def fingerprint(self) -> list[int]:
        """Returns a checksum for each leaf, from a sample of its values."""
        return [zlib.crc32(_sample(leaf), self.row_count) for leaf in self.leaves]


@final
class BatchPlacer:
    """Splits batches over the replicas of a placement and puts them on the devices."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        # 64-bit types are kept or narrowed as the thread that asks for batches has it.
        self._enable_x64 = _compat.keeps_64_bits()
        count, local = placement.replica_count, placement.local_replica_ids
        self._all_local = len(local) == count
        self._local_ids = np.array(local)
        self._devices = [placement.devices[index] for index in local]
        self._runs = _consecutive_runs(local)

    def split(self, batch: HostBatch, *, name: str, even: bool) -> Any:
        """Places a global batch: consecutive pieces of ceil(n/R) rows.

        Args:
          batch: the global batch.
          name: what messages call it.
          even: whether to refuse a batch that does not split evenly.
        """
        replicas = self.placement.replica_count
        total = batch.row_count
        rows = -(-total // replicas)
        padded = rows * replicas != total
        if padded and even:
            raise DataError(
                fact=f"{name} has {total} rows, which do not split evenly over {replicas} "
                "replicas.",
                expected=f"a multiple of {replicas} rows in every batch, since "
                "remainder='error' was asked for.",
                hint="use remainder='pad', which keeps every row and masks the padding, or "
                "remainder='drop', which leaves the last partial batch out.",
            )
        buffers = [self._filled(leaf, batch.order, total, rows, name) for leaf in batch.leaves]
        counts = np.clip(total - rows * self._local_ids, 0, rows) if padded else None
        return self._placed(buffers, counts, batch.structure)

    def stack(
        self, pieces: Sequence[HostBatch], *, name: str, fixed_rows: int | None = None
    ) -> Any:
        """Places one batch a replica; missing ones at the end become empty.

        Args:
          pieces: batches for this process's replicas, in order.
          name: what messages call them.
          fixed_rows: the rows every replica must get, if the processes cannot see
            each other's pieces and so could not agree otherwise.
        """
        _require_equal_pieces(pieces, name)
        counts = np.zeros(len(self._local_ids), np.int32)
        counts[: len(pieces)] = [piece.row_count for piece in pieces]
        rows = int(counts.max()) if fixed_rows is None else fixed_rows
        if rows < counts.max():
            raise DataError(
                fact=f"{name}: a replica's batch has {counts.max()} rows, the first one had "
                f"{rows}.",
                expected="no batch longer than the first, since several processes read and "
                "each must know the shape of all.",
                hint="yield the longest batch first, or batches of one size.",
            )
        longest = int(counts.argmax())
        buffers = []
        for index, first in enumerate(pieces[0].leaves):
            shape = (len(counts), rows, *first.shape[1:])
            buffer = _aligned_empty(shape, self._canonical(first.dtype))
            for replica, count in enumerate(counts):
                leaf = pieces[replica if count else longest].leaves[index]
                _write_rows(buffer[replica], leaf, None, slice(0, int(count)), name)
            buffers.append(buffer)
        padded = fixed_rows is not None or bool((counts != rows).any())
        return self._placed(buffers, counts if padded else None, pieces[0].structure)

    def _filled(self, leaf: np.ndarray, order: Any, total: int, rows: int, name: str) -> np.ndarray:
        """Copies this process's rows of ``leaf`` into new memory (local replicas, rows, ...).

        Always a copy: sources reuse their buffers, and a device may go on reading (or
        simply use) host memory after device_put has returned, whatever may_alias says.
        """
        tail = leaf.shape[1:]
        flat = _aligned_empty((len(self._devices) * rows, *tail), self._canonical(leaf.dtype))
        for first, offset, length in self._runs:
            # Pieces are consecutive, so padding can only stand at the end of a run.
            start, stop = min(first * rows, total), min((first + length) * rows, total)
            target = flat[offset * rows : (offset + length) * rows]
            _write_rows(target, leaf, order, slice(start, stop), name)
        return flat.reshape((len(self._devices), rows, *tail))

    def _placed(self, buffers: list[np.ndarray], counts: Any, structure: Any) -> Any:
        if counts is not None:
            buffers = [*buffers, counts.astype(np.int32)]
        with jax.enable_x64(self._enable_x64):
            arrays = self._put(buffers)
        # The very same object in every leaf: that is how a step knows one batch.
        row_counts = None if counts is None else arrays.pop()
        return structure.unflatten(
            [PerReplica.from_stacked(array, row_counts, is_batch=True) for array in arrays]
        )

    def _put(self, buffers: list[np.ndarray]) -> list[jax.Array]:
        if self._all_local:
            return jax.device_put(buffers, self.placement.split)
        # device_put onto devices of other processes would compare the data of all of them.
        parts = [buffer[index : index + 1] for buffer in buffers for index in range(len(buffer))]
        shards = jax.device_put(parts, self._devices * len(buffers))
        local, replicas = len(self._devices), self.placement.replica_count
        return [
            jax.make_array_from_single_device_arrays(
                (replicas, *buffer.shape[1:]),
                self.placement.split,
                shards[index * local : (index + 1) * local],
            )
            for index, buffer in enumerate(buffers)
        ]

    def _canonical(self, dtype: np.dtype) -> np.dtype:
        native = dtype if dtype.isnative else dtype.newbyteorder("=")
        return native if self._enable_x64 else _NARROWED.get(native, native)


def host_array(leaf: Any, name: Callable[[], str]) -> np.ndarray:
    """Returns ``leaf`` as a NumPy array of numbers, sharing memory where that is possible."""
    array = leaf if type(leaf) is np.ndarray else _converted(leaf, name)
    dtype = array.dtype
    if dtype.kind not in "biufc" and (
        dtype.kind in "mOSU" or not jax.numpy.issubdtype(dtype, np.number)
    ):
        raise DataError(
            fact=f"{name()} is an array of {dtype}.",
            expected="numbers or booleans, which are what devices can hold.",
            hint="encode text and objects as numbers in the source, or leave that part out.",
        )
    return array


def is_array(value: Any) -> bool:
    """Says whether ``value`` is an array of any library, by its NumPy protocol."""
    return getattr(type(value), "__array__", None) is not None and not isinstance(
        value, (np.generic, PerReplica)
    )


def is_data_leaf(value: Any) -> bool:
    """The ``is_leaf`` of walks through sources and their elements."""
    # JAX is about to refuse iterators in nests; here they get an error of their own.
    return is_leaf(value) or isinstance(value, (Iterator, MappingView))


def _converted(leaf: Any, name: Callable[[], str]) -> np.ndarray:
    if isinstance(leaf, (bool, int, float, complex, np.generic)):
        return np.asarray(leaf)
    if not is_array(leaf):
        raise DataError(
            fact=f"{name()} is {_shown(leaf)}, a {type(leaf).__name__}.",
            expected="arrays of numbers in a nest of tuples, lists, dictionaries or dataclasses "
            "that JAX knows as pytrees.",
            hint="leave this part out, encode it as numbers, or register its class with "
            "jax.tree_util.register_dataclass.",
        )
    if isinstance(leaf, np.ma.MaskedArray) or (
        isinstance(leaf, jax.Array) and _compat.is_typed_key(leaf)
    ):
        raise DataError(
            fact=f"{name()} is a {type(leaf).__name__} of {leaf.dtype}.",
            expected="plain arrays: a mask would be lost, and random keys belong to a replica.",
            hint="pass masked.data and masked.mask as two arrays; for random numbers use "
            "ctx.random_key inside the replica function.",
        )
    if isinstance(leaf, (np.ndarray, jax.Array)):
        return np.asarray(leaf)
    detach = getattr(leaf, "detach", None)
    if not callable(detach):
        return np.asarray(leaf)
    # A torch tensor may take part in autograd or live on another device.
    detached: Any = detach()
    tensor = detached.cpu()
    try:
        return np.asarray(tensor)
    except TypeError:
        # torch does not tell NumPy about bfloat16.
        return np.asarray(jax.dlpack.from_dlpack(tensor))


def _common_row_count(arrays: Sequence[np.ndarray], element: Any, name: str) -> int:
    for index, array in enumerate(arrays):
        if array.ndim == 0:
            raise DataError(
                fact=f"{name}: {_path(element, index)} is a single {array.dtype}, so the source "
                "seems to yield examples, not batches.",
                expected="global batches: arrays whose first axis counts the examples.",
                hint=_BATCH_FIRST,
            )
    row_count = arrays[0].shape[0]
    for array in arrays:
        if array.shape[0] != row_count:
            raise DataError(
                fact=f"{name} has leaves with different numbers of rows: "
                f"{_shapes(arrays, element)}.",
                expected="the same first axis in all parts of a batch, one row an example.",
                hint=f"if these are single examples, {_BATCH_FIRST}",
            )
    return row_count


def _require_equal_pieces(pieces: Sequence[HostBatch], name: str) -> None:
    first = pieces[0]
    for piece in pieces[1:]:
        same = piece.structure == first.structure and all(
            own.shape[1:] == other.shape[1:] and own.dtype == other.dtype
            for own, other in zip(piece.leaves, first.leaves, strict=True)
        )
        if not same:
            raise DataError(
                fact=f"{name}: the batches of two replicas differ in more than their rows: "
                f"{_described(first)} and {_described(piece)}.",
                expected="one structure, dtype and shape of a row for all replicas.",
                hint="make dataset_fn yield batches of one kind.",
            )


def _write_rows(target: np.ndarray, leaf: np.ndarray, order: Any, rows: slice, name: str) -> None:
    """Writes these rows of a batch to the top of ``target`` and pads the rest of it."""
    count = rows.stop - rows.start
    _copy_rows(target[:count], leaf, order, rows, name)
    padding = target[count:]
    if not len(padding):
        return
    total = len(leaf if order is None else order)
    if total:
        # Padding repeats a real row. It is never counted, but it is computed with: of
        # zeros a logarithm or a division would make NaN, also in gradients.
        _copy_rows(padding[:1], leaf, order, slice(total - 1, total), name)
        padding[1:] = padding[0]
    else:
        padding[:] = 0


def _copy_rows(target: np.ndarray, leaf: np.ndarray, order: Any, rows: slice, name: str) -> None:
    if order is None:
        chosen = leaf[rows]
    elif leaf.dtype == target.dtype:
        # mode="clip" is the one that writes straight into ``target``; order is in range.
        np.take(leaf, order[rows], axis=0, out=target, mode="clip")
        return
    else:
        chosen = leaf[order[rows]]
    np.copyto(target, chosen, casting="unsafe")
    if leaf.dtype.kind in "iu" and leaf.dtype != target.dtype and (target != chosen).any():
        largest = max(chosen.ravel(), key=lambda value: abs(int(value)))
        raise DataError(
            fact=f"{name} holds {largest} in an array of {leaf.dtype}, and JAX would turn it "
            f"into {largest.astype(target.dtype)}, since it keeps {target.dtype}.",
            expected=f"integers that fit into {target.dtype}.",
            hint='number the ids from 0, or call jax.config.update("jax_enable_x64", True) first.',
        )


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns new memory that XLA's CPU client can use without copying it again."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    offset = -raw.__array_interface__["data"][0] % _ALIGNMENT
    return raw[offset : offset + size].view(dtype).reshape(shape)


def _consecutive_runs(ids: Sequence[int]) -> list[tuple[int, int, int]]:
    """Groups replica ids into (first id, position among ids, length)."""
    runs: list[tuple[int, int, int]] = []
    for position, index in enumerate(ids):
        if runs and index == runs[-1][0] + runs[-1][2]:
            first, offset, length = runs[-1]
            runs[-1] = (first, offset, length + 1)
        else:
            runs.append((index, position, 1))
    return runs


def _sample(leaf: np.ndarray) -> bytes:
    rows = leaf[:: max(1, len(leaf) // 64)]
    flat = rows.reshape(len(rows), math.prod(rows.shape[1:]))
    return flat[:, :: max(1, flat.shape[1] // 8)].tobytes()


def _path(element: Any, index: int) -> str:
    paths = jax.tree_util.tree_flatten_with_path(element, is_leaf=is_data_leaf)[0]
    return "element" + jax.tree_util.keystr(paths[index][0])


def _shapes(arrays: Sequence[np.ndarray], element: Any) -> str:
    return ", ".join(f"{_path(element, index)} {array.shape}" for index, array in enumerate(arrays))


def _described(batch: HostBatch) -> str:
    return str(batch.structure.unflatten([f"{leaf.dtype}{leaf.shape}" for leaf in batch.leaves]))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def spec_of(nest: Any) -> Any:
    """Returns what one replica's part of ``nest`` looks like, as ShapeDtypeStructs."""
    return jax.tree.map(
        lambda value: jax.ShapeDtypeStruct(value.stacked.shape[1:], value.stacked.dtype),
        nest,
        is_leaf=is_leaf,
    )
