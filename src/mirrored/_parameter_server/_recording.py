"""Recording: what a step does with variables on servers, while it is traced.

Owns the values that stand for variables and rows inside the trace, and what is to be
sent afterwards. Writes go through JAX's Refs, so they work inside ``lax.scan`` and
``cond`` and see each other; updates by an optimizer are seen in the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import jax
import jax.numpy as jnp

from mirrored._errors import ArgumentError, ContextError
from mirrored._parameter_server._catalog import OptimizerSpec, VariableSpec
from mirrored._parameter_server._layout import UpdateLayout


@final
class Recording:
    """One trace of a step.

    Args:
      specs: the dense variables there are.
      values: what stands for each.
      rows: for each table by number, what stands for the rows the step uses.
      inverses: for each lookup, in order, where its ids are among these rows; None in
        the first trace, which finds out what is looked up.
    """

    def __init__(
        self,
        specs: Sequence[VariableSpec],
        values: Sequence[Any],
        rows: dict[int, Any],
        inverses: Sequence[Any] | None,
    ) -> None:
        self._specs = {spec.number: spec for spec in specs}
        self._refs = {
            spec.number: jax.new_ref(value) for spec, value in zip(specs, values, strict=True)
        }
        self._added = {
            spec.number: jax.new_ref(jnp.zeros(spec.shape, spec.dtype)) for spec in specs
        }
        self._rows = rows
        self._inverses = inverses
        self.read: set[int] = set()
        self._assigned: set[int] = set()
        self._incremented: set[int] = set()
        self._updated: set[int] = set()
        self.lookups: list[tuple[VariableSpec, Any]] = []
        self._gradients: list[tuple[OptimizerSpec, list[tuple[Any, VariableSpec]]]] = []

    def value(self, spec: VariableSpec) -> Any:
        """Reads a variable."""
        if spec.number in self._updated:
            raise ContextError(
                fact=f"variable {spec.name!r} was read after apply_gradients in the same step.",
                expected="reads before the update; the new value is on the servers, where other "
                "workers change it too.",
                hint="read it first, or in the next step.",
            )
        self._require_known(spec)
        self.read.add(spec.number)
        return self._refs[spec.number][...]

    def write(self, spec: VariableSpec, action: str, value: Any) -> None:
        """Writes a variable."""
        self._require_known(spec)
        value = jax.lax.stop_gradient(value)
        reference = self._refs[spec.number]
        if action == "assign":
            self._assigned.add(spec.number)
            reference[...] = value
            return
        delta = -value if action == "assign_sub" else value
        # What the servers have counts, not what this worker saw: the difference is sent.
        self._incremented.add(spec.number)
        self.read.add(spec.number)
        self._added[spec.number][...] += delta
        reference[...] += delta

    def rows(self, spec: VariableSpec) -> Any:
        """What stands for the rows of a table that this step uses."""
        found = self._rows.get(spec.number)
        if found is None:
            raise _late(spec.name)
        return found

    def lookup(self, spec: VariableSpec, ids: Any, rows: Any) -> Any:
        """Takes rows by ids."""
        number = len(self.lookups)
        self.lookups.append((spec, ids))
        if self._inverses is None:
            places = jnp.zeros(jnp.shape(ids), jnp.int32)
        else:
            places = self._inverses[number]
        return jnp.take(rows, places, axis=0, mode="clip")

    def apply(self, optimizer: OptimizerSpec, pairs: list[tuple[Any, VariableSpec]]) -> None:
        """Notes gradients for an optimizer."""
        if any(known.number == optimizer.number for known, _ in self._gradients):
            raise ContextError(
                fact=f"optimizer {optimizer.name!r} was applied twice in one step.",
                expected="one apply_gradients of an optimizer in a step.",
                hint="add the gradients up first, or call strategy.run once for each update.",
            )
        self._gradients.append((optimizer, pairs))
        self._updated.update(spec.number for _, spec in pairs if not spec.is_table)

    def groups(self) -> list[list[VariableSpec]]:
        """The variables read, those first that an optimizer's buffers hold together."""
        groups, seen = [], set()
        for _, pairs in self._gradients:
            group = [spec for _, spec in pairs if not spec.is_table and spec.number in self.read]
            if group:
                groups.append(group)
                seen.update(spec.number for spec in group)
        rest = [spec for number, spec in self._specs.items() if number in self.read - seen]
        return [*groups, rest] if rest else groups

    def dense_updates(self) -> UpdateLayout:
        """What is to be sent besides rows of tables."""
        layout = UpdateLayout()
        for optimizer, pairs in self._gradients:
            dense = [(gradient, spec) for gradient, spec in pairs if not spec.is_table]
            if dense:
                layout.gradients(optimizer, dense)
        for number in sorted(self._assigned):
            layout.write("assign", self._specs[number], self._refs[number][...])
        for number in sorted(self._incremented - self._assigned):
            layout.write("add", self._specs[number], self._added[number][...])
        return layout

    def row_updates(self) -> list[tuple[OptimizerSpec, VariableSpec, Any]]:
        """The gradients of rows, one for each table and optimizer."""
        return [
            (optimizer, spec, gradient)
            for optimizer, pairs in self._gradients
            for gradient, spec in pairs
            if spec.is_table
        ]

    def _require_known(self, spec: VariableSpec) -> None:
        if spec.number not in self._specs:
            raise _late(spec.name)


def check_pairs(optimizer: str, pairs: Sequence[tuple[Any, VariableSpec]], *, rows: bool) -> None:
    """Checks gradients against the variables they are for."""
    for gradient, spec in pairs:
        shape = tuple(jnp.shape(gradient))
        fits = shape == spec.shape
        if spec.is_table and rows:
            fits = shape[1:] == spec.shape[1:]
        if not fits:
            raise ArgumentError(
                fact=f"optimizer {optimizer!r} was given a gradient of shape {shape} for "
                f"{spec.name!r} of shape {spec.shape}.",
                expected="equal shapes.",
                hint="check that gradients and variables are zipped in the same order.",
            )


def _late(name: str) -> ContextError:
    return ContextError(
        fact=f"{name!r} was made while the step that uses it was traced.",
        expected="variables and tables made before training starts.",
        hint="make them in `with strategy.scope():`, outside the step.",
    )
