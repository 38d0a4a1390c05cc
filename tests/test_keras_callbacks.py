"""Callbacks on a strategy: every built-in one, and whatever a user's own may do."""

from __future__ import annotations

import contextlib
import csv
import os
import signal

import keras
import numpy as np
import pytest
from conftest import make_strategy, wait_until

from mirrored.keras import _private
from mirrored.keras._callbacks import BatchCalls, batch_calls

pytestmark = pytest.mark.usefixtures("quick_compilation")

# Batches of one size, so that one program serves; uneven ones are in test_keras_exact.py.
N, BATCH, STEPS = 24, 4, 6


@pytest.fixture(scope="module")
def two():
    """One strategy for all, so that models and their programs serve more than one test."""
    return make_strategy(2)


def data():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(N, 3)).astype("float32")
    return x, x.sum(axis=1, keepdims=True)


# By strategy: a compiled model and the values of its variables when it was new.
FRESH = {}


def build(strategy):
    """Returns the model as it was when new, with the programs it has by now."""
    if strategy not in FRESH:
        model = build_anew(strategy)
        values = [np.array(variable.value) for variable in everything(model)]
        # A model's first fit draws an order more than the others do.
        fit(model, [], epochs=1)
        FRESH[strategy] = model, values
    model, values = FRESH[strategy]
    for variable, value in zip(everything(model), values, strict=True):
        variable.assign(value)
    model.stop_training = False
    model._initial_epoch = 0  # BackupAndRestore's
    keras.utils.set_random_seed(5)
    return model


def everything(model):
    return [*model.variables, *model.optimizer.variables]


def build_anew(strategy, **compile_arguments):
    keras.utils.set_random_seed(5)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(1)])
        arguments = {"optimizer": lambda: keras.optimizers.Adam(0.01), "loss": "mse"}
        arguments |= compile_arguments
        model.compile(**arguments | {"optimizer": arguments["optimizer"]()})
        model.optimizer.build(model.trainable_variables)
    return model


def fit(model, callbacks, epochs=3, **arguments):
    return model.fit(
        *data(),
        batch_size=BATCH,
        epochs=epochs,
        verbose=0,
        callbacks=callbacks,
        **arguments,
    ).history


