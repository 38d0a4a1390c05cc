"""The dense arrays of one server: pieces of variables in flat buffers.

Owns where each piece lies and how several are read and replaced at once. A buffer is
never changed in place: whoever was handed one keeps what he got. What is computed with
them is in ``_updates``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from mirrored._errors import ServerError


@final
@dataclasses.dataclass(frozen=True)
class Piece:
    """Some rows of a variable (all of them, unless it is partitioned).

    Args:
      number: its number, which no other piece of any server has.
      name: the name of its variable, for checkpoints and messages.
      start: its first row in the variable.
      shape: its own shape.
      dtype: of its elements.
    """

    number: int
    name: str
    start: int
    shape: tuple[int, ...]
    dtype: Any

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@final
class Buffer:
    """Pieces that lie one behind the other in one flat array."""

    def __init__(self, pieces: Sequence[Piece], flat: np.ndarray) -> None:
        self.pieces = tuple(pieces)
        self.numbers = tuple(piece.number for piece in pieces)
        self.flat = flat
        ends = np.cumsum([piece.size for piece in pieces], dtype=np.int64).tolist()
        self.spans = dict(zip(self.numbers, zip([0, *ends[:-1]], ends, strict=True), strict=True))

    def values(self) -> list[np.ndarray]:
        """The pieces, each in its shape; they share the buffer's memory."""
        return [
            self.flat[slice(*self.spans[piece.number])].reshape(piece.shape)
            for piece in self.pieces
        ]


@final
class Store:
    """All dense pieces of a server."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._buffers: dict[int, Buffer] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._buffers

    def add(self, piece: Piece, value: np.ndarray) -> None:
        """Takes a piece in; what is there already stays as it is."""
        if piece.number not in self._buffers:
            self.put(piece, value)

    def put(self, piece: Piece, value: np.ndarray) -> None:
        """Takes a piece in, in a buffer of its own."""
        if value.shape != piece.shape or value.dtype != piece.dtype:
            raise ServerError(
                fact=f"{self._server} was given {value.dtype}{list(value.shape)} for "
                f"{piece.name!r}, which is {piece.dtype}{list(piece.shape)}.",
                expected="a value of the variable's own shape and dtype.",
                hint="all processes must run the same version of the program.",
            )
        self._buffers[piece.number] = Buffer([piece], value.reshape(-1))

    def pieces(self) -> list[Piece]:
        """All pieces, by number."""
        return [self.piece(number) for number in sorted(self._buffers)]

    def piece(self, number: int) -> Piece:
        """What a piece is."""
        buffer = self._buffer(number)
        return buffer.pieces[buffer.numbers.index(number)]

    def value(self, number: int) -> np.ndarray:
        """The value of one piece, which shares the buffer's memory."""
        buffer = self._buffer(number)
        start, end = buffer.spans[number]
        return buffer.flat[start:end].reshape(self.piece(number).shape)

    def read(self, numbers: Sequence[int]) -> np.ndarray:
        """Some pieces of one dtype in one flat array; not copied where they lie so."""
        buffer = self._buffer(numbers[0])
        if buffer.numbers == tuple(numbers):
            return buffer.flat
        parts = []
        for number in numbers:
            buffer = self._buffer(number)
            start, end = buffer.spans[number]
            parts.append(buffer.flat[start:end])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def together(self, numbers: Sequence[int]) -> Buffer:
        """Lays some pieces of one dtype into one buffer, in this order."""
        wanted = tuple(numbers)
        buffer = self._buffer(wanted[0])
        if buffer.numbers == wanted:
            return buffer
        made = Buffer([self.piece(number) for number in wanted], self.read(wanted))
        others = {id(self._buffer(number)): self._buffer(number) for number in wanted}
        for number in wanted:
            self._buffers[number] = made
        # What shared a buffer with them and did not come along.
        for other in others.values():
            left = [piece for piece in other.pieces if piece.number not in made.spans]
            for piece in left:
                start, end = other.spans[piece.number]
                self._buffers[piece.number] = Buffer([piece], other.flat[start:end])
        return made

    def check_change(self, number: int, values: np.ndarray) -> None:
        """Raises ServerError unless these can be written into a piece."""
        buffer = self._buffer(number)
        start, end = buffer.spans[number]
        if values.size != end - start or values.dtype != buffer.flat.dtype:
            raise ServerError(
                fact=f"{self._server} was given {values.dtype}[{values.size}] to write into "
                f"{self.piece(number).name!r}, which is {buffer.flat.dtype}[{end - start}].",
                expected="a value of the variable's own size and dtype.",
                hint="all processes must run the same version of the program.",
            )

    def change(self, number: int, values: np.ndarray, *, add: bool) -> None:
        """Sets a piece, or adds to it."""
        self.check_change(number, values)
        buffer = self._buffer(number)
        start, end = buffer.spans[number]
        flat = values.reshape(-1)
        if len(buffer.pieces) == 1:
            buffer.flat = buffer.flat + flat if add else flat
            return
        changed = buffer.flat.copy()
        changed[start:end] = changed[start:end] + flat if add else flat
        buffer.flat = changed

    def byte_count(self) -> int:
        """How many bytes all pieces have."""
        return sum(piece.size * np.dtype(piece.dtype).itemsize for piece in self.pieces())

    def _buffer(self, number: int) -> Buffer:
        buffer = self._buffers.get(number)
        if buffer is None:
            raise ServerError(
                fact=f"{self._server} was asked for piece {number}, which it does not have.",
                expected=f"one of its {len(self._buffers)} pieces.",
                hint="a server that came back without a checkpoint is empty: use "
                'on_server_failure="restore".',
            )
        return buffer
