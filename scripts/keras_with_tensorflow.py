"""Checks what needs TensorFlow or PyTorch beside JAX, on three replicas.

    tf-env/bin/python scripts/keras_with_tensorflow.py

tf.data and torch's DataLoader as sources, and TensorBoard's event files, read by TensorBoard's own
reader. Run it with a Python that has jax, keras, tensorflow and tensorboard, and perhaps torch;
the project's own environment has none of the three. Each check compares with one device of stock
Keras.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pathlib
import tempfile

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import mirrored.testing

mirrored.testing.use_cpu_devices(3)

import keras
import numpy as np
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

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
    """Reads all scalars below a folder, as TensorBoard does."""
    found: dict[str, list[tuple[int, float]]] = {}
    for run in sorted({file.parent for file in folder.rglob("events.*")}):
        reader = EventAccumulator(str(run), size_guidance={"tensors": 0}).Reload()
        for tag in reader.Tags()["tensors"]:
            events = reader.Tensors(tag)
            numbers = [tf.make_ndarray(event.tensor_proto) for event in events]
            if all(number.dtype.kind == "f" and number.ndim == 0 for number in numbers):
                steps = [event.step for event in events]
                found[f"{run.name}/{tag}"] = list(zip(steps, map(float, numbers), strict=True))
    return found


def check_source(strategy, name: str, source) -> None:
    """Batches of 4 of 22 rows, the last one partial, train as on one device."""
    expected = trained(None, (source,), validation_data=source)
    found = trained(strategy, (source,), validation_data=source)
    for word in ("loss", "val_loss"):
        np.testing.assert_allclose(found[1][word], expected[1][word], rtol=1e-6)
    predictions = found[0].predict(source, verbose=0)
    np.testing.assert_allclose(predictions, expected[0].predict(X, verbose=0), rtol=1e-5)
    print(f"{name}: equal to one device")


def check_tensorboard(strategy, update_freq) -> None:
    """A reader finds in the event files what stock Keras writes, step for step."""
    with tempfile.TemporaryDirectory() as folder:
        for name, where in (("stock", None), ("ours", strategy)):
            board = keras.callbacks.TensorBoard(
                str(pathlib.Path(folder, name)), update_freq=update_freq
            )
            trained(where, (X, Y), [board], batch_size=4, validation_data=(X, Y))
        expected = scalars(pathlib.Path(folder, "stock"))
        found = scalars(pathlib.Path(folder, "ours"))
    assert expected.keys() == found.keys(), (expected.keys(), found.keys())
    assert found.keys() >= {"train/epoch_loss", "validation/epoch_loss"}, found.keys()
    for tag, points in expected.items():
        assert [step for step, _ in points] == [step for step, _ in found[tag]], tag
        np.testing.assert_allclose(
            [value for _, value in found[tag]], [value for _, value in points], rtol=1e-5
        )
    print(f"TensorBoard, update_freq={update_freq!r}: { ({k: len(v) for k, v in found.items()}) }")


def main() -> None:
    """Runs all checks."""
    strategy = mirrored.MirroredStrategy()
    check_source(strategy, "tf.data", tf.data.Dataset.from_tensor_slices((X, Y)).batch(4))
    if importlib.util.find_spec("torch") is None:
        print("torch is not installed here: its DataLoader was not checked")
    else:
        torch = importlib.import_module("torch.utils.data")
        check_source(strategy, "torch's DataLoader", torch.DataLoader(Pairs(), batch_size=4))
    for update_freq in ("epoch", "batch", 3):
        check_tensorboard(strategy, update_freq)


class Pairs:
    """The rows as torch reads them."""

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(X)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns a row and its target."""
        return X[index], Y[index]


if __name__ == "__main__":
    main()
