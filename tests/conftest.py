"""Eight virtual CPU devices for every test, and one strategy of every kind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import mirrored.testing

mirrored.testing.use_cpu_devices(8)

import hypothesis
import jax
import numpy as np
import pytest

import mirrored

# The same examples in every run: a red run can be repeated, and CI never surprises.
hypothesis.settings.register_profile("repeatable", derandomize=True, database=None)
hypothesis.settings.load_profile("repeatable")

STRATEGIES = {
    "default": mirrored.get_strategy,
    "one_device": lambda: mirrored.OneDeviceStrategy("cpu:0"),
    "mirrored_1": lambda: mirrored.MirroredStrategy(["cpu:0"]),
    "mirrored_2": lambda: mirrored.MirroredStrategy(["cpu:0", "cpu:1"]),
    "mirrored_3": lambda: mirrored.MirroredStrategy(["cpu:5", "cpu:1", "cpu:3"]),
    "mirrored_4": lambda: mirrored.MirroredStrategy([f"cpu:{i}" for i in range(4)]),
    "mirrored_8": lambda: mirrored.MirroredStrategy(),
    "multi_worker": lambda: mirrored.MultiWorkerMirroredStrategy(),
}


@pytest.fixture(scope="session", autouse=True)
def programs_compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Programs that tests start find what an earlier one has compiled; this process does not."""
    with pytest.MonkeyPatch.context() as patch:
        compiled = tmp_path_factory.mktemp("compiled")
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(compiled))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
        yield


@pytest.fixture(params=list(STRATEGIES))
def strategy(request: pytest.FixtureRequest) -> mirrored.Strategy:
    """One strategy of every kind and several sizes."""
    return STRATEGIES[request.param]()


@pytest.fixture
def two() -> mirrored.Strategy:
    """The two replicas of the conformance page."""
    return mirrored.MirroredStrategy(["cpu:0", "cpu:1"])


def make_strategy(replica_count: int) -> mirrored.Strategy:
    """Makes a strategy with a given number of replicas."""
    return mirrored.MirroredStrategy(jax.devices()[:replica_count])


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Waits for what another thread does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.005)


def components(strategy: mirrored.Strategy, value: Any) -> list[np.ndarray]:
    """The value of each replica, whether it varies or not."""
    if isinstance(value, mirrored.PerReplica):
        return [np.asarray(part) for part in strategy.local_results(value)]
    return [np.asarray(value)] * strategy.num_replicas_in_sync


def replica_id() -> Any:
    """The number of the replica that asks."""
    return mirrored.get_replica_context().replica_id_in_sync_group


@pytest.fixture(scope="module")
def quick_compilation() -> Iterator[None]:
    """Compiles without optimizing: for programs that run for less time than that takes."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
