"""What a server writes for a checkpoint, and how one takes up what others wrote.

Owns the file of one server and how arrays in it are named: by variable and first row, so
that servers in another number, or with other partitions, find the rows they need. Plain
npz files, one a server: they hold numbers only, no server needs Orbax, and a table is
written by the server that has it, not gathered on the coordinator first. When they are
written, and that all belong to one moment, is the business of ``_recovery``.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np

from mirrored._errors import CheckpointError
from mirrored._parameter_server._channel import Fields
from mirrored._parameter_server._store import Piece
from mirrored._parameter_server._tables import RowUpdate
from mirrored._parameter_server._updates import DenseUpdate


class Leaf(NamedTuple):
    """One array of an optimizer's state and the piece it goes with, if it does."""

    path: str
    piece: Piece | None


def state_leaves(state: Any, pieces: list[Piece]) -> list[Leaf]:
    """Finds for each array of a state the piece it belongs to.

    Rules are given lists of pieces, so a state that has an array for each has a place in
    a list at the end of its path.
    """
    leaves = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        last: Any = path[-1] if path else None
        place = last.idx if isinstance(last, jax.tree_util.SequenceKey) else None
        if place is not None and place < len(pieces) and leaf.shape == pieces[place].shape:
            leaves.append(Leaf(jax.tree_util.keystr(path[:-1]), pieces[place]))
        else:
            leaves.append(Leaf(jax.tree_util.keystr(path), None))
    return leaves


def save(server: Any, directory: str) -> Fields:
    """Writes a server's arrays; returns what the manifest says of them."""
    arrays: dict[str, np.ndarray] = {}
    entries: list[Fields] = []

    def add(kind: str, array: Any, **said: Any) -> None:
        host = np.asarray(array)
        key = f"a{len(entries)}"
        entries.append(
            {"kind": kind, "key": key, "shape": list(host.shape), "dtype": host.dtype.name, **said}
        )
        # NumPy's files know no bfloat16: bytes, whose meaning the manifest keeps.
        arrays[key] = host if host.dtype.isbuiltin == 1 else host.reshape(-1).view(np.uint8)

    for piece in server.holdings.store.pieces():
        add("value", server.holdings.store.value(piece.number), name=piece.name, start=piece.start)
    for number, update in server.holdings.updates.items():
        found = state_leaves(update.state, update.pieces)
        for leaf, array in zip(found, jax.tree.leaves(update.state), strict=True):
            _add_leaf(add, "dense", number, leaf, array)
    for table in server.holdings.tables.values():
        add("value", table.values, name=table.piece.name, start=table.piece.start)
        for number, rows in table.optimizers.items():
            found = state_leaves(rows.structure.unflatten(rows.leaves), [table.piece])
            for leaf, array in zip(found, rows.leaves, strict=True):
                named = leaf if leaf.piece else Leaf(f"{table.piece.name}:{leaf.path}", None)
                _add_leaf(add, "rows", number, named, array)
    name = f"server-{server.spec.index:05d}.npz"
    with open(os.path.join(directory, name), "xb") as file:
        np.savez(file, allow_pickle=False, **arrays)
        file.flush()
        os.fsync(file.fileno())
    optimizers = {
        str(number): sorted({piece.name for piece in update.pieces})
        for number, update in server.holdings.updates.items()
    }
    return {
        "file": name,
        "entries": entries,
        "optimizers": optimizers,
        "applied": server.applied.as_fields(),
    }


def _add_leaf(add: Callable[..., None], kind: str, number: int, leaf: Leaf, array: Any) -> None:
    if leaf.piece is None:
        add(f"{kind} number", array, optimizer=number, leaf=leaf.path)
    else:
        add(
            f"{kind} state",
            array,
            optimizer=number,
            leaf=leaf.path,
            name=leaf.piece.name,
            start=leaf.piece.start,
        )


def restore(server: Any, directory: str, manifest: Fields) -> None:
    """Gives a server's pieces the values and the state that a checkpoint has."""
    saved = _Saved(directory, manifest)
    pieces = server.holdings.store.pieces()
    for piece in pieces:
        server.holdings.store.put(piece, saved.rows("value", piece))
    server.holdings.updates.clear()
    names = saved.optimizers()
    for number, variables in names.items():
        own = [piece for piece in pieces if piece.name in variables]
        if own and number in server.holdings.rules:
            server.holdings.updates[number] = _dense_update(server, saved, number, own, variables)
    for table in server.holdings.tables.values():
        table.values = saved.rows("value", table.piece)
        table.optimizers.clear()
        for number in saved.row_optimizers(table.piece.name):
            if number in server.holdings.rules:
                table.optimizers[number] = _row_update(server, saved, number, table)
    own = {"floor": manifest["next_closure"], "last": []}
    if len(manifest["servers"]) == server.spec.server_count:
        # A closure that lost its worker half way may wait to run again.
        own = manifest["servers"][server.spec.index]["applied"]
    server.applied.restore(own)


def _dense_update(
    server: Any, saved: _Saved, number: int, own: list[Piece], variables: set[str]
) -> DenseUpdate:
    lists: dict[str, list[int]] = {}
    for piece in own:
        lists.setdefault(np.dtype(piece.dtype).name, []).append(piece.number)
    update = DenseUpdate(
        server.holdings.rules[number],
        server.holdings.store,
        list(lists.values()),
        whole=saved.is_whole(own, variables),
    )
    leaves, structure = jax.tree.flatten(update.state)
    found = state_leaves(update.state, update.pieces)
    update.state = structure.unflatten(
        [saved.leaf("dense", number, leaf, like) for leaf, like in zip(found, leaves, strict=True)]
    )
    return update


