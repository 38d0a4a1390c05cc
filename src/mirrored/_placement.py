"""From a list of devices to a mesh and the shardings arrays live under.

A Placement is what the lower layers are given instead of a strategy: which
devices, in which order, and where a mirrored or a per-replica array belongs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, final

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mirrored import _compat, _workers
from mirrored._errors import ArgumentTypeError, DeviceError, VariableError

# A jax.Device; type checkers see that name as a variable, not as a type.
Device = Any


@final
class Placement:
    """The devices of a strategy as a mesh with one axis, ``replica``.

    Args:
      devices: one for each replica.
      owner_name: whose they are, for messages.
      only_compiles: whether nothing can live on them, since they are there to compile
        for: what would be an array is its shape then.
    """

    def __init__(
        self, devices: Sequence[Device], owner_name: str, *, only_compiles: bool = False
    ) -> None:
        self.devices = tuple(devices)
        self.owner_name = owner_name
        self.only_compiles = only_compiles
        self.mesh = _compat.make_mesh(np.array(self.devices, dtype=object))
        self.replica_count = len(self.devices)
        self.mirrored = NamedSharding(self.mesh, PartitionSpec())
        self.split = NamedSharding(self.mesh, PartitionSpec(_compat.REPLICA_AXIS))
        self.device_set = frozenset(self.devices)
        process = self.devices[0].client.process_index()
        self.local_replica_ids = tuple(
            index for index, device in enumerate(self.devices) if device.process_index == process
        )

    def describe(self) -> str:
        """Names the owner and its devices, for error messages."""
        shown = ", ".join(device_name(device) for device in self.devices[:4])
        more = ", ..." if self.replica_count > 4 else ""
        noun = "device" if self.replica_count == 1 else "devices"
        return f"{self.owner_name} ({self.replica_count} {noun}: {shown}{more})"

    @property
    def spans_processes(self) -> bool:
        """Whether some of the devices belong to other processes."""
        return len(self.local_replica_ids) < self.replica_count

    @property
    def sends_one_by_one(self) -> bool:
        """Whether each array of a combined collective is sent by itself (Gloo, between CPUs)."""
        return self.spans_processes and self.devices[0].platform == "cpu"

    def mirror(self, value: Any, what: str = "a value", *, must_agree: bool = False) -> jax.Array:
        """Puts an equal copy of ``value`` on every device; never aliases the input.

        Over several processes worker 0's value is taken; with ``must_agree`` another
        worker that has another value raises.
        """
        if self.only_compiles:
            return self.shape_of(value, self.mirrored)
        if isinstance(value, jax.Array) and value.sharding == self.mirrored:
            return jax.numpy.copy(value)
        if self.spans_processes:
            return self._mirror_over_processes(value, what, must_agree)
        if isinstance(value, np.ndarray):
            # XLA's CPU client may use aligned host memory as it is, whatever may_alias says.
            value = value.copy()
        # may_alias=False: the result is donated to training steps later, and a
        # caller's own array must not disappear with it.
        return jax.device_put(value, self.mirrored, may_alias=False)

    def _mirror_over_processes(self, value: Any, what: str, must_agree: bool) -> jax.Array:
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            return jax.device_put(value, self.mirrored)
        if _compat.is_typed_key(value):
            data = self._mirror_over_processes(jax.random.key_data(value), what, must_agree)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
        workers = _workers.connected()
        own = np.asarray(value)
        agreed = own if workers is None else workers.broadcast(own, what)
        if must_agree and own.tobytes() != agreed.tobytes():
            raise VariableError(
                fact=f"{what} was given {own} on this worker and {agreed} on worker 0.",
                expected="the same value on every worker.",
                hint="compute it from values that all workers have, or reduce it first.",
            )
        return self.lift(agreed)

    def lift(self, value: Any) -> jax.Array:
        """Puts a value that every process has on every device, without comparing them."""
        array = np.array(value)
        shards = [
            jax.device_put(array, self.devices[index], may_alias=False)
            for index in self.local_replica_ids
        ]
        return jax.make_array_from_single_device_arrays(array.shape, self.mirrored, shards)

    def shape_of(self, value: Any, sharding: Any) -> Any:
        """Describes the array that ``value`` would be on these devices."""
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)

    def computed(self, make: Any, sharding: Any, *args: Any) -> Any:
        """Calls ``make`` in one compiled program whose results live under ``sharding``."""
        if not self.only_compiles:
            return jax.jit(make, out_shardings=sharding)(*args)
        shapes = jax.eval_shape(make, *args)
        return jax.tree.map(self.shape_of, shapes, jax.tree.broadcast(sharding, shapes))

    def stack(self, components: Sequence[Any]) -> jax.Array:
        """Places one equally shaped component on each device, as one array (R, ...)."""
        if self.only_compiles:
            return self.shape_of(jax.eval_shape(jax.numpy.stack, list(components)), self.split)
        if len(self.local_replica_ids) == self.replica_count:
            if any(isinstance(component, jax.Array) for component in components):
                stacked = jax.numpy.stack([jax.numpy.asarray(part) for part in components])
            else:
                stacked = np.stack([np.asarray(part) for part in components])
            return jax.device_put(stacked, self.split)
        first = np.asarray(components[self.local_replica_ids[0]])
        shards = [
            jax.device_put(np.asarray(components[index])[None], self.devices[index])
            for index in self.local_replica_ids
        ]
        shape = (self.replica_count, *first.shape)
        return jax.make_array_from_single_device_arrays(shape, self.split, shards)

    def __reduce__(self) -> Any:
        raise ArgumentTypeError(
            fact=f"the placement of {self.describe()} was pickled or copied.",
            expected="one in each process, since it holds devices.",
            hint="make the strategy in the process that uses it.",
        )


def device_name(device: Device) -> str:
    """Writes a device the way users name it: ``cpu:1``, ``gpu:0``."""
    return f"{device.platform}:{device.id}"


def accelerators_or_cpus() -> list[Device]:
    """Lists this process's accelerators, or its CPU devices where there are none."""
    return jax.local_devices()


