"""Optimizer state in shards: the same numbers, 1/R of the memory, or a refusal."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import make_strategy

import mirrored

SHAPES = [(5, 3), (3,), (), (2, 2, 2)]

SHARDABLE = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optax.adam(1e-2),
    "adamw": optax.adamw(optax.cosine_decay_schedule(1e-2, 10)),
    "masked decay": optax.adamw(1e-2, weight_decay=0.3, mask=lambda p: [x.ndim > 1 for x in p]),
    "lion": optax.lion(1e-2),
    "adagrad": optax.adagrad(1e-1),
    "rmsprop": optax.rmsprop(1e-2, centered=True),
    "global norm": optax.chain(optax.clip_by_global_norm(0.05), optax.adam(1e-2)),
    "lamb": optax.lamb(1e-2),
    "lars": optax.lars(1e-1),
    "block rms": optax.chain(optax.clip_by_block_rms(0.01), optax.sgd(0.1)),
    "elementwise clip": optax.chain(optax.clip(0.01), optax.adamax(1e-2)),
    "multi_transform": optax.multi_transform(
        {"a": optax.adam(1e-2), "b": optax.sgd(0.3, momentum=0.5)}, ["a", "b", "a", "b"]
    ),
    "masked": optax.masked(optax.adam(1e-2), [True, False, True, False]),
    "inject": optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    "if finite": optax.apply_if_finite(optax.adam(1e-2), 3),
    "multi steps": optax.MultiSteps(optax.adam(1e-2), 2),
    "noise": optax.chain(optax.add_noise(0.1, 0.5, 3), optax.sgd(0.1)),
    "ema": optax.chain(optax.ema(0.9), optax.scale(-0.1)),
}


def train(strategy, tx, *, steps=4, **options):
    random = np.random.default_rng(0)
    initial = [np.asarray(random.normal(size=shape), np.float32) for shape in SHAPES]
    targets = random.normal(size=(steps, 8)).astype(np.float32)
    with strategy.scope():
        variables = [mirrored.Variable(value, name=f"v{i}") for i, value in enumerate(initial)]
        optimizer = mirrored.Optimizer(tx, **options)

    def step(target):
        def loss_fn():
            total = sum(
                (variable * variable).sum() * (i + 1) for i, variable in enumerate(variables)
            )
            return jnp.mean((jnp.tanh(total / 50) - target) ** 2 + variables[1][0] * target)

        _, gradients = mirrored.value_and_grad(loss_fn, variables, reduce=False)
        optimizer.apply_gradients(zip(gradients, variables))

    program = mirrored.function(lambda target: strategy.run(step, args=(target,)))
    for target in targets:
        program(mirrored.PerReplica(list(target.reshape(strategy.num_replicas_in_sync, -1))))
    return variables, optimizer, program


@pytest.mark.parametrize("name", SHARDABLE)
def test_the_numbers_are_those_of_whole_states(name):
    replica_count = 4
    tx = SHARDABLE[name]
    expected, _, _ = train(make_strategy(replica_count), tx)
    variables, _, program = train(make_strategy(replica_count), tx, shard_state=True)
    for variable, other in zip(variables, expected):
        np.testing.assert_allclose(variable.numpy(), other.numpy(), rtol=2e-6, atol=1e-6)
    assert program.trace_count == 1


@pytest.mark.parametrize(
    ("tx", "operation"),
    [
        (optax.adafactor(1e-2, min_dim_size_to_factor=2), "reduce_sum|reduce_mean"),
        (optax.adaptive_grad_clip(0.1), "reduce_sum"),
        (optax.contrib.muon(1e-2), "reshape"),
    ],
)
def test_what_cannot_be_done_on_parts_is_refused(two, tx, operation):
    with pytest.raises(mirrored.ArgumentError, match=operation) as error:
        train(two, tx, shard_state=True)
    assert "leave shard_state out" in error.value.hint


def test_memory_of_the_state_is_divided():
    strategy = make_strategy(8)
    with strategy.scope():
        weight = mirrored.Variable(jnp.zeros((64, 32)))
        optimizer = mirrored.Optimizer(optax.adam(1e-3), shard_state=True)
    optimizer.build([weight])
    arrays = [
        v.storage
        for v in jax.tree.leaves(
            optimizer.state, is_leaf=lambda v: isinstance(v, mirrored.Variable)
        )
    ]
    per_device = sum(array.addressable_shards[0].data.nbytes for array in arrays)
    assert per_device == 2 * 64 * 32 * 4 // 8 + 4


def test_one_reduce_scatter_and_one_all_gather():
    strategy = make_strategy(4)
    _, _, program = train(strategy, optax.adam(1e-2), steps=1, shard_state=True)
    text = program.lower(mirrored.PerReplica([np.zeros(2, np.float32)] * 4)).compile().as_text()
    assert text.count(" reduce-scatter(") == 1
    assert text.count(" all-gather(") == 1
    assert text.count(" all-reduce(") == 0


def test_reduced_gradients_and_gradients_from_outside(two):
    with two.scope():
        weight = mirrored.Variable([1.0, 2.0, 3.0])
        optimizer = mirrored.Optimizer(optax.sgd(0.5, momentum=0.5), shard_state=True)
    gradient = jnp.array([2.0, 2.0, 4.0])
    optimizer.apply_gradients([(gradient, weight)])
    assert weight.numpy().tolist() == [0.0, 1.0, 1.0]
    two.run(
        lambda: optimizer.apply_gradients(
            [(mirrored.get_replica_context().all_reduce("mean", gradient), weight)]
        )
    )
    assert weight.numpy().tolist() == [-1.5, -0.5, -2.0]


def test_bad_gradients_are_named_and_skipped(two):
    with two.scope():
        weight = mirrored.Variable([1.0, 2.0, 3.0], name="weight")
        optimizer = mirrored.Optimizer(optax.adam(0.5), shard_state=True, check_finite=True)

    def step(x):
        optimizer.apply_gradients([(x, weight)])

    with pytest.raises(mirrored.NonFiniteError, match="weight"):
        two.run(step, args=(mirrored.PerReplica([[1.0, 1.0, np.inf], [0.0, 0.0, 0.0]]),))
    assert weight.numpy().tolist() == [1.0, 2.0, 3.0]


def test_gradients_reduced_in_bfloat16(two):
    gradient = mirrored.PerReplica([np.float32([1.001, 2.0]), np.float32([3.001, 4.0])])
    for options in ({}, {"shard_state": True}):
        with two.scope():
            weight = mirrored.Variable([0.0, 0.0])
            optimizer = mirrored.Optimizer(
                optax.sgd(1.0), communication_dtype=jnp.bfloat16, **options
            )

        def step(x, optimizer=optimizer, weight=weight):
            optimizer.apply_gradients([(x, weight)])

        program = mirrored.function(lambda x, step=step: two.run(step, args=(x,)))
        program(gradient)
        # 1.001 and 3.001 are 1 and 3 in bfloat16.
        assert weight.numpy().tolist() == [-2.0, -3.0]
        assert weight.dtype == jnp.float32
        assert "bf16" in program.lower(gradient).as_text()


def test_options_that_would_have_no_effect_are_refused(two):
    with two.scope():
        weight = mirrored.Variable(1.0)
        optimizer = mirrored.Optimizer(optax.sgd(1.0), communication_dtype=jnp.bfloat16)

    def step():
        _, gradient = mirrored.value_and_grad(lambda: weight * weight, weight)
        optimizer.apply_gradients([(gradient, weight)])

    with pytest.raises(mirrored.ArgumentError, match="reduced already") as error:
        two.run(step)
    assert "reduce=False" in error.value.hint
    with pytest.raises(mirrored.ArgumentError, match="'exact'"):
        mirrored.Optimizer(optax.sgd(1.0), reduction="exact")
