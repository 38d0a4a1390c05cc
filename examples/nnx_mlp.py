"""Trains a Flax NNX model on all devices: the step is plain NNX."""

import jax
import numpy as np
import optax
from flax import nnx

import mirrored
import mirrored.nnx


class Model(nnx.Module):
    """Two layers with dropout and batch norm."""

    def __init__(self, rngs):
        self.first = nnx.Linear(20, 64, rngs=rngs)
        # Statistics of the global batch; those of nnx.BatchNorm are of each replica's part.
        self.norm = mirrored.nnx.BatchNorm(64, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.second = nnx.Linear(64, 3, rngs=rngs)

    def __call__(self, x):
        """Returns the logits."""
        return self.second(self.dropout(nnx.relu(self.norm(self.first(x)))))


def train_step(model, optimizer, metrics, batch):
    x, labels = batch

    def loss_fn(model):
        logits = model(x)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return mirrored.mean(losses), logits

    (loss, logits), gradients = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    optimizer.update(model, gradients)
    metrics.update(loss=loss, logits=logits, labels=labels)


def main():
    strategy = mirrored.MirroredStrategy()
    print(f"Number of devices: {strategy.num_replicas_in_sync}")
    with strategy.scope():
        model = Model(nnx.Rngs(0))
        optimizer = mirrored.nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())

    @mirrored.function
    def step(model, optimizer, metrics, batch):
        strategy.run(train_step, args=(model, optimizer, metrics, batch))

    random = np.random.default_rng(0)
    x = random.normal(size=(1024, 20)).astype(np.float32)
    labels = (x[:, :3]).argmax(-1).astype(np.int32)
    for epoch in range(3):
        for batch in strategy.distribute_dataset((x, labels), batch_size=64):
            step(model, optimizer, metrics, batch)
        shown = {name: round(float(value), 4) for name, value in metrics.compute().items()}
        print(f"epoch {epoch}: {shown}")
        metrics.reset()
    jax.block_until_ready(nnx.state(model))
    return shown


if __name__ == "__main__":
    main()
