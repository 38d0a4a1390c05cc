"""Ids: which rows a step will use, found before it runs.

Owns the part of a traced step that computes the ids it looks up, and turning ids into
different row numbers, padded to a few sizes, and the places of the ids among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, final

import jax
import numpy as np
from jax.extend.core import Literal, jaxpr_as_fun

from mirrored._errors import ArgumentError, ContextError
from mirrored._parameter_server._catalog import VariableSpec
from mirrored._parameter_server._tables import bucket


class UsedRows(NamedTuple):
    """The rows of one table that a step uses."""

    spec: VariableSpec
    rows: np.ndarray
    """their numbers, all different, sorted"""
    places: list[np.ndarray]
    """for each lookup in this table, where its ids are among them"""

    @property
    def bucket(self) -> int:
        """The size they are padded to."""
        return bucket(len(self.rows))


@final
class IdsProgram:
    """Computes the ids of all lookups of a step from the step's arguments.

    Args:
      jaxpr: the traced step, whose last outputs are the ids.
      lookups: the tables, in the order of the ids.
      argument_count: how many of the last inputs are arguments; the ones before them are
        values of variables and rows, which are not known yet.
    """

    def __init__(
        self, jaxpr: Any, lookups: Sequence[tuple[VariableSpec, Any]], argument_count: int
    ) -> None:
        self._specs = [spec for spec, _ in lookups]
        inner = jaxpr.jaxpr
        wanted = inner.outvars[len(inner.outvars) - len(lookups) :]
        self.shapes = [variable.aval.shape for variable in wanted]
        first = len(inner.invars) - argument_count
        arguments = {variable: place for place, variable in enumerate(inner.invars[first:])}
        self._refuse_unknown(inner, inner.invars[:first], wanted)
        # Ids that are arguments as they are, which they mostly are, need no computing.
        self._direct = [
            None if isinstance(variable, Literal) else arguments.get(variable)
            for variable in wanted
        ]
        unknown = [variable.aval for variable in inner.invars[:first]]
        evaluate = jaxpr_as_fun(jaxpr)
        count = len(lookups)

        def ids(*dynamic: Any) -> Any:
            # XLA leaves out all that the ids do not need.
            zeros = [jax.numpy.zeros(aval.shape, aval.dtype) for aval in unknown]
            return evaluate(*zeros, *dynamic)[-count:]

        self._program = jax.jit(ids)

    def __call__(self, dynamic: Sequence[Any]) -> list[UsedRows]:
        """Finds the rows that a step with these arguments uses."""
        computed: list[Any] = []
        if any(place is None for place in self._direct):
            computed = list(self._program(*dynamic))
        all_ids = [
            np.asarray(computed[index] if place is None else dynamic[place])
            for index, place in enumerate(self._direct)
        ]
        used = []
        for spec in sorted({spec.number: spec for spec in self._specs}.values(), key=_number):
            own = [
                ids
                for of, ids in zip(self._specs, all_ids, strict=True)
                if of.number == spec.number
            ]
            used.append(used_rows(spec, own))
        return used

    def places(self, used: Sequence[UsedRows]) -> list[np.ndarray]:
        """The places of the ids of all lookups, in their order in the step."""
        rest = {found.spec.number: iter(found.places) for found in used}
        return [next(rest[spec.number]) for spec in self._specs]

    def _refuse_unknown(self, inner: Any, unknown: Sequence[Any], wanted: Sequence[Any]) -> None:
        depends = set(unknown)
        for equation in inner.eqns:
            if any(not isinstance(atom, Literal) and atom in depends for atom in equation.invars):
                depends.update(equation.outvars)
        for spec, variable in zip(self._specs, wanted, strict=True):
            if not isinstance(variable, Literal) and variable in depends:
                raise ContextError(
                    fact=f"the ids looked up in table {spec.name!r} depend on values that are on "
                    "the servers.",
                    expected="ids computed from the arguments of the step alone, since rows are "
                    "asked for before it runs.",
                    hint="compute the ids in a step of their own, and give them to the next one.",
                )


def used_rows(spec: VariableSpec, lookups: Sequence[np.ndarray]) -> UsedRows:
    """Finds the different rows among the ids of several lookups."""
    flat = [ids.reshape(-1) for ids in lookups]
    joined = flat[0] if len(flat) == 1 else np.concatenate(flat)
    rows, inverse = np.unique(joined, return_inverse=True)
    if len(rows) and not (rows[0] >= 0 and rows[-1] < spec.shape[0]):
        bad = rows[0] if rows[0] < 0 else rows[-1]
        raise ArgumentError(
            fact=f"id {bad} was looked up in table {spec.name!r} of {spec.shape[0]} rows.",
            expected=f"ids from 0 to {spec.shape[0] - 1}.",
            hint="hash or clip ids before they are looked up.",
        )
    ends = np.cumsum([len(ids) for ids in flat])[:-1]
    places = [
        part.reshape(ids.shape).astype(np.int32)
        for part, ids in zip(np.split(inverse.reshape(-1), ends), lookups, strict=True)
    ]
    return UsedRows(spec, rows.astype(np.int64), places)


def _number(spec: VariableSpec) -> int:
    return spec.number
