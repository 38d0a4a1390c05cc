"""NNX objects at the door of a program, inside it, and written back at its end.

Owns taking modules apart into arrays, remembering how, and what each changed variable
becomes by its policy. It uses NNX's public graph functions only.
"""

from __future__ import annotations

import collections
import functools
import sys
import weakref
from collections.abc import Hashable
from typing import Any, final

import jax
import jax.numpy as jnp
from flax import nnx

from mirrored import _context, _objects
from mirrored._claims import Claim
from mirrored._collectives import Communicator
from mirrored._errors import ContextError, PaddingError
from mirrored._replica import ReplicaContext
from mirrored._types import OPTIMIZER_STATE, OTHER_STATE, PARAMETERS
from mirrored.nnx._batch_norm import BatchNorm
from mirrored.nnx._policy import Policy, policy_of, when_changed

_MOST_CACHED = 64


def argument_adapter() -> _objects.Adapter:
    """Returns what the core needs to know about NNX objects."""
    return _Adapter()


@final
class _Adapter(_objects.Adapter):
    def owns(self, kind: type) -> bool:
        return issubclass(kind, (nnx.Pytree, nnx.Variable))

    def take(self, objects: tuple[Any, ...]) -> _objects.Taken:
        key = tuple(map(id, objects))
        cached = _cache.get(key)
        if cached is not None and cached.is_current(objects):
            return cached
        taken = _TakenObjects(objects, key)
        if len(_cache) >= _MOST_CACHED:
            _cache.pop(next(iter(_cache)))
        if taken.can_be_cached:
            _cache[key] = taken
        return taken


_cache: dict[tuple[int, ...], _TakenObjects] = {}


@final
class _Shape:
    """Everything about objects that decides their program; compared by identity."""


_shapes: dict[Any, _Shape] = {}


def _forget() -> None:
    _cache.clear()
    _shapes.clear()


when_changed(_forget)


@final
class _TakenObjects(_objects.Taken):
    """NNX objects as a graph definition and a list of arrays."""

    def __init__(self, objects: tuple[Any, ...], key: tuple[int, ...]) -> None:
        self.graphdef, state = nnx.split(objects)
        flat = nnx.to_flat_state(state)
        leaves, self._structure = jax.tree.flatten(state)
        # A state that was restored may hold NumPy arrays, a new variable a Python number.
        self.arrays = [
            leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf) for leaf in leaves
        ]
        # For each array: where it is, and the variable that holds it (None for an array
        # that stands in a module without a variable).
        self.places: list[tuple[Any, nnx.Variable | None]] = []
        for path, part in flat:
            count = len(jax.tree.leaves(part))
            self.places += [(path, part if isinstance(part, nnx.Variable) else None)] * count
        self._one_each = all(
            variable is None or isinstance(variable.get_raw_value(), jax.Array)
            for _, variable in self.places
        )
        self._watched: list[tuple[Any, list[int], list[Any]]] = []
        # A Variable by itself, as nnx.State holds them, cannot be held weakly.
        passing = any(isinstance(thing, nnx.Variable) for thing in objects)
        self.can_be_cached = self._one_each and not passing and self._watch(objects)
        if self.can_be_cached:
            # Bound here: modules may be gone when the interpreter ends.
            forget = _cache.pop
            self._held = [weakref.ref(thing, lambda _: forget(key, None)) for thing in objects]
        avals = tuple((array.shape, array.dtype) for array in self.arrays)
        full = (self.graphdef, self._structure, avals)
        self.signature: Hashable = _shapes.setdefault(full, _Shape())

    def _watch(self, thing: Any) -> bool:
        """Notes the parts of every container; False if some could change unseen."""
        if isinstance(thing, (nnx.Variable, jax.Array)):
            return True
        if isinstance(thing, nnx.Pytree):
            container: Any = vars(thing)
        elif isinstance(thing, nnx.State):
            container = thing.raw_mapping
        elif isinstance(thing, (dict, list)):
            container = thing
        elif isinstance(thing, tuple):
            return all([self._watch(part) for part in thing])
        else:
            # What is no pytree, or an empty one (None, say), is a static attribute.
            return jax.tree_util.all_leaves([thing]) or not jax.tree.leaves(thing)
        parts = list(container if isinstance(container, list) else container.values())
        if any(container is other for other, _, _ in self._watched):
            return True
        self._watched.append((container, list(map(id, parts)), parts))
        return all([self._watch(part) for part in parts])

    def is_current(self, objects: tuple[Any, ...]) -> bool:
        """Reads the objects' arrays; False if the objects are not built as they were."""
        if any(held() is not thing for held, thing in zip(self._held, objects, strict=True)):
            return False
        for container, identities, _ in self._watched:
            parts = container if isinstance(container, list) else container.values()
            if list(map(id, parts)) != identities:
                return False
        arrays = self.arrays
        for number, (_, variable) in enumerate(self.places):
            if variable is None:
                continue
            value = variable.get_raw_value()
            old = arrays[number]
            if value is not old:
                if not isinstance(value, jax.Array):
                    return False
                if value.shape != old.shape or value.dtype != old.dtype:
                    return False
                arrays[number] = value
        return True

    def names(self) -> list[str]:
        paths = [_shown(path) for path, _ in self.places]
        counts, numbers = collections.Counter(paths), collections.Counter[str]()
        named = []
        for path in paths:
            # A variable that holds a nest has several arrays in one place.
            named.append(path if counts[path] == 1 else f"{path}.{numbers[path]}")
            numbers[path] += 1
        return named

    def roles(self) -> list[str]:
        kinds = ((nnx.Param, PARAMETERS), (nnx.optimizer.OptState, OPTIMIZER_STATE))
        return [
            next((role for kind, role in kinds if isinstance(variable, kind)), OTHER_STATE)
            for _, variable in self.places
        ]

    def inside(self, arrays: list[Any], replica: ReplicaContext | None) -> _objects.Inner:
        return _InnerObjects(self, arrays, replica)

    def merge(self, arrays: list[Any]) -> tuple[Any, ...]:
        """Makes new objects of the same structure."""
        return nnx.merge(self.graphdef, self._structure.unflatten(arrays))

    def write(self, arrays: dict[int, Any]) -> None:
        for number, array in arrays.items():
            self.arrays[number] = array
            variable = self.places[number][1]
            if self._one_each and variable is not None:
                variable.set_raw_value(array)
        if not self._one_each:
            self._write_nested()

    def _write_nested(self) -> None:
        """Writes variables that hold a nest of arrays."""
        left = iter(self.arrays)
        written: set[int] = set()
        for _, variable in self.places:
            if variable is None:
                next(left)
            elif id(variable) not in written:
                written.add(id(variable))
                leaves, structure = jax.tree.flatten(variable.get_raw_value())
                variable.set_raw_value(structure.unflatten([next(left) for _ in leaves]))

    def is_shared(self, number: int) -> bool:
        # Beside the module's variable and the list here, nobody should hold it: an array
        # that the caller kept from an earlier step must not be donated away.
        return sys.getrefcount(self.arrays[number]) > _OWN_REFERENCES


