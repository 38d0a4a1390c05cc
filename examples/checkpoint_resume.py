"""Train, get interrupted, and go on as if nothing had happened.

Run it twice with the same directory: ``python examples/checkpoint_resume.py /tmp/run --stop-after
30``, then without ``--stop-after``. The second run begins in the middle of the epoch and ends with
the weights of a run that was never interrupted. Where there is no accelerator, add
``--cpu-devices 4``.
"""

import argparse

import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import mirrored
import mirrored.testing
from mirrored.checkpoint import Checkpoint


def main(directory: str, epochs: int = 3, stop_after: int | None = None) -> np.ndarray:
    """Trains, from the last checkpoint if there is one, and returns the weights."""
    images, labels = load_digits(return_X_y=True)
    strategy = mirrored.MirroredStrategy()
    with strategy.scope():
        W = mirrored.Variable(jnp.zeros((64, 10)), name="weights")
        optimizer = mirrored.Optimizer(optax.adam(1e-2))

    def replica_step(images, labels):
        def loss_fn():
            logits = images @ W
            return mirrored.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))

        loss, gradient = mirrored.value_and_grad(loss_fn, W)
        optimizer.apply_gradients([(gradient, W)])
        return loss

    @mirrored.function
    def step(batch):
        return strategy.run(replica_step, args=batch)

    data = (images.astype(np.float32) / 16, labels)
    dataset = strategy.distribute_dataset(data, batch_size=64, shuffle=True)
    checkpoint = Checkpoint(directory, {"weights": W, "optimizer": optimizer}, every=10)
    loss = float("nan")
    for batch in checkpoint.batches(dataset, epochs):
        loss = step(batch)
        if stop_after is not None and checkpoint.step + 1 == stop_after:
            checkpoint.completed()
            checkpoint.wait()
            print(f"interrupted after step {stop_after}")
            break
    else:
        print(f"{checkpoint.step} steps, loss {float(loss):.4f}")
    return W.numpy()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", help="where checkpoints are kept")
    parser.add_argument("--stop-after", type=int, help="pretend to be interrupted after this step")
    parser.add_argument("--cpu-devices", type=int, help="train on this many virtual CPU devices")
    options = parser.parse_args()
    if options.cpu_devices:
        mirrored.testing.use_cpu_devices(options.cpu_devices)
    main(options.directory, stop_after=options.stop_after)
