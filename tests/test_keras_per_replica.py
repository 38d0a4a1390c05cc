"""Per-replica batch norm: its statistics, its one all-reduce, and what stays global."""

from __future__ import annotations

import re

import keras
import numpy as np
import pytest

import mirrored
import mirrored.keras
from mirrored.keras import _private

pytestmark = pytest.mark.usefixtures("quick_compilation")


def data(n=12):
    rng = np.random.default_rng(3)
    return rng.normal(size=(n, 6, 6, 1)).astype("float32"), rng.integers(0, 3, n)


def cnn(strategy, norm=True):
    keras.utils.set_random_seed(0)
    body = []
    for filters in (4, 4, 4):
        body.append(keras.layers.Conv2D(filters, 3, padding="same"))
        if norm:
            body.append(keras.layers.BatchNormalization())
        body.append(keras.layers.ReLU())
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((6, 6, 1)), *body, keras.layers.Flatten(), keras.layers.Dense(3)]
        )
        model.compile(
            keras.optimizers.SGD(0.1, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    return model


def fit(model, n=12):
    x, y = data(n)
    return model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history


def all_reduces(model):
    program = _private.step_function(model, "train")
    (traced,) = program._traces.values()
    (function,) = traced.functions.values()
    state = tuple(_private.values_of(part) for part in _private.variable_lists(model, "train"))
    position = program._position(0)
    leaves = [keras.ops.zeros(shape, dtype) for shape, dtype in next(iter(program._traces))[3]]
    compiled = function.lower(state, leaves, position, position).compile().as_text()
    return len(re.findall(r" all-reduce(?:-start)?\(", compiled))


@pytest.mark.conformance(45)
def test_moving_statistics_are_the_mean_of_the_replicas(two):
    with two.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.BatchNormalization(momentum=0.5)])
        model.compile(keras.optimizers.SGD(0.0), "mse")
    mirrored.keras.per_replica(model)
    x = np.arange(1, 5, dtype="float32")[:, None]
    model.fit(x, x, batch_size=4, shuffle=False, verbose=0)
    for variable, value in zip(model.layers[0].non_trainable_variables, (1.25, 0.625)):
        for shard in variable.value.addressable_shards:
            np.testing.assert_allclose(shard.data, [value], rtol=1e-6)


def test_one_all_reduce_a_step(two):
    model = mirrored.keras.per_replica(cnn(two))
    fit(model)
    assert all_reduces(model) == 1


@pytest.mark.parametrize("n", [12, 11])
def test_without_batch_norm_it_is_the_global_step(n, two):
    expected, found = cnn(two, norm=False), mirrored.keras.per_replica(cnn(two, norm=False))
    for (name, values), other in zip(fit(expected, n).items(), fit(found, n).values()):
        np.testing.assert_allclose(values, other, rtol=2e-6, err_msg=name)
    for one, other in zip(expected.get_weights(), found.get_weights()):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_model_that_would_draw_equal_numbers_everywhere_is_refused(two):
    with two.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dropout(0.5)])
        model.compile("sgd", "mse")
    mirrored.keras.per_replica(model)
    with pytest.raises(mirrored.ArgumentError, match="draws random numbers"):
        model.fit(np.ones((4, 2)), np.ones((4, 2)), verbose=0)
    assert np.isfinite(model.evaluate(np.ones((4, 2)), np.ones((4, 2)), verbose=0))
