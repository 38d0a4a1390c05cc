"""A custom training loop on every local device: handwritten digits, no download.

Run it with ``python examples/custom_loop.py``; where there is no accelerator, add
``--cpu-devices 4`` to train on four virtual CPU devices.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import mirrored
import mirrored.testing


def load() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Loads 1,797 real images of 8 x 8 pixels: the first 1,500 to train, 297 to test."""
    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype(np.float32), np.eye(10, dtype=np.float32)[labels]
    return (images[:1500], labels[:1500]), (images[1500:], labels[1500:])


def main(epochs: int = 10, batch_size: int = 64) -> float:
    train, test = load()
    strategy = mirrored.MirroredStrategy()
    print(f"Number of devices: {strategy.num_replicas_in_sync}")

    key = jax.random.key(0)
    with strategy.scope():
        W = mirrored.Variable(jax.random.normal(key, (64, 10)) * 0.01, name="weights")
        b = mirrored.Variable(jnp.zeros(10), name="biases")
        optimizer = mirrored.Optimizer(optax.adam(1e-2))

    def train_step(images, labels):
        def loss_fn():
            per_example = optax.softmax_cross_entropy(images @ W + b, labels)
            return mirrored.mean(per_example)  # exact on the last, partial batch too

        loss, gradients = mirrored.value_and_grad(loss_fn, [W, b])
        optimizer.apply_gradients(zip(gradients, [W, b]))
        return loss

    @mirrored.function
    def distributed_train_step(images, labels):
        return strategy.run(train_step, args=(images, labels))

    def is_right(images, labels):
        return (images @ W + b).argmax(axis=1) == labels.argmax(axis=1)

    @mirrored.function
    def distributed_test_step(images, labels):
        right = strategy.run(is_right, args=(images, labels))
        return strategy.reduce("sum", right, axis=0)

    train_data = strategy.distribute_dataset(train, batch_size, shuffle=True)
    test_data = strategy.distribute_dataset(test, batch_size)
    accuracy = 0.0
    for epoch in range(epochs):
        losses = []
        batches = mirrored.progress(train_data, f"epoch {epoch + 1}/{epochs}")
        for images, labels in batches:
            losses.append(distributed_train_step(images, labels))
            batches.report(loss=losses[-1])
        right = sum(int(distributed_test_step(*batch)) for batch in test_data)
        accuracy = right / len(test[0])
        print(f"epoch {epoch + 1}: loss {np.mean(losses):.4f}, test accuracy {accuracy:.4f}")
    kinds = ", ".join(f"{device.platform}:{device.id}" for device in strategy.devices)
    print(f"Trained on {kinds}: {accuracy:.1%} of the test images are read correctly.")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu-devices", type=int, help="train on this many virtual CPU devices")
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    if options.cpu_devices:
        mirrored.testing.use_cpu_devices(options.cpu_devices)
    main(options.epochs)
