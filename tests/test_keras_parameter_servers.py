"""Keras on parameter servers: fit is one device's with one worker, evaluate and predict always."""

from __future__ import annotations

import time

import jax
import keras
import numpy as np
import pytest
from parameter_servers import cluster

import mirrored
import mirrored.keras
from mirrored.keras._served_rule import KerasRule

ROWS = 43
GENERATOR = np.random.default_rng(0)
IDS = GENERATOR.integers(0, 20, (ROWS, 3))
X = GENERATOR.normal(size=(ROWS, 4)).astype("f")
Y = GENERATOR.integers(0, 3, ROWS)


def ranking_model():
    """Two inputs, a table, batch norm and dropout: all kinds of state there are."""
    keras.utils.set_random_seed(1)
    ids, features = keras.Input((3,), dtype="int32"), keras.Input((4,))
    rows = keras.layers.Flatten()(keras.layers.Embedding(20, 4, name="items")(ids))
    hidden = keras.layers.Concatenate()([rows, features])
    hidden = keras.layers.Dense(8, activation="relu")(hidden)
    hidden = keras.layers.Dropout(0.2)(keras.layers.BatchNormalization()(hidden))
    return keras.Model([ids, features], keras.layers.Dense(3)(hidden))


def small_model(units=3):
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(units, name="out")])


def compiled(model, optimizer=None, metrics=("accuracy",), **arguments):
    model.compile(
        optimizer=optimizer or keras.optimizers.SGD(0.1),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=list(metrics),
        **arguments,
    )
    return model


@pytest.mark.parametrize("engine", ["threads", "ray"])
def test_one_worker_in_turn_is_one_device(engine):
    """Weights, history, metrics and predictions, to float rounding; the last batch is partial."""

    def train(make):
        model = make()
        history = model.fit(
            [IDS, X],
            Y,
            epochs=3,
            batch_size=8,
            validation_data=([IDS[:5], X[:5]], Y[:5]),
            class_weight={0: 1.0, 1: 2.0, 2: 0.5},
            verbose=0,
        )
        evaluated = model.evaluate([IDS, X], Y, batch_size=8, verbose=0)
        predicted = model.predict([IDS, X], batch_size=8, verbose=0)
        return model, history.history, evaluated, predicted

    def make():
        return compiled(ranking_model(), keras.optimizers.Adagrad(0.1), ["accuracy"])

    one, history, evaluated, predicted = train(make)
    with cluster(engine, workers=1, servers=2, staleness="sync") as (strategy, coordinator):
        with strategy.scope():
            model = make()
        before = coordinator.status()
        ours, our_history, our_evaluated, our_predicted = train(lambda: model)
        for mine, theirs in zip(ours.get_weights(), one.get_weights()):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)
        assert list(our_history) == list(history)
        for name, values in history.items():
            np.testing.assert_allclose(our_history[name], values, rtol=1e-5)
        np.testing.assert_allclose(our_evaluated, evaluated, rtol=1e-5)
        assert our_predicted.shape == (ROWS, 3)
        np.testing.assert_allclose(our_predicted, predicted, rtol=1e-4, atol=1e-6)
        assert int(ours.optimizer.iterations) == int(one.optimizer.iterations) == 18
        # Only used rows moved: at most 20 of them in a batch, never 24 ids of 8 examples.
        reads = 3 * 7 + 6 + 6
        for server, first in zip(coordinator.status().servers, before.servers):
            read = server.tables[-1]["rows_read"] - first.tables[-1]["rows_read"]
            assert 0 < read <= 10 * reads


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5), clipvalue=0.05
    ),
    "adamw": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.1, amsgrad=True),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "adadelta": lambda: keras.optimizers.Adadelta(1.0),
    "adamax": lambda: keras.optimizers.Adamax(0.1),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01, centered=True, momentum=0.5),
    "nadam": lambda: keras.optimizers.Nadam(0.1),
    "lion": lambda: keras.optimizers.Lion(0.01),
    "ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "clipped": lambda: keras.optimizers.Adam(0.1, global_clipnorm=0.1),
}


