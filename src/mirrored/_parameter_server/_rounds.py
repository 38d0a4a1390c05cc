"""Rounds: what several workers send becomes one step.

Owns what was sent for the step being gathered: the mean of gradients and of what is
assigned (moving averages, say), the sum of what is added (counters). Whose gradients are taken
is decided in ``_turns``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import jax
import numpy as np

from mirrored._parameter_server._channel import Fields

Identity = tuple[int, int]


class _Offer(NamedTuple):
    identity: Identity
    updates: list[Fields]
    arrays: list[np.ndarray]


@final
class Rounds:
    """The gradients sent for rounds that are not closed yet."""

    def __init__(self) -> None:
        self._offers: dict[int, dict[int, _Offer]] = {}
        self._taken = -1

    def add(
        self,
        round_number: int,
        lease: int,
        identity: Identity,
        updates: list[Fields],
        arrays: list[np.ndarray],
    ) -> None:
        """Keeps what a worker sent; what it sent before for this round is replaced."""
        if round_number > self._taken:
            self._offers.setdefault(round_number, {})[lease] = _Offer(
                # The list is the asker's, who may empty it; the arrays stay.
                identity,
                updates,
                list(arrays),
            )

    def take(
        self,
        round_number: int,
        leases: Sequence[int],
        is_applied: Callable[[int, int], bool],
    ) -> tuple[list[Identity], list[Fields], list[np.ndarray]] | None:
        """The step made of what these workers sent; None if it was made before.

        Args:
          round_number: which round.
          leases: whose gradients make it.
          is_applied: says of a closure's step that it was in an earlier one: sent again,
            since its worker was lost, before this server knew that the round was closed.
        """
        if round_number <= self._taken:
            return None
        self._taken = round_number
        offers = self._offers.pop(round_number, {})
        self._offers = {
            number: kept for number, kept in self._offers.items() if number > round_number
        }
        chosen = [
            offers[lease]
            for lease in leases
            if lease in offers and not is_applied(*offers[lease].identity)
        ]
        updates, arrays = _mean(chosen, len(leases))
        return [offer.identity for offer in chosen], updates, arrays


def _mean(offers: list[_Offer], count: int) -> tuple[list[Fields], list[np.ndarray]]:
    """One update for each thing the offers update."""
    dense: dict[Any, tuple[Fields, list[list[np.ndarray]]]] = {}
    rows: dict[Any, tuple[Fields, list[list[np.ndarray]]]] = {}
    writes: dict[Any, tuple[Fields, list[list[np.ndarray]]]] = {}
    for offer in offers:
        rest = offer.arrays
        for update in offer.updates:
            kind = update["kind"]
            if kind == "rows":
                size, group, key = 2, rows, (update["optimizer"], update["table"])
            elif kind == "gradients":
                size, group, key = len(update["lists"]), dense, update["optimizer"]
            else:
                size, group, key = 1, writes, (kind, update["piece"])
            group.setdefault(key, (update, []))[1].append(rest[:size])
            rest = rest[size:]
    updates, arrays = [], []
    for update, parts in dense.values():
        updates.append(update)
        totals = (_sum(column) for column in zip(*parts, strict=True))
        arrays += [np.divide(total, count, dtype=total.dtype) for total in totals]
    for update, parts in rows.values():
        numbers, places = np.unique(
            np.concatenate([numbers for numbers, _ in parts]), return_inverse=True
        )
        gradients = np.concatenate([gradient for _, gradient in parts])
        total = np.zeros((len(numbers), *gradients.shape[1:]), gradients.dtype)
        np.add.at(total, places, gradients)
        updates.append(update)
        arrays += [numbers, np.divide(total, count, dtype=total.dtype)]
    for update, parts in writes.values():
        values = [value for (value,) in parts]
        updates.append(update)
        arrays.append(_sum(values) if update["kind"] == "add" else _assigned(values))
    return updates, arrays


def _sum(values: Sequence[np.ndarray]) -> np.ndarray:
    total = values[0].copy()
    for value in values[1:]:
        total += value
    return total


def _assigned(values: Sequence[np.ndarray]) -> np.ndarray:
    """What several workers assign: the mean; of what has no mean the last worker's."""
    if not jax.numpy.issubdtype(values[0].dtype, np.inexact):
        return values[-1]
    total = _sum(values)
    return np.divide(total, len(values), dtype=total.dtype)
