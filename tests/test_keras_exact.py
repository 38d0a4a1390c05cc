"""Law 1 for Keras: what a strategy trains is what stock Keras trains on one device."""

from __future__ import annotations

import itertools

import grain
import jax
import keras
import numpy as np
import pytest
from conftest import make_strategy

import mirrored.keras

pytestmark = [
    pytest.mark.usefixtures("quick_compilation"),
    # Keras says so at the end of the first epoch of data without a length.
    pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning"),
]


class Ramp(keras.utils.PyDataset):
    def __init__(self, x, y, batch_size):
        super().__init__()
        self.x, self.y, self.batch_size = x, y, batch_size

    def __len__(self):
        return -(-len(self.x) // self.batch_size)

    def __getitem__(self, index):
        rows = slice(index * self.batch_size, (index + 1) * self.batch_size)
        return self.x[rows], self.y[rows]


class Lazy(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(8, activation="tanh")
        self.norm = keras.layers.BatchNormalization(momentum=0.7)
        self.head = keras.layers.Dense(3)

    def call(self, inputs, training=False):
        return self.head(self.norm(self.hidden(inputs), training=training))


class OwnStep(Lazy):
    """The custom train_step of Keras's guide, with a metric of its own."""

    def __init__(self):
        super().__init__()
        self.seen = keras.metrics.Sum(name="seen")

    def compute_own_loss(self, trainable, non_trainable, x, y):
        y_pred, non_trainable = self.stateless_call(trainable, non_trainable, x, training=True)
        return keras.ops.mean((y_pred - keras.ops.one_hot(y, 3)) ** 2), (y_pred, non_trainable)

    def train_step(self, state, data):
        trainable, non_trainable, optimizer, metrics = state
        x, y = data
        (loss, (_, non_trainable)), grads = jax.value_and_grad(self.compute_own_loss, has_aux=True)(
            trainable, non_trainable, x, y
        )
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, grads, trainable)
        named = dict(zip([v.path for v in self.metrics_variables], metrics))
        own = self.seen.variables[0].path
        named[own] = named[own] + x.shape[0]
        logs = {"own_loss": loss, "seen": named[own]}
        return logs, (trainable, non_trainable, optimizer, list(named.values()))


def sequential(*layers, inputs=5):
    return keras.Sequential([keras.Input((inputs,)), *layers])


def plain():
    return sequential(keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3))


def regularized():
    return sequential(
        keras.layers.Dense(
            8, kernel_regularizer="l2", activity_regularizer=keras.regularizers.L1(0.01)
        ),
        keras.layers.Dense(3),
    )


def functional():
    first, second = keras.Input((5,), name="first"), keras.Input((5,), name="second")
    joined = keras.layers.Concatenate()([first, second])
    out = keras.layers.Dense(3)(keras.layers.BatchNormalization()(joined))
    return keras.Model({"first": first, "second": second}, out)


def mixed():
    half = {"dtype": "mixed_float16"}
    return sequential(keras.layers.Dense(8, **half), keras.layers.Dense(3, **half))


def shaky_loss(y_true, y_pred):
    """A loss that is no mean over rows: padding cannot hide in it."""
    return keras.ops.max(keras.ops.abs(y_pred - y_true), axis=0)


N, BATCH = 45, 8


def logits():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def data(kind="ints"):
    rng = np.random.default_rng(7)
    x = rng.normal(size=(N, 5)).astype("float32")
    y = rng.integers(0, 3, N)
    return (x, y) if kind == "ints" else (x, np.eye(3, dtype="float32")[y])


def weights_of_rows():
    return np.linspace(0.1, 2.0, N).astype("float32")


def generator():
    x, y = data()
    while True:
        for start in range(0, N, BATCH):
            yield x[start : start + BATCH], y[start : start + BATCH]


def grain_dataset():
    x, y = data()
    rows = [(x[i], y[i]) for i in range(N)]
    return grain.MapDataset.source(rows).batch(BATCH)


def acc():
    return [keras.metrics.SparseCategoricalAccuracy("accuracy")]