@pytest.fixture(scope="module")
def single():
    """One worker and one server, on threads, for many models."""
    with cluster(workers=1) as (strategy, coordinator):
        yield strategy, coordinator


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_rules_of_optimizers_are_keras_own(name):
    values = [np.linspace(-1, 1, 6, dtype="f").reshape(3, 2), np.ones(3, "f")]
    optimizer = OPTIMIZERS[name]()
    weights = [keras.Variable(value) for value in values]
    optimizer.build(weights)
    rule = KerasRule(OPTIMIZERS[name]())
    state, update = jax.jit(rule.init)(values), jax.jit(rule.update)
    for step in range(4):
        gradients = [0.3 * step - value for value in values]
        optimizer.apply([keras.ops.convert_to_tensor(g) for g in gradients], weights)
        values, state = update(gradients, state, values)
    for ours, theirs in zip(values, weights):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["adam", "clipped"])
def test_optimizers_on_servers_are_keras_own(single, name):
    strategy, _ = single

    def train(model):
        model.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    expected = train(compiled(small_model(), OPTIMIZERS[name]()))
    with strategy.scope():
        model = compiled(small_model(), OPTIMIZERS[name]())
    for ours, theirs in zip(train(model), expected):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-6)


REFUSED = {
    "use_ema": lambda: keras.optimizers.Adam(use_ema=True),
    "gradient_accumulation_steps": lambda: keras.optimizers.Adam(gradient_accumulation_steps=2),
    "loss_scale_factor": lambda: keras.optimizers.Adam(loss_scale_factor=2.0),
    "whole matrices": lambda: keras.optimizers.Adafactor(),
    "scales the loss": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
}


def shorter(optimizer):
    optimizer.clipvalue = 0.01
    return optimizer


def scheduled(optimizer):
    optimizer.learning_rate = keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5)
    return optimizer


CHANGES = {
    "another": lambda optimizer: keras.optimizers.Adagrad(0.1),
    "clipped": shorter,
    "scheduled": scheduled,
}


@pytest.mark.parametrize("name", list(CHANGES))
def test_a_model_compiled_again_trains_by_what_it_was_compiled_with(single, name):
    def train(model):
        compiled(model, keras.optimizers.Adam(0.1))
        model.fit(X, Y, batch_size=8, verbose=0)
        compiled(model, CHANGES[name](model.optimizer))
        model.fit(X, Y, batch_size=8, verbose=0)
        return model.get_weights()

    expected = train(small_model())
    strategy, _ = single
    with strategy.scope():
        model = small_model()
    for mine, theirs in zip(train(model), expected):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("what", list(REFUSED))
def test_optimizers_that_cannot_be_there_are_refused(single, what):
    strategy, _ = single
    with strategy.scope():
        model = compiled(small_model(), REFUSED[what]())
    with pytest.raises(mirrored.ArgumentError, match=what):
        model.fit(X, Y, verbose=0)


def test_norms_over_all_weights_need_all_of_them():
    with cluster(workers=1, servers=2) as (strategy, _):
        with strategy.scope():
            model = compiled(small_model(), keras.optimizers.SGD(0.1, global_clipnorm=1.0))
        with pytest.raises(mirrored.ArgumentError, match="across the elements"):
            model.fit(X, Y, verbose=0)


def test_what_needs_all_rows_is_refused(single):
    strategy, _ = single
    with strategy.scope():
        for problem in (
            {"embeddings_regularizer": "l2"},
            {"embeddings_constraint": "non_neg"},
            {"lora_rank": 2},
        ):
            layer = keras.layers.Embedding(10, 4, **problem)
            with pytest.raises(mirrored.ArgumentError, match=next(iter(problem))):
                layer(np.zeros((1, 1), "int32"))
        constrained = keras.layers.Dense(3, kernel_constraint="non_neg")
        model = compiled(keras.Sequential([keras.Input((4,)), constrained]))
    with pytest.raises(mirrored.ArgumentError, match="has a constraint"):
        model.fit(X, Y, verbose=0)


