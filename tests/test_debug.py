"""Debug mode: the same results with concrete values, one replica at a time."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import make_strategy

import mirrored
from mirrored import PerReplica


def test_prints_come_in_order_with_concrete_values(two, capsys):
    def replica_function(x):
        rank = mirrored.get_replica_context().replica_id_in_sync_group
        print("replica", rank, "has", float(x))
        if x > 1:
            print("large")
        return rank * 10

    with two.debug():
        two.run(replica_function, (PerReplica([1.0, 2.0]),))
    assert capsys.readouterr().out == "replica 0 has 1.0\nreplica 1 has 2.0\nlarge\n"


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("rows", [12, 7])
@pytest.mark.parametrize("kind", ["global", "own"])
def test_training_gives_what_the_compiled_program_gives(replicas, rows, kind):
    if kind == "own" and rows % replicas:
        rows = 12
    x = np.linspace(-1, 1, rows * 2, dtype="f").reshape(rows, 2)
    results = []
    for debug in (False, True):
        strategy = make_strategy(replicas)
        with strategy.scope():
            w = mirrored.Variable([0.5, -0.5])
            mean = mirrored.Variable(0.0, aggregation="mean")
            seen = mirrored.Variable(0.0, synchronization="on_read", aggregation="sum")
            steps = mirrored.Variable(0)
            optimizer = mirrored.Optimizer(optax.adam(0.1))

        def train_step(x, w=w, mean=mean, seen=seen, steps=steps, optimizer=optimizer):
            def loss_fn():
                per_example = jnp.tanh(x @ w) ** 2
                mean.assign((x @ w)[0])
                return mirrored.mean(per_example) if kind == "global" else per_example.mean()

            loss, gradients = mirrored.value_and_grad(loss_fn, [w])
            optimizer.apply_gradients(zip(gradients, [w]))
            context = mirrored.get_replica_context()
            seen.assign_add(context.example_weights.sum())
            steps.assign_add(1)
            scanned = jax.lax.scan(lambda c, row: (c + row, None), context.own(jnp.zeros(2)), x)[0]
            return loss, context.all_reduce("max", scanned), context.all_gather(x[:1, 0])

        losses = []
        for _ in range(2):
            for batch in strategy.distribute_dataset(x, batch_size=8):
                if debug:
                    with strategy.debug():
                        loss, highest, firsts = strategy.run(train_step, (batch,))
                else:
                    loss, highest, firsts = strategy.run(train_step, (batch,))
                losses.append(float(strategy.reduce("mean", loss)))
        results.append(
            (
                losses,
                w.numpy().tolist(),
                float(mean),
                float(seen),
                int(steps),
                np.asarray(highest).tolist(),
                np.asarray(firsts).tolist(),
            )
        )
    for compiled, debugged in zip(*results):
        np.testing.assert_allclose(debugged, compiled, rtol=1e-5, atol=1e-6)


def test_an_exception_in_one_replica_ends_all(two):
    def replica_function():
        context = mirrored.get_replica_context()
        if context.replica_id_in_sync_group == 1:
            raise KeyError("mine")
        return context.all_reduce("sum", 1.0)

    before = threading.active_count()
    with two.debug(), pytest.raises(KeyError, match="mine"):
        two.run(replica_function)
    assert threading.active_count() == before
    assert int(two.run(lambda: mirrored.get_replica_context().all_reduce("sum", 1))) == 2


def test_replicas_that_do_not_meet_are_named(two):
    def replica_function():
        context = mirrored.get_replica_context()
        if context.replica_id_in_sync_group == 0:
            context.all_reduce("sum", 1.0)

    with two.debug(), pytest.raises(RuntimeError, match="replica 0: a sum; replica 1: returned"):
        two.run(replica_function)


def test_a_difference_is_refused(two):
    with two.scope():
        v = mirrored.Variable(0.0, name="v")

    def replica_function():
        v.assign(mirrored.get_replica_context().replica_id_in_sync_group + 1.0)

    with two.debug(), pytest.raises(mirrored.VariableError, match="'v'"):
        two.run(replica_function)
    assert float(v) == 0.0


@pytest.mark.parametrize("compiled_before", [False, True])
def test_compiled_functions_run_as_the_python_they_are(two, compiled_before):
    with two.scope():
        total = mirrored.Variable(0.0, aggregation="sum")
    seen = []

    def replica_function(x):
        seen.append(type(mirrored.get_replica_context().replica_id_in_sync_group))
        total.assign_add(x)

    @mirrored.function
    def step(x):
        two.run(replica_function, (x,))
        return total.value

    batch = PerReplica([1.0, 2.0])
    if compiled_before:
        assert float(step(batch)) == float(step(batch)) - 3.0 == 3.0
        seen.clear()
        total.assign(0.0)
    with two.debug():
        assert float(step(batch)) == 3.0
    assert seen == [int, int]
    # Outside it is compiled again.
    assert float(step(batch)) == 6.0
    assert seen[2:] == [] if compiled_before else seen[2] is not int


def test_a_run_inside_jax_jit_is_refused_in_debug_mode(two):
    with two.debug(), pytest.raises(RuntimeError, match="inside a compiled function"):
        jax.jit(lambda: two.run(lambda: 1))()
