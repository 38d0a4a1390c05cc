"""Layout: how variables and gradients lie in the flat arrays of messages.

Owns cutting gradients into the pieces of each server and putting pulled pieces together
again, both as code that JAX traces, so that it is part of the compiled step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import jax.numpy as jnp
import numpy as np

from mirrored._parameter_server._catalog import OptimizerSpec, Placed, VariableSpec
from mirrored._parameter_server._channel import Fields
from mirrored._parameter_server._exchange import Values


@final
class ReadLayout:
    """Which flat arrays to ask for to get some variables.

    Args:
      groups: variables that are best asked for together, because their servers keep them
        in one buffer.
    """

    def __init__(self, groups: Sequence[Sequence[VariableSpec]]) -> None:
        self.reads: dict[int, list[list[int]]] = {}
        # By piece: server, list, first element.
        self._places: dict[int, tuple[int, int, int]] = {}
        self.specs = [spec for group in groups for spec in group]
        for group in groups:
            for (server, _), parts in by_server_and_dtype(group).items():
                lists = self.reads.setdefault(server, [])
                offset = 0
                for part in parts:
                    self._places[part.piece.number] = (server, len(lists), offset)
                    offset += part.piece.size
                lists.append([part.piece.number for part in parts])

    @property
    def order(self) -> list[tuple[int, int]]:
        """The flat arrays as (server, list), in a fixed order."""
        return [
            (server, index) for server in self.reads for index in range(len(self.reads[server]))
        ]

    def flats(self, values: Values) -> list[np.ndarray]:
        """The flat arrays that came, in this order."""
        return [values[server][index] for server, index in self.order]

    def assemble(self, spec: VariableSpec, flats: Sequence[Any], namespace: Any = jnp) -> Any:
        """Takes a variable out of the flat arrays."""
        where = {place: index for index, place in enumerate(self.order)}
        values = []
        for part in spec.parts:
            server, index, offset = self._places[part.piece.number]
            flat = flats[where[server, index]]
            values.append(flat[offset : offset + part.piece.size])
        return spec.assemble(values, namespace)


def by_server_and_dtype(specs: Sequence[VariableSpec]) -> dict[tuple[int, str], list[Placed]]:
    """Groups the parts of variables by where they are and what they are made of."""
    found: dict[tuple[int, str], list[Placed]] = {}
    for spec in specs:
        for part in spec.parts:
            found.setdefault((part.server, spec.dtype.name), []).append(part)
    return found


@final
class UpdateLayout:
    """The updates of one step: what is said to each server, and its arrays in order."""

    def __init__(self) -> None:
        self.fields: dict[int, list[Fields]] = {}
        self.arrays: dict[int, list[Any]] = {}
        self.is_step = False

    def __bool__(self) -> bool:
        return bool(self.fields)

    def _add(self, server: int, fields: Fields, arrays: Sequence[Any]) -> None:
        self.fields.setdefault(server, []).append(fields)
        self.arrays.setdefault(server, []).extend(arrays)

    def gradients(
        self,
        optimizer: OptimizerSpec,
        pairs: Sequence[tuple[Any, VariableSpec]],
        namespace: Any = jnp,
    ) -> None:
        """Adds dense gradients, one flat array for each server and dtype."""
        self.is_step = True
        gradient_of = {spec.number: gradient for gradient, spec in pairs}
        owner = {part.piece.number: spec for _, spec in pairs for part in spec.parts}
        specs = [spec for _, spec in pairs]
        by_server: dict[int, list[tuple[list[int], Any]]] = {}
        for (server, _), parts in by_server_and_dtype(specs).items():
            pieces = [
                _rows(gradient_of[owner[part.piece.number].number], part, namespace)
                for part in parts
            ]
            flat = pieces[0] if len(pieces) == 1 else namespace.concatenate(pieces)
            numbers = [part.piece.number for part in parts]
            by_server.setdefault(server, []).append((numbers, flat))
        whole = len(by_server) == 1 and all(len(spec.parts) == 1 for spec in specs)
        for server, lists in by_server.items():
            fields = {
                "kind": "gradients",
                "optimizer": optimizer.number,
                "lists": [numbers for numbers, _ in lists],
                "whole": whole,
            }
            self._add(server, fields, [flat for _, flat in lists])

    def write(self, kind: str, spec: VariableSpec, value: Any, namespace: Any = jnp) -> None:
        """Adds an assignment ("assign") or an addition ("add")."""
        whole = namespace.broadcast_to(value, spec.shape)
        for part in spec.parts:
            fields = {"kind": kind, "piece": part.piece.number}
            self._add(part.server, fields, [_rows(whole, part, namespace)])

    def rows(
        self, optimizer: OptimizerSpec, spec: VariableSpec, rows: np.ndarray, gradients: np.ndarray
    ) -> None:
        """Adds gradients of some rows of a table, all different and sorted."""
        self.is_step = True
        for part, chosen in split_rows(spec, rows):
            fields = {
                "kind": "rows",
                "optimizer": optimizer.number,
                "table": part.piece.number,
            }
            local = rows[chosen] - part.piece.start
            self._add(part.server, fields, [local, np.ascontiguousarray(gradients[chosen])])

    def set_rows(self, spec: VariableSpec, rows: np.ndarray, values: np.ndarray) -> None:
        """Adds new values of some rows of a table, all different and sorted."""
        for part, chosen in split_rows(spec, rows):
            fields = {"kind": "set_rows", "table": part.piece.number}
            local = rows[chosen] - part.piece.start
            self._add(part.server, fields, [local, np.ascontiguousarray(values[chosen])])

    def flat_arrays(self) -> list[Any]:
        """All arrays, server by server."""
        return [array for arrays in self.arrays.values() for array in arrays]

    def with_arrays(self, arrays: Sequence[Any]) -> UpdateLayout:
        """The same updates with other arrays, given as ``flat_arrays`` lists them."""
        result = UpdateLayout()
        result.is_step = self.is_step
        result.fields = {server: list(fields) for server, fields in self.fields.items()}
        rest = list(arrays)
        for server, own in self.arrays.items():
            result.arrays[server], rest = rest[: len(own)], rest[len(own) :]
        return result

    def parts(self) -> dict[int, tuple[list[Fields], list[Any]]]:
        """What to send to each server."""
        return {server: (fields, self.arrays[server]) for server, fields in self.fields.items()}


def split_rows(spec: VariableSpec, rows: np.ndarray) -> list[tuple[Placed, slice]]:
    """For each part that has some of these sorted rows, which of them."""
    found = []
    for part in spec.parts:
        start = part.piece.start
        low, high = np.searchsorted(rows, [start, start + part.piece.shape[0]])
        if low < high:
            found.append((part, slice(int(low), int(high))))
    return found


def _rows(whole: Any, part: Placed, namespace: Any) -> Any:
    piece = part.piece
    if not piece.shape or whole.shape[0] == piece.shape[0]:
        cut = whole
    else:
        cut = whole[piece.start : piece.start + piece.shape[0]]
    return namespace.asarray(cut, piece.dtype).reshape(-1)