@final
class _Held:
    """Holds an object as _TakenObjects and a variable do, to count such references."""

    def __init__(self) -> None:
        self.arrays = [object()]
        self._raw_value = self.arrays[0]

    def count(self, number: int) -> int:
        """Counts as ``is_shared`` does."""
        return sys.getrefcount(self.arrays[number])


_OWN_REFERENCES = _Held().count(0)


@final
class _InnerObjects(_objects.Inner):
    """NNX objects inside one trace."""

    def __init__(
        self, taken: _TakenObjects, arrays: list[Any], replica: ReplicaContext | None
    ) -> None:
        self._taken = taken
        self._policies = [
            Policy.AGREE if variable is None else policy_of(path[1:], variable)
            for path, variable in taken.places
        ]
        self._entered = list(arrays)
        if replica is not None:
            first = replica.replica_id == 0
            for number, policy in enumerate(self._policies):
                if policy is Policy.SUM:
                    # What was there before counts once.
                    value = self._entered[number]
                    self._entered[number] = jnp.where(first, value, jnp.zeros_like(value))
        self.objects = taken.merge(self._entered)
        self._cells = [] if replica is None else _with_own_carries(self.objects)

    def changed(self) -> dict[int, Any]:
        for cell in self._cells:
            object.__setattr__(cell, "__class__", type(cell).__base__)
        self._cells = []
        graphdef, state = nnx.split(self.objects)
        if graphdef != self._taken.graphdef:
            self._refuse_structure(state)
        arrays = jax.tree.leaves(state)
        return {
            number: new
            for number, (new, old) in enumerate(zip(arrays, self._entered, strict=True))
            if new is not old
        }

    def _refuse_structure(self, state: Any) -> None:
        before = {path for path, _ in self._taken.places}
        after = {path for path, _ in nnx.to_flat_state(state)}
        parts = [f"{_shown(path)} was added" for path in sorted(after - before, key=str)]
        parts += [f"{_shown(path)} was removed" for path in sorted(before - after, key=str)]
        told = "; ".join(parts) or "a Python attribute was changed"
        raise ContextError(
            fact=f"the structure of an NNX object changed inside a compiled function: {told}.",
            expected="a compiled function that changes the values of variables only.",
            hint="call model.train() and model.eval() outside; take sown values off again with "
            "nnx.pop(model, nnx.Intermediate) and return them.",
        )

    def claims(self, replica: ReplicaContext) -> dict[int, Claim]:
        changed = self.changed()
        if replica.rows is not None and replica.rows.padded:
            self._refuse_mean_of_means(changed)
        reduced = {**changed, **self._reduced(changed, replica)}
        return {
            number: self._claim(number, value, changed[number]) for number, value in reduced.items()
        }

    def _refuse_mean_of_means(self, changed: dict[int, Any]) -> None:
        """Refuses Flax's batch norm over an axis where replicas have different numbers of rows."""
        places = {self._taken.places[number][0] for number in changed}
        for path, node in nnx.iter_graph(self.objects):
            if not isinstance(node, nnx.BatchNorm) or isinstance(node, BatchNorm):
                continue
            if node.axis_name is not None and (*path, "mean") in places:
                raise PaddingError(
                    fact=f"nnx.BatchNorm {_shown(path)!r} with axis_name={node.axis_name!r} was "
                    "given a batch with padded rows: it averages the replicas' means as if each "
                    "had the same number of rows.",
                    expected="statistics in which each real row counts once.",
                    hint="use mirrored.nnx.BatchNorm, without axis_name, or drop the remainder "
                    "with remainder='drop'.",
                )

    def _reduced(self, changed: dict[int, Any], replica: ReplicaContext) -> dict[int, Any]:
        """Reduces what differs by type, all in one collective."""
        communicator = replica.communicator
        own = {
            number: value
            for number, value in changed.items()
            if self._policies[number] is Policy.SUM
            or (self._policies[number] is not Policy.AGREE and communicator.is_own(value))
        }
        merged = self._merged_welford(own, communicator)
        own = {number: value for number, value in own.items() if number not in merged}
        if not own:
            return merged
        rows = replica.rows
        weight = 1 if rows is None or not rows.padded else rows.real_count()
        parts = []
        for number, value in own.items():
            policy = self._policies[number]
            if policy is Policy.MEAN:
                # A replica without a real row has nothing to say, not even NaN.
                value = jnp.where(weight == 0, jnp.zeros_like(value), value * weight)
            elif policy is Policy.FIRST:
                value = jnp.where(communicator.replica_id == 0, value, jnp.zeros_like(value))
            parts.append(value)
        count = jnp.asarray(weight, jnp.float32)
        *totals, total_weight = communicator.sum([*parts, count])
        results = merged
        for (number, value), total in zip(own.items(), totals, strict=True):
            if self._policies[number] is Policy.MEAN:
                total = total / total_weight
            results[number] = total.astype(value.dtype)
        return results

    def _merged_welford(self, own: dict[int, Any], communicator: Communicator) -> dict[int, Any]:
        """Merges means and squared deviations, which are no sums."""
        numbers = {path: number for number, (path, _) in enumerate(self._taken.places)}
        merged: dict[int, Any] = {}
        for path, node in nnx.iter_graph(self.objects):
            if not isinstance(node, nnx.metrics.Welford):
                continue
            places = [numbers[(*path, name)] for name in ("count", "mean", "m2")]
            if self._policies[places[0]] is not Policy.SUM or not set(places) <= set(own):
                continue
            count, mean, squares = (own[place] for place in places)
            # A replica that has seen nothing may hold NaN.
            mean = jnp.where(count == 0, 0, mean)
            squares = jnp.where(count == 0, 0, squares)
            total, weighted = communicator.sum([count, count * mean])
            whole = weighted / jnp.maximum(total, 1)
            (deviations,) = communicator.sum([squares + count * (mean - whole) ** 2])
            merged.update(zip(places, (total, whole, deviations), strict=True))
        return merged

    def _claim(self, number: int, value: Any, basis: Any) -> Claim:
        path, variable = self._taken.places[number]
        kind = type(variable).__name__ if variable is not None else "array"
        label = f"{kind} {_shown(path)!r} of argument {type(self.objects[path[0]]).__name__}"
        if self._policies[number] is Policy.AGREE:
            return Claim(value, label, _hint(variable))
        return Claim(
            value,
            label,
            basis=basis,
            padding_hint="pass the mask mirrored.get_replica_context().example_weights on: "
            "metrics.update(mask=..., ...), batch_norm(x, mask=...); or drop the remainder with "
            "remainder='drop'.",
        )


