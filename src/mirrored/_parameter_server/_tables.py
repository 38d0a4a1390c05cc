"""The tables of one server: large arrays that are read and updated row by row.

Owns the rows, the state of row-wise optimizers, and the sizes that row numbers are
padded to so that nothing is compiled anew. Rows are changed in place; nobody is handed
a view of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import jax
import numpy as np

from mirrored._errors import ServerError
from mirrored._parameter_server._rules import Rule, require_elementwise
from mirrored._parameter_server._store import Piece
from mirrored._parameter_server._updates import carried_over, cpu_device, with_number

_SMALLEST = 16
_ALIGNMENT = 64


def bucket(count: int) -> int:
    """The size that ``count`` rows are padded to: one to seven quarters of a power of two.

    >>> [bucket(count) for count in (1, 17, 25, 1700)]
    [16, 20, 28, 1792]
    """
    size = _SMALLEST
    while size * 2 < count:
        size *= 2
    if count <= size:
        return size
    return size + -(-(count - size) * 4 // size) * (size // 4)


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array that lies where XLA's programs on the CPU take it without a copy."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


@final
class Table:
    """Some rows of a table (all of them, on a single server)."""

    def __init__(self, piece: Piece, values: np.ndarray) -> None:
        self.piece = piece
        self.values = values
        self.rows_read = 0
        self.rows_written = 0
        # By the optimizer's number.
        self.optimizers: dict[int, RowUpdate] = {}

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Copies the rows with these numbers, counted from this piece's first; checked before."""
        self.rows_read += len(rows)
        return self.values.take(rows, axis=0)

    def update(
        self,
        number: int,
        rule: Rule,
        rows: np.ndarray,
        gradients: np.ndarray,
        numbers: Mapping[str, Any],
    ) -> None:
        """Changes some rows by one step of an optimizer; checked before.

        Args:
          number: of the optimizer.
          rule: what it computes.
          rows: which rows.
          gradients: theirs.
          numbers: what was set in the optimizer's state before it had one.
        """
        self.rows_written += len(rows)
        optimizer = self.optimizers.get(number)
        if optimizer is None:
            optimizer = self.optimizers[number] = RowUpdate(rule, self.piece, self.values)
            for path, value in numbers.items():
                optimizer.set_number(path, value)
        optimizer.apply(self.values, rows, gradients)

    def write(self, rows: np.ndarray, values: np.ndarray) -> None:
        """Sets some rows; checked before."""
        self.rows_written += len(rows)
        self.values[rows] = values

    def check_rows(self, rows: np.ndarray) -> None:
        """Raises ServerError unless these are numbers of rows of this piece."""
        if rows.ndim != 1 or rows.dtype != np.int64:
            raise ServerError(
                fact=f"table {self.piece.name!r} was given row numbers {rows.dtype}"
                f"{list(rows.shape)}.",
                expected="int64 in one dimension.",
                hint="all processes must run the same version of mirrored.",
            )
        if len(rows) and not (int(rows.min()) >= 0 and int(rows.max()) < len(self.values)):
            raise ServerError(
                fact=f"table {self.piece.name!r} was asked for rows {int(rows.min())} to "
                f"{int(rows.max())} of its {len(self.values)} on this server.",
                expected="rows that are there.",
                hint="look at the largest id of the batch.",
            )

    def check_update(self, rows: np.ndarray, values: np.ndarray) -> None:
        """Raises ServerError unless these are different rows, and a value for each."""
        self.check_rows(rows)
        if values.shape != (len(rows), *self.piece.shape[1:]) or values.dtype != self.piece.dtype:
            raise ServerError(
                fact=f"table {self.piece.name!r} was given {len(rows)} row numbers and values "
                f"{values.dtype}{list(values.shape)}.",
                expected=f"{self.piece.dtype}{[len(rows), *self.piece.shape[1:]]}.",
                hint="all processes must run the same version of the program.",
            )
        # Of a row that came twice one value would be lost.
        if len(rows) and not bool((rows[1:] > rows[:-1]).all()):
            raise ServerError(
                fact=f"table {self.piece.name!r} was given row numbers that are not in order, or "
                "not different.",
                expected="each row once, in order.",
                hint="all processes must run the same version of mirrored.",
            )


@final
class RowUpdate:
    """An optimizer's update of some rows of a table, and its state.

    A row's state moves only when the row does: momentum and decay act on a row in the
    steps that use it. Numbers that belong to the optimizer as a whole, such as Adam's
    count of steps, are kept once for the table.
    """

    def __init__(self, rule: Rule, piece: Piece, values: np.ndarray) -> None:
        self._device = cpu_device()
        self._piece = piece
        self.rule = rule
        self.leaves: list[Any] = []
        self._take_in(rule, values, None)

    def _take_in(self, rule: Rule, values: np.ndarray, before: Any) -> None:
        piece = self._piece
        require_elementwise(
            rule,
            [jax.ShapeDtypeStruct(piece.shape, piece.dtype)],
            f"{piece.name!r} is updated row by row",
        )
        with jax.default_device(self._device):
            state = jax.jit(rule.init)([values])
        leaves, self.structure = jax.tree.flatten(carried_over(before, state))
        self.by_row = [leaf.shape == values.shape for leaf in leaves]
        self.leaves = [
            leaf if not by_row or isinstance(leaf, np.ndarray) else np.array(leaf)
            for leaf, by_row in zip(leaves, self.by_row, strict=True)
        ]
        self.rule = rule
        self._step: Callable[..., Any] = jax.jit(self._traced)

    def replace(self, rule: Rule, values: np.ndarray) -> None:
        """Goes on with another rule, from what of the state both have."""
        self._take_in(rule, values, self.structure.unflatten(self.leaves))

    def apply(self, values: np.ndarray, rows: np.ndarray, gradients: np.ndarray) -> None:
        """Changes ``values`` and the state, in place, at ``rows``."""
        count = len(rows)
        size = bucket(count)
        padded = aligned_empty((size, *gradients.shape[1:]), gradients.dtype)
        padded[:count] = gradients
        padded[count:] = 0
        state = [
            _taken(leaf, rows, size) if by_row else leaf
            for leaf, by_row in zip(self.leaves, self.by_row, strict=True)
        ]
        with jax.default_device(self._device):
            new_values, new_state = self._step(_taken(values, rows, size), padded, state)
        values[rows] = np.asarray(new_values)[:count]
        for index, (leaf, by_row) in enumerate(zip(new_state, self.by_row, strict=True)):
            if by_row:
                self.leaves[index][rows] = np.asarray(leaf)[:count]
            else:
                self.leaves[index] = leaf

    def set_number(self, path: str, value: Any) -> None:
        """Sets one of the numbers that belong to the optimizer as a whole."""
        state = with_number(self.structure.unflatten(self.leaves), path, value)
        self.leaves = jax.tree.leaves(state)

    def _traced(self, values: Any, gradients: Any, state: Sequence[Any]) -> tuple[Any, Any]:
        (new_values,), new_state = self.rule.update(
            [gradients], self.structure.unflatten(state), [values]
        )
        return new_values, jax.tree.leaves(new_state)


def _taken(array: np.ndarray, rows: np.ndarray, size: int) -> np.ndarray:
    found = aligned_empty((size, *array.shape[1:]), array.dtype)
    # mode="clip" spares the copy through a second buffer; the numbers were checked.
    np.take(array, rows, axis=0, out=found[: len(rows)], mode="clip")
    found[len(rows) :] = 0
    return found
