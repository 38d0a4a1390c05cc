"""What a step would need on devices that are not here."""

from __future__ import annotations

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mirrored
import mirrored.nnx
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
    here = mirrored.MirroredStrategy(["cpu:0", "cpu:1"])
    (x,) = here.distribute_dataset(np.ones((7, 32), np.float32), batch_size=7)
    state = TX.init(parameters)
    compiled = make(here).lower(parameters, state, x).compile()
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
    with pytest.raises(mirrored.ArgumentError, match=r"plan\.batch"):
        mirrored.plan.plan(strategy, lambda x: x, mirrored.PerReplica([1.0, 2.0]))
    with pytest.raises(mirrored.ArgumentError, match="scalar"):
        mirrored.plan.batch(strategy, np.float32(1.0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(mirrored.MissingDependencyError, match="libtpu"):
        mirrored.plan.strategy("v5e:4x4")


def variables_step(strategy, initial=None, **options):
    """The step of ``make`` over Variables."""
    with strategy.scope():
        w = mirrored.Variable(jnp.zeros((32, 16)) if initial is None else initial, name="w")
        optimizer = mirrored.Optimizer(TX, **options)

    def replica_step(x):
        loss, gradient = mirrored.value_and_grad(lambda: mirrored.mean((x @ w).sum(-1) ** 2), w)
        optimizer.apply_gradients([(gradient, w)])
        return loss

    return mirrored.function(lambda x: strategy.run(replica_step, args=(x,))), w


@pytest.mark.parametrize("shard_state", [False, True])
def test_variables(shard_state):
    """The program is the one that runs on a strategy whose devices are there."""
    strategy = mirrored.plan.strategy("cpu:4")
    step, w = variables_step(strategy, shard_state=shard_state)
    batch = mirrored.plan.batch(strategy, jax.ShapeDtypeStruct((62, 32), jnp.float32))
    plan = mirrored.plan.plan(strategy, step, batch)

    here = mirrored.MirroredStrategy([f"cpu:{number}" for number in range(4)])
    real_step, real_w = variables_step(here, shard_state=shard_state)
    (x,) = here.distribute_dataset(np.ones((62, 32), np.float32), batch_size=62)
    compiled = real_step.lower(x).compile()
    memory = compiled.memory_analysis()
    assert plan.program.arguments == memory.argument_size_in_bytes
    assert plan.program.temporaries == memory.temp_size_in_bytes
    assert plan.program.donated == memory.alias_size_in_bytes > WEIGHT_BYTES
    assert plan.program.flops == compiled.cost_analysis()["flops"]
    kept = 4 if shard_state else 1
    assert plan.memory["parameters"] == WEIGHT_BYTES
    assert plan.memory["optimizer state"] == 2 * WEIGHT_BYTES // kept + 4
    assert plan.memory["batch"] == 16 * 32 * 4
    assert step.trace_count == 1
    # Neither was anything computed nor does the plan stand in the way of training.
    assert isinstance(w.storage, jax.ShapeDtypeStruct)
    real_step(x)
    assert float(jnp.abs(real_w.value).max()) == 0  # the gradient of 0 ** 2


@pytest.mark.parametrize(
    "initial",
    [
        lambda: jnp.ones((32, 16)),
        lambda: jax.ShapeDtypeStruct((32, 16), jnp.float32),
        lambda: lambda: jnp.ones((32, 16)),
        lambda: [[1.0] * 16] * 32,
    ],
)
def test_initial_values_are_not_computed(initial):
    step, w = variables_step(strategy := mirrored.plan.strategy("cpu:2"), initial())
    assert (w.shape, w.dtype) == ((32, 16), jnp.float32)
    plan = mirrored.plan.plan(strategy, step, planned_batch(strategy))
    assert plan.memory["parameters"] == WEIGHT_BYTES


def test_larger_than_this_machine():
    """10 TB of parameters that nobody allocates."""
    strategy = mirrored.plan.strategy("cpu:2")
    with strategy.scope():
        w = mirrored.Variable(lambda: jnp.zeros((50_000, 50_000_000), jnp.float32))
        count = mirrored.Variable(0, trainable=False, synchronization="on_read", aggregation="sum")

    def replica_step():
        count.assign_add(1)
        return w.value[0, 0]

    plan = mirrored.plan.plan(strategy, mirrored.function(lambda: strategy.run(replica_step)))
    assert plan.memory["parameters"] == 50_000 * 50_000_000 * 4


def test_nnx_objects():
    strategy = mirrored.plan.strategy("cpu:4")
    with strategy.scope():
        model = nnx.Linear(32, 16, rngs=nnx.Rngs(0))
        optimizer = mirrored.nnx.Optimizer(model, TX, wrt=nnx.Param)

    def replica_step(model, optimizer, x):
        loss, gradients = nnx.value_and_grad(lambda model: mirrored.mean(model(x).sum(-1) ** 2))(
            model
        )
        optimizer.update(model, gradients)
        return loss

    @mirrored.function
    def step(model, optimizer, x):
        return strategy.run(replica_step, args=(model, optimizer, x))

    before = np.array(model.kernel[...])
    plan = mirrored.plan.plan(strategy, step, model, optimizer, planned_batch(strategy))
    assert plan.memory["parameters"] == WEIGHT_BYTES + 16 * 4
    assert plan.memory["optimizer state"] == 2 * (WEIGHT_BYTES + 16 * 4) + 8
    np.testing.assert_array_equal(model.kernel[...], before)  # still there, and whole


def test_what_needs_devices_is_refused():
    strategy = mirrored.plan.strategy("cpu:2")
    step, w = variables_step(strategy)
    batch = planned_batch(strategy)
    rows = np.ones((4, 32), np.float32)
    for attempt in (
        lambda: step(batch),
        lambda: step(rows),
        lambda: w.numpy(),
        lambda: w + 1,
        lambda: w.assign(np.zeros((32, 16), np.float32)),
        lambda: w.assign_add(np.zeros((32, 16), np.float32)),
        lambda: strategy.run(lambda x: x, args=(rows,)),
        lambda: strategy.reduce("sum", mirrored.PerReplica([1.0, 2.0])),
        lambda: strategy.gather(mirrored.PerReplica([[1.0], [2.0]]), axis=0),
        lambda: strategy.explain(step, rows),
        lambda: strategy.debug(),
        lambda: strategy.distribute_dataset(rows, batch_size=2),
        lambda: strategy.distribute_datasets_from_function(lambda context: [rows]),
    ):
        with pytest.raises(mirrored.DeviceError, match="there to compile for"):
            attempt()


def test_keras_variables_are_refused():
    keras = pytest.importorskip("keras")
    strategy = mirrored.plan.strategy("cpu:2")
    with strategy.scope(), pytest.raises(mirrored.DeviceError, match=r"stateless_call"):
        keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])


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
    step, _ = variables_step(strategy)
    with_variables = mirrored.plan.plan(strategy, step, planned_batch(strategy))
    assert with_variables.memory["optimizer state"] == 2 * WEIGHT_BYTES + 4
    with pytest.raises(mirrored.DeviceError, match="v5e:17x3"):
        mirrored.plan.strategy("v5e:17x3")
