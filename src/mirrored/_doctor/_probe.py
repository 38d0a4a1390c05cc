"""What the child process does: start the backend, compute, and time all-reduces.

It owns no judgement: it writes one line of
JSON before each stage and one after, so that whoever waits knows where it got stuck.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from mirrored import _compat
from mirrored._cluster import resolve_cluster
from mirrored._errors import ClusterError
from mirrored._placement import Placement, device_name

CLUSTER, BACKEND, COMPUTE, REACH = "cluster", "backend", "compute", "reach"
LATENCY, BANDWIDTH = "latency", "bandwidth"
WHAT_HAPPENS = {
    CLUSTER: "looking for a cluster",
    BACKEND: "starting JAX's backend",
    COMPUTE: "computing a product on each device",
    LATENCY: "the first all-reduce",
    BANDWIDTH: "an all-reduce of many bytes",
    REACH: "reaching worker 0",
}

_DETECTION_SECONDS = 4.0
_CONNECT_SECONDS = 3.0
_SMALL_BYTES = 4 << 10
_CHAINED = 16
_LARGE_BYTES = {"cpu": 16 << 20}
_LARGE_BYTES_OF_ACCELERATORS = 256 << 20
_TIMED_CALLS = 5


def main(*, devices_only: bool) -> None:
    """Goes through the stages, as far as there is something to look at."""
    # Libraries print; what is meant for the parent goes where nobody else writes.
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def stage(name: str, look: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        print(json.dumps({"begun": name}), file=channel, flush=True)
        facts = look()
        print(json.dumps({"done": name, "facts": facts}), file=channel, flush=True)
        return facts

    cluster = {} if devices_only else stage(CLUSTER, _cluster)
    backend = stage(BACKEND, _backend)
    devices = jax.local_devices()
    stage(COMPUTE, lambda: _compute(devices))
    if len(devices) > 1:
        placement = Placement(devices, "mirrored doctor")
        stage(LATENCY, lambda: _latency(placement))
        stage(BANDWIDTH, lambda: _bandwidth(placement, backend["platform"]))
    if cluster.get("coordinator"):
        stage(REACH, lambda: _reach(cluster["coordinator"], cluster["process_id"]))


def _cluster() -> dict[str, Any]:
    try:
        cluster = resolve_cluster(None, _DETECTION_SECONDS)
    except ClusterError as error:
        return {"error": [error.fact, error.expected, error.hint]}
    if cluster is None:
        return {}
    return {
        "source": cluster.source,
        "coordinator": cluster.coordinator,
        "process_count": cluster.process_count,
        "process_id": cluster.process_id,
    }


def _backend() -> dict[str, Any]:
    started = time.perf_counter()
    devices = jax.local_devices()
    shown = []
    for device in devices:
        memory = device.memory_stats() or {}
        shown.append(
            {
                "name": device_name(device),
                "kind": device.device_kind,
                "bytes_limit": memory.get("bytes_limit"),
                "bytes_in_use": memory.get("bytes_in_use"),
            }
        )
    return {
        "platform": devices[0].platform,
        "devices": shown,
        "seconds": time.perf_counter() - started,
    }


def _compute(devices: list[Any]) -> dict[str, Any]:
    """Multiplies the same small integers everywhere: the result is exact, or wrong."""
    left = np.arange(64 * 64, dtype=np.float32).reshape(64, 64) % 7
    expected = left @ left.T
    wrong = []
    for device in devices:
        value = jax.device_put(left, device)
        if not np.array_equal(np.asarray(value @ value.T), expected):
            wrong.append(device_name(device))
    return {"wrong": wrong}


def _all_reduces(placement: Placement, count: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """One program with ``count`` all-reduces, each of what the one before gave."""

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=placement.mesh,
        in_specs=PartitionSpec(_compat.REPLICA_AXIS),
        out_specs=PartitionSpec(_compat.REPLICA_AXIS),
    )
    def program(values: jax.Array, own: jax.Array) -> jax.Array:
        for _ in range(count):
            # `own` differs between devices, as far as XLA knows: without it all all-reduces
            # after the first would be of equal values, and become multiplications.
            values = lax.psum(values, _compat.REPLICA_AXIS) * own
        return values

    return program


def _timed(placement: Placement, byte_count: int, count: int) -> float:
    """Median seconds of one of ``count`` chained all-reduces of ``byte_count`` a device."""
    replicas = placement.replica_count
    values = placement.stack([np.ones(byte_count // 4, np.float32)] * replicas)
    own = placement.stack([np.full(1, 1 / replicas, np.float32)] * replicas)
    program = _all_reduces(placement, count)
    result = jax.block_until_ready(program(values, own))
    if float(np.asarray(result.addressable_shards[0].data).flat[0]) != 1.0:
        message = f"an all-reduce of ones over {replicas} devices does not give {replicas}"
        raise ArithmeticError(message)
    times = []
    for _ in range(_TIMED_CALLS):
        started = time.perf_counter()
        jax.block_until_ready(program(values, own))
        times.append(time.perf_counter() - started)
    return statistics.median(times) / count


def _latency(placement: Placement) -> dict[str, Any]:
    return {"bytes": _SMALL_BYTES, "seconds": _timed(placement, _SMALL_BYTES, _CHAINED)}


def _bandwidth(placement: Placement, platform: str) -> dict[str, Any]:
    byte_count = _LARGE_BYTES.get(platform, _LARGE_BYTES_OF_ACCELERATORS)
    facts = {"bytes": byte_count, "seconds": _timed(placement, byte_count, 1)}
    if platform == "cpu":
        facts["memcpy_seconds"] = _memcpy(byte_count)
    return facts


def _memcpy(byte_count: int) -> float:
    source, target = np.ones(byte_count, np.uint8), np.zeros(byte_count, np.uint8)
    times = []
    for _ in range(_TIMED_CALLS):
        started = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _reach(coordinator: str, process_id: int) -> dict[str, Any]:
    """Worker 0 must be able to listen at its address; the others to come to its machine."""
    host, _, port = coordinator.rpartition(":")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM
        )[0]
    except OSError as error:
        return {"unknown_host": f"{host}: {error.strerror or error}"}
    with socket.socket(family, kind, protocol) as connection:
        connection.settimeout(_CONNECT_SECONDS)
        try:
            if process_id == 0:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                connection.bind(address)
                return {"state": "free"}
            connection.connect(address)
        except ConnectionRefusedError:
            # Its machine answers: worker 0 is not started yet, and the others wait for it.
            return {"state": "not listening yet"}
        except OSError as error:
            key = "cannot_listen" if process_id == 0 else "unreachable"
            return {key: f"{coordinator}: {error.strerror or error}"}
    return {"state": "listening"}
