"""The strategies there are, which differ only in the devices they put in the mesh.

Owns OneDevice, Mirrored, MultiWorkerMirrored and the default strategy; what they do is
in ``_strategy``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import jax

from mirrored import _context, _failure, _replica
from mirrored._cluster import Cluster
from mirrored._placement import Placement, default_placement, resolve_devices
from mirrored._strategy import Strategy


@final
class OneDeviceStrategy(Strategy):
    """Everything on one device, through the same code as several.

    Args:
      device: a device string such as "cpu:0" or "gpu:1", or a jax.Device; the first
        local device if left out.

    >>> import mirrored
    >>> mirrored.OneDeviceStrategy("cpu:0").num_replicas_in_sync
    1
    """

    def __init__(self, device: Any = None) -> None:
        super().__init__()
        devices = resolve_devices(None if device is None else [device])[:1]
        self._placement = Placement(devices, type(self).__name__)

    @property
    def placement(self) -> Placement:
        return self._placement


@final
class MirroredStrategy(Strategy):
    """One replica on each of several devices of this process.

    Args:
      devices: device strings such as ["gpu:0", "gpu:1"], or jax devices; all local
        accelerators if left out, or all CPU devices where there is none. Other
        devices are never touched.

    >>> import mirrored
    >>> strategy = mirrored.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> strategy.num_replicas_in_sync
    2
    """

    def __init__(self, devices: Sequence[Any] | None = None) -> None:
        super().__init__()
        self._placement = Placement(resolve_devices(devices), type(self).__name__)

    @property
    def placement(self) -> Placement:
        return self._placement


@final
class MultiWorkerMirroredStrategy(Strategy):
    """One replica on every device of every process of the cluster.

    Make it before anything asks JAX for devices. Who belongs to the cluster is read
    from ``mirrored launch``, TF_CONFIG or what JAX detects (Slurm, Open MPI,
    Kubernetes, Cloud TPU), unless ``cluster`` says so. Without any sign of a cluster
    it is a MirroredStrategy over all devices.

    Args:
      cluster: a ``mirrored.Cluster``, or a dictionary in the form of TF_CONFIG.
      timeout: how many seconds to wait for the other workers, here and at every later
        wait for one of them; the error then names the absent.

    >>> import mirrored
    >>> mirrored.MultiWorkerMirroredStrategy().num_replicas_in_sync
    8
    """

    def __init__(
        self, cluster: Cluster | Mapping[str, Any] | None = None, *, timeout: float = 300.0
    ) -> None:
        super().__init__()
        _failure.join(cluster, timeout)
        # Sorted by process, so that each worker's replicas, and with them its share of
        # every batch, stand together.
        devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
        self._placement = Placement(devices, type(self).__name__)

    @property
    def placement(self) -> Placement:
        return self._placement


@final
class _DefaultStrategy(Strategy):
    """What is current outside every scope: one replica on the first local device."""

    @property
    def placement(self) -> Placement:
        # Found when first asked for: importing the library must not start a backend.
        return default_placement()


_DEFAULT = _DefaultStrategy()
_replica.set_default_strategy(_DEFAULT)


def get_strategy() -> Strategy:
    """Returns the current strategy; outside any scope the default one, with one replica.

    >>> import mirrored
    >>> mirrored.get_strategy().num_replicas_in_sync
    1
    """
    strategy = _context.current().strategy
    return _DEFAULT if strategy is None else strategy
