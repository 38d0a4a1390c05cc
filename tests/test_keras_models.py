"""Which strategy a model belongs to, saving and loading, and steps outside an epoch."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time

import jax
import keras
import numpy as np
import pytest
from conftest import make_strategy

import mirrored
import mirrored.keras
from mirrored.keras._flight import Pace

pytestmark = pytest.mark.usefixtures("quick_compilation")

X = np.arange(14, dtype="float32").reshape(7, 2) / 14
Y = X.sum(axis=1, keepdims=True)


def layers():
    return [keras.Input((2,)), keras.layers.Dense(4, activation="relu"), keras.layers.Dense(1)]


def compiled(strategy, **arguments):
    keras.utils.set_random_seed(2)
    with strategy.scope():
        model = keras.Sequential(layers())
        model.compile(**{"optimizer": keras.optimizers.Adam(0.1), "loss": "mse"} | arguments)
    return model


def fit(model, **arguments):
    return model.fit(X, Y, **{"batch_size": 4, "verbose": 0, "shuffle": False} | arguments).history


def device_count(model):
    (count,) = {len(v.value.devices()) for v in [*model.variables, *model.optimizer.variables]}
    return count


# --- the pitfall -------------------------------------------------------------------------------


@pytest.mark.conformance(47)
@pytest.mark.parametrize("method", ["fit", "evaluate", "train_on_batch"])
def test_a_model_made_outside_and_compiled_inside_is_an_error(method, two):
    model = keras.Sequential(layers(), name="early")
    with two.scope():
        model.compile("sgd", "mse")
    with pytest.raises(
        mirrored.OwnershipError, match=r"'early'.*dense.*outside any scope"
    ) as error:
        getattr(model, method)(X, Y)
    assert "the line that makes the model" in error.value.hint


@pytest.mark.conformance(47)
def test_built_inside_and_compiled_outside_works(two):
    expected = fit(compiled(two))
    keras.utils.set_random_seed(2)
    with two.scope():
        model = keras.Sequential(layers())
    model.compile(keras.optimizers.Adam(0.1), "mse", metrics=["mae"])
    np.testing.assert_allclose(fit(model)["loss"], expected["loss"], rtol=1e-6)
    assert device_count(model) == 2


def test_an_optimizer_made_outside_is_an_error(two):
    optimizer = keras.optimizers.Adam(0.1, name="early_adam")
    model = compiled(two, optimizer=optimizer)
    with pytest.raises(mirrored.OwnershipError, match="early_adam") as error:
        fit(model)
    assert "makes the Adam" in error.value.hint


def test_a_layer_made_outside_is_an_error(two):
    early = keras.layers.Dense(3, name="early_layer")
    early.build((None, 2))
    with two.scope():
        model = keras.Sequential([keras.Input((2,)), early])
        model.compile("sgd", "mse")
    with pytest.raises(mirrored.OwnershipError, match="early_layer/kernel") as error:
        fit(model)
    assert "the layer of that weight" in error.value.hint


def test_a_model_of_another_strategy_is_an_error_even_on_equal_devices(two):
    other = make_strategy(2)
    model = keras.Sequential(layers())
    with two.scope():
        inner = keras.Sequential(layers())
    with other.scope():
        model = keras.Sequential([keras.Input((2,)), inner])
        model.compile("sgd", "mse")
    with pytest.raises(mirrored.OwnershipError, match="another strategy"):
        fit(model)


def test_training_an_outsider_inside_the_scope_is_an_error(two):
    model = keras.Sequential(layers(), name="outsider")
    model.compile("sgd", "mse")
    with two.scope(), pytest.raises(mirrored.OwnershipError, match="'outsider'"):
        fit(model)
    assert model.predict(X, verbose=0).shape == (7, 1)


def test_models_beside_the_strategy_are_left_alone(two):
    def alone():
        keras.utils.set_random_seed(4)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dropout(0.5), *layers()[1:]])
        model.compile("sgd", "mse")
        return fit(model), model

    expected, _ = alone()
    with two.scope():
        keras.random.uniform((2,))
    compiled(two)
    found, model = alone()
    assert found == expected
    assert mirrored.keras.strategy_of(model) is None
    assert device_count(model) == 1
    keras.random.uniform((2,)) + model.predict(X[:1], verbose=0)[0]


def test_strategies_of_different_sizes_in_turn():
    histories = [fit(compiled(make_strategy(r)))["loss"] for r in (2, 4, 2, 1, 3)]
    for found in histories[1:]:
        np.testing.assert_allclose(found, histories[0], rtol=1e-6)


# --- saving and loading ------------------------------------------------------------------------


def test_save_and_load_in_and_out_of_the_scope_and_train_on(tmp_path, two):
    whole = compiled(two)
    fit(whole, epochs=4)
    model = compiled(two)
    fit(model, epochs=2)
    model.save(tmp_path / "m.keras")
    four = make_strategy(4)
    with four.scope():
        inside = keras.models.load_model(tmp_path / "m.keras")
    outside = keras.models.load_model(tmp_path / "m.keras")
    for loaded, count in ((inside, 4), (outside, 1)):
        fit(loaded, epochs=2)
        assert device_count(loaded) == count
        for got, wanted in zip(loaded.get_weights(), whole.get_weights()):
            np.testing.assert_allclose(got, wanted, rtol=2e-6, atol=1e-6)
    assert mirrored.keras.strategy_of(inside) is four
    assert mirrored.keras.strategy_of(outside) is None


def test_weights_loaded_outside_the_scope_stay_mirrored(tmp_path, two):
    first, second = compiled(two), compiled(two)
    fit(first)
    fit(second, epochs=2)
    first.save_weights(tmp_path / "w.weights.h5")
    second.load_weights(tmp_path / "w.weights.h5")
    assert all(len(v.value.devices()) == 2 for v in second.weights)
    np.testing.assert_array_equal(first.predict(X, verbose=0), second.predict(X, verbose=0))


# --- other ways to train -----------------------------------------------------------------------


def test_steps_outside_an_epoch_equal_one_device(two):
    found = []
    for strategy in (None, two):
        keras.utils.set_random_seed(2)
        if strategy is None:
            model = keras.Sequential(layers())
            model.compile(keras.optimizers.Adam(0.1), "mse", metrics=["mae"])
        else:
            model = compiled(strategy, metrics=["mae"])
        logs = [model.train_on_batch(X[:n], Y[:n], return_dict=True) for n in (4, 1, 7)]
        logs.append(model.test_on_batch(X, Y, return_dict=True))
        logs.append(model.train_on_batch(X, Y, sample_weight=np.arange(7.0), return_dict=True))
        found.append((logs, model.predict_on_batch(X[:5]), model.evaluate(X, Y, verbose=0)))
    for got, wanted in zip(found[1][0], found[0][0]):
        # Keras 3.14 turned arrays into numbers, and 3.15 resets the metrics before each.
        assert keras.tree.map_structure(type, got) == keras.tree.map_structure(type, wanted)
        got, wanted = keras.tree.map_structure(float, (got, wanted))
        assert got == pytest.approx(wanted, rel=2e-6)
    assert found[1][1].shape == (5, 1)
    np.testing.assert_allclose(found[1][1], found[0][1], rtol=1e-5)
    assert found[1][2] == pytest.approx(found[0][2], rel=1e-5)


def test_a_lazy_model_predicts_without_compile(two):
    with two.scope():
        model = keras.Sequential([keras.layers.Dense(3)])
    assert model.predict(X, batch_size=2, verbose=0).shape == (7, 3)
    assert {len(v.value.devices()) for v in model.variables} == {2}


def test_outputs_that_are_not_one_row_for_each_row_come_whole(two):
    with two.scope():
        model = keras.Sequential(
            [keras.Input((2,)), keras.layers.Lambda(lambda t: keras.ops.reshape(t, (-1,)))]
        )
    np.testing.assert_array_equal(model.predict(X, batch_size=3, verbose=0), X.reshape(-1))


def test_one_trace_and_a_fixed_number_of_programs(two):
    traces = []

    def loss(y_true, y_pred):
        traces.append(y_true.shape)
        return keras.ops.mean((y_true - y_pred) ** 2, axis=-1)

    model = compiled(two, loss=loss)
    fit(model, epochs=6)
    # Once to build (by Keras), and once for each shape of batch.
    assert traces[-2:] == [(4, 1), (3, 1)]
    assert len(traces) == 3


class OwnFunctions(keras.Model):
    """Makes its step functions itself, as Keras lets a class do."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.calls = 0

    def call(self, inputs):
        return self.dense(inputs)

    def make_train_function(self, force=False):
        step = jax.jit(self.train_step)

        def function(state, iterator):
            self.calls += 1
            return step(state, next(iterator))

        self.train_function = function

    def make_predict_function(self, force=False):
        def function(state, iterator):
            outputs, others = self.predict_step(state, next(iterator))
            return 2 * outputs, (state[0], others)

        self.predict_function = function


