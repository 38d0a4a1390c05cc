"""Metrics reach TensorBoard's files through a writer that knows nothing of this library."""

from __future__ import annotations

import struct

import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from tensorboardX import SummaryWriter
from tensorboardX.proto import event_pb2

import mirrored

X = np.random.default_rng(0).normal(size=(22, 3)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)
STRATEGIES = [
    mirrored.OneDeviceStrategy("cpu:0"),
    mirrored.MirroredStrategy([f"cpu:{number}" for number in range(4)]),
]


def scalars(directory):
    """What TensorBoard would draw: {tag: [(step, value), ...]}."""
    (file,) = directory.glob("events*")
    data, found = file.read_bytes(), {}
    while data:
        # A record: its length, a checksum of that, the event, a checksum of it.
        (length,) = struct.unpack("<Q", data[:8])
        event = event_pb2.Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def losses_of_a_loop(strategy, directory):
    with strategy.scope():
        w = mirrored.Variable(jnp.zeros((3, 1)), name="w")
        optimizer = mirrored.Optimizer(optax.sgd(0.1))

    def train_step(x, y):
        loss, gradient = mirrored.value_and_grad(lambda: mirrored.mean((x @ w - y) ** 2), w)
        optimizer.apply_gradients([(gradient, w)])
        return loss

    step = mirrored.function(lambda x, y: strategy.run(train_step, args=(x, y)))
    with SummaryWriter(str(directory)) as writer:
        for number, batch in enumerate(strategy.distribute_dataset((X, Y), batch_size=8)):
            writer.add_scalar("loss", float(step(*batch)), number)


def metrics_of_fit(strategy, directory):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    with SummaryWriter(str(directory)) as writer:

        def write(epoch, logs):
            for name, value in logs.items():
                writer.add_scalar(name, value, epoch)

        callback = keras.callbacks.LambdaCallback(on_epoch_end=write)
        model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=[callback])


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        (losses_of_a_loop, {"loss": [0, 1, 2]}),
        (metrics_of_fit, {"loss": [0, 1], "mae": [0, 1]}),
    ],
)
def test_as_on_one_device(train, expected, tmp_path):
    found = []
    for number, strategy in enumerate(STRATEGIES):
        train(strategy, tmp_path / str(number))
        found.append(scalars(tmp_path / str(number)))
    assert {tag: [step for step, _ in values] for tag, values in found[0].items()} == expected
    for tag, values in found[0].items():
        np.testing.assert_allclose(found[1][tag], values, rtol=1e-5)
        assert values[-1][1] < values[0][1]
