"""Keras over several workers; prints what fit, evaluate and predict give."""

import json
import os
import pathlib
import signal
import sys

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np

import mirrored
import mirrored.checkpoint
import mirrored.keras

strategy = mirrored.MultiWorkerMirroredStrategy(timeout=60)
mode, directory = sys.argv[1], pathlib.Path(sys.argv[2])
keras.utils.set_random_seed(0)
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


class Kill(keras.callbacks.Callback):
    """Kills worker 1 in the middle of the third epoch, the first time."""

    def on_epoch_begin(self, epoch, logs=None):
        first = os.environ["MIRRORED_ATTEMPT"] == "0"
        if mode == "kill" and first and epoch == 2 and jax.process_index() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


x = np.random.default_rng(0).normal(size=(45, 8)).astype("f4")
y = np.random.default_rng(1).integers(0, 3, 45)
checkpoint = mirrored.checkpoint.Checkpoint(directory, {}, every=1)
callbacks = [mirrored.keras.Backup(checkpoint), Kill()]
history = model.fit(
    x, y, epochs=4, batch_size=16, verbose=0, shuffle=False, callbacks=callbacks
).history
checkpoint.wait()
found = {
    "last": {name: values[-1] for name, values in history.items()},
    "evaluate": model.evaluate(x, y, batch_size=16, verbose=0),
    "predict": model.predict(x, batch_size=16, verbose=0).tolist(),
}
print("FOUND " + json.dumps(found), flush=True)
