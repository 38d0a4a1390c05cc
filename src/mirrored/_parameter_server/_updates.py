"""Updates of dense pieces: a rule, the buffers it changes and its state.

Owns the compiled update: gradients arrive as one flat array a dtype, are taken apart
inside the program, and the new values leave it as one flat array again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from mirrored._errors import ServerError
from mirrored._parameter_server._rules import Rule, require_elementwise
from mirrored._parameter_server._store import Store


def cpu_device() -> Any:
    """Where servers compute: host memory is what they serve from."""
    return jax.local_devices(backend="cpu")[0]


def with_number(state: Any, path: str, value: Any) -> Any:
    """A state in which the leaf at a path (as ``jax.tree_util.keystr`` says it) is another."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(state)
    return structure.unflatten(
        [
            jnp.asarray(value, leaf.dtype) if jax.tree_util.keystr(at) == path else leaf
            for at, leaf in leaves
        ]
    )


def carried_over(old: Any, new: Any) -> Any:
    """A new state with what an old one had at the same paths, in the same shapes."""
    known = {
        jax.tree_util.keystr(at): leaf for at, leaf in jax.tree_util.tree_leaves_with_path(old)
    }
    leaves, structure = jax.tree_util.tree_flatten_with_path(new)
    kept = []
    for at, leaf in leaves:
        before = known.get(jax.tree_util.keystr(at))
        fits = before is not None and before.shape == leaf.shape and before.dtype == leaf.dtype
        kept.append(before if fits else leaf)
    return structure.unflatten(kept)


@final
class DenseUpdate:
    """One optimizer's update of the pieces a server has of its variables.

    Args:
      rule: what to compute.
      store: where the pieces are.
      lists: their numbers, a list for each dtype; gradients come in the same order.
      whole: whether these are all of the optimizer's variables, and all of each.
    """

    def __init__(
        self, rule: Rule, store: Store, lists: Sequence[Sequence[int]], *, whole: bool
    ) -> None:
        self.rule = rule
        self.lists = [tuple(numbers) for numbers in lists]
        self._device = cpu_device()
        self._buffers = [store.together(numbers) for numbers in lists]
        # In the order the variables were given in, since transformations may depend on it;
        # of several dtypes in the order they were made in.
        self._order = [
            (index, place)
            for index, buffer in enumerate(self._buffers)
            for place in range(len(buffer.pieces))
        ]
        if len(lists) > 1:
            self._order.sort(key=lambda at: self._buffers[at[0]].numbers[at[1]])
        self.pieces = [self._buffers[index].pieces[place] for index, place in self._order]
        self._whole = whole
        self.state: Any = self._first_state(rule)
        self._held: list[tuple[np.ndarray | None, Any]] = [(None, None)] * len(lists)
        self._step = jax.jit(self._traced, donate_argnums=2)

    def _first_state(self, rule: Rule) -> Any:
        if not self._whole:
            shapes = [jax.ShapeDtypeStruct(piece.shape, piece.dtype) for piece in self.pieces]
            require_elementwise(rule, shapes, "its variables are divided between servers")
        values = [buffer.values() for buffer in self._buffers]
        ordered = [values[index][place] for index, place in self._order]
        with jax.default_device(self._device):
            return jax.jit(rule.init)(ordered)

    def replace(self, rule: Rule) -> None:
        """Goes on with another rule, from what of the state both have."""
        self.state = carried_over(self.state, self._first_state(rule))
        self.rule = rule
        self._step = jax.jit(self._traced, donate_argnums=2)

    def apply(self, gradients: Sequence[np.ndarray]) -> None:
        """Changes the values by one step; the gradients were checked before."""
        flats = []
        for index, buffer in enumerate(self._buffers):
            seen, held = self._held[index]
            # Changed by an assignment since: what lies on the device is old.
            flats.append(held if seen is buffer.flat else jax.device_put(buffer.flat, self._device))
        new, self.state = self._step(flats, list(gradients), self.state)
        for index, (buffer, array) in enumerate(zip(self._buffers, new, strict=True)):
            buffer.flat = np.asarray(array)
            self._held[index] = (buffer.flat, array)

    def require_same(self, server: str, lists: Sequence[Sequence[int]]) -> None:
        """Raises ServerError unless gradients come for the pieces it keeps state for."""
        if self.lists != [tuple(numbers) for numbers in lists]:
            raise ServerError(
                fact=f"optimizer {self.rule.name!r} keeps state for pieces {self.lists} on "
                f"{server} and was given gradients of {lists}.",
                expected="the same variables in every step.",
                hint="use one Optimizer for each set of variables.",
            )

    def set_number(self, path: str, value: Any) -> None:
        """Sets a number in the state."""
        with jax.default_device(self._device):
            self.state = with_number(self.state, path, value)

    def _traced(self, flats: list[Any], gradients: list[Any], state: Any) -> tuple[Any, Any]:
        values, state = self.rule.update(self._apart(gradients), state, self._apart(flats))
        return self._joined(values), state

    def _apart(self, flats: list[Any]) -> list[Any]:
        return [
            flats[index][slice(*buffer.spans[piece.number])].reshape(piece.shape)
            for index, place in self._order
            for buffer in [self._buffers[index]]
            for piece in [buffer.pieces[place]]
        ]

    def _joined(self, values: list[Any]) -> list[Any]:
        parts: list[list[Any]] = [[None] * len(buffer.pieces) for buffer in self._buffers]
        for (index, place), value in zip(self._order, values, strict=True):
            parts[index][place] = value.reshape(-1)
        return [
            jnp.concatenate(row).astype(buffer.flat.dtype)
            for row, buffer in zip(parts, self._buffers, strict=True)
        ]
