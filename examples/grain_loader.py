"""Feeds a training loop from Grain and goes on from a saved iterator."""

import tempfile

import grain
import jax
import numpy as np
import optax

import mirrored
from mirrored.checkpoint import Checkpoint


def main():
    strategy = mirrored.MirroredStrategy()
    x = np.random.default_rng(0).normal(size=(96, 4)).astype(np.float32)
    dataset = (
        grain.MapDataset.source(x).seed(1).shuffle().map(lambda row: (row, row.sum())).batch(16)
    )
    with strategy.scope():
        weights = mirrored.Variable(np.zeros(4, np.float32))
        optimizer = mirrored.Optimizer(optax.sgd(0.1))

    def train_step(batch):
        x, y = batch
        loss, gradient = mirrored.value_and_grad(
            lambda: mirrored.mean((x @ weights - y) ** 2), weights
        )
        optimizer.apply_gradients([(gradient, weights)])
        return loss

    @mirrored.function
    def step(batch):
        return strategy.reduce("mean", strategy.run(train_step, args=(batch,)))

    # The first run stops in its second epoch, and saves variables and position.
    batches = strategy.distribute_dataset(dataset)
    state = {"weights": weights, "optimizer": optimizer, "data": batches}
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = Checkpoint(directory, state)
        for batch in batches:
            step(batch)
        for number, batch in enumerate(batches):
            step(batch)
            if number == 2:
                break
        checkpoint.save(9)
        checkpoint.wait()
        # What a new process would begin with.
        weights.assign(np.zeros(4, np.float32))
        print(f"goes on after step {checkpoint.restore()}")
        for epoch in (1, 2):
            for batch in batches:
                loss = step(batch)
            print(f"epoch {epoch}: loss {float(loss):.5f}")
    jax.block_until_ready(weights.value)
    return float(loss)


if __name__ == "__main__":
    main()
