"""Processes that die, stop, come and go: nothing is lost, nothing counts twice, all are named."""

from __future__ import annotations

import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from parameter_servers import ENGINES, cluster, make_strategy

import mirrored


@pytest.fixture(params=list(ENGINES))
def engine(request):
    return request.param


def kill_worker(strategy, index):
    """As a machine that is lost: no process of Ray's says goodbye."""
    kill(strategy, "worker", index, signal.SIGKILL)


def kill_server(strategy, index):
    kill(strategy, "server", index, signal.SIGKILL)


def kill(strategy, what, index, number):
    engine = strategy.engine
    if type(engine).__name__ == "RayEngine":
        os.kill(getattr(engine, f"process_of_{what}")(index), number)
    else:
        getattr(engine, f"kill_{what}")(index)


class Counting:
    """A model whose weights say how often each kind of update was applied."""

    def __init__(self, strategy, pause=0.0):
        with strategy.scope():
            a = mirrored.Variable(0.0, name="a")
            b = mirrored.Variable(np.zeros(3, "f"), name="b")
            W = mirrored.Variable(np.zeros(2, "f"), name="W")
            table = mirrored.EmbeddingTable(4, 1, zeros, name="table")
            optimizer = mirrored.Optimizer(optax.sgd(1.0), name="sgd")
        self.variables = a, b, W, table
        self.is_mean = strategy.staleness.kind == "sync"

        def step(ids):
            def loss_fn():
                return -jnp.sum(W) - jnp.sum(table.lookup(ids))

            _, gradients = mirrored.value_and_grad(loss_fn, [W, table])
            optimizer.apply_gradients(zip(gradients, [W, table]))
            b.assign_add(jnp.ones(3))

        def closure(number):
            a.assign_add(1.0)
            for _ in range(2):
                strategy.run(step, args=(np.array([0, 3, 3]),))
                time.sleep(pause)
            a.assign_add(1.0)
            return number

        self.closure = closure

    def check(self, closures):
        a, b, W, table = self.variables
        steps = 2 * closures
        assert float(a) == steps
        assert b.numpy().tolist() == [steps] * 3
        # A synchronous step is the mean of several gradients, which are 1: what is applied
        # is counted, and must be the same on all servers.
        applied = W.numpy()[0] if self.is_mean else steps
        assert steps / 3 <= applied <= steps
        assert W.numpy().tolist() == [applied] * 2
        assert table.numpy().ravel().tolist() == [applied, 0, 0, 2 * applied]


def zeros(key, shape, dtype):
    return jnp.zeros(shape, dtype)


@pytest.mark.conformance(54)
def test_workers_killed_between_and_during_closures(engine):
    with cluster(engine, servers=2) as (strategy, coordinator):
        counting = Counting(strategy, pause=0.005)
        kill_worker(strategy, 0)
        first = [coordinator.schedule(counting.closure, args=(n,)) for n in range(12)]
        assert first[0].fetch(60) == 0
        kill_worker(strategy, 1)
        coordinator.join(60)
        more = [coordinator.schedule(counting.closure, args=(n,)) for n in range(12, 20)]
        coordinator.join(60)
        assert coordinator.fetch(first + more) == list(range(20))
        counting.check(20)


@pytest.mark.conformance(55)
def test_a_killed_server_is_named(engine):
    with make_strategy(engine, workers=1, servers=2, timeout=20.0) as strategy:
        coordinator = mirrored.ClusterCoordinator(strategy)
        counting = Counting(strategy)
        coordinator.schedule(counting.closure, args=(0,)).fetch(60)
        kill_server(strategy, 1)
        start = time.monotonic()
        with pytest.raises(mirrored.ServerError, match="server 1"):
            for n in range(1000):
                coordinator.schedule(counting.closure, args=(n,))
                coordinator.join(60)
        assert time.monotonic() - start < 20.0


