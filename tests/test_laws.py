"""The laws, over every strategy: N replicas equal one, and nothing drifts."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import STRATEGIES, make_strategy
from hypothesis import given, settings
from hypothesis import strategies as st

import mirrored


def make_data(rows, seed=0):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(rows, 6)).astype("f")
    y = np.tanh(x @ generator.normal(size=(6, 2))).astype("f")
    return x, y


class Program:
    """A small network trained with the custom loop; its steps count their traces."""

    def __init__(self, strategy, tx, exact=True, communication=None):
        self.traces = 0
        self.strategy = strategy
        with strategy.scope():
            self.w1 = mirrored.Variable(np.linspace(-1, 1, 30, dtype="f").reshape(6, 5), name="w1")
            self.b1 = mirrored.Variable(np.zeros(5, "f"), name="b1")
            self.w2 = mirrored.Variable(np.linspace(1, -1, 10, dtype="f").reshape(5, 2), name="w2")
            self.mean = mirrored.Variable(np.zeros(5, "f"), aggregation="mean", name="mean")
            self.seen = mirrored.Variable(0.0, synchronization="on_read", aggregation="sum")
            optimizer = mirrored.Optimizer(tx, **(communication or {}))
        self.trainable = [self.w1, self.b1, self.w2]
        self.initial = [variable.numpy() for variable in self.trainable]

        def train_step(x, y):
            self.traces += 1

            def loss_fn():
                hidden = jnp.tanh(x @ self.w1 + self.b1)
                per_example = ((hidden @ self.w2 - y) ** 2).sum(axis=1)
                return mirrored.mean(per_example) if exact else per_example.mean()

            loss, gradients = mirrored.value_and_grad(
                loss_fn, self.trainable, reduce=not communication
            )
            optimizer.apply_gradients(zip(gradients, self.trainable))
            weights = mirrored.get_replica_context().example_weights
            self.seen.assign_add(weights.sum())
            return loss

        @mirrored.function
        def step(batch):
            losses = strategy.run(train_step, args=batch)
            return strategy.reduce("mean", losses)

        self.step = step

    def restart(self):
        """Back to the start, for an optimizer without state."""
        for variable, value in zip(self.trainable, self.initial):
            variable.assign(value)
        self.seen.assign(0.0)

    def values(self):
        return np.concatenate([v.numpy().ravel() for v in self.trainable])


def train(strategy, tx, rows, batch_size, epochs=2, communication=None, **options):
    program = Program(strategy, tx, communication=communication)
    losses = []
    dataset = strategy.distribute_dataset(make_data(rows), batch_size=batch_size, **options)
    for _ in range(epochs):
        losses += [float(program.step(batch)) for batch in dataset]
    return program, np.array(losses)


@functools.cache
def reference_step(tx):
    """A step of plain JAX, compiled once for each shape."""

    @jax.jit
    def step(params, state, x, y):
        def loss_fn(params):
            hidden = jnp.tanh(x @ params[0] + params[1])
            return ((hidden @ params[2] - y) ** 2).sum(axis=1).mean()

        loss, gradients = jax.value_and_grad(loss_fn)(params)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def reference(tx, rows, batch_size, epochs=2):
    """The same training in plain JAX on one device."""
    x, y = make_data(rows)
    params = {
        "w1": jnp.linspace(-1, 1, 30).reshape(6, 5),
        "b1": jnp.zeros(5),
        "w2": jnp.linspace(1, -1, 10).reshape(5, 2),
    }
    order = ("w1", "b1", "w2")
    params = [params[name] for name in order]
    state = tx.init(params)
    step = reference_step(tx)
    losses = []
    for _ in range(epochs):
        for start in range(0, rows, batch_size):
            batch = x[start : start + batch_size], y[start : start + batch_size]
            params, state, loss = step(params, state, *batch)
            losses.append(float(loss))
    return np.concatenate([np.asarray(p).ravel() for p in params]), np.array(losses)


ADAM = optax.adam(0.05)


@pytest.mark.parametrize("kind", list(STRATEGIES))
@pytest.mark.parametrize(("rows", "batch_size"), [(32, 16), (29, 16), (17, 8), (3, 8)])
def test_replicas_give_what_one_device_gives(kind, rows, batch_size):
    expected, expected_losses = reference(ADAM, rows, batch_size)
    program, losses = train(STRATEGIES[kind](), ADAM, rows, batch_size)
    np.testing.assert_allclose(losses, expected_losses, rtol=2e-5)
    np.testing.assert_allclose(program.values(), expected, rtol=2e-4, atol=2e-5)
    assert float(program.seen) == 2 * rows


@pytest.mark.parametrize(
    "make",
    [
        lambda: optax.sgd(0.1, momentum=0.9),
        lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.02)),
        lambda: optax.rmsprop(0.01),
        lambda: optax.adagrad(0.1),
        lambda: optax.lamb(0.01),
        lambda: optax.adafactor(0.02),
        lambda: optax.lion(0.01),
        lambda: optax.MultiSteps(optax.adam(0.05), every_k_schedule=2),
        lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.05),
        lambda: optax.sgd(optax.cosine_decay_schedule(0.1, 4)),
        lambda: optax.masked(optax.sgd(0.1), [True, False, True]),
    ],
    ids=lambda make: None,
)
def test_every_kind_of_optimizer(make):
    expected, expected_losses = reference(make(), 29, 8)
    for replicas in (1, 4):
        program, losses = train(make_strategy(replicas), make(), 29, 8)
        np.testing.assert_allclose(losses, expected_losses, rtol=2e-4)
        np.testing.assert_allclose(program.values(), expected, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize(
    "communication",
    [{"shard_state": True}, {"reduction": "reproducible"}, {"communication_dtype": jnp.float32}],
    ids=lambda communication: next(iter(communication)),
)
def test_however_gradients_travel(communication):
    expected, expected_losses = reference(optax.adam(0.05), 29, 8)
    program, losses = train(make_strategy(4), optax.adam(0.05), 29, 8, communication=communication)
    np.testing.assert_allclose(losses, expected_losses, rtol=2e-5)
    np.testing.assert_allclose(program.values(), expected, rtol=2e-4, atol=2e-5)


SGD = optax.sgd(0.1)


@functools.cache
def sgd_program(replicas):
    """Compiled once for each shape, whatever the examples."""
    return Program(make_strategy(replicas), SGD)


@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(1, 40),
    batch_size=st.integers(1, 17),
    replicas=st.sampled_from([2, 3, 4, 8]),
)
def test_any_number_of_rows(rows, batch_size, replicas):
    expected, _ = reference(SGD, rows, batch_size, epochs=1)
    program = sgd_program(replicas)
    program.restart()
    for batch in program.strategy.distribute_dataset(make_data(rows), batch_size=batch_size):
        program.step(batch)
    np.testing.assert_allclose(program.values(), expected, rtol=2e-4, atol=2e-5)
    assert float(program.seen) == rows


def test_replicas_cannot_drift():
    strategy = make_strategy(8)
    program, _ = train(strategy, optax.adam(0.1), 61, 16)
    for variable in [*program.trainable, program.mean]:
        shards = [np.asarray(shard.data) for shard in variable.storage.addressable_shards]
        for shard in shards[1:]:
            np.testing.assert_array_equal(shards[0], shard)


def test_cost_does_not_grow_with_the_number_of_replicas():
    seen = {}
    for replicas in (1, 2, 4, 8):
        strategy = make_strategy(replicas)
        program, _ = train(strategy, optax.adam(0.1), 64, 16)
        batch = next(iter(strategy.distribute_dataset(make_data(16), batch_size=16)))
        text = program.step.lower(batch).compile().as_text()
        collectives = re.findall(
            r" (all-[a-z]+|reduce-scatter|collective-[a-z]+)(?:-start)?\(", text
        )
        seen[replicas] = (program.traces, program.step.trace_count, collectives)
    # One trace, and one more for the state the optimizer creates at its first step.
    assert {value[:2] for value in seen.values()} == {(2, 1)}
    assert all(seen[r][2] == ["all-reduce"] for r in (2, 4, 8)), seen


def test_the_hot_step_transfers_nothing():
    strategy = make_strategy(4)
    program = Program(strategy, optax.adam(0.1))
    batches = list(strategy.distribute_dataset(make_data(32), batch_size=16))
    program.step(batches[0])
    with jax.transfer_guard("disallow"):
        loss = program.step(batches[1])
    assert np.isfinite(float(loss))


def test_thousands_of_queued_steps_do_not_hang():
    strategy = make_strategy(8)
    with strategy.scope():
        total = mirrored.Variable(0.0, aggregation="sum")

    @mirrored.function
    def step():
        strategy.run(lambda: total.assign_add(1.0))

    for _ in range(5000):
        step()
    assert float(total) == 40000.0
