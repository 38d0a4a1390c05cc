"""What a step would need on devices that are not here."""

from __future__ import annotations

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mirrored
import mirrored.plan

TX = optax.adam(1e-2)
SHAPES = {"w": jax.ShapeDtypeStruct((32, 16), jnp.float32)}
WEIGHT_BYTES = 32 * 16 * 4


def make(strategy, **options):
    def loss_fn(parameters, x):
        return mirrored.mean((x @ parameters["w"]).sum(-1) ** 2)

    def train_step(parameters, state, x):
        gradients = strategy.run(jax.grad(loss_fn), args=(parameters, x))
        updates, state = TX.update(strategy.reduce("mean", gradients), state, parameters)
        return optax.apply_updates(parameters, updates), state

    return jax.jit(train_step, **options)


def planned(strategy, rows, **options):
    x = mirrored.plan.batch(strategy, jax.ShapeDtypeStruct((rows, 32), jnp.float32))
    state = jax.eval_shape(TX.init, SHAPES)
    return mirrored.plan.plan(strategy, make(strategy, **options), SHAPES, state, x)


def test_shapes_are_enough():
    strategy = mirrored.plan.strategy("cpu:4")
    plan = planned(strategy, 64, donate_argnums=(0, 1))
    assert plan.memory["parameters"] == WEIGHT_BYTES
    assert plan.memory["optimizer state"] == 2 * WEIGHT_BYTES + 4
    assert plan.memory["batch"] == 16 * 32 * 4
    assert plan.program.arguments == 3 * WEIGHT_BYTES + 4 + 16 * 32 * 4
    assert plan.program.donated == 3 * WEIGHT_BYTES + 4
    reductions = [one for one in plan.program.collectives if one.kind == "all-reduce"]
    assert [one.bytes >= WEIGHT_BYTES for one in reductions] == [True]
    assert planned(strategy, 64).memory["results"] > 3 * WEIGHT_BYTES
    text = str(plan)
    assert "compiled for MirroredStrategy (4 devices" in text
    assert "all-reduce" in text
    assert f"parameters {'2 KiB':>16}" in text


def test_it_is_the_program_that_would_run():
    """The same collectives and sizes as of the same step on real arrays."""
    strategy = mirrored.plan.strategy("cpu:2")
    plan = planned(strategy, 7)
    parameters = {"w": jnp.ones((32, 16))}
    (x,) = strategy.distribute_dataset(np.ones((7, 32), np.float32), batch_size=7)
    state = TX.init(parameters)
    compiled = make(strategy).lower(parameters, state, x).compile()
    memory = compiled.memory_analysis()
    assert plan.program.arguments == memory.argument_size_in_bytes
    assert plan.program.temporaries == memory.temp_size_in_bytes
    again = mirrored.plan.plan(strategy, make(strategy), parameters, state, planned_batch(strategy))
    assert again.program == plan.program


def planned_batch(strategy):
    return mirrored.plan.batch(strategy, np.ones((7, 32), np.float32))


def test_bad_requests(monkeypatch):
    for name in ("v5e", "v5e:", "tpu", "8 GPUs", "gpu:x"):
        with pytest.raises(mirrored.ArgumentError, match=r"plan\.strategy was given"):
            mirrored.plan.strategy(name)
    strategy = mirrored.plan.strategy("cpu:2")
    with pytest.raises(mirrored.ArgumentError, match="functional style"):
        mirrored.plan.plan(strategy, mirrored.function(lambda: 1))
    with pytest.raises(mirrored.ArgumentError, match=r"plan\.batch"):
        mirrored.plan.plan(strategy, lambda x: x, mirrored.PerReplica([1.0, 2.0]))
    with pytest.raises(mirrored.ArgumentError, match="scalar"):
        mirrored.plan.batch(strategy, np.float32(1.0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(mirrored.MissingDependencyError, match="libtpu"):
        mirrored.plan.strategy("v5e:4x4")


def test_gpus_that_are_not_there():
    with pytest.raises(mirrored.DeviceError, match="8 GPUs"):
        mirrored.plan.strategy("gpu:8")


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra plan")
def test_a_tpu_slice():
    strategy = mirrored.plan.strategy("v5e:4x4")  # of four hosts
    assert strategy.num_replicas_in_sync == 16
    plan = planned(strategy, 70, donate_argnums=(0, 1))
    assert sum(one.bytes for one in plan.program.collectives) >= WEIGHT_BYTES
    assert plan.memory["parameters"] == WEIGHT_BYTES
    with pytest.raises(mirrored.DeviceError, match="v5e:17x3"):
        mirrored.plan.strategy("v5e:17x3")