def _with_own_carries(objects: Any) -> list[Any]:
    """Lets recurrent cells start from a carry of this replica, which the data makes it.

    A scan wants one type from the start, and cells start from zeros, which are the same on
    all replicas.
    """
    cells = [node for _, node in nnx.iter_graph(objects) if isinstance(node, nnx.RNNCellBase)]
    for cell in cells:
        object.__setattr__(cell, "__class__", _with_own_carry(type(cell)))
    return cells


@functools.cache
def _with_own_carry(kind: Any) -> Any:
    def initialize_carry(self: Any, *args: Any, **kwargs: Any) -> Any:
        carry = kind.initialize_carry(self, *args, **kwargs)
        replica = _context.current().replica
        return carry if replica is None else replica.own(carry)

    return type(kind)(kind.__name__, (kind,), {"initialize_carry": initialize_carry})


def _hint(variable: Any) -> str:
    if isinstance(variable, (nnx.Param, nnx.optimizer.OptState)):
        return (
            "the gradients were not reduced: use mirrored.nnx.Optimizer, or reduce them first "
            'with mirrored.get_replica_context().all_reduce("mean", gradients).'
        )
    return (
        "say how replicas' values become one: mirrored.nnx.set_policy("
        f'{type(variable).__name__}, "mean"), or reduce it first with ctx.all_reduce.'
    )


def _shown(path: Any) -> str:
    return ".".join(map(str, path[1:]))
