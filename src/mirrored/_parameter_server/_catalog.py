"""Catalog: what lives on the servers, and which server has which part.

Owns the descriptions that travel with closures and the choice of a server for each
part. Parts go where the fewest bytes are, so a large variable does not end up beside
another one while a server stands empty, as it may when servers take turns.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any, final

import numpy as np

from mirrored._parameter_server._partitioners import row_ranges
from mirrored._parameter_server._store import Piece


@final
@dataclasses.dataclass(frozen=True)
class Placed:
    """A piece and the server that has it."""

    server: int
    piece: Piece


@final
@dataclasses.dataclass(frozen=True)
class VariableSpec:
    """A variable, or a table, as every process knows it.

    Args:
      name: for messages and checkpoints; no other has it.
      shape: of the whole.
      dtype: its NumPy dtype.
      parts: its pieces, in the order of their rows.
      is_table: whether it is read and updated row by row.
      trainable: kept for those who ask.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    parts: tuple[Placed, ...]
    is_table: bool
    trainable: bool

    @property
    def number(self) -> int:
        """What it is known by: the number of its first piece."""
        return self.parts[0].piece.number

    def assemble(self, values: list[Any], namespace: Any) -> Any:
        """Puts its pieces, in order, together."""
        joined = values[0] if len(values) == 1 else namespace.concatenate(values)
        return joined.reshape(self.shape)


@final
@dataclasses.dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer as every process knows it; its rule is on the servers only."""

    number: int
    name: str


@final
class Catalog:
    """All that was made in a strategy's scope."""

    def __init__(self, server_count: int, partitioner: Any) -> None:
        self._partitioner = partitioner
        self._bytes = [0] * server_count
        self._numbers = itertools.count()
        self._optimizer_numbers = itertools.count()
        self.variables: dict[int, VariableSpec] = {}
        self.makers: dict[int, Callable[[int, int], np.ndarray]] = {}
        self.rules: dict[int, Any] = {}

    @property
    def server_bytes(self) -> list[int]:
        """How many bytes were given to each server."""
        return list(self._bytes)

    def add(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: Any,
        *,
        is_table: bool = False,
        trainable: bool = True,
    ) -> VariableSpec:
        """Cuts a new variable into pieces and gives each to a server."""
        dtype = np.dtype(dtype)
        partitioner = self._partitioner
        if is_table and partitioner is None:
            # A table is there because it is large: every server takes its share.
            partitioner = self._evenly
        ranges = row_ranges(shape, dtype, partitioner)
        row_size = math.prod(shape[1:]) * dtype.itemsize
        parts: list[Placed] = []
        for start, stop in ranges:
            piece = Piece(
                next(self._numbers),
                name,
                start,
                (stop - start, *shape[1:]) if shape else (),
                dtype,
            )
            server = min(range(len(self._bytes)), key=lambda index: (self._bytes[index], index))
            self._bytes[server] += (stop - start) * row_size
            parts.append(Placed(server, piece))
        spec = VariableSpec(name, shape, dtype, tuple(parts), is_table, trainable)
        self.variables[spec.number] = spec
        return spec

    def _evenly(self, shape: tuple[int, ...], dtype: Any) -> list[int]:
        return [min(len(self._bytes), shape[0]), *[1] * (len(shape) - 1)]

    def add_optimizer(self, name: str, rule: Any) -> OptimizerSpec:
        """Numbers a new optimizer."""
        spec = OptimizerSpec(next(self._optimizer_numbers), name)
        self.rules[spec.number] = rule
        return spec

    def pieces_of(self, server: int, *, tables: bool) -> list[Piece]:
        """The pieces a server has."""
        return [
            part.piece
            for spec in self.variables.values()
            if spec.is_table is tables
            for part in spec.parts
            if part.server == server
        ]