def test_steps_of_the_users_own_are_refused(single):
    strategy, _ = single

    class Own(keras.Sequential):
        def train_step(self, state, data):
            return super().train_step(state, data)

    with strategy.scope():
        model = compiled(Own([keras.Input((4,)), keras.layers.Dense(3)]))
        eager = compiled(small_model(), run_eagerly=True)
    with pytest.raises(mirrored.ArgumentError, match="a train_step of its own"):
        model.fit(X, Y, verbose=0)
    with pytest.raises(mirrored.ArgumentError, match="run_eagerly"):
        eager.fit(X, Y, verbose=0)


class Largest(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="largest")
        self.most = self.add_variable((), "zeros", name="most")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.most.assign(keras.ops.maximum(self.most, keras.ops.max(y_pred)))

    def result(self):
        return self.most + 0


def test_metrics_must_add_up_over_workers(single):
    strategy, _ = single
    with strategy.scope():
        model = compiled(small_model(), metrics=[Largest()])
    with pytest.raises(mirrored.ArgumentError, match="'largest'"):
        model.fit(X, Y, verbose=0)


@pytest.fixture(scope="module")
def several():
    with cluster(workers=3, servers=2) as (strategy, coordinator):
        yield strategy, coordinator


@pytest.mark.conformance(44)
def test_evaluate_and_predict_are_exact_on_any_number_of_workers(several):
    strategy, _ = several
    metrics = ["accuracy", "sparse_categorical_crossentropy"]
    one = compiled(ranking_model(), metrics=metrics)
    with strategy.scope():
        model = compiled(ranking_model(), metrics=metrics)
    for rows in (1, 5, 43):
        data = [IDS[:rows], X[:rows]]
        expected = one.evaluate(data, Y[:rows], batch_size=4, verbose=0)
        found = model.evaluate(data, Y[:rows], batch_size=4, verbose=0)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        predictions = one.predict(data, batch_size=4, verbose=0)
        ours = model.predict(data, batch_size=4, verbose=0)
        assert ours.shape == (rows, 3)
        np.testing.assert_allclose(ours, predictions, rtol=1e-5, atol=1e-6)


def test_every_step_counts_once_on_several_workers(several):
    """A gradient that is the same wherever it is computed: the sum of steps is exact."""
    strategy, _ = several
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
        model.compile(optimizer=keras.optimizers.SGD(0.5), loss=lambda y, out: keras.ops.mean(-out))
        model.set_weights([np.zeros((1, 1), "f")])
    history = model.fit(np.ones((96, 1), "f"), np.ones(96), batch_size=4, epochs=2, verbose=0)
    assert model.get_weights()[0].tolist() == [[24.0]]
    assert len(history.history["loss"]) == 2
    assert int(model.optimizer.iterations) == 48


def test_callbacks_are_called_in_order_with_the_model_as_it_is(single, tmp_path):
    strategy, _ = single
    seen = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            seen.append(("begin", batch))

        def on_train_batch_end(self, batch, logs=None):
            seen.append(("end", batch, float(self.model.get_weights()[1][0])))
            assert 0.0 <= logs["accuracy"] <= 1.0

        def on_epoch_begin(self, epoch, logs=None):
            self.model.optimizer.learning_rate = 0.1 / (epoch + 1)

    def train(model, *more):
        seen.clear()
        model.fit(
            X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0, callbacks=[Watch(), *more]
        )
        return list(seen), model.get_weights()

    expected, weights = train(compiled(small_model()))
    with strategy.scope():
        model = compiled(small_model())
    best = keras.callbacks.ModelCheckpoint(
        tmp_path / "best.weights.h5", save_weights_only=True, monitor="loss", save_best_only=True
    )
    found, ours = train(model, best)
    assert [each[:2] for each in found] == [each[:2] for each in expected]
    for mine, theirs in zip(found, expected):
        np.testing.assert_allclose(mine[2:], theirs[2:], rtol=1e-5, atol=1e-7)
    for mine, theirs in zip(ours, weights):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-7)
    with strategy.scope():
        again = small_model()
        again.load_weights(tmp_path / "best.weights.h5")
    for mine, theirs in zip(again.get_weights(), ours):
        np.testing.assert_array_equal(mine, theirs)