class Recorder(keras.callbacks.Callback):
    """Writes down every batch call, with its logs."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def on_train_batch_begin(self, batch, logs=None):
        self.calls.append(("begin", batch, None))

    def on_train_batch_end(self, batch, logs=None):
        self.calls.append(("end", batch, float(logs["loss"])))


class SafeRecorder(Recorder):
    async_safe = True


def assert_same(found, expected, tolerance=3e-6):
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", [Recorder, SafeRecorder])
def test_batch_callbacks_get_every_call_in_order_with_the_logs_of_its_step(kind, two):
    reference, recorder = Recorder(), kind()
    fit(build(None), [reference], epochs=2)
    fit(build(two), [recorder], epochs=2)
    # Stock Keras runs end hooks of async_safe callbacks in a thread, so does fit here.
    expected = sorted(reference.calls, key=str)
    assert len(expected) == 2 * 2 * STEPS
    if kind is Recorder:
        order = [call[:2] for call in recorder.calls]
        assert order == [(what, n) for n in range(STEPS) for what in ("begin", "end")] * 2
    found = sorted(recorder.calls, key=str)
    assert [call[:2] for call in found] == [call[:2] for call in expected]
    for got, wanted in zip(found, expected):
        assert wanted[2] is None or got[2] == pytest.approx(wanted[2], rel=1e-5)


def test_a_batch_callback_may_read_and_change_the_model(two):
    def run(strategy):
        model = build(strategy)
        seen = []

        def halve(batch, logs):
            # By closure, as users do; and through everything Keras offers.
            weights = model.get_weights()
            seen.append(float(weights[0].sum()))
            if batch == 2:
                model.set_weights([0.5 * array for array in weights])
            model.optimizer.learning_rate = 0.01 / (batch + 1)

        history = fit(model, [keras.callbacks.LambdaCallback(on_train_batch_end=halve)])
        return seen, history, model.get_weights()

    keras.utils.set_random_seed(1)
    found = run(two)
    # Stock Keras shows such a closure no values during an epoch, so the law is asked of one
    # device through the same code.
    expected = run(make_strategy(1))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    assert len(set(found[0])) == 3 * STEPS
    assert_same(found[1], expected[1])
    for got, wanted in zip(found[2], expected[2]):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_a_batch_callback_may_evaluate_and_predict_in_the_middle(two):
    x, _ = data()

    class Nested(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            assert self.model.predict(x, verbose=0).shape == (N, 1)

    expected = fit(build(None), [])
    assert_same(fit(build(two), [Nested()]), expected)


CALLBACKS = {
    "early": lambda path: keras.callbacks.EarlyStopping("loss", patience=0, min_delta=100.0),
    "best_restored": lambda path: keras.callbacks.EarlyStopping(
        "loss", mode="max", patience=1, restore_best_weights=True
    ),
    "plateau": lambda path: keras.callbacks.ReduceLROnPlateau(
        "loss", factor=0.5, patience=1, min_delta=100.0
    ),
    "schedule": lambda path: keras.callbacks.LearningRateScheduler(
        lambda epoch, rate: rate / (epoch + 1)
    ),
    "csv": lambda path: keras.callbacks.CSVLogger(str(path / "log.csv")),
    "checkpoint": lambda path: keras.callbacks.ModelCheckpoint(str(path / "m{epoch}.keras")),
    "best": lambda path: keras.callbacks.ModelCheckpoint(
        str(path / "best.weights.h5"), save_weights_only=True, save_best_only=True, monitor="loss"
    ),
    "every_2": lambda path: keras.callbacks.ModelCheckpoint(
        str(path / "b{epoch}-{batch}.weights.h5"), save_weights_only=True, save_freq=2
    ),
    "backup": lambda path: keras.callbacks.BackupAndRestore(str(path / "backup")),
    "backup_2": lambda path: keras.callbacks.BackupAndRestore(str(path / "backup"), save_freq=2),
    "nan": lambda path: keras.callbacks.TerminateOnNaN(),
    "progbar": lambda path: keras.callbacks.ProgbarLogger(),
    "lambda": lambda path: keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: (path / f"{epoch}").write_text("")
    ),
}


@pytest.mark.parametrize("name", list(CALLBACKS))
def test_built_in_callbacks_do_what_they_do_on_one_device(name, tmp_path, two):
    found = []
    for strategy in (None, two):
        path = tmp_path / str(len(found))
        path.mkdir()
        model = build(strategy)
        history = fit(model, [CALLBACKS[name](path)])
        values = [np.array(variable.value) for variable in everything(model)]
        files = sorted(os.listdir(path))
        saved = [weights_in(path / file) for file in files if file.endswith((".h5", ".keras"))]
        found.append((history, values, files, saved))
    (expected, values, files, saved), ours = found
    assert_same(ours[0], expected)
    # The optimizer's state is among them: its learning rate, too.
    assert_close(ours[1], values)
    assert ours[2] == files
    for got, wanted in zip(ours[3], saved, strict=True):
        assert_close(got, wanted)
    if name == "early":
        assert len(expected["loss"]) == 2
    if name in ("checkpoint", "every_2"):
        assert len(saved) == {"checkpoint": 3, "every_2": 9}[name]
    if name == "csv":
        with open(tmp_path / "1" / "log.csv") as file:
            rows = list(csv.DictReader(file))
        np.testing.assert_allclose([float(r["loss"]) for r in rows], expected["loss"], rtol=1e-5)


def assert_close(found, expected):
    for got, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def weights_in(file):
    """The weights of a file, read by one device."""
    if file.suffix == ".keras":
        return keras.models.load_model(file).get_weights()
    model = build_anew(None)
    model.load_weights(file)
    return model.get_weights()


def test_averaged_weights_are_swapped_in_for_the_validation(two):
    found = []
    for strategy in (None, two):
        model = build_anew(strategy, optimizer=lambda: keras.optimizers.Adam(0.01, use_ema=True))
        callbacks = [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)]
        history = fit(model, callbacks, epochs=2, validation_data=data())
        found.append((history, model.get_weights()))
    assert_same(found[1][0], found[0][0])
    assert_close(found[1][1], found[0][1])


def test_an_orbax_checkpoint_is_saved_after_each_epoch(tmp_path, two):
    # What is in it is asked by Keras's own tests, which scripts/keras_own_tests.py runs.
    pytest.importorskip("keras", minversion="3.13")
    callback = keras.callbacks.OrbaxCheckpoint(
        str(tmp_path / "o"), save_freq="epoch", max_to_keep=9
    )
    assert batch_calls(keras.callbacks.CallbackList([callback]), "train") is BatchCalls.NOTHING
    expected = fit(build(two), [])
    assert fit(build(two), [callback]) == expected
    callback.wait_until_finished()
    assert sorted(os.listdir(tmp_path / "o")) == ["0", "1", "2"]


def test_checkpoints_restore_into_one_device(tmp_path, two):
    model = build(two)
    fit(model, [keras.callbacks.ModelCheckpoint(str(tmp_path / "m.keras"))])
    loaded = keras.models.load_model(tmp_path / "m.keras")
    x, _ = data()
    np.testing.assert_allclose(loaded.predict(x, verbose=0), model.predict(x, verbose=0), rtol=1e-6)
    assert all(len(v.value.devices()) == 1 for v in loaded.variables)


def test_terminate_on_nan_stops_at_the_very_batch(two):
    x, y = data()
    y[BATCH : 2 * BATCH] = np.nan
    recorder = Recorder()
    model = build(two)
    model.fit(
        x,
        y,
        batch_size=BATCH,
        shuffle=False,
        verbose=0,
        epochs=3,
        callbacks=[keras.callbacks.TerminateOnNaN(), recorder],
    )
    assert [call[1] for call in recorder.calls if call[0] == "end"] == [0, 1]


def test_stop_asked_for_before_an_epoch_ends_it_after_one_step(two):
    class Stop(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.stop_training = epoch == 1

    found = []
    for strategy in (None, two):
        model = build(strategy)
        history = fit(model, [Stop()])
        assert int(model.optimizer.iterations) == STEPS + 1
        found.append(history)
    assert_same(found[1], found[0])


def test_backup_and_restore_goes_on_where_it_stopped(tmp_path, two):
    whole = build_anew(two)
    fit(whole, [], epochs=4, shuffle=False)

    class Crash(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise OSError("power")

    def backup():
        return keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))

    first = build_anew(two)
    with pytest.raises(OSError, match="power"):
        fit(first, [backup(), Crash()], epochs=4, shuffle=False)
    again = build_anew(two)
    history = fit(again, [backup()], epochs=4, shuffle=False)
    assert len(history["loss"]) == 2
    for got, wanted in zip(again.get_weights(), whole.get_weights()):
        np.testing.assert_array_equal(got, wanted)


class Interrupting(keras.callbacks.Callback):
    """Presses Ctrl-C between two batches or epochs."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_leaves_a_usable_model(two):
    model = build(two)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        fit(model, [Interrupting()])
    assert signal.getsignal(signal.SIGINT) is handler
    interrupted = model.get_weights()
    assert len(fit(model, [])["loss"]) == 3
    fit(build(two), [], epochs=1)
    for got, wanted in zip(interrupted, model.get_weights()):
        np.testing.assert_array_equal(got, wanted)


