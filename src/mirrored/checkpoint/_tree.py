"""What is saved: a nest of variables, optimizers, modules, arrays, datasets.

Owns how each kind of leaf is taken down and put back, on whatever number of replicas
and workers. How names and values are kept is in ``_content``, where in ``_storage``.
"""

from __future__ import annotations

import functools
import math
from typing import Any, final

import jax
import numpy as np

from mirrored import _objects
from mirrored._errors import CheckpointError
from mirrored._optimizer import Optimizer
from mirrored._shards import shard_length
from mirrored._types import VariableAggregation
from mirrored._variable import Variable
from mirrored.checkpoint._content import NUMBERS, Content, Snapshot, is_split_over_processes


def _has_position(leaf: Any) -> bool:
    return callable(getattr(leaf, "get_state", None)) and callable(getattr(leaf, "set_state", None))


def _is_foreign_variable(leaf: Any) -> bool:
    """Says whether a leaf is a variable of another library, such as Keras."""
    return callable(getattr(leaf, "assign", None)) and isinstance(
        getattr(leaf, "value", None), jax.Array
    )


def _has_variables(leaf: Any) -> bool:
    """Says whether a leaf is a model or an optimizer of another library, such as Keras."""
    variables = getattr(leaf, "variables", None)
    return isinstance(variables, (list, tuple)) and all(map(_is_foreign_variable, variables))


def _is_leaf(leaf: Any) -> bool:
    return (
        leaf is None
        or isinstance(leaf, (Variable, Optimizer, np.random.Generator))
        or _objects.is_object(leaf)
        or _has_position(leaf)
        or _is_foreign_variable(leaf)
        or (not isinstance(leaf, (dict, list, tuple)) and _has_variables(leaf))
    )


