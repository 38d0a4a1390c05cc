"""NNX modules and optimizers train as on one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import make_strategy
from flax import nnx
from nnx_models import (
    ADAM,
    Mlp,
    assert_close,
    compiled,
    data,
    hand_written,
    per_replica_batch,
    train_step,
    weights,
)

import mirrored
import mirrored.nnx

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.parametrize(
    ("how", "replica_count", "rows"),
    [
        *(("function", count, rows) for count in (1, 2, 4, 8) for rows in (8, 11, 3)),
        *((how, *case) for how in ("eager", "nnx.jit") for case in ((2, 11), (4, 8), (8, 3))),
    ],
)
def test_n_replicas_equal_one_device(how, replica_count, rows):
    strategy = make_strategy(replica_count)
    with strategy.scope():
        model = Mlp(nnx.Rngs(0))
        optimizer = mirrored.nnx.Optimizer(model, ADAM, wrt=nnx.Param)
    step = compiled(how, strategy)
    batches = [per_replica_batch(replica_count, *arrays) for arrays in zip(*data(rows))]
    losses = [float(step(model, optimizer, batch)) for batch in batches]
    expected_losses, expected = hand_written(rows, ADAM)
    assert_close(losses, expected_losses)
    assert_close(weights(model), expected)
    assert int(optimizer.step[...]) == 3
    if how != "nnx.jit":
        assert model.first.kernel[...].sharding == strategy.placement.mirrored


def test_one_trace_and_no_transfer_in_later_steps(two):
    with two.scope():
        model = Mlp(nnx.Rngs(0))
        optimizer = mirrored.nnx.Optimizer(model, ADAM, wrt=nnx.Param)
    step = compiled("function", two)
    x, y = data(8)
    batch = jax.device_put(per_replica_batch(2, x[0], y[0]), two.placement.split)
    step(model, optimizer, batch)
    with jax.transfer_guard("disallow"):
        for _ in range(3):
            step(model, optimizer, batch)
    assert step.trace_count == 1
    text = step.lower(model, optimizer, batch).compile().as_text()
    # One for all gradients; mirrored.mean and strategy.reduce of the loss have one each.
    assert text.count(" all-reduce(") == 3
    assert "all-gather" not in text


def test_a_module_is_read_again_after_the_user_changed_it(two):
    with two.scope():
        model = Mlp(nnx.Rngs(0), dropout=nnx.Dropout(0.5, rngs=nnx.Rngs(1)))

    @mirrored.function
    def total(model, x):
        return two.run(lambda m, x: mirrored.mean(m.dropout(m.first(x))), args=(model, x))

    x = jnp.ones((2, 3))
    model.eval()
    first = float(total(model, x))
    model.first.kernel[...] = model.first.kernel[...] * 2
    assert float(total(model, x)) == pytest.approx(2 * first, rel=1e-6)
    assert total.trace_count == 1
    model.first = nnx.Linear(3, 4, rngs=nnx.Rngs(5), use_bias=False)
    replaced = float(total(model, x))
    assert replaced == pytest.approx(float((x @ model.first.kernel[...]).mean()), rel=1e-6)
    model.train()
    assert float(total(model, x)) != replaced
    assert total.trace_count == 3


def test_arrays_the_caller_kept_stay_alive(two):
    with two.scope():
        model = Mlp(nnx.Rngs(0))
        optimizer = mirrored.nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    step = compiled("function", two)
    x, y = data(8)
    batch = per_replica_batch(2, x[0], y[0])
    step(model, optimizer, batch)
    kept = model.first.kernel[...]
    before = np.array(kept)
    step(model, optimizer, batch)
    np.testing.assert_array_equal(np.asarray(kept), before)
    assert not np.array_equal(np.asarray(model.first.kernel[...]), before)
    given_up = model.first.kernel.get_raw_value
    step(model, optimizer, batch)
    assert given_up().shape == (3, 4)


@pytest.mark.parametrize("how", ["eager", "function", "nnx.jit"])
def test_an_unreduced_parameter_is_an_error_with_its_path(two, how):
    with two.scope():
        model = Mlp(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    x, y = data(8)
    before = weights(model)
    with pytest.raises(mirrored.VariableError, match=r"Param 'first\.bias'.*would differ") as error:
        compiled(how, two)(model, optimizer, per_replica_batch(2, x[0], y[0]))
    assert "mirrored.nnx.Optimizer" in error.value.hint
    assert_close(weights(model), before)


def test_a_plain_optimizer_takes_reduced_gradients(two):
    def step(model, optimizer, batch):
        x, y = batch
        loss, gradients = nnx.value_and_grad(lambda m: ((m(x) - y) ** 2).mean())(model)
        gradients = mirrored.get_replica_context().all_reduce("mean", gradients)
        optimizer.update(model, gradients)
        return loss

    with two.scope():
        model = Mlp(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)
    program = compiled("function", two, step)
    losses = [
        float(program(model, optimizer, per_replica_batch(2, *arrays))) for arrays in zip(*data(8))
    ]
    expected_losses, expected = hand_written(8, ADAM)
    assert_close(losses, expected_losses)
    assert_close(weights(model), expected)


def test_shared_modules_stay_shared(two):
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.one = nnx.Linear(2, 2, rngs=rngs, use_bias=False)
            self.two = self.one

    model = Tied(nnx.Rngs(0))
    before = np.asarray(model.one.kernel[...])

    def double(model, also):
        assert model.one is also
        model.two.kernel[...] = model.one.kernel[...] * 2

    two.run(double, args=(model, model.one))
    np.testing.assert_array_equal(model.one.kernel[...], 2 * before)
    assert model.one is model.two


def test_a_changed_structure_is_an_error(two):
    class Sowing(nnx.Module):
        def __call__(self, x):
            self.seen = nnx.Intermediate(x)
            return x

    with pytest.raises(mirrored.ContextError, match="seen was added"):
        two.run(lambda m, x: m(x), args=(Sowing(), jnp.ones(2)))


def test_a_captured_module_is_an_error(two):
    model = Mlp(nnx.Rngs(0))
    x = jnp.ones((2, 3))

    @mirrored.function
    def captured(x):
        return two.run(lambda m, x: m(x), args=(model, x))

    with pytest.raises(mirrored.ContextError, match="captured"):
        captured(x)
    with pytest.raises(mirrored.ContextError, match="captured"):
        two.run(lambda x: model(x), args=(x,))


def test_debug_mode_runs_the_same_program(two):
    tx = optax.sgd(0.1)  # op by op, each of Adam's many would be compiled by itself
    with two.scope():
        model = Mlp(nnx.Rngs(0))
        optimizer = mirrored.nnx.Optimizer(model, tx, wrt=nnx.Param)
    x, y = data(8)
    with two.debug():
        for number in range(3):
            two.run(train_step, args=(model, optimizer, per_replica_batch(2, x[number], y[number])))
    assert_close(weights(model), hand_written(8, tx)[1])


def test_arrays_nobody_kept_are_donated(two, monkeypatch):
    with two.scope():
        model = Mlp(nnx.Rngs(0))
        optimizer = mirrored.nnx.Optimizer(model, ADAM, wrt=nnx.Param)
    step = compiled("function", two)
    x, y = data(8)
    batch = per_replica_batch(2, x[0], y[0])
    step(model, optimizer, batch)
    copied = []
    original = jnp.copy
    monkeypatch.setattr(jnp, "copy", lambda array: copied.append(array.shape) or original(array))
    step(model, optimizer, batch)
    assert copied == []
    kept = model.first.kernel[...]
    step(model, optimizer, batch)
    assert copied == [kept.shape]
