"""What NNX keeps besides parameters: statistics, metrics, streams, variables of one's own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import make_strategy
from flax import nnx
from nnx_models import (
    Mlp,
    compiled,
    data,
    per_replica_batch,
)

import mirrored
import mirrored.nnx
from mirrored.nnx import _policy


def test_batch_statistics_are_averaged(two):
    with two.scope():
        norm = nnx.BatchNorm(1, momentum=0.5, rngs=nnx.Rngs(0))
    x = jnp.arange(1.0, 5.0).reshape(4, 1)
    two.run(lambda norm, x: norm(x), args=(norm, per_replica_batch(2, np.asarray(x))[0]))
    # Case 45 of the conformance page: half of means 1.5 and 3.5, variances 0.25 and 0.25.
    assert norm.mean[...].tolist() == [1.25]
    assert norm.var[...].tolist() == [0.625]


def test_batch_norm_over_all_replicas_equals_one_device(two):
    norm = nnx.BatchNorm(1, momentum=0.5, axis_name="replica", rngs=nnx.Rngs(0))
    x = np.arange(1.0, 5.0, dtype=np.float32).reshape(4, 1)
    two.run(lambda norm, x: norm(x), args=(norm, per_replica_batch(2, x)[0]))
    assert (norm.mean[...].tolist(), norm.var[...].tolist()) == ([1.25], [1.125])


def test_batch_norm_refuses_padded_rows_it_does_not_mask(two):
    norm = nnx.BatchNorm(1, momentum=0.5, rngs=nnx.Rngs(0))
    (x,) = per_replica_batch(2, np.arange(1.0, 4.0, dtype=np.float32).reshape(3, 1))

    def blind(norm, x):
        return mirrored.mean(norm(x))

    def masked(norm, x):
        weights = mirrored.get_replica_context().example_weights
        return mirrored.mean(norm(x, mask=weights[:, None] > 0))

    with pytest.raises(mirrored.PaddingError, match=r"BatchStat 'mean'"):
        two.run(blind, args=(norm, x))
    two.run(masked, args=(norm, x))
    # Means 1.5 (of two rows) and 3 (of one): (2 * 0.75 + 1 * 1.5) / 3.
    assert norm.mean[...].tolist() == [1.0]


@pytest.mark.parametrize("replica_count", [1, 2, 4])
@pytest.mark.parametrize("rows", [8, 5])
def test_metrics_count_every_row_once(replica_count, rows):
    strategy = make_strategy(replica_count)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())
    values = np.arange(rows, dtype=np.float32)
    logits = np.stack([values, 3 - values], -1)
    labels = (values > 4).astype(np.int32)

    def update(metrics, batch):
        loss, logits, labels = batch
        mask = mirrored.get_replica_context().example_weights
        metrics.update(loss=loss, logits=logits, labels=labels, mask=mask)

    for _ in range(2):
        strategy.run(
            update, args=(metrics, per_replica_batch(replica_count, values, logits, labels))
        )
    expected = float((logits.argmax(-1) == labels).mean())
    results = metrics.compute()
    assert float(results["loss"]) == pytest.approx(values.mean())
    assert float(results["accuracy"]) == pytest.approx(expected)
    assert int(metrics.loss.count[...]) == 2 * rows


def test_metrics_reset_and_updated_in_one_run(two):
    average = nnx.metrics.Average()
    average.update(values=jnp.array([100.0]))

    def update(average, x):
        average.reset()
        average.update(values=x)

    two.run(update, args=(average, per_replica_batch(2, np.float32([1, 2, 3, 6]))[0]))
    assert float(average.compute()) == 3.0


def test_metrics_refuse_padded_rows_they_do_not_mask(two):
    average = nnx.metrics.Average()
    (x,) = per_replica_batch(2, np.float32([1, 2, 3]))

    def blind(average, x):
        average.update(values=x)
        return mirrored.mean(x)

    with pytest.raises(mirrored.PaddingError, match="MetricState") as error:
        two.run(blind, args=(average, x))
    assert "example_weights" in error.value.hint


def test_welford_is_merged(two):
    def update(welford, x):
        welford.update(values=x)

    x = np.random.default_rng(0).normal(2.0, 3.0, (3, 8)).astype(np.float32)
    distributed, alone = nnx.metrics.Welford(), nnx.metrics.Welford()
    for row in x:
        two.run(update, args=(distributed, per_replica_batch(2, row)[0]))
        alone.update(values=jnp.asarray(row))
    for mine, theirs in zip(
        jax.tree.leaves(distributed.compute()), jax.tree.leaves(alone.compute())
    ):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5)


def test_dropout_differs_by_replica_and_step_and_its_state_stays_mirrored(two):
    with two.scope():
        dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    key = jax.random.key_data(dropout.rngs.key[...]).tolist()

    @mirrored.function
    def drop(dropout, x):
        return two.run(lambda d, x: d(x), args=(dropout, x))

    masks = [
        np.asarray(part)
        for _ in range(2)
        for part in two.local_results(drop(dropout, jnp.ones(64)))
    ]
    assert len({mask.tobytes() for mask in masks}) == 4
    assert int(dropout.rngs.count[...]) == 2
    assert jax.random.key_data(dropout.rngs.key[...]).tolist() == key
    again = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(two.local_results(drop(again, jnp.ones(64)))[1], masks[1])


def test_keys_pass_through_a_gradient(two):
    with two.scope():
        model = Mlp(nnx.Rngs(0), dropout=nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
        optimizer = mirrored.nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def step(model, optimizer, batch):
        x, y = batch

        def loss_fn(model):
            return mirrored.mean(((model.dropout(model(x)) - y) ** 2).mean(-1))

        loss, gradients = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, gradients)
        return loss

    x, y = data(8)
    program = compiled("function", two, step)
    for number in range(2):
        program(model, optimizer, per_replica_batch(2, x[number], y[number]))
    assert int(model.dropout.rngs.count[...]) == 2


class Ema(nnx.Variable):
    pass


class Seen(nnx.Variable):
    pass


def test_the_policy_of_a_variable_type_can_be_chosen(two, monkeypatch):
    monkeypatch.setattr(_policy, "_POLICIES", list(_policy._POLICIES))

    class Counter(nnx.Module):
        def __init__(self):
            self.ema = Ema(jnp.array(0.0))
            self.seen = Seen(jnp.array(10))

    def count(counter, x):
        counter.ema[...] = x.sum()
        counter.seen[...] += x.size

    counter = Counter()
    x = mirrored.PerReplica([[1.0, 2.0], [5.0, 6.0]])
    with pytest.raises(mirrored.VariableError, match="Ema 'ema'") as error:
        two.run(count, args=(counter, x))
    assert "set_policy(Ema" in error.value.hint
    mirrored.nnx.set_policy(Ema, "mean")
    mirrored.nnx.set_policy(nnx.PathContains("seen"), "sum")
    two.run(count, args=(counter, x))
    assert float(counter.ema[...]) == 7.0
    assert int(counter.seen[...]) == 14
    mirrored.nnx.set_policy(Ema, "first")
    two.run(count, args=(counter, x))
    assert float(counter.ema[...]) == 3.0
    with pytest.raises(mirrored.ArgumentError, match="'average'"):
        mirrored.nnx.set_policy(Ema, "average")
