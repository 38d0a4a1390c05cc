"""Handwritten digits with Keras on every local device: real data, no download.

Run it with ``python examples/keras_mirrored.py``; where there is no accelerator, add
``--cpu-devices 4`` to train on four virtual CPU devices. keras_tf.py is the same program
on tf.distribute.
"""

import argparse
import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np
from sklearn.datasets import load_digits

import mirrored
import mirrored.testing


def load():
    """Loads 1,797 images of 8 x 8 pixels: the first 1,500 to train, 297 to test."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    return (images[:1500], labels[:1500]), (images[1500:], labels[1500:])


def build_model():
    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )


def main(epochs=5, strategy=None, verbose=1):
    (x_train, y_train), (x_test, y_test) = load()
    strategy = strategy or mirrored.MirroredStrategy()
    print(f"Number of devices: {strategy.num_replicas_in_sync}")
    with strategy.scope():
        model = build_model()
        model.compile(
            optimizer=keras.optimizers.Adam(),
            loss="sparse_categorical_crossentropy",
            metrics=["accuracy"],
        )
    model.fit(x_train, y_train, epochs=epochs, batch_size=32, verbose=verbose)
    loss, accuracy = model.evaluate(x_test, y_test, verbose=0)
    print(f"test loss {loss:.4f}, test accuracy {accuracy:.4f}")
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu-devices", type=int, help="train on this many virtual CPU devices")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    if options.cpu_devices:
        mirrored.testing.use_cpu_devices(options.cpu_devices)
    main(options.epochs)