@functools.cache
def default_placement() -> Placement:
    """Returns the placement of everything made outside any scope."""
    return Placement(jax.local_devices()[:1], "the default strategy")


def resolve_devices(devices: Sequence[Any] | None) -> list[Device]:
    """Turns device strings and jax devices into a checked list of jax devices."""
    if devices is None:
        return accelerators_or_cpus()
    if isinstance(devices, (str, jax.Device)):
        raise DeviceError(
            fact=f"devices={devices!r} is a single device.",
            expected='a list of devices, for example ["gpu:0", "gpu:1"].',
            hint="put it in a list, or leave devices out to use all of them.",
        )
    resolved = [_resolve_device(device) for device in devices]
    if not resolved:
        raise DeviceError(
            fact="devices=[] names no device.",
            expected="at least one device.",
            hint="leave devices out to use all local devices.",
        )
    _check_unique(resolved)
    platforms = sorted({device.platform for device in resolved})
    if len(platforms) > 1:
        raise DeviceError(
            fact=f"devices mixes {' and '.join(platforms)}: "
            f"{', '.join(device_name(device) for device in resolved)}.",
            expected="devices of one kind, since replicas run in lockstep.",
            hint=f"name only the {platforms[-1]} devices.",
        )
    return resolved


def _check_unique(resolved: list[Device]) -> None:
    seen: set[Device] = set()
    for device in resolved:
        if device in seen:
            raise DeviceError(
                fact=f"{device_name(device)} stands twice in devices.",
                expected="each device once: one replica runs on one device.",
                hint="remove the second one, or use mirrored.testing.use_cpu_devices(n) "
                "for several virtual CPU devices.",
            )
        seen.add(device)


def _resolve_device(device: Any) -> Device:
    if isinstance(device, jax.Device):
        return device
    if not isinstance(device, str):
        raise DeviceError(
            fact=f"{device!r} ({type(device).__name__}) is not a device.",
            expected='a string such as "gpu:0" or "cpu:1", or a jax.Device.',
            hint="see jax.local_devices() for what there is.",
        )
    # tf.distribute's users write "/gpu:0" or "/device:GPU:0".
    name = device.lower().rsplit("/", 1)[-1].removeprefix("device:")
    kind, _, number = name.partition(":")
    platform = {"cuda": "gpu", "rocm": "gpu"}.get(kind, kind)
    available = _devices_of(platform)
    if number == "" and len(available) == 1:
        return available[0]
    if number.isdigit() and available:
        for candidate in available:
            if candidate.id == int(number) or candidate.local_hardware_id == int(number):
                return candidate
    everything = ", ".join(device_name(found) for found in available or jax.local_devices())
    raise DeviceError(
        fact=f"there is no device {device!r} on this machine.",
        expected=f"one of: {everything}.",
        hint="leave devices out to use all local devices; for virtual CPU devices call "
        "mirrored.testing.use_cpu_devices(n) first.",
    )


def _devices_of(platform: str) -> list[Device]:
    try:
        return jax.local_devices(backend=platform)
    except RuntimeError:
        # JAX's word for "no such platform here".
        return []
