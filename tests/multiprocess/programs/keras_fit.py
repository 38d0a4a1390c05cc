"""Keras over several workers; prints what fit, evaluate and predict give."""

import json
import os
import pathlib
import random
import signal
import sys

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np

import mirrored
import mirrored.checkpoint
import mirrored.keras

X = np.random.default_rng(0).normal(size=(45, 8)).astype("f4")
Y = np.random.default_rng(1).integers(0, 3, 45)


class Kill(keras.callbacks.Callback):
    """Kills worker 1 in the middle of the third epoch, once what was saved is written."""

    def __init__(self, checkpoint):
        super().__init__()
        self.checkpoint = checkpoint

    def on_train_batch_end(self, batch, logs=None):
        if self.checkpoint.step >= 16:
            self.checkpoint.wait()
            if jax.process_index() == 1:
                os.kill(os.getpid(), signal.SIGKILL)


class Batches(keras.utils.PyDataset):
    """The rows in batches of 8, the last of which has 5."""

    def __len__(self):
        return 6

    def __getitem__(self, number):
        rows = slice(8 * number, 8 * number + 8)
        return X[rows], Y[rows]


def generated():
    """A generator's batches: each of another size, the last of a single row."""
    for start, end in ((0, 7), (7, 20), (20, 23), (23, 24)):
        yield X[start:end], Y[start:end]


def train(strategy, directory, seed, killed):
    # Whatever the others draw, weights are worker 0's.
    keras.utils.set_random_seed(jax.process_index())
    drawn_next = random.Random(jax.process_index()).random()
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(16, activation="relu"),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(3),
            ]
        )
        model.compile(
            optimizer=keras.optimizers.Adam(0.01),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    assert jax.process_index() == 0 or random.random() == drawn_next
    keras.utils.set_random_seed(seed)
    checkpoint = mirrored.checkpoint.Checkpoint(directory, {}, every=4)
    callbacks = [mirrored.keras.Backup(checkpoint)]
    if killed:
        callbacks.append(Kill(checkpoint))
    elif jax.process_index() == 1:
        # On one worker only, and it may look at the model: all take one step at a time.
        callbacks.append(
            keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs=None: None)
        )
    history = model.fit(X, Y, epochs=4, batch_size=8, verbose=0, callbacks=callbacks).history
    checkpoint.wait()
    others = {
        "py_dataset": model.fit(Batches(workers=2), epochs=2, shuffle=False, verbose=0).history,
        "generator": model.fit(generated(), steps_per_epoch=4, shuffle=False, verbose=0).history,
        "evaluate": {"all": model.evaluate(Batches(), verbose=0)},
    }
    return {
        "others": others,
        "steps": checkpoint.step,
        "last": {name: values[-1] for name, values in history.items()},
        "evaluate": model.evaluate(X, Y, batch_size=16, verbose=0),
        "predict": model.predict(X, batch_size=16, verbose=0).tolist(),
    }


if __name__ == "__main__":
    first = os.environ["MIRRORED_ATTEMPT"] == "0"
    strategy = mirrored.MultiWorkerMirroredStrategy(timeout=60)
    # Each worker would draw another order of the rows; worker 0's counts.
    found = train(strategy, pathlib.Path(sys.argv[1]), jax.process_index(), first)
    print("FOUND " + json.dumps(found), flush=True)