def test_a_class_may_make_its_step_functions_itself(two):
    found = []
    for strategy in (None, two):
        keras.utils.set_random_seed(2)
        with contextlib.nullcontext() if strategy is None else strategy.scope():
            model = OwnFunctions()
            model.compile("adam", "mse")
        losses = [*fit(model)["loss"], *fit(model)["loss"], model.train_on_batch(X, Y)]
        assert model.calls == 5
        found.append((losses, model.predict(X, batch_size=4, verbose=0)))
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=2e-6)
    np.testing.assert_allclose(found[1][1], found[0][1], rtol=2e-6)


def test_a_generator_may_train_and_ask_another_model(two):
    found = []
    for strategy in (None, two):
        keras.utils.set_random_seed(2)
        with contextlib.nullcontext() if strategy is None else strategy.scope():
            student, teacher = keras.Sequential(layers()), keras.Sequential(layers())
            student.compile("sgd", "mse")
            teacher.compile("sgd", "mse")

        def batches(teacher=teacher):
            while True:
                teacher.train_on_batch(X[:5], Y[:5])
                yield X, teacher.predict(X, verbose=0)

        history = student.fit(batches(), steps_per_epoch=5, epochs=2, shuffle=False, verbose=0)
        found.append(history.history["loss"])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


def test_variables_that_share_an_array_are_trained_apart(two):
    found = []
    for shared in (True, False):
        keras.utils.set_random_seed(2)
        with two.scope():
            model = keras.Sequential(layers())
            model.compile(keras.optimizers.SGD(0.1, use_ema=True), "mse")
        fit(model)
        averages = [v for v in model.optimizer.variables if "average" in v.path]
        assert len(averages) == 4
        for variable, average in zip(model.trainable_variables, averages):
            average.assign(variable.value if shared else np.array(variable.value))
        loss = model.train_on_batch(X, Y)
        found.append((loss, [np.asarray(v.value).tolist() for v in averages]))
    assert found[0] == found[1]