@pytest.mark.conformance(55)
def test_servers_are_restored_together(engine, tmp_path):
    """All go back to one moment, though only one was lost; what came after is done again."""
    with make_strategy(
        engine,
        servers=2,
        on_server_failure="restore",
        checkpoint_directory=str(tmp_path),
        checkpoint_every=5,
    ) as strategy:
        coordinator = mirrored.ClusterCoordinator(strategy)
        counting = Counting(strategy, pause=0.002)
        values = [coordinator.schedule(counting.closure, args=(n,)) for n in range(8)]
        values[6].fetch(60)
        kill_server(strategy, 1)
        values += [coordinator.schedule(counting.closure, args=(n,)) for n in range(8, 12)]
        coordinator.join(60)
        kill_server(strategy, 0)
        # Found out by whoever reads next, were it the program itself.
        counting.check(12)
        assert coordinator.fetch(values) == list(range(12))


def test_a_program_goes_on_from_a_checkpoint(engine, tmp_path):
    """The coordinator's own process was lost: another one makes the same variables and goes on."""
    with cluster(engine, servers=2) as (strategy, coordinator):
        counting = Counting(strategy)
        names = [variable.name for variable in counting.variables]
        for n in range(5):
            coordinator.schedule(counting.closure, args=(n,))
        coordinator.join(60)
        coordinator.save(tmp_path)
        for n in range(3):
            coordinator.schedule(counting.closure, args=(n,))
        coordinator.join(60)
        counting.check(8)
        # What came after the checkpoint is undone on all servers alike.
        assert coordinator.restore(tmp_path)
        counting.check(5)
        for n in range(4):
            coordinator.schedule(counting.closure, args=(n,))
        coordinator.join(60)
        counting.check(9)
        assert len(set(names)) == 4


@pytest.mark.parametrize("staleness", ["async", mirrored.bounded(1), "sync"], ids=str)
def test_workers_come_and_go_while_training(engine, staleness):
    with cluster(engine, staleness=staleness) as (strategy, coordinator):
        with strategy.scope():
            v = mirrored.Variable(0.0, name="v")
            seen = mirrored.Variable(np.zeros(64, "i"), name="seen")

        def step():
            v.assign_add(1.0)

        def closure():
            worker = mirrored.current_worker_index()
            strategy.run(step)
            seen.assign_add(jnp.zeros(64, "i").at[worker].set(1))
            time.sleep(0.005)
            return worker

        values = [coordinator.schedule(closure) for _ in range(10)]
        added = coordinator.add_worker()
        values += [coordinator.schedule(closure) for _ in range(200)]
        assert strategy.worker_count == 3
        deadline = time.monotonic() + 60
        while not seen.numpy()[added]:
            assert time.monotonic() < deadline
            values += [coordinator.schedule(closure) for _ in range(50)]
            coordinator.fetch(values[-1])
        coordinator.remove_worker(added)
        assert strategy.worker_count == 2
        values += [coordinator.schedule(closure) for _ in range(20)]
        coordinator.join(60)
        fetched = coordinator.fetch(values)
        assert float(v) == len(values)
        assert seen.numpy().sum() == len(values)
        assert added in fetched
        assert added not in fetched[-10:]
        with pytest.raises(mirrored.ArgumentError, match="remove_worker was given"):
            coordinator.remove_worker(added)


@pytest.mark.parametrize("staleness", ["async", "sync"])
def test_a_stopped_worker_does_not_keep_the_rest_waiting(staleness, caplog):
    """SIGSTOP: the process is there, and says nothing. After the timeout it counts as lost."""
    with make_strategy("ray", workers=2, staleness=staleness, timeout=4.0) as strategy:
        coordinator = mirrored.ClusterCoordinator(strategy)
        with strategy.scope():
            v = mirrored.Variable(0.0, name="v")

        def step():
            v.assign_add(1.0)

        def closure():
            strategy.run(step)
            time.sleep(0.02)

        coordinator.schedule(closure)
        coordinator.join(60)
        for _ in range(60):
            coordinator.schedule(closure)
        time.sleep(0.1)
        kill(strategy, "worker", 0, signal.SIGSTOP)
        start = time.monotonic()
        coordinator.join(100)
        assert time.monotonic() - start < 60.0
        assert float(v) == 61.0
        assert "worker 0" in caplog.text
        assert "did not answer" in caplog.text


