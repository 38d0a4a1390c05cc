"""Checks what needs TensorFlow beside JAX: tf.data as a source, and TensorBoard's event files.

    tf-env/bin/python scripts/keras_with_tensorflow.py

Run it with a Python that has jax, keras and tensorflow; the project's own environment has no
TensorFlow. Each check compares two replicas with one device of stock Keras.
"""

from __future__ import annotations

import os
import pathlib
import tempfile

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import mirrored.testing

mirrored.testing.use_cpu_devices(2)

import keras
import numpy as np
import tensorflow as tf

import mirrored

X = np.random.default_rng(0).normal(size=(22, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def trained(strategy, source, callbacks=None, **fit):
    """Trains a small model and returns it with its logs."""
    keras.utils.set_random_seed(1)

    def make():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.1), "mse")
        return model

    if strategy is None:
        model = make()
    else:
        with strategy.scope():
            model = make()
    history = model.fit(*source, epochs=2, verbose=0, callbacks=callbacks, **fit)
    return model, history.history


def scalars(folder: pathlib.Path) -> dict[str, list[tuple[int, float]]]:
    """Reads all scalars of all event files below a folder."""
    found: dict[str, list[tuple[int, float]]] = {}
    for file in sorted(folder.rglob("events.*")):
        for event in tf.compat.v1.train.summary_iterator(str(file)):
            for value in event.summary.value:
                number = tf.make_ndarray(value.tensor) if value.HasField("tensor") else None
                if number is not None and number.dtype.kind == "f" and number.ndim == 0:
                    found.setdefault(value.tag, []).append((event.step, float(number)))
    return found


def check_tf_data(two) -> None:
    """A tf.data.Dataset with a partial last batch trains as on one device."""
    dataset = (tf.data.Dataset.from_tensor_slices((X, Y)).batch(4),)
    expected, found = trained(None, dataset), trained(two, dataset)
    np.testing.assert_allclose(found[1]["loss"], expected[1]["loss"], rtol=1e-6)
    predictions = found[0].predict(dataset[0], verbose=0)
    np.testing.assert_allclose(predictions, expected[0].predict(X, verbose=0), rtol=1e-5)


def check_tensorboard(two, update_freq) -> None:
    """A reader finds in the event files what stock Keras writes, step for step."""
    with tempfile.TemporaryDirectory() as folder:
        for name, strategy in (("stock", None), ("ours", two)):
            board = keras.callbacks.TensorBoard(
                str(pathlib.Path(folder, name)), update_freq=update_freq
            )
            trained(strategy, (X, Y), [board], batch_size=4)
        expected = scalars(pathlib.Path(folder, "stock"))
        found = scalars(pathlib.Path(folder, "ours"))
    assert expected.keys() == found.keys(), (expected.keys(), found.keys())
    assert "epoch_loss" in found, found.keys()
    for tag, points in expected.items():
        assert [step for step, _ in points] == [step for step, _ in found[tag]], tag
        np.testing.assert_allclose(
            [value for _, value in found[tag]], [value for _, value in points], rtol=1e-5
        )
    print(f"TensorBoard, update_freq={update_freq!r}: { ({k: len(v) for k, v in found.items()}) }")


def main() -> None:
    """Runs all checks."""
    two = mirrored.MirroredStrategy()
    check_tf_data(two)
    print("tf.data: equal to one device")
    for update_freq in ("epoch", "batch", 3):
        check_tensorboard(two, update_freq)


if __name__ == "__main__":
    main()