def _flatten(nest: Any) -> tuple[list[tuple[str, Any]], Any]:
    found, structure = jax.tree_util.tree_flatten_with_path(nest, is_leaf=_is_leaf)
    return [
        (jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in found
    ], structure


@final
class State:
    """A nest of things to save, and how each of them is put back."""

    def __init__(self, nest: dict[str, Any]) -> None:
        self.nest = nest
        # Optimizers whose variables do not exist yet, with what they will be given.
        self._waiting: dict[str, Content] = {}

    def needs_all_workers(self) -> bool:
        """Says whether taking it down combines values of several workers."""
        return any(_is_spread_over_workers(leaf) for _, leaf in _flatten(self.nest)[0])

    # --- taking down -------------------------------------------------------------

    def take(self) -> Snapshot:
        """Takes the state down as it is now."""
        snapshot = Snapshot()
        for name, leaf in _flatten(self.nest)[0]:
            self._take_leaf(snapshot, name, leaf)
        snapshot.keep()
        return snapshot

    def _take_leaf(self, snapshot: Snapshot, name: str, leaf: Any) -> None:
        if isinstance(leaf, Variable):
            _take_variable(snapshot, name, leaf)
        elif isinstance(leaf, Optimizer):
            self._take_optimizer(snapshot, name, leaf)
        elif isinstance(leaf, np.random.Generator):
            snapshot.add_value(name, leaf.bit_generator.state, "generator")
        elif _objects.is_object(leaf):
            taken = _objects.take([leaf])
            for inner, array in zip(taken.names(), taken.arrays, strict=True):
                snapshot.add_array(f"{name}.{inner}", array, "array")
        elif _has_position(leaf):
            snapshot.add_value(name, leaf.get_state(), "position")
        elif _is_foreign_variable(leaf):
            snapshot.add_array(name, leaf.value, "variable")
        elif isinstance(leaf, NUMBERS):
            snapshot.add_value(name, leaf, "value")
        elif _has_variables(leaf):
            for index, variable in enumerate(leaf.variables):
                snapshot.add_array(f"{name}.{index}", variable.value, "variable")
        elif isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
            snapshot.add_array(name, leaf, "array")
        else:
            raise CheckpointError(
                fact=f"{name!r} is {leaf!r} ({type(leaf).__name__}), which cannot be saved.",
                expected="Variables, Optimizers, arrays, numbers, and objects with get_state and "
                "set_state, in dictionaries, lists and other pytrees.",
                hint="save the arrays it holds.",
            )

    def _take_optimizer(self, snapshot: Snapshot, name: str, optimizer: Optimizer) -> None:
        if optimizer.home is not None:
            raise CheckpointError(
                fact=f"{name!r} is optimizer {optimizer.name!r}, whose state is on parameter "
                "servers.",
                expected="the coordinator in its place: it saves all that servers have.",
                hint='write {"servers": coordinator}.',
            )
        waiting = self._waiting.get(name)
        if optimizer.state is None and waiting is not None:
            waiting.add_to(snapshot)
            return
        for inner, variable, shape in _state_variables(name, optimizer):
            stored = variable.storage
            if variable.on_read:
                stored = _joined(stored, shape, variable.placement.mirrored)
            snapshot.add_array(inner, stored, "optimizer")

    # --- putting back ------------------------------------------------------------

    def put(self, arrays: dict[str, np.ndarray], content: dict[str, Any], where: str) -> None:
        """Puts a checkpoint's state back; arrays and numbers are replaced in the nest."""
        source = Content(arrays, content, where)
        leaves, structure = _flatten(self.nest)
        restored = [self._put_leaf(source, name, leaf) for name, leaf in leaves]
        source.refuse_the_rest()
        new = structure.unflatten(restored)
        # The dictionary that was given stays the one the program looks at.
        self.nest.update(new)

    def _put_leaf(self, source: Content, name: str, leaf: Any) -> Any:
        if isinstance(leaf, Variable):
            _put_variable(source, name, leaf)
        elif isinstance(leaf, Optimizer):
            self._put_optimizer(source, name, leaf)
        elif isinstance(leaf, np.random.Generator):
            leaf.bit_generator.state = source.value(name)
        elif _objects.is_object(leaf):
            taken = _objects.take([leaf])
            found = [
                source.array_like(f"{name}.{inner}", array)
                for inner, array in zip(taken.names(), taken.arrays, strict=True)
            ]
            taken.write(dict(enumerate(found)))
        elif _has_position(leaf):
            leaf.set_state(source.value(name))
        elif _is_foreign_variable(leaf):
            leaf.assign(source.array(name, leaf.shape))
        elif isinstance(leaf, NUMBERS):
            return source.value(name)
        elif _has_variables(leaf):
            for index, variable in enumerate(leaf.variables):
                variable.assign(source.array(f"{name}.{index}", variable.shape))
        else:
            return source.array_like(name, leaf)
        return leaf

    def _put_optimizer(self, source: Content, name: str, optimizer: Optimizer) -> None:
        saved = source.under(f"{name}.")
        if saved.is_empty():
            if optimizer.state is not None and jax.tree.leaves(optimizer.state):
                raise CheckpointError(
                    fact=f"{name!r} had not taken a step when {source.where} was saved, so its "
                    "state is not there; in the program it has one.",
                    expected="an optimizer that has taken no step, or a checkpoint with its state.",
                    hint="call optimizer.build(variables) before the first save.",
                )
            return
        if optimizer.state is None:
            self._waiting[name] = saved

        def fill() -> None:
            self._waiting.pop(name, None)
            for inner, variable, shape in _state_variables(name, optimizer):
                array = saved.array(inner, shape)
                if variable.on_read:
                    _put_shards(variable, array)
                else:
                    _put_stored(variable, array)
            saved.refuse_the_rest()

        optimizer.when_built(fill)


def _is_spread_over_workers(leaf: Any) -> bool:
    if isinstance(leaf, Variable):
        return leaf.on_read and leaf.placement.spans_processes
    if isinstance(leaf, Optimizer):
        return any(_is_spread_over_workers(one) for _, one, _ in _state_variables("", leaf))
    return is_split_over_processes(leaf)


# --- variables ----------------------------------------------------------------------


def _take_variable(snapshot: Snapshot, name: str, variable: Variable) -> None:
    if variable.home is not None:
        snapshot.add_array(name, variable.read(lend=False), "variable")
    elif not variable.on_read:
        snapshot.add_array(name, variable.storage, "variable")
    elif variable.aggregation is VariableAggregation.NONE:
        snapshot.add_array(name, variable.storage, "components")
    else:
        snapshot.add_array(name, variable.read(lend=False), "aggregate")


def _put_variable(source: Content, name: str, variable: Variable) -> None:
    if variable.home is not None:
        variable.assign(source.array(name, variable.shape))
        return
    if not variable.on_read:
        _put_stored(variable, source.array(name, variable.shape))
        return
    if variable.aggregation is not VariableAggregation.NONE:
        variable.assign(source.array(name, variable.shape))
        return
    count = variable.placement.replica_count
    components = source.array(name)
    if len(components) != count:
        raise CheckpointError(
            fact=f"variable {name!r} (ON_READ, aggregation NONE) was saved with "
            f"{len(components)} components and is now restored on {count} replicas.",
            expected="as many replicas, since the components have no single value.",
            hint="give it an aggregation, or leave it out of the state.",
        )
    variable.storage = variable.placement.stack(list(components))


def _put_stored(variable: Variable, array: np.ndarray) -> None:
    placement = variable.placement
    value = np.asarray(array).astype(variable.dtype, copy=False)
    variable.storage = (
        placement.lift(value) if placement.spans_processes else placement.mirror(value)
    )


# --- optimizer state, whole or in shards ----------------------------------------------


def _state_variables(
    name: str, optimizer: Optimizer
) -> list[tuple[str, Variable, tuple[int, ...]]]:
    """Lists an optimizer's variables with their names and the shapes they have as a whole."""
    found, _ = jax.tree_util.tree_flatten_with_path(
        optimizer.state, is_leaf=lambda leaf: isinstance(leaf, Variable)
    )
    return [
        (f"{name}.{jax.tree_util.keystr(path, simple=True, separator='.')}", leaf, shape)
        for (path, leaf), shape in zip(found, optimizer.state_shapes, strict=True)
        if isinstance(leaf, Variable)
    ]


@functools.partial(jax.jit, static_argnames=("shape", "sharding"))
def _joined(rows: Any, shape: tuple[int, ...], sharding: Any) -> Any:
    """Puts the shards of all replicas together: what an undivided optimizer would hold."""
    whole = rows.reshape(-1)[: math.prod(shape)].reshape(shape)
    return jax.lax.with_sharding_constraint(whole, sharding)


def _put_shards(variable: Variable, array: np.ndarray) -> None:
    placement = variable.placement
    count = placement.replica_count
    rows = np.zeros(shard_length(array.shape, count) * count, variable.dtype)
    rows[: array.size] = array.reshape(-1)
    variable.storage = placement.stack(list(rows.reshape(count, -1)))
