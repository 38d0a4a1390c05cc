"""What a checkpoint holds: arrays and JSON values by name, taken down and read again.

Owns the account of names (none twice, none missing, none left over), copies that no
later step changes, and how values are written as JSON. Which names the variables of a
program have is in ``_tree``.
"""

from __future__ import annotations

import base64
import functools
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mirrored import _compat
from mirrored._errors import CheckpointError

NUMBERS = (bool, int, float, str, type(None))


def is_split_over_processes(array: Any) -> bool:
    """Says whether no process can see the whole of an array."""
    return isinstance(array, jax.Array) and not (
        array.is_fully_replicated or array.is_fully_addressable
    )


@final
class Snapshot:
    """The state at one step: arrays that no later step changes, and JSON values."""

    def __init__(self) -> None:
        self.arrays: dict[str, Any] = {}
        self.values: dict[str, Any] = {}
        self.kinds: dict[str, str] = {}

    def add_array(self, name: str, array: Any, kind: str) -> None:
        """Takes an array down; of random keys, their data."""
        if name in self.arrays:
            raise CheckpointError(
                fact=f"two things to save are both called {name!r}.",
                expected="keys that stay different when joined by dots.",
                hint="rename one of the keys.",
            )
        self.kinds[name] = kind
        if _compat.is_typed_key(array):
            self.kinds[name] = f"key:{jax.random.key_impl(array)}"
            array = jax.random.key_data(array)
        self.arrays[name] = array if isinstance(array, jax.Array) else np.array(array)

    def add_value(self, name: str, value: Any, kind: str) -> None:
        """Takes down what JSON can hold."""
        self.kinds[name] = kind
        self.values[name] = to_json(value)

    def keep(self) -> None:
        """Copies the arrays, which the next step will donate; all workers gather split ones."""
        on_device = {name: a for name, a in self.arrays.items() if isinstance(a, jax.Array)}
        split = {name: a for name, a in on_device.items() if is_split_over_processes(a)}
        on_device |= {name: whole.addressable_data(0) for name, whole in _gathered(split).items()}
        for name, array in on_device.items():
            if array.is_fully_replicated:
                on_device[name] = array.addressable_data(0)
            elif array.is_fully_addressable:
                self.arrays[name] = np.array(array)
        one_device = {name: a for name, a in on_device.items() if len(a.devices()) == 1}
        self.arrays |= _copied(one_device)

    def content(self) -> dict[str, Any]:
        """What goes into the manifest beside the arrays."""
        return {"values": self.values, "kinds": self.kinds}

    def to_host(self) -> dict[str, np.ndarray]:
        """Fetches the arrays; takes a while, and needs no other worker."""
        return {name: np.asarray(array) for name, array in self.arrays.items()}


def _gathered(arrays: dict[str, Any]) -> dict[str, Any]:
    """Makes arrays that are split over processes whole on each of them."""
    if not arrays:
        return {}
    return {
        name: _whole(array, NamedSharding(array.sharding.mesh, PartitionSpec()))
        for name, array in arrays.items()
    }


@functools.partial(jax.jit, static_argnames="sharding")
def _whole(array: Any, sharding: Any) -> Any:
    return jax.lax.with_sharding_constraint(array, sharding)


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
class Content:
    """A checkpoint's content while it is put back; keeps account of what was used."""

    def __init__(self, arrays: dict[str, Any], content: dict[str, Any], where: str) -> None:
        self._arrays = arrays
        self._values = content["values"]
        self._kinds = content["kinds"]
        self.where = where
        self._used: set[str] = set()

    def array(self, name: str, shape: Any = None) -> np.ndarray:
        """Returns an array; with ``shape`` only if it has that one."""
        if name not in self._arrays:
            raise self._missing(name)
        self._used.add(name)
        array = self._arrays[name]
        if shape is not None and tuple(shape) != array.shape:
            raise CheckpointError(
                fact=f"{name!r} has shape {tuple(shape)} in the program and {array.shape} in "
                f"{self.where}.",
                expected="the model that was saved.",
                hint="restore into the same model, or start in another directory.",
            )
        return array

    def array_like(self, name: str, leaf: Any) -> Any:
        """Returns an array as the program has it: where ``leaf`` is, keys as keys."""
        kind = self._kinds.get(name, "")
        if kind.startswith("key:"):
            data = jnp.asarray(self.array(name))
            return jax.random.wrap_key_data(data, impl=kind.removeprefix("key:"))
        if not isinstance(leaf, jax.Array):
            array = self.array(name)
            return array if isinstance(leaf, np.ndarray) else array[()]
        array = self.array(name, leaf.shape)
        if leaf.is_fully_addressable:
            return jax.device_put(array, leaf.sharding)
        return jax.make_array_from_callback(array.shape, leaf.sharding, array.__getitem__)

    def value(self, name: str) -> Any:
        """Returns a JSON value."""
        if name not in self._values:
            raise self._missing(name)
        self._used.add(name)
        return from_json(self._values[name])

    def under(self, prefix: str) -> Content:
        """Takes the part whose names begin with ``prefix``; it is accounted for by itself."""
        names = [name for name in self._arrays if name.startswith(prefix)]
        self._used.update(names)
        kinds = {name: self._kinds[name] for name in names}
        arrays = {name: self._arrays[name] for name in names}
        return Content(arrays, {"values": {}, "kinds": kinds}, self.where)

    def add_to(self, snapshot: Snapshot) -> None:
        """Takes the arrays down again as they are."""
        snapshot.arrays |= self._arrays
        snapshot.kinds |= self._kinds

    def is_empty(self) -> bool:
        """Says whether there is nothing to put back."""
        return not self._arrays

    def _missing(self, name: str) -> CheckpointError:
        saved = sorted({*self._arrays, *self._values})
        return CheckpointError(
            fact=f"{self.where} does not hold {name!r}; it holds {saved[:20]}"
            f"{' and more' if len(saved) > 20 else ''}.",
            expected="everything that the program wants restored.",
            hint="save and restore the same keys; start in another directory for another model.",
        )

    def refuse_the_rest(self) -> None:
        """Raises if the checkpoint holds what nobody asked for."""
        left = sorted({*self._arrays, *self._values} - self._used)
        if left:
            raise CheckpointError(
                fact=f"{self.where} also holds {left[:20]}, which the program does not ask for.",
                expected="the keys and variables that were saved.",
                hint="add them to the state, or start in another directory for another model.",
            )


def to_json(value: Any) -> Any:
    """Makes JSON of what get_state returns: bytes, arrays and tuples included."""
    if isinstance(value, bytes):
        return {"__bytes__": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray):
        content = base64.b64encode(value.tobytes()).decode()
        return {"__array__": content, "dtype": str(value.dtype), "shape": list(value.shape)}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return {"__tuple__": [to_json(item) for item in value]}
    if isinstance(value, list):
        return [to_json(item) for item in value]
    if isinstance(value, NUMBERS):
        return value
    raise CheckpointError(
        fact=f"get_state returned {value!r} ({type(value).__name__}).",
        expected="numbers, strings, bytes and arrays in dictionaries, lists and tuples.",
        hint="let it return what JSON can hold.",
    )


def from_json(value: Any) -> Any:
    """Reads what ``to_json`` made."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "__bytes__" in value:
        return base64.b64decode(value["__bytes__"])
    if "__array__" in value:
        content = np.frombuffer(base64.b64decode(value["__array__"]), value["dtype"])
        return content.reshape(value["shape"]).copy()
    if "__tuple__" in value:
        return tuple(from_json(item) for item in value["__tuple__"])
    return {key: from_json(item) for key, item in value.items()}