def _row_update(server: Any, saved: _Saved, number: int, table: Any) -> RowUpdate:
    update = RowUpdate(server.holdings.rules[number], table.piece, table.values)
    found = state_leaves(update.structure.unflatten(update.leaves), [table.piece])
    update.leaves = [
        saved.leaf(
            "rows",
            number,
            leaf if leaf.piece else Leaf(f"{table.piece.name}:{leaf.path}", None),
            like,
        )
        for leaf, like in zip(found, update.leaves, strict=True)
    ]
    return update


class _Saved:
    """The arrays of all servers in a checkpoint, read when they are asked for."""

    def __init__(self, directory: str, manifest: Fields) -> None:
        self._directory = directory
        self._servers = manifest["servers"]

    def optimizers(self) -> dict[int, set[str]]:
        """The variables of each optimizer, by its number."""
        found: dict[int, set[str]] = {}
        for server in self._servers:
            for number, names in server["optimizers"].items():
                found.setdefault(int(number), set()).update(names)
        return found

    def row_optimizers(self, name: str) -> list[int]:
        """The optimizers that have state for rows of a table."""
        return sorted(
            {
                entry["optimizer"]
                for _, entry in self._entries()
                if (entry["kind"] == "rows number" and entry["leaf"].startswith(f"{name}:"))
                or (entry["kind"] == "rows state" and entry["name"] == name)
            }
        )

    def is_whole(self, own: list[Piece], variables: set[str]) -> bool:
        """Whether pieces are all rows of all of some variables."""
        total = sum(
            math.prod(entry["shape"])
            for _, entry in self._entries()
            if entry["kind"] == "value" and entry["name"] in variables
        )
        return total == sum(piece.size for piece in own)

    def rows(self, kind: str, piece: Piece, **also: Any) -> np.ndarray:
        """Puts a piece together of the rows that servers had of it."""
        result = np.zeros(piece.shape, piece.dtype)
        if piece.shape == ():
            result = result.reshape(1)
        missing = result.shape[0]
        start, stop = piece.start, piece.start + result.shape[0]
        for file, entry in self._entries():
            if entry["kind"] != kind or entry["name"] != piece.name:
                continue
            if any(entry[key] != value for key, value in also.items()):
                continue
            begin = entry["start"]
            end = begin + (entry["shape"][0] if entry["shape"] else 1)
            low, high = max(start, begin), min(stop, end)
            if low >= high:
                continue
            array = self._read(file, entry)
            if array.ndim == 0:
                array = array.reshape(1)
            if array.shape[1:] != result.shape[1:] or array.dtype != result.dtype:
                raise _does_not_fit(piece, array)
            result[low - start : high - start] = array[low - begin : high - begin]
            missing -= high - low
        if missing:
            raise CheckpointError(
                fact=f"{self._directory} has not all rows of {piece.name!r}: {missing} of "
                f"{len(result)} are missing.",
                expected="a checkpoint of this program's variables.",
                hint="variables are found by their names: name= must be what it was.",
            )
        return result.reshape(piece.shape)

    def leaf(self, kind: str, number: int, leaf: Leaf, like: Any) -> Any:
        """An array of an optimizer's state."""
        if leaf.piece is not None:
            return self.rows(f"{kind} state", leaf.piece, optimizer=number, leaf=leaf.path)
        found = [
            self._read(file, entry)
            for file, entry in self._entries()
            if entry["kind"] == f"{kind} number"
            and (entry["optimizer"], entry["leaf"]) == (number, leaf.path)
        ]
        if not found or found[0].shape != like.shape:
            raise CheckpointError(
                fact=f"{self._directory} has no {leaf.path!r} of shape {like.shape} for optimizer "
                f"{number}.",
                expected="the state of the optimizer that the program makes.",
                hint="make the same optimizers in the same order as when it was saved.",
            )
        # Servers that had a part of the optimizer's variables each counted its steps.
        return jax.numpy.asarray(functools.reduce(np.maximum, found) if found[1:] else found[0])

    def _entries(self) -> Iterable[tuple[str, Fields]]:
        for server in self._servers:
            for entry in server["entries"]:
                yield server["file"], entry

    def _read(self, file: str, entry: Fields) -> np.ndarray:
        array = _opened(os.path.join(self._directory, file))[entry["key"]]
        dtype = _dtype(entry["dtype"])
        return array if array.dtype == dtype else array.view(dtype).reshape(entry["shape"])


@functools.lru_cache(maxsize=16)
def _opened(path: str) -> Any:
    return np.load(path, allow_pickle=False)


def _dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def _does_not_fit(piece: Piece, array: np.ndarray) -> CheckpointError:
    return CheckpointError(
        fact=f"{piece.name!r} was saved as {array.dtype}, rows of {list(array.shape[1:])}, and is "
        f"{piece.dtype}, rows of {list(piece.shape[1:])}.",
        expected="the shape and dtype it was saved with; only the number of shards may change.",
        hint="restore with the program that saved it.",
    )
