"""Conformance 10 to 20, 23, 37: run, contexts, collectives inside."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import components, make_strategy, replica_id

import mirrored
from mirrored import PerReplica


@pytest.mark.conformance(10)
def test_run_arguments(strategy):
    result = strategy.run(lambda x: 2 * x, (3.0,))
    assert components(strategy, result) == [6.0] * strategy.num_replicas_in_sync
    count = strategy.num_replicas_in_sync
    nested = {"x": PerReplica(np.arange(count)), "y": 10}
    result = strategy.run(lambda d: d["x"] + d["y"], (nested,))
    assert components(strategy, result) == [10 + r for r in range(count)]
    result = strategy.run(lambda d: d["x"] + d["y"], kwargs={"d": nested})
    assert components(strategy, result) == [10 + r for r in range(count)]


@pytest.mark.conformance(11)
def test_run_constants(strategy):
    assert strategy.run(lambda: 1) == 1
    assert strategy.run(lambda: None) is None
    assert strategy.run(lambda: ("a", True, 2.5)) == ("a", True, 2.5)


@pytest.mark.conformance(12)
@pytest.mark.parametrize("args", [3.0, {"x": 1}, "ab", np.ones(2)])
def test_run_refuses_args_that_are_no_sequence(strategy, args):
    with pytest.raises(ValueError, match="tuple or a list"):
        strategy.run(lambda x: x, args)


@pytest.mark.conformance(13)
def test_run_lets_exceptions_through(strategy):
    class OwnError(Exception):
        pass

    def fails():
        raise OwnError("mine")

    with pytest.raises(OwnError, match="mine"):
        strategy.run(fails)
    assert strategy.run(lambda: 1) == 1
    assert not mirrored.has_strategy()


@pytest.mark.conformance(14)
def test_run_and_reduce_inside_run(strategy):
    with pytest.raises(RuntimeError, match="cross-replica context"):
        strategy.run(lambda: strategy.run(lambda: 1))
    with pytest.raises(RuntimeError, match="cross-replica context"):
        strategy.run(lambda: strategy.reduce("sum", PerReplica([1]), axis=None))
    with pytest.raises(RuntimeError, match="cross-replica context"):
        strategy.run(lambda: strategy.gather(PerReplica([[1]]), axis=0))


@pytest.mark.conformance(15)
def test_scopes_do_not_mix(two):
    other = make_strategy(4)
    with two.scope():
        with two.scope():
            assert mirrored.get_strategy() is two
        with pytest.raises(RuntimeError, match="Mixing different"), other.scope():
            pass
        with pytest.raises(RuntimeError, match="Mixing different"):
            other.run(lambda: 1)
        assert mirrored.get_strategy() is two
    assert not mirrored.has_strategy()


@pytest.mark.conformance(16)
def test_contexts(two):
    assert not mirrored.has_strategy()
    context = mirrored.get_replica_context()
    assert context.num_replicas_in_sync == 1
    assert context.all_reduce("sum", 3) == 3
    assert context.all_reduce("mean", 3) == 3
    assert context.merge_call(lambda strategy, x: 2 * x, args=(2,)) == 4
    assert context.strategy is mirrored.get_strategy()
    assert not mirrored.in_cross_replica_context()
    with two.scope():
        assert mirrored.in_cross_replica_context()
        assert mirrored.get_replica_context() is None
        assert mirrored.has_strategy()

    def replica_function():
        assert not mirrored.in_cross_replica_context()
        assert mirrored.get_strategy() is two
        assert mirrored.get_replica_context().strategy is two
        return mirrored.get_replica_context().num_replicas_in_sync

    assert two.run(replica_function) == 2


@pytest.mark.conformance(17)
@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
def test_collectives(replicas):
    strategy = make_strategy(replicas)
    total = replicas * (replicas + 1) / 2

    def replica_function():
        context = mirrored.get_replica_context()
        x = context.replica_id_in_sync_group + 1.0
        return (
            context.all_reduce("sum", x),
            context.all_reduce("mean", {"a": x, "b": [10 * x]}),
            context.all_gather(x),
            context.all_reduce("max", x),
            context.all_gather(jnp.stack([x, -x])[None], axis=1),
        )

    sums, means, gathered, highest, wide = strategy.run(replica_function)
    assert isinstance(sums, jax.Array)
    assert float(sums) == total
    assert float(means["a"]) == total / replicas
    assert float(means["b"][0]) == 10 * total / replicas
    assert gathered.tolist() == [r + 1.0 for r in range(replicas)]
    assert float(highest) == replicas
    assert wide.tolist() == [[s * (r + 1.0) for r in range(replicas) for s in (1, -1)]]


@pytest.mark.conformance(18)
@pytest.mark.parametrize("replicas", [2, 4])
def test_gradients_of_collectives(replicas):
    strategy = make_strategy(replicas)

    def gradient_of(collective):
        def replica_function():
            context = mirrored.get_replica_context()
            rank = context.replica_id_in_sync_group
            return jax.grad(lambda x: (rank + 1) * collective(context, x))(rank + 1.0)

        return [float(g) for g in components(strategy, strategy.run(replica_function))]

    total = replicas * (replicas + 1) / 2
    assert gradient_of(lambda c, x: c.all_reduce("sum", x)) == [total] * replicas
    assert gradient_of(lambda c, x: c.all_reduce("mean", x)) == [total / replicas] * replicas
    weights = np.array([10.0**r for r in range(replicas)], "f")
    expected = [total * weight for weight in weights]
    assert gradient_of(lambda c, x: (c.all_gather(x) * weights).sum()) == expected


@pytest.mark.conformance(19)
@pytest.mark.parametrize("replicas", [2, 8])
def test_gradient_inside_run_is_local(replicas):
    strategy = make_strategy(replicas)

    def replica_function(w):
        rank = replica_id()
        return jax.grad(lambda w: (rank + 1) * w.sum())(w)

    result = strategy.run(replica_function, (jnp.array([1.0, 2.0]),))
    for rank, gradient in enumerate(components(strategy, result)):
        assert gradient.tolist() == [rank + 1.0] * 2
    assert strategy.reduce("mean", result).tolist() == [(replicas + 1) / 2] * 2


@pytest.mark.conformance(20)
def test_merge_call(strategy):
    def replica_function():
        context = mirrored.get_replica_context()
        rank = context.replica_id_in_sync_group
        return context.merge_call(
            lambda strategy, x: strategy.reduce("sum", x, axis=None), args=(rank + 1,)
        )

    count = strategy.num_replicas_in_sync
    assert int(strategy.run(replica_function)) == count * (count + 1) // 2


@pytest.mark.conformance(23)
def test_strategies_in_turn():
    first, second = make_strategy(2), make_strategy(4)
    for strategy in (first, second, first, second):
        result = strategy.run(lambda: replica_id() + 1)
        count = strategy.num_replicas_in_sync
        assert int(strategy.reduce("sum", result)) == count * (count + 1) // 2


@pytest.mark.conformance(37)
@pytest.mark.parametrize("replicas", [2, 4])
def test_random_numbers(replicas):
    def draw(strategy, seed, step):
        def replica_function():
            key = mirrored.get_replica_context().random_key(seed, step)
            return jax.random.normal(key, (3,))

        return np.stack(components(strategy, strategy.run(replica_function)))

    strategy = make_strategy(replicas)
    numbers = draw(strategy, 1, 0)
    assert len({tuple(row) for row in numbers.tolist()}) == replicas
    np.testing.assert_array_equal(numbers, draw(strategy, 1, 0))
    assert (numbers != draw(strategy, 1, 1)).all()
    assert (numbers != draw(strategy, 2, 0)).all()
    reordered = mirrored.MirroredStrategy(jax.devices()[:replicas][::-1])
    np.testing.assert_array_equal(numbers, draw(reordered, 1, 0))
    np.testing.assert_array_equal(numbers[:2], draw(make_strategy(8), 1, 0)[:2])


@pytest.mark.conformance(37)
def test_a_key_that_enters_run_differs_per_replica(two):
    result = two.run(lambda key: jax.random.normal(key), (jax.random.key(0),))
    first, second = components(two, result)
    assert first != second


def test_a_traced_replica_id_cannot_branch(two):
    def replica_function():
        if mirrored.get_replica_context().replica_id == 0:
            return 1.0
        return 2.0

    with pytest.raises(mirrored.TracingError, match=r"hint: .*jax\.lax\.cond"):
        two.run(replica_function)
    with two.debug():
        assert components(two, two.run(replica_function)) == [1.0, 1.0]


def test_one_trace_one_collective_whatever_the_number_of_replicas():
    counts = []
    for replicas in (1, 2, 4, 8):
        strategy = make_strategy(replicas)
        traces = []

        def replica_function(x, traces=traces):
            traces.append(1)
            context = mirrored.get_replica_context()
            return context.all_reduce("mean", {"a": x, "b": x * 2}), x.sum()

        @mirrored.function
        def step(x, strategy=strategy, replica_function=replica_function):
            mean, own = strategy.run(replica_function, (x,))
            return mean, strategy.reduce("sum", own)

        batch = PerReplica(np.ones((replicas, 4), "f")).placed(strategy.placement)
        step(batch)
        step(batch)
        text = step.lower(batch).compile().as_text()
        counts.append((len(traces), len(re.findall(r" all-reduce(?:-start)?\(", text))))
    assert counts[0][0] == 1
    assert counts == [counts[0], *[(1, 1)] * 3] or counts == [(1, 1)] * 4


def test_control_flow_inside_run(two):
    def replica_function(x):
        context = mirrored.get_replica_context()
        rank = context.replica_id_in_sync_group

        def body(carry, row):
            return carry + context.all_reduce("sum", row), row * 2

        total, doubled = jax.lax.scan(body, jnp.zeros(()), x)
        chosen = jax.lax.cond(rank == 0, lambda: 10.0, lambda: 20.0)
        counted = jax.lax.while_loop(lambda c: c < 3 + rank, lambda c: c + 1, 0 * rank)
        return total, doubled, chosen, counted

    x = PerReplica([[1.0, 2.0], [3.0, 4.0]])
    total, doubled, chosen, counted = two.run(replica_function, (x,))
    assert float(total) == 10.0
    assert [part.tolist() for part in components(two, doubled)] == [[2, 4], [6, 8]]
    assert components(two, chosen) == [10, 20]
    assert components(two, counted) == [3, 4]


def test_recompiles_when_a_captured_value_changes(two):
    scale = 2.0

    def replica_function(x):
        return x * scale

    value = PerReplica([1.0, 2.0])
    assert components(two, two.run(replica_function, (value,))) == [2.0, 4.0]
    scale = 3.0
    assert components(two, two.run(replica_function, (value,))) == [3.0, 6.0]


def test_lambdas_in_a_loop_are_compiled_once(two):
    traces = []

    def noted(x):
        traces.append(1)
        return x

    value = PerReplica([1.0, 2.0])
    for _ in range(5):
        two.run(lambda x: noted(x) + 1, (value,))
    assert len(traces) == 1


def test_flags_stay_python(two):
    def replica_function(x, training):
        return x * 2 if training else x

    value = PerReplica([1.0, 2.0])
    assert components(two, two.run(replica_function, (value, True))) == [2.0, 4.0]
    assert components(two, two.run(replica_function, (value, False))) == [1.0, 2.0]


def test_functional_style_inside_jit():
    x = np.arange(16, dtype="f").reshape(16, 1) / 16
    y = 3 * x + 1
    results = []
    for replicas in (1, 2, 8):
        strategy = make_strategy(replicas)

        def loss_fn(params, batch):
            inputs, targets = batch
            return ((inputs @ params["w"] + params["b"] - targets) ** 2).mean()

        @jax.jit
        def train_step(params, batch, strategy=strategy, loss_fn=loss_fn):
            loss, grads = strategy.run(jax.value_and_grad(loss_fn), args=(params, batch))
            grads = strategy.reduce("mean", grads)
            params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
            return params, strategy.reduce("mean", loss)

        batch = tuple(PerReplica(np.split(a, replicas)).placed(strategy.placement) for a in (x, y))
        params = {"w": jnp.zeros((1, 1)), "b": jnp.zeros(1)}
        text = train_step.lower(params, batch).compile().as_text()
        if replicas > 1:
            assert len(re.findall(r" all-reduce\(", text)) == 1
            assert "all-gather" not in text
        for _ in range(5):
            params, loss = train_step(params, batch)
        results.append([float(loss), float(params["w"][0, 0]), float(params["b"][0])])
    np.testing.assert_allclose(results[1], results[0], rtol=1e-6)
    np.testing.assert_allclose(results[2], results[0], rtol=1e-6)
