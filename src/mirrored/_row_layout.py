"""Rows: where the rows of a batch lie in an array made of them.

Owns the arithmetic of layouts (transposed, reshaped, cut, put together again), and what is known
of a value while a program is followed. What operations do to rows is in ``_row_rules``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, final

import jax.numpy as jnp
import numpy as np

# A longer constant is not looked through for row numbers.
_LONGEST_CONSTANT = 1_000_000


@final
@dataclasses.dataclass(frozen=True)
class Rows:
    """Every element belongs to one row of the batch, told by its place.

    The element at place ``p`` in row-major order belongs to row
    ``start + (p // inner) % count``.
    """

    inner: int
    count: int
    start: int = 0
    # The rows of one round of each ``scan`` around, which goes over rows, outermost first.
    rounds: tuple[Any, ...] = ()

    def normal(self) -> Rows:
        """The one way to write it: of a single row, any ``inner`` says the same."""
        return dataclasses.replace(self, inner=1) if self.count == 1 else self

    def axes(self, shape: Sequence[int]) -> dict[int, tuple[int, int, int]] | None:
        """The axes that rows run along: what each holds outside, of, and inside the rows.

        None where rows do not begin and end with parts of axes.
        """
        found = {}
        end = self.inner * self.count
        below = 1
        for axis in reversed(range(len(shape))):
            above = below * shape[axis]
            low, high = max(below, self.inner), min(above, end)
            if high > low:
                if low % below or high % low or above % high:
                    return None
                found[axis] = (above // high, high // low, low // below)
            below = above
        return dict(sorted(found.items()))

    def moved(
        self, shape: Sequence[int], new: Sequence[int], where: Mapping[int, int]
    ) -> Rows | None:
        """The layout in an array of shape ``new`` in which axis ``a`` is axis ``where[a]``.

        None where the rows are gone, or no longer lie in order.
        """
        if self.count == 1:
            return self
        axes = self.axes(shape)
        if axes is None or any(
            axis not in where or new[where[axis]] != shape[axis] for axis in axes
        ):
            return None
        came_from = {where[axis]: axis for axis in axes}
        # The new array's axes as a row of (size, old axis if it is rows), outermost first.
        parts: list[tuple[int, int | None]] = []
        for axis, size in enumerate(new):
            old = came_from.get(axis)
            if old is None:
                parts.append((size, None))
            else:
                outside, of_rows, inside = axes[old]
                parts += [(outside, None), (of_rows, old), (inside, None)]
        parts = [part for part in parts if part[0] != 1]
        places = [place for place, (_, old) in enumerate(parts) if old is not None]
        order = [parts[place][1] for place in places]
        if places != list(range(places[0], places[0] + len(places))) or order != list(axes):
            return None
        inner = math.prod(size for size, _ in parts[places[-1] + 1 :])
        return dataclasses.replace(self, inner=inner)

    def part(self, shape: Sequence[int], axis: int, start: int, size: int) -> Rows | None:
        """The layout in the part of an array that begins at ``start`` of ``axis``."""
        if self.count == 1 or size == shape[axis]:
            return self
        new = [*shape]
        new[axis] = size
        axes = self.axes(shape)
        if axes is None:
            return None
        if axis not in axes:
            return self.moved(shape, new, {old: old for old in axes})
        outside, of_rows, inside = axes[axis]
        if axis != next(iter(axes)) or outside != 1 or inside != 1:
            return None
        rows_each = self.count // of_rows
        inner = self.inner
        rows = Rows(inner, size * rows_each, self.start + start * rows_each, self.rounds)
        return rows.normal()


def joined(
    pieces: Sequence[Rows | None], shapes: Sequence[Sequence[int]], axis: int
) -> Rows | None:
    """The layout in pieces put together along an axis, if they are consecutive rows."""
    total = 0
    first = pieces[0]
    if first is None:
        return None
    inner = math.prod(shapes[0][axis + 1 :])
    for piece, shape in zip(pieces, shapes, strict=True):
        if piece is None or piece.rounds != first.rounds or piece.start != first.start + total:
            return None
        # The axis is all rows, and the outermost of the piece that is longer than 1.
        whole = piece.count == shape[axis] and math.prod(shape[:axis]) == 1
        if not whole or (piece.count > 1 and piece.inner != inner):
            return None
        total += piece.count
    return Rows(inner, total, first.start, first.rounds).normal()


def row_numbers_in(value: Any) -> Rows | None:
    """Finds that a constant counts 0, 1, 2, ... along one of its axes."""
    array = np.asarray(value)
    if array.dtype.kind not in "iu" or not 1 < array.size <= _LONGEST_CONSTANT:
        return None
    for axis, size in enumerate(array.shape):
        counted = np.arange(size).reshape([-1 if a == axis else 1 for a in range(array.ndim)])
        if size > 1 and (array == counted).all():
            return Rows(math.prod(array.shape[axis + 1 :]), size)
    return None


@final
@dataclasses.dataclass(frozen=True)
class Known:
    """What is known of a value."""

    # Where its rows lie, if it is made of the batch.
    rows: Rows | None = None
    mixed: bool = False
    # Where, if its elements are the numbers of the rows their places belong to; of a
    # list of indices, for each column.
    numbers: Rows | None = None
    columns: tuple[Rows | None, ...] = ()
    # Whether it is False everywhere.
    never: bool = False


APART = Known()
MIXED = Known(mixed=True)


def union(operands: Sequence[Known]) -> Known:
    """What is made of several values, element by element."""
    if any(operand.mixed for operand in operands):
        return MIXED
    layouts = {operand.rows for operand in operands if operand.rows is not None}
    if len(layouts) > 1:
        return MIXED
    return Known(next(iter(layouts), None))


def union_of(layouts: Sequence[Rows | None]) -> Known:
    """The same of layouts that were carried along; None: the rows got lost."""
    if None in layouts:
        return MIXED
    return union([Known(rows) for rows in layouts])


def constant(value: Any) -> Known:
    """What is known of a constant."""
    if value is None or not getattr(value, "shape", ()):
        return APART
    if value.dtype == bool:
        return Known(never=not value.any())
    is_integer = jnp.issubdtype(value.dtype, jnp.integer)
    return Known(numbers=row_numbers_in(value) if is_integer else None)


def shape_of(atom: Any) -> tuple[int, ...]:
    """The shape of an operand or a result of an equation."""
    return tuple(atom.aval.shape)


def same_axes(shape: Sequence[int]) -> dict[int, int]:
    """Every axis stays where it is."""
    return {axis: axis for axis in range(len(shape))}