# name: (model, compile arguments, fit arguments), each made anew for each run
CASES = {
    "shuffled": (
        plain,
        lambda: {"loss": logits(), "metrics": acc()},
        lambda: {"shuffle": True},
    ),
    "batch_norm": (
        lambda: sequential(keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dense(3)),
        lambda: {"loss": logits(), "metrics": acc()},
        dict,
    ),
    "dropout": (
        lambda: sequential(
            keras.layers.Dense(8), keras.layers.Dropout(0.4, seed=3), keras.layers.Dense(3)
        ),
        lambda: {"loss": logits()},
        dict,
    ),
    "sample_weight": (
        plain,
        lambda: {"loss": logits(), "weighted_metrics": acc(), "metrics": acc()},
        lambda: {"sample_weight": weights_of_rows()},
    ),
    "class_weight": (
        plain,
        lambda: {"loss": logits(), "weighted_metrics": acc()},
        lambda: {"class_weight": {0: 1.0, 1: 0.3, 2: 2.5}},
    ),
    "custom_loss": (
        plain,
        lambda: {
            "loss": shaky_loss,
            "metrics": [keras.metrics.AUC(), keras.metrics.F1Score(average="macro")],
        },
        lambda: {"y": data("one_hot")[1]},
    ),
    "regularized": (regularized, lambda: {"loss": logits()}, dict),
    "clipped_ema_accumulated": (
        plain,
        lambda: {
            "loss": logits(),
            "optimizer": keras.optimizers.AdamW(
                keras.optimizers.schedules.ExponentialDecay(0.05, 3, 0.7),
                global_clipnorm=0.1,
                use_ema=True,
                ema_overwrite_frequency=4,
                gradient_accumulation_steps=2,
            ),
        },
        dict,
    ),
    "validation": (
        plain,
        lambda: {"loss": logits(), "metrics": acc()},
        lambda: {"validation_split": 0.3, "validation_batch_size": 3},
    ),
    "validation_data": (
        plain,
        lambda: {"loss": logits(), "metrics": acc()},
        lambda: {"validation_data": data(), "validation_steps": 3, "validation_freq": 2},
    ),
    "steps_per_epoch": (
        plain,
        lambda: {"loss": logits()},
        lambda: (
            {"x": generator(), "y": None, "batch_size": None, "steps_per_epoch": 4}
            | {"shuffle": False}
        ),
    ),
    "py_dataset": (
        plain,
        lambda: {"loss": logits()},
        lambda: {"x": Ramp(*data(), BATCH), "y": None, "batch_size": None},
    ),
    "grain": (
        plain,
        lambda: {"loss": logits()},
        lambda: {"x": grain_dataset(), "y": None, "batch_size": None, "shuffle": False},
    ),
    "dictionary": (
        functional,
        lambda: {"loss": logits(), "metrics": acc()},
        lambda: {"x": {"first": data()[0], "second": -data()[0]}},
    ),
    "lazy": (Lazy, lambda: {"loss": logits(), "metrics": acc()}, dict),
    "own_train_step": (OwnStep, dict, dict),
    "eager": (
        Lazy,
        lambda: {"loss": logits(), "metrics": acc(), "run_eagerly": True},
        lambda: {"epochs": 1},
    ),
    "steps_per_execution": (
        plain,
        lambda: {"loss": logits(), "metrics": acc(), "steps_per_execution": 4},
        dict,
    ),
}


def train(case, strategy):
    build, compile_arguments, fit_arguments = CASES[case]
    keras.utils.set_random_seed(11)
    keras.backend.clear_session()

    def make():
        model = build()
        model.compile(**{"optimizer": keras.optimizers.SGD(0.1), **compile_arguments()})
        return model

    if strategy is None:
        model = make()
    else:
        with strategy.scope():
            model = make()
    x, y = data()
    arguments = {"x": x, "y": y, "batch_size": BATCH, "epochs": 2, "verbose": 0}
    arguments |= fit_arguments()
    history = model.fit(**arguments).history
    inputs = arguments["x"] if isinstance(arguments["x"], dict) else x
    return (
        model,
        history,
        [np.asarray(w) for w in model.get_weights()],
        model.predict(inputs, batch_size=15, verbose=0),
        model.evaluate(inputs, y, batch_size=15, verbose=0) if case != "custom_loss" else 0,
    )


REFERENCES = {}


def reference(case):
    if case not in REFERENCES:
        REFERENCES[case] = train(case, None)[1:]
    return REFERENCES[case]