def test_ctrl_c_inside_a_step_waits_until_the_model_has_its_values(two):
    model = build_anew(two)
    fit(model, [], epochs=1)
    program = _private.step_function(model, "train")
    (traced,) = [trace for key, trace in program._traces.items() if key[1][0] == BATCH]
    function = traced.functions[True, False]
    pressed = []

    def pressing(*arguments):
        result = function(*arguments)
        if not pressed:
            # The old arrays are given away, the new ones not stored yet.
            pressed.append(signal.raise_signal(signal.SIGINT))
        return result

    traced.functions[True, False] = pressing
    with pytest.raises(KeyboardInterrupt):
        fit(model, [], epochs=1)
    assert pressed
    assert all(np.isfinite(array).all() for array in model.get_weights())
    assert len(fit(model, [])["loss"]) == 3


@pytest.mark.parametrize("recorder", [SafeRecorder, None])
def test_the_steps_before_the_data_failed_are_taken_and_told(recorder, two):
    found = []
    for strategy in (None, two):

        def generator():
            x, y = data()
            for start in range(0, 12, 4):
                yield x[start : start + 4], y[start : start + 4]
            raise OSError("gone")

        model = build_anew(strategy)
        callbacks = [recorder()] if recorder else []
        with pytest.raises(OSError, match="gone"):
            model.fit(generator(), shuffle=False, verbose=0, callbacks=callbacks)
        for callback in callbacks:
            # Keras tells it from another thread, for which an error does not wait.
            wait_until(lambda calls=callback.calls: [call[0] for call in calls].count("end") == 3)
        told = [call for callback in callbacks for call in callback.calls]
        found.append((model.get_weights(), told, int(model.optimizer.iterations.value)))
    assert found[0][2] == found[1][2] == 3
    for got, wanted in zip(found[1][0], found[0][0]):
        np.testing.assert_allclose(got, wanted, rtol=3e-6, atol=3e-6)
    for _, told, _ in found:
        ends = sorted(call[:2] for call in told if call[0] == "end")
        assert ends == ([("end", batch) for batch in range(3)] if recorder else [])