def test_averaged_weights_are_trained_on_after_they_were_looked_at(two):
    # At its end fit gives weights and averages the same arrays; stock Keras deletes them here.
    found = []
    for looks in (False, True):
        keras.utils.set_random_seed(2)
        with two.scope():
            model = keras.Sequential(layers())
            model.compile(keras.optimizers.SGD(0.1, use_ema=True), "mse")
        fit(model)
        if looks:
            model.evaluate(X, Y, verbose=0)
            model.test_on_batch(X, Y)
            model.predict(X, verbose=0)
        found.append(fit(model)["loss"])
    assert found[0] == found[1]


def test_calls_of_one_chunk_have_equal_lengths():
    pace = Pace()
    assert pace.next_count("step", 128) == 1
    pace.measured("step", 1, began=0.0)  # compiled: says nothing
    assert pace.next_count("step", 128) == 1
    pace.measured("step", 1, began=time.perf_counter() + 1)  # as fast as can be: grows by 8
    assert pace.next_count("step", 5) == 5
    assert pace.next_count("step", 17) == 6
    pace.measured("step", 8, began=time.perf_counter() - 8)  # a second each
    assert pace.next_count("step", 17) == 1
    assert pace.next_count("other", 17) == 1


def test_the_mixin_says_the_same(two):
    class Own(mirrored.keras.Mirrored, keras.Sequential):
        pass

    with two.scope():
        model = Own(layers())
        model.compile("sgd", "mse")
    fit(model)
    assert device_count(model) == 2
    alone = Own(layers())
    alone.compile("sgd", "mse")
    fit(alone)
    assert device_count(alone) == 1


def test_the_limits_of_keras_config_are_kept_and_said(two):
    model = compiled(two)
    keras.config.set_max_epochs(2)
    try:
        with pytest.warns(UserWarning, match="Limiting epochs to 2"):
            assert len(fit(model, epochs=5)["loss"]) == 2
    finally:
        keras.config.set_max_epochs(None)


def test_validation_data_is_looked_at_before_the_first_epoch(two):
    model = compiled(two)
    before = model.get_weights()
    with pytest.raises(ValueError, match="expected to be in format"):
        fit(model, validation_data=(X, Y, Y, Y))
    for one, other in zip(model.get_weights(), before):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_data_that_is_distributed_already_is_an_error_with_the_way_out(method, two):
    model = compiled(two)
    dataset = two.distribute_dataset([(X, Y)])
    for given in (dataset, iter(dataset)):
        with pytest.raises(mirrored.ArgumentError, match="split over the replicas") as error:
            getattr(model, method)(given, verbose=0)
        assert "what was given to distribute_dataset" in error.value.hint


# --- what must be there ------------------------------------------------------------------------

PROGRAM = """
import os
os.environ["KERAS_BACKEND"] = {backend!r}
import mirrored.testing
mirrored.testing.use_cpu_devices(2)
import mirrored
with mirrored.MirroredStrategy().scope():
    import keras
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
import numpy as np
model.fit(np.ones((5, 2)), np.ones((5, 1)), verbose=0)
print(len(model.weights[0].value.devices()), "devices")
"""


def run_program(backend):
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM.format(backend=backend)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_keras_may_be_imported_inside_the_scope():
    result = run_program("jax")
    assert result.stdout == "2 devices\n", result.stderr


def test_another_backend_is_an_error_with_the_line_to_set():
    result = run_program("numpy")
    assert result.returncode == 1
    assert 'os.environ["KERAS_BACKEND"] = "jax"' in result.stderr
    assert "Keras runs on numpy" in result.stderr


def test_a_model_built_by_its_first_batch_is_fitted_again():
    """Its input layer, made after ``compile``, is no change that would deserve a warning."""
    with mirrored.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    fit(model)
    fit(model)
    model.layers[0].trainable = False
    # Keras 3.15 was the first to warn.
    warns = "_warn_if_trainable_state_changed" in dir(keras.Model)
    with (
        pytest.warns(UserWarning, match="trainable") if warns else contextlib.nullcontext(),
        pytest.raises(ValueError, match="optimizer was built"),
    ):
        fit(model)
