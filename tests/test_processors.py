"""How many CPU devices and threads XLA is told of, before JAX starts."""

import os
import subprocess
import sys

import pytest

from mirrored import _processors

CORES = len(os.sched_getaffinity(0))


@pytest.fixture
def neighbours():
    """Processes of this machine: one with all its processors, one with only the first."""
    command = [sys.executable, "-c", "input()"]
    started = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(2)]
    yield [process.pid for process in started]
    for process in started:
        process.communicate(b"\n")


def shared(pids, environment):
    _processors.share_processors(pids, environment)
    return environment.get("NPROC")


def test_the_processors_are_shared_out(neighbours):
    every = [os.getpid(), *neighbours]
    assert shared(every[:2], {}) == str(max(CORES // 2, 1))
    assert shared(every, {}) == str(max(CORES // 3, 1))
    # Several devices of one process wait for each other.
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    assert shared(every, flags) == str(max(CORES // 3, 8))


def test_nothing_is_changed_without_need(neighbours):
    assert shared([os.getpid()], {}) is None
    assert shared([os.getpid(), *neighbours], {"NPROC": "7"}) == "7"
    assert shared([os.getpid(), *neighbours], {"PJRT_NPROC": "7"}) is None
    # A process that cannot be seen from here, as in another container.
    assert shared([os.getpid(), 2**22 + 1], {}) is None


@pytest.mark.skipif(CORES < 2, reason="one processor cannot be divided")
def test_bound_processes_keep_their_processors(neighbours):
    """A scheduler that gives each process processors of its own has shared them out already."""
    mine = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(mine)})
        os.sched_setaffinity(neighbours[0], mine - {min(mine)})
        assert shared([os.getpid(), neighbours[0]], {}) is None
    finally:
        os.sched_setaffinity(0, mine)


def test_several_devices_have_threads_enough():
    environment = _processors.cpu_environment(4, {"XLA_FLAGS": "--a=b", "NPROC": "99"})
    assert environment["NPROC"] == "99"
    assert environment["XLA_FLAGS"] == "--a=b --xla_force_host_platform_device_count=4"
    assert int(_processors.cpu_environment(64, {})["NPROC"]) >= 128
    assert _processors.asked_cpu_devices(environment) == 4
    # One device waits for nobody: XLA, or the workers of this machine, decide.
    assert "NPROC" not in _processors.cpu_environment(1, {})
