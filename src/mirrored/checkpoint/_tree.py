"""What is saved: a nest of variables, optimizers, arrays, datasets, as arrays and JSON.

Owns how each kind of leaf is taken down and put back, on whatever number of replicas
and workers. Where it is kept is in ``_storage``.
"""

from __future__ import annotations

import base64
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from mirrored import _compat
from mirrored._errors import CheckpointError
from mirrored._optimizer import Optimizer
from mirrored._types import VariableAggregation
from mirrored._variable import Variable

_NUMBERS = (bool, int, float, str, type(None))


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
        isinstance(leaf, (Variable, Optimizer, np.random.Generator))
        or _has_position(leaf)
        or _is_foreign_variable(leaf)
        or (not isinstance(leaf, (dict, list, tuple)) and _has_variables(leaf))
    )


def _flatten(nest: Any) -> tuple[list[tuple[str, Any]], Any]:
    found, structure = jax.tree_util.tree_flatten_with_path(
        nest, is_leaf=lambda leaf: leaf is None or _is_leaf(leaf)
    )
    return [
        (jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in found
    ], structure


@final
class Snapshot:
    """The state at one step: arrays that no later step changes, and JSON values."""

    def __init__(self) -> None:
        self.arrays: dict[str, Any] = {}
        self.values: dict[str, Any] = {}
        self.kinds: dict[str, str] = {}

    def content(self) -> dict[str, Any]:
        """What goes into the manifest beside the arrays."""
        return {"values": self.values, "kinds": self.kinds}

    def to_host(self) -> dict[str, np.ndarray]:
        """Fetches the arrays; takes a while, and needs no other worker."""
        return {name: np.asarray(array) for name, array in self.arrays.items()}


@final
class State:
    """A nest of things to save, and how each of them is put back."""

    def __init__(self, nest: dict[str, Any]) -> None:
        self.nest = nest
        # Optimizers whose variables do not exist yet, with what they will be given.
        self._waiting: dict[str, Snapshot] = {}

    def needs_all_workers(self) -> bool:
        """Says whether taking it down combines values of several workers."""
        return any(
            isinstance(leaf, Variable) and leaf.on_read and leaf.placement.spans_processes
            for _, leaf in _flatten(self.nest)[0]
        )

    # --- taking down -------------------------------------------------------------

    def take(self) -> Snapshot:
        """Takes the state down as it is now."""
        snapshot = Snapshot()
        for name, leaf in _flatten(self.nest)[0]:
            self._take_leaf(snapshot, name, leaf)
        local = {
            name: array for name, array in snapshot.arrays.items() if isinstance(array, jax.Array)
        }
        # Copies: the next step donates what they are taken from.
        snapshot.arrays |= _copied(local)
        return snapshot

    def _take_leaf(self, snapshot: Snapshot, name: str, leaf: Any) -> None:
        if isinstance(leaf, Variable):
            self._take_variable(snapshot, name, leaf)
        elif isinstance(leaf, Optimizer):
            self._take_optimizer(snapshot, name, leaf)
        elif isinstance(leaf, np.random.Generator):
            snapshot.kinds[name] = "generator"
            snapshot.values[name] = _to_json(leaf.bit_generator.state)
        elif _has_position(leaf):
            snapshot.kinds[name] = "position"
            snapshot.values[name] = _to_json(leaf.get_state())
        elif _is_foreign_variable(leaf):
            _take_array(snapshot, name, leaf.value, "variable")
        elif isinstance(leaf, _NUMBERS):
            snapshot.kinds[name] = "value"
            snapshot.values[name] = leaf
        elif _has_variables(leaf):
            for index, variable in enumerate(leaf.variables):
                _take_array(snapshot, f"{name}.{index}", variable.value, "variable")
        elif isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
            _take_array(snapshot, name, leaf, "array")
        else:
            raise CheckpointError(
                fact=f"{name!r} is {leaf!r} ({type(leaf).__name__}), which cannot be saved.",
                expected="Variables, Optimizers, arrays, numbers, and objects with get_state and "
                "set_state, in dictionaries, lists and other pytrees.",
                hint="save the arrays it holds.",
            )

    def _take_variable(self, snapshot: Snapshot, name: str, variable: Variable) -> None:
        if not variable.on_read:
            _take_array(snapshot, name, variable.storage, "variable")
        elif variable.aggregation is VariableAggregation.NONE:
            whole = variable.storage
            if variable.placement.spans_processes:
                whole = jax.jit(jnp.copy, out_shardings=variable.placement.mirrored)(whole)
            _take_array(snapshot, name, whole, "components")
        else:
            _take_array(snapshot, name, variable.read(lend=False), "aggregate")

    def _take_optimizer(self, snapshot: Snapshot, name: str, optimizer: Optimizer) -> None:
        waiting = self._waiting.get(name)
        if optimizer.state is None and waiting is not None:
            snapshot.arrays |= waiting.arrays
            snapshot.kinds |= waiting.kinds
            return
        for inner, variable in _optimizer_variables(name, optimizer):
            _take_array(snapshot, inner, variable.storage, "optimizer")
        snapshot.kinds[name] = "optimizer"

    # --- putting back ------------------------------------------------------------

    def put(self, arrays: dict[str, np.ndarray], content: dict[str, Any], where: str) -> None:
        """Puts a checkpoint's state back; arrays and numbers are replaced in the nest."""
        put = _Put(arrays, content, where)
        leaves, structure = _flatten(self.nest)
        restored = [self._put_leaf(put, name, leaf) for name, leaf in leaves]
        put.refuse_the_rest()
        new = structure.unflatten(restored)
        # The dictionary that was given stays the one the program looks at.
        self.nest.update(new)

    def _put_leaf(self, put: _Put, name: str, leaf: Any) -> Any:
        if isinstance(leaf, Variable):
            _put_variable(put, name, leaf)
        elif isinstance(leaf, Optimizer):
            self._put_optimizer(put, name, leaf)
        elif isinstance(leaf, np.random.Generator):
            leaf.bit_generator.state = _from_json(put.value(name))
        elif _has_position(leaf):
            leaf.set_state(_from_json(put.value(name)))
        elif _is_foreign_variable(leaf):
            leaf.assign(put.array(name, leaf.shape))
        elif isinstance(leaf, _NUMBERS):
            return put.value(name)
        elif _has_variables(leaf):
            for index, variable in enumerate(leaf.variables):
                variable.assign(put.array(f"{name}.{index}", variable.shape))
        else:
            return _put_array(put, name, leaf)
        return leaf

    def _put_optimizer(self, put: _Put, name: str, optimizer: Optimizer) -> None:
        saved = put.under(f"{name}.")
        put.used.add(name)
        if not saved.arrays:
            return
        if optimizer.state is None:
            self._waiting[name] = saved

        def fill() -> None:
            self._waiting.pop(name, None)
            part = _Put(saved.arrays, saved.content(), put.where)
            for inner, variable in _optimizer_variables(name, optimizer):
                _put_stored(variable, part.array(inner, variable.shape))
            part.refuse_the_rest()

        optimizer.when_built(fill)


def _optimizer_variables(name: str, optimizer: Optimizer) -> list[tuple[str, Variable]]:
    found, _ = jax.tree_util.tree_flatten_with_path(
        optimizer.state, is_leaf=lambda leaf: isinstance(leaf, Variable)
    )
    return [
        (f"{name}.{jax.tree_util.keystr(path, simple=True, separator='.')}", leaf)
        for path, leaf in found
        if isinstance(leaf, Variable)
    ]


def _take_array(snapshot: Snapshot, name: str, array: Any, kind: str) -> None:
    if name in snapshot.arrays:
        raise CheckpointError(
            fact=f"two things to save are both called {name!r}.",
            expected="keys that stay different when joined by dots.",
            hint="rename one of the keys.",
        )
    snapshot.kinds[name] = kind
    if _compat.is_typed_key(array):
        snapshot.kinds[name] = f"key:{jax.random.key_impl(array)}"
        array = jax.random.key_data(array)
    if isinstance(array, jax.Array):
        if not array.is_fully_replicated and not array.is_fully_addressable:
            raise CheckpointError(
                fact=f"{name!r} is split over devices ({array.sharding}).",
                expected="arrays that are the same on all workers.",
                hint="gather it first, or keep it in a Variable.",
            )
        replicated = array.is_fully_replicated
        array = array.addressable_data(0) if replicated else np.array(array)
    else:
        array = np.array(array)
    snapshot.arrays[name] = array


@jax.jit
def _copy_all(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: jnp.copy(array) for name, array in arrays.items()}


def _copied(arrays: dict[str, Any]) -> dict[str, Any]:
    """Copies arrays of this process's devices, one program for each device."""
    by_device: dict[Any, dict[str, Any]] = {}
    for name, array in arrays.items():
        by_device.setdefault(next(iter(array.devices())), {})[name] = array
    copies: dict[str, Any] = {}
    for group in by_device.values():
        copies |= _copy_all(group)
    return copies


@final
class _Put:
    """A checkpoint's content while it is put back; keeps account of what was used."""

    def __init__(self, arrays: dict[str, Any], content: dict[str, Any], where: str) -> None:
        self._arrays = arrays
        self._values = content["values"]
        self.kinds = content["kinds"]
        self.where = where
        self.used: set[str] = set()

    def array(self, name: str, shape: Any = None) -> np.ndarray:
        if name not in self._arrays:
            raise self._missing(name)
        self.used.add(name)
        array = self._arrays[name]
        if shape is not None and tuple(shape) != array.shape:
            raise CheckpointError(
                fact=f"{name!r} has shape {tuple(shape)} in the program and {array.shape} in "
                f"{self.where}.",
                expected="the model that was saved.",
                hint="restore into the same model, or start in another directory.",
            )
        return array

    def value(self, name: str) -> Any:
        if name not in self._values:
            raise self._missing(name)
        self.used.add(name)
        return self._values[name]

    def under(self, prefix: str) -> Snapshot:
        part = Snapshot()
        for name, array in self._arrays.items():
            if name.startswith(prefix):
                part.arrays[name] = array
                part.kinds[name] = self.kinds[name]
                self.used.add(name)
        part.kinds[prefix.removesuffix(".")] = "optimizer"
        return part

    def _missing(self, name: str) -> CheckpointError:
        saved = sorted({*self._arrays, *self._values})
        return CheckpointError(
            fact=f"{self.where} does not hold {name!r}; it holds {saved[:20]}"
            f"{' and more' if len(saved) > 20 else ''}.",
            expected="everything that the program wants restored.",
            hint="save and restore the same keys; start in another directory for another model.",
        )

    def refuse_the_rest(self) -> None:
        left = sorted({*self._arrays, *self._values} - self.used)
        if left:
            raise CheckpointError(
                fact=f"{self.where} also holds {left[:20]}, which the program does not ask for.",
                expected="the keys and variables that were saved.",
                hint="add them to the state, or start in another directory for another model.",
            )


def _put_variable(put: _Put, name: str, variable: Variable) -> None:
    if not variable.on_read:
        _put_stored(variable, put.array(name, variable.shape))
        return
    if variable.aggregation is not VariableAggregation.NONE:
        variable.assign(put.array(name, variable.shape))
        return
    count = variable.placement.replica_count
    components = put.array(name)
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


def _put_array(put: _Put, name: str, leaf: Any) -> Any:
    kind = put.kinds.get(name, "")
    array = put.array(name)
    if kind.startswith("key:"):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=kind.removeprefix("key:"))
    if not isinstance(leaf, jax.Array):
        return array if isinstance(leaf, np.ndarray) else array[()]
    if leaf.is_fully_addressable:
        return jax.device_put(array, leaf.sharding)
    shards = [jax.device_put(array, device) for device in leaf.sharding.addressable_devices]
    return jax.make_array_from_single_device_arrays(array.shape, leaf.sharding, shards)


def _to_json(value: Any) -> Any:
    """Makes JSON of what get_state returns: bytes, arrays and tuples included."""
    if isinstance(value, bytes):
        return {"__bytes__": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray):
        content = base64.b64encode(value.tobytes()).decode()
        return {"__array__": content, "dtype": str(value.dtype), "shape": list(value.shape)}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {str(key): _to_json(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return {"__tuple__": [_to_json(item) for item in value]}
    if isinstance(value, list):
        return [_to_json(item) for item in value]
    if isinstance(value, _NUMBERS):
        return value
    raise CheckpointError(
        fact=f"get_state returned {value!r} ({type(value).__name__}).",
        expected="numbers, strings, bytes and arrays in dictionaries, lists and tuples.",
        hint="let it return what JSON can hold.",
    )


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "__bytes__" in value:
        return base64.b64decode(value["__bytes__"])
    if "__array__" in value:
        content = np.frombuffer(base64.b64decode(value["__array__"]), value["dtype"])
        return content.reshape(value["shape"]).copy()
    if "__tuple__" in value:
        return tuple(_from_json(item) for item in value["__tuple__"])
    return {key: _from_json(item) for key, item in value.items()}
