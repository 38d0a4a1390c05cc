"""NNX modules, optimizers, metrics and random streams train as on one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import make_strategy
from flax import nnx

import mirrored
import mirrored.nnx
from mirrored.nnx import _policy


class Mlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, **parts) -> None:
        self.first = nnx.Linear(3, 4, rngs=rngs)
        self.second = nnx.Linear(4, 2, rngs=rngs)
        self.scale = jnp.array([1.0, 0.5, 2.0])  # an array without a Variable
        for name, part in parts.items():
            setattr(self, name, part)

    def __call__(self, x):
        return self.second(jax.nn.relu(self.first(x * self.scale)))


def per_replica_batch(replica_count, *arrays):
    """What distribute_dataset yields: pieces of ceil(n / R) rows, padded, with counts."""
    rows = len(arrays[0])
    length = -(-rows // replica_count)
    counts = np.clip(rows - length * np.arange(replica_count), 0, length).astype(np.int32)
    parts = []
    for array in arrays:
        padded = np.zeros((replica_count * length, *array.shape[1:]), array.dtype)
        padded[:rows] = array
        stacked = jnp.asarray(padded.reshape(replica_count, length, *array.shape[1:]))
        shown = None if (counts == length).all() else jnp.asarray(counts)
        parts.append(mirrored.PerReplica.from_stacked(stacked, shown, is_batch=True))
    return tuple(parts)


def data(rows, steps=3):
    random = np.random.default_rng(rows)
    shape = (steps, rows)
    return (
        random.normal(size=(*shape, 3)).astype(np.float32),
        random.normal(size=(*shape, 2)).astype(np.float32),
    )


def train_step(model, optimizer, batch):
    x, y = batch

    def loss_fn(model):
        return mirrored.mean(((model(x) - y) ** 2).mean(-1))

    loss, gradients = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


def hand_written(rows, tx):
    """The same training on one device, in plain NNX."""
    model = Mlp(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, y):
        loss, gradients = nnx.value_and_grad(lambda m: ((m(x) - y) ** 2).mean())(model)
        optimizer.update(model, gradients)
        return loss

    losses = [float(step(model, optimizer, x, y)) for x, y in zip(*data(rows))]
    return losses, weights(model)


def weights(model):
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))


def compiled(how, strategy, step=train_step):
    def program(model, optimizer, batch):
        return strategy.reduce("mean", strategy.run(step, args=(model, optimizer, batch)))

    return {"eager": lambda f: f, "function": mirrored.function, "nnx.jit": nnx.jit}[how](program)


def assert_close(actual, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), actual, expected
    )


@pytest.mark.parametrize("how", ["eager", "function", "nnx.jit"])
@pytest.mark.parametrize("replica_count", [1, 2, 4, 8])
@pytest.mark.parametrize("rows", [8, 11, 3])
def test_n_replicas_equal_one_device(how, replica_count, rows):
    strategy = make_strategy(replica_count)
    with strategy.scope():
        model = Mlp(nnx.Rngs(0))
        optimizer = mirrored.nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    step = compiled(how, strategy)
    batches = [per_replica_batch(replica_count, *arrays) for arrays in zip(*data(rows))]
    losses = [float(step(model, optimizer, batch)) for batch in batches]
    expected_losses, expected = hand_written(rows, optax.adam(1e-2))
    assert_close(losses, expected_losses)
    assert_close(weights(model), expected)
    assert int(optimizer.step[...]) == 3
    if how != "nnx.jit":
        assert model.first.kernel[...].sharding == strategy.placement.mirrored


def test_one_trace_and_no_transfer_in_later_steps(two):
    with two.scope():
        model = Mlp(nnx.Rngs(0))
        optimizer = mirrored.nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
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
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    program = compiled("function", two, step)
    losses = [
        float(program(model, optimizer, per_replica_batch(2, *arrays))) for arrays in zip(*data(8))
    ]
    expected_losses, expected = hand_written(8, optax.adam(1e-2))
    assert_close(losses, expected_losses)
    assert_close(weights(model), expected)


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
    with two.scope():
        model = Mlp(nnx.Rngs(0))
        optimizer = mirrored.nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    x, y = data(8)
    with two.debug():
        for number in range(3):
            two.run(train_step, args=(model, optimizer, per_replica_batch(2, x[number], y[number])))
    assert_close(weights(model), hand_written(8, optax.adam(1e-2))[1])


def test_arrays_nobody_kept_are_donated(two, monkeypatch):
    with two.scope():
        model = Mlp(nnx.Rngs(0))
        optimizer = mirrored.nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
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