@pytest.mark.parametrize("where", ["step", "callback", "data", "evaluate"])
def test_an_error_in_user_code_leaves_a_usable_model(where, two):
    broken = [True]

    def loss(y_true, y_pred):
        if where in ("step", "evaluate") and broken[0]:
            raise ZeroDivisionError(where)
        return keras.ops.mean((y_true - y_pred) ** 2, axis=-1)

    class Failing(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                raise ZeroDivisionError(where)

    def generator():
        x, y = data()
        for start in range(0, 12, 4):
            yield x[start : start + 4], y[start : start + 4]
        raise ZeroDivisionError(where)

    model = build_anew(two, loss=loss)
    before = model.get_weights()
    with pytest.raises(ZeroDivisionError):
        if where == "data":
            model.fit(generator(), shuffle=False, verbose=0)
        elif where == "evaluate":
            model.evaluate(*data(), verbose=0)
        else:
            fit(model, [Failing()] if where == "callback" else [])
    broken[0] = False
    if where in ("step", "evaluate"):
        for got, wanted in zip(model.get_weights(), before):
            np.testing.assert_array_equal(got, wanted)
    assert np.isfinite(fit(model, [])["loss"]).all()


@pytest.mark.parametrize("group", [1, 4])
def test_predict_callbacks_get_the_rows_of_their_batch(group, two):
    model = build_anew(two, steps_per_execution=group)
    rows = []
    callback = keras.callbacks.LambdaCallback()
    callback.on_predict_batch_end = lambda batch, logs: rows.append((batch, logs["outputs"]))
    predictions = model.predict(data()[0], batch_size=BATCH, verbose=0, callbacks=[callback])
    assert [batch for batch, _ in rows] == list(range(group - 1, STEPS + group - 1, group))
    np.testing.assert_array_equal(np.concatenate([out for _, out in rows]), predictions)
    assert predictions.shape == (N, 1)


def test_the_progress_bar_ends_full(two, capsys):
    build(two).fit(*data(), batch_size=BATCH, verbose=1)
    assert f"{STEPS}/{STEPS}" in capsys.readouterr().out