@pytest.mark.parametrize("seed", range(2))
def test_random_kills_lose_no_closure_and_double_no_update(engine, seed, tmp_path):
    """The short form of `make chaos-ps`."""
    kills_at_random(engine, seed, str(tmp_path), closures=30, kills=2)


def kills_at_random(engine, seed, directory, *, closures, kills):
    """Trains while workers and servers are killed; every update must have counted once."""
    chosen = random.Random(seed)
    with make_strategy(
        engine,
        servers=2,
        staleness=chosen.choice(["async", mirrored.bounded(1), "sync"]),
        on_server_failure="restore",
        checkpoint_directory=directory,
        checkpoint_every=chosen.randint(3, 12),
    ) as strategy:
        coordinator = mirrored.ClusterCoordinator(strategy)
        counting = Counting(strategy, pause=0.005)
        values = [coordinator.schedule(counting.closure, args=(n,)) for n in range(closures)]
        killed = []
        for _ in range(kills):
            values[chosen.randrange(closures)].fetch(120)
            time.sleep(chosen.uniform(0, 0.05))
            kind, index = chosen.choice(["worker", "server"]), chosen.randrange(2)
            try:
                kill(strategy, kind, index, signal.SIGKILL)
            except (mirrored.ServerError, ProcessLookupError, KeyError):
                # It is dead already, or is just being replaced.
                continue
            killed.append(f"{kind} {index}")
        coordinator.join(240)
        assert coordinator.fetch(values) == list(range(closures))
        counting.check(closures)
        return f"{strategy.staleness}, killed {', '.join(killed) or 'nobody'}"


PROGRAM = """
import sys, time, mirrored
strategy = mirrored.ParameterServerStrategy(worker_count=1, engine="ray")
coordinator = mirrored.ClusterCoordinator(strategy)
with strategy.scope():
    v = mirrored.Variable(0.0, name="v")
engine = strategy.engine
def closure():
    v.assign_add(1.0)
coordinator.schedule(closure)
coordinator.join(60)
print("processes", engine.process_of_worker(0), engine.process_of_server(0), flush=True)
{end}
"""
ENDS = {
    "an error": ("raise RuntimeError('on purpose')", None, (1,)),
    "Ctrl-C": (
        "def waits():\n    time.sleep(600)\ncoordinator.schedule(waits)\ncoordinator.join()",
        signal.SIGINT,
        # 1 is what any program ends with in which Ray runs.
        (1, 130, -signal.SIGINT),
    ),
    "a kill": ("time.sleep(600)", signal.SIGKILL, (-signal.SIGKILL,)),
}


@pytest.mark.parametrize("end", list(ENDS))
def test_nothing_is_left_behind(end, tmp_path):
    """After an error, Ctrl-C or a kill of the program, all its processes are gone."""
    line, number, codes = ENDS[end]
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.format(end=line))
    with subprocess.Popen(
        [sys.executable, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    ) as program:
        line = program.stdout.readline()
        while line and not line.startswith("processes"):
            line = program.stdout.readline()
        started = [int(word) for word in line.split()[1:]]
        if number is not None and started:
            time.sleep(0.3)
            program.send_signal(number)
        _, said = program.communicate(timeout=60)
    assert len(started) == 2, said
    assert program.returncode in codes, said
    expected = {"an error": "on purpose", "Ctrl-C": "KeyboardInterrupt", "a kill": ""}
    assert expected[end] in said
    deadline = time.monotonic() + 30
    while any(pathlib.Path(f"/proc/{process}").exists() for process in started):
        assert time.monotonic() < deadline, f"left behind after {end}"
        time.sleep(0.1)
