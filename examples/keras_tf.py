"""Handwritten digits with Keras on tf.distribute: the program before keras_mirrored.py.

The lines that differ between the two are the import and the first line of main.
"""

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits


def load():
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


def main():
    (x_train, y_train), (x_test, y_test) = load()
    strategy = tf.distribute.MirroredStrategy()
    print(f"Number of devices: {strategy.num_replicas_in_sync}")
    with strategy.scope():
        model = build_model()
        model.compile(
            optimizer=keras.optimizers.Adam(),
            loss="sparse_categorical_crossentropy",
            metrics=["accuracy"],
        )
    model.fit(x_train, y_train, epochs=5, batch_size=32)
    return model.evaluate(x_test, y_test, verbose=0)


if __name__ == "__main__":
    print("test loss and accuracy:", main())