def test_fit_goes_on_where_it_was_and_stops_early(single):
    """set_weights between two fits, recompiling, EarlyStopping, steps_per_epoch, one batch."""
    strategy, _ = single

    def train(model):
        stop = keras.callbacks.EarlyStopping(monitor="loss", min_delta=10.0, patience=1)
        first = model.fit(X, Y, batch_size=16, epochs=5, shuffle=False, verbose=0, callbacks=[stop])
        assert len(first.history["loss"]) == 2
        model.set_weights([weight * 0.5 for weight in model.get_weights()])
        compiled(model, keras.optimizers.Adam(0.1))
        model.fit(X, Y, batch_size=8, steps_per_epoch=2, shuffle=False, verbose=0)
        logs = model.train_on_batch(X[:6], Y[:6], return_dict=True)
        tested = model.test_on_batch(X[:5], Y[:5])
        return [*model.get_weights(), logs["loss"], *tested, model.predict_on_batch(X[:3])]

    expected = train(compiled(small_model()))
    with strategy.scope():
        model = compiled(small_model())
    for ours, theirs in zip(train(model), expected):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_workers_make_their_own_data(several):
    strategy, _ = several
    contexts = []

    def make(context):
        contexts.append(context.input_pipeline_id)
        for _ in range(2):
            yield np.full((4, 1), 1.0, "f"), np.ones(4)

    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
        model.compile(optimizer=keras.optimizers.SGD(0.5), loss=lambda y, out: keras.ops.mean(-out))
        model.set_weights([np.zeros((1, 1), "f")])
    with pytest.raises(mirrored.ArgumentError, match="steps_per_epoch"):
        model.fit(make, verbose=0)
    model.fit(make, steps_per_epoch=12, epochs=2, verbose=0)
    assert model.get_weights()[0].tolist() == [[12.0]]
    assert set(contexts) <= {0, 1, 2}


def test_a_failing_step_reaches_the_program(several):
    strategy, coordinator = several

    class Fails(keras.layers.Layer):
        def call(self, inputs, training=False):
            if training:
                raise ZeroDivisionError("on purpose")
            return inputs

    with strategy.scope():
        model = compiled(keras.Sequential([keras.Input((4,)), Fails(), keras.layers.Dense(3)]))
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        model.fit(X, Y, batch_size=4, verbose=0)
    coordinator.join(60)
    assert model.evaluate(X, Y, verbose=0)[0] > 0


def test_a_lost_worker_changes_nothing():
    """Steps of the batches it had are taken by others, once."""
    sent = []

    def listener(worker, operation):
        sent.append(worker)
        if sent.count(0) == 9:
            time.sleep(0)
            strategy.engine.kill_worker(0)

    with cluster(workers=2, engine_options={"listener": listener}) as (strategy, _):
        with strategy.scope():
            model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
            model.compile(
                optimizer=keras.optimizers.SGD(0.5), loss=lambda y, out: keras.ops.mean(-out)
            )
            model.set_weights([np.zeros((1, 1), "f")])
        model.fit(np.ones((96, 1), "f"), np.ones(96), batch_size=4, verbose=0)
        assert model.get_weights()[0].tolist() == [[12.0]]


def test_large_tables_are_drawn_where_they_are(monkeypatch):
    monkeypatch.setattr("mirrored.keras._served_tables._DRAWN_AT_ONCE_BYTES", 0)
    with cluster(workers=1, servers=2) as (strategy, _), strategy.scope():
        for initializer, low, high in (
            (keras.initializers.RandomUniform(-0.5, 0.5, seed=3), 0.28, 0.30),
            (keras.initializers.RandomNormal(stddev=2.0), 1.95, 2.05),
            # sqrt(2 / (20000 + 4))
            (keras.initializers.GlorotNormal(), 0.0099, 0.0101),
            (keras.initializers.Constant(3.0), 0.0, 0.0),
        ):
            layer = keras.layers.Embedding(20_000, 4, embeddings_initializer=initializer)
            layer.build()
            (values,) = layer.get_weights()
            assert low <= values.std() <= high
            blocks = values[:8192], values[8192:16384]
            assert low == 0.0 or not np.array_equal(*blocks)
