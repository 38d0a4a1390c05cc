"""Holdings: the variables, tables and optimizers of one server.

Owns what a server has, examining an update before any of it is applied, and applying it. So
an update that is refused has changed nothing. Who may send what, and when, is in
``_server``; where arrays lie in ``_store`` and ``_tables``, how they change in ``_updates``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np

from mirrored._errors import ServerError
from mirrored._parameter_server._channel import Fields
from mirrored._parameter_server._questions import array_count
from mirrored._parameter_server._rules import Rule
from mirrored._parameter_server._store import Piece, Store
from mirrored._parameter_server._tables import Table
from mirrored._parameter_server._updates import DenseUpdate


@final
class Holdings:
    """What one server has.

    Args:
      server: its name.
    """

    def __init__(self, server: str) -> None:
        self._server = server
        self.store = Store(server)
        self.tables: dict[int, Table] = {}
        # By the optimizer's number.
        self.rules: dict[int, Rule] = {}
        self.updates: dict[int, DenseUpdate] = {}
        # Numbers in optimizers' states that were set, by the path of each.
        self._numbers: dict[int, dict[str, Any]] = {}

    # --- making ------------------------------------------------------------------

    def create(self, described: Sequence[Fields], values: Sequence[np.ndarray]) -> None:
        """Takes pieces in, with their values."""
        for fields, value in zip(described, values, strict=True):
            piece = Piece(
                fields["number"], fields["name"], fields["start"], value.shape, value.dtype
            )
            self.store.add(piece, value)

    def expect_pieces(self, pieces: Sequence[Piece]) -> None:
        """Makes room for pieces whose values a checkpoint will bring."""
        for piece in pieces:
            self.store.put(piece, np.zeros(piece.shape, piece.dtype))

    def create_table(self, piece: Piece, make: Callable[[int, int], np.ndarray] | None) -> None:
        """Makes a table; without values, if a checkpoint will bring them."""
        if piece.number in self.tables and make is not None:
            return
        if make is None:
            values = np.zeros(piece.shape, piece.dtype)
        else:
            values = np.array(make(piece.start, piece.start + piece.shape[0]), piece.dtype)
        self.tables[piece.number] = Table(piece, values)

    def set_rule(self, number: int, rule: Rule) -> None:
        """Takes an optimizer's rule in; one that is there already stays."""
        self.rules.setdefault(number, rule)

    def replace_rule(self, number: int, rule: Rule) -> None:
        """Lets another rule take an optimizer's place, which keeps its state."""
        self.rules[number] = rule
        if number in self.updates:
            self.updates[number].replace(rule)
        for table in self.tables.values():
            if number in table.optimizers:
                table.optimizers[number].replace(rule, table.values)

    def set_number(self, number: int, path: str, value: Any) -> None:
        """Sets a number in an optimizer's state, its learning rate say, on this server."""
        self._numbers.setdefault(number, {})[path] = value
        if number in self.updates:
            self.updates[number].set_number(path, value)
        for table in self.tables.values():
            if number in table.optimizers:
                table.optimizers[number].set_number(path, value)

    # --- reading -----------------------------------------------------------------

    def require(self, lists: Sequence[Sequence[int]]) -> None:
        """Raises ServerError unless all these pieces are here."""
        for numbers in lists:
            for number in numbers:
                self.store.piece(number)

    def read(self, lists: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Pieces, in one flat array a list."""
        return [self.store.read(numbers) for numbers in lists]

    def rows(self, tables: Sequence[int], rows: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Rows of tables."""
        found = [self._table(number) for number in tables]
        for table, numbers in zip(found, rows, strict=True):
            table.check_rows(numbers)
        return [table.read(numbers) for table, numbers in zip(found, rows, strict=True)]

    def _table(self, number: int) -> Table:
        table = self.tables.get(number)
        if table is None:
            raise ServerError(
                fact=f"{self._server} was asked for table {number}, which it does not have.",
                expected=f"one of its {len(self.tables)} tables.",
                hint="a server that came back without a checkpoint is empty: use "
                'on_server_failure="restore".',
            )
        return table

    # --- updating ----------------------------------------------------------------

    def examine(self, updates: Sequence[Fields], arrays: Sequence[np.ndarray]) -> None:
        """Raises ServerError if any of the updates of a message cannot be applied."""
        rest = list(arrays)
        for update in updates:
            kind, count = update["kind"], array_count(update)
            own, rest = rest[:count], rest[count:]
            if kind == "gradients":
                self._examine_gradients(update, own)
            elif kind in ("rows", "set_rows"):
                self._table(update["table"]).check_update(*own)
                if kind == "rows":
                    self._rule(update["optimizer"])
            else:
                self.store.check_change(update["piece"], *own)

    def _examine_gradients(self, update: Fields, gradients: Sequence[np.ndarray]) -> None:
        rule, lists = self._rule(update["optimizer"]), update["lists"]
        numbers = [number for one in lists for number in one]
        known = self.updates.get(update["optimizer"])
        if known is not None:
            known.require_same(self._server, lists)
        pieces = {number: self.store.piece(number) for number in numbers}
        for one, gradient in zip(lists, gradients, strict=True):
            dtypes = {pieces[number].dtype for number in one}
            size = sum(pieces[number].size for number in one)
            if (
                dtypes != {gradient.dtype}
                or gradient.shape != (size,)
                or len(pieces) < len(numbers)
            ):
                raise ServerError(
                    fact=f"optimizer {rule.name!r} was given a gradient "
                    f"{gradient.dtype}{list(gradient.shape)} for pieces {one} of "
                    f"{', '.join(sorted(map(str, dtypes)))}[{size}].",
                    expected="one number for each element of different pieces.",
                    hint="all processes must run the same version of the program.",
                )

    def apply(self, updates: Sequence[Fields], arrays: Sequence[np.ndarray]) -> None:
        """Applies updates that were examined, whose arrays stand in the same order."""
        rest = list(arrays)
        for update in updates:
            kind, count = update["kind"], array_count(update)
            own, rest = rest[:count], rest[count:]
            if kind == "gradients":
                self._dense_update(update).apply(own)
            elif kind == "rows":
                number, table = update["optimizer"], self._table(update["table"])
                numbers = self._numbers.get(number, {})
                table.update(number, self._rule(number), own[0], own[1], numbers)
            elif kind == "set_rows":
                self._table(update["table"]).write(*own)
            else:
                self.store.change(update["piece"], *own, add=kind == "add")

    def _rule(self, number: int) -> Rule:
        rule = self.rules.get(number)
        if rule is None:
            raise ServerError(
                fact=f"{self._server} does not know optimizer {number}.",
                expected="optimizers made in the strategy's scope, before they are used.",
                hint="make the optimizer in `with strategy.scope():`.",
            )
        return rule

    def _dense_update(self, update: Fields) -> DenseUpdate:
        number, lists = update["optimizer"], [tuple(numbers) for numbers in update["lists"]]
        found = self.updates.get(number)
        if found is None:
            found = self.updates[number] = DenseUpdate(
                self._rule(number), self.store, lists, whole=update["whole"]
            )
            for path, value in self._numbers.get(number, {}).items():
                found.set_number(path, value)
        return found
