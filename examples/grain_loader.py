"""Feeds a training loop from Grain and goes on from a saved iterator."""

import grain
import jax
import numpy as np
import optax

import mirrored


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

    for epoch in range(3):
        for batch in strategy.distribute_dataset(dataset):
            loss = step(batch)
        print(f"epoch {epoch}: loss {float(loss):.5f}")
    jax.block_until_ready(weights.value)
    return float(loss)


if __name__ == "__main__":
    main()
