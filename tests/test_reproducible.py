"""Training on 1, 2, 4 and 8 devices to the same bits."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import optax
import pytest
from conftest import make_strategy

import mirrored


def mlp(parameters, x):
    for weight, bias in parameters[:-1]:
        x = jax.nn.relu(x @ weight + bias)
    weight, bias = parameters[-1]
    return x @ weight + bias


def mlp_parameters(random):
    sizes = [20, 33, 17, 5]
    return [
        (random.normal(size=(a, b)).astype(np.float32) / 4, np.zeros(b, np.float32))
        for a, b in itertools.pairwise(sizes)
    ]


def cnn(parameters, x):
    x = x.reshape(-1, 5, 4, 1)
    for kernel in parameters[:-1]:
        x = jax.nn.relu(
            jax.lax.conv_general_dilated(
                x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
        )
    return x.reshape(len(x), -1) @ parameters[-1]


def cnn_parameters(random):
    shapes = [(3, 3, 1, 6), (3, 3, 6, 4), (80, 5)]
    return [random.normal(size=shape).astype(np.float32) / 3 for shape in shapes]


def train(replica_count, model, make_parameters, *, dropout):
    strategy = make_strategy(replica_count)
    random = np.random.default_rng(0)
    with strategy.scope():
        variables = jax.tree.map(mirrored.Variable, make_parameters(random))
        optimizer = mirrored.Optimizer(optax.adam(1e-2))
    data = random.normal(size=(5, 48, 20)).astype(np.float32)
    labels = random.integers(0, 5, size=(5, 48))
    leaves = jax.tree.leaves(variables, is_leaf=lambda v: isinstance(v, mirrored.Variable))

    def loss_fn(x, y):
        if dropout:
            key = mirrored.get_replica_context().random_key(7)
            x = x * jax.random.bernoulli(key, 0.8, x.shape)
        return mirrored.mean(
            optax.softmax_cross_entropy_with_integer_labels(model(read(variables), x), y)
        )

    def read(nest):
        return jax.tree.map(
            lambda v: v.value, nest, is_leaf=lambda v: isinstance(v, mirrored.Variable)
        )

    step_of = mirrored.reproducible_value_and_grad(loss_fn, leaves, micro_shards=8)

    def step(x, y):
        loss, gradients = step_of(x, y)
        optimizer.apply_gradients(zip(gradients, leaves))
        return loss

    program = mirrored.function(lambda x, y: strategy.run(step, args=(x, y)))

    def split(array):
        return mirrored.PerReplica(np.split(array, replica_count))

    losses = [np.asarray(program(split(x), split(y))) for x, y in zip(data, labels)]
    return [*losses, *(leaf.numpy() for leaf in leaves)]


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize(("model", "parameters"), [(mlp, mlp_parameters), (cnn, cnn_parameters)])
def test_the_bits_are_the_same_on_any_number_of_devices(model, parameters, dropout):
    expected = train(1, model, parameters, dropout=dropout)
    for replica_count in (2, 4, 8):
        actual = train(replica_count, model, parameters, dropout=dropout)
        for ours, theirs in zip(actual, expected):
            np.testing.assert_array_equal(ours, theirs)


def test_the_gradient_is_that_of_the_whole_batch(two):
    random = np.random.default_rng(1)
    parameters = mlp_parameters(random)
    x = random.normal(size=(16, 20)).astype(np.float32)

    def loss_fn(parameters, x):
        return mirrored.mean(mlp(parameters, x).sum(-1) ** 2)

    step = mirrored.reproducible_value_and_grad(loss_fn, micro_shards=4)
    split = mirrored.PerReplica(np.split(x, 2))
    loss, gradients = two.run(step, args=(parameters, split))
    whole_loss, whole = jax.value_and_grad(loss_fn)(parameters, x)
    np.testing.assert_allclose(loss, whole_loss, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), gradients, whole
    )


@pytest.mark.parametrize("replica_count", [1, 2, 4, 8])
def test_a_sum_over_replicas_is_that_of_the_tree(replica_count):
    strategy = make_strategy(replica_count)
    parts = np.random.default_rng(2).normal(size=(8, 13)).astype(np.float32) * 1e3
    with strategy.scope():
        weight = mirrored.Variable(np.zeros(13, np.float32))
        optimizer = mirrored.Optimizer(optax.sgd(1.0), reduce="sum", reduction="reproducible")

    def step(part):
        rows = part
        while len(rows) > 1:
            rows = rows[0::2] + rows[1::2]
        optimizer.apply_gradients([(-rows[0], weight)])

    strategy.run(step, args=(mirrored.PerReplica(np.split(parts, replica_count)),))
    tree = parts
    while len(tree) > 1:
        tree = tree[0::2] + tree[1::2]
    np.testing.assert_array_equal(weight.numpy(), tree[0])


def test_what_does_not_divide_is_refused():
    with pytest.raises(mirrored.ArgumentError, match="micro_shards=6"):
        mirrored.reproducible_value_and_grad(lambda x: x, micro_shards=6)
    step = mirrored.reproducible_value_and_grad(lambda w, x: (w * x).mean(), micro_shards=4)
    with pytest.raises(mirrored.ArgumentError, match=r"4 micro-shards.*3 replicas"):
        make_strategy(3).run(step, args=(1.0, mirrored.PerReplica([np.ones(4)] * 3)))
    with pytest.raises(mirrored.ArgumentError, match="3 rows"):
        make_strategy(2).run(step, args=(1.0, mirrored.PerReplica([np.ones(3)] * 2)))
    with make_strategy(3).scope():
        weight = mirrored.Variable(0.0)
        optimizer = mirrored.Optimizer(optax.sgd(1.0), reduction="reproducible")
    with pytest.raises(mirrored.ArgumentError, match="over 3 replicas"):
        optimizer.strategy.run(
            lambda g: optimizer.apply_gradients([(g, weight)]),
            args=(mirrored.PerReplica([1.0, 2.0, 3.0]),),
        )