def assert_equal_runs(found, expected, tolerance=3e-6):
    history, weights, predictions, evaluation = expected
    assert found[0].keys() == history.keys()
    for name, values in history.items():
        np.testing.assert_allclose(found[0][name], values, rtol=tolerance, atol=tolerance)
    for got, wanted in zip(found[1], weights, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)
    assert found[2].shape == (N, 3)
    np.testing.assert_allclose(found[2], predictions, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(found[3], evaluation, rtol=tolerance, atol=tolerance)


# Each case with one number of replicas, in turn: the tests below take one case through all.
@pytest.mark.parametrize(("case", "replicas"), list(zip(CASES, itertools.cycle([2, 3, 4]))))
def test_fit_evaluate_and_predict_equal_one_device(case, replicas):
    strategy = make_strategy(replicas)
    model, *found = train(case, strategy)
    assert mirrored.keras.strategy_of(model) is strategy
    assert all(len(v.value.devices()) == replicas for v in model.variables)
    assert_equal_runs(found, reference(case))


@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
@pytest.mark.parametrize("case", ["batch_norm", "dropout"])
def test_any_number_of_replicas(case, replicas):
    _, *found = train(case, make_strategy(replicas))
    assert_equal_runs(found, reference(case))


def one_weight(strategy, n, batch_size, **fit):
    x = np.arange(1, n + 1, dtype="float32")[:, None]
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")]
        )
        model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"])
    model.fit(x, 0 * x, batch_size=batch_size, shuffle=False, verbose=0, **fit)
    return model, x


@pytest.mark.conformance(44)
@pytest.mark.parametrize(
    ("n", "batch_size", "replicas", "weight"),
    [
        (7, 4, 2, 0.226667),
        (5, 4, 2, 0.425),
        (3, 4, 2, 0.906667),
        (1, 4, 2, 0.98),
        (9, 8, 4, -0.3038),
    ],
)
def test_the_last_partial_batch_counts_as_it_should(n, batch_size, replicas, weight):
    model, x = one_weight(make_strategy(replicas), n, batch_size)
    trained = float(model.get_weights()[0][0, 0])
    assert trained == pytest.approx(weight, rel=2e-6)
    predictions = model.predict(x, batch_size=batch_size, verbose=0)
    np.testing.assert_allclose(predictions, trained * x, rtol=1e-6)
    loss, mae = model.evaluate(x, 0 * x, batch_size=batch_size, verbose=0)
    assert loss == pytest.approx(float(np.mean((trained * x) ** 2)), rel=1e-6)
    assert mae == pytest.approx(float(np.mean(abs(trained * x))), rel=1e-6)


@pytest.mark.conformance(45)
def test_batch_norm_sees_the_whole_batch(two):
    with two.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.BatchNormalization(momentum=0.5)])
        model.compile(keras.optimizers.SGD(0.0), "mse")
    x = np.arange(1, 5, dtype="float32")[:, None]
    model.fit(x, x, batch_size=4, verbose=0)
    for variable, value in zip(model.layers[0].non_trainable_variables[:2], (1.25, 1.125)):
        for shard in variable.value.addressable_shards:
            np.testing.assert_allclose(shard.data, [value], rtol=1e-6)


@pytest.mark.conformance(46)
def test_dropout_masks_differ_between_the_rows_of_two_replicas(two):
    with two.scope():
        model = sequential(keras.layers.Dropout(0.5, seed=1), inputs=64)
    masks = np.asarray(model(np.ones((4, 64), "float32"), training=True))
    assert len({row.tobytes() for row in masks}) == 4


@pytest.mark.conformance(46)
def test_keras_mean_counts_rows_not_replicas(two):
    with two.scope():
        model = sequential(keras.layers.Lambda(lambda t: t), inputs=1)
        model.compile("sgd", loss=lambda t, p: p[:, 0])
    x = np.array([[1.0], [2.0], [3.0], [10.0]], "float32")
    assert model.evaluate(x, x, batch_size=3, verbose=0) == 4.0


def test_mixed_precision_to_its_own_rounding():
    found = []
    for strategy in (None, make_strategy(2)):
        keras.utils.set_random_seed(3)
        if strategy is None:
            model = mixed()
            model.compile("sgd", logits())
        else:
            with strategy.scope():
                model = mixed()
                model.compile("sgd", logits())
        model.fit(*data(), batch_size=BATCH, epochs=2, verbose=0)
        found.append(model.get_weights())
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-3)
