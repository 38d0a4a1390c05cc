"""What several workers train, save and restore: an NNX model, and optimizer state in shards."""

import numpy as np
import optax
from flax import nnx

import mirrored
import mirrored.checkpoint
import mirrored.nnx

# Batches of 8: the last one has a single row, so that all replicas but one have none.
X = np.random.default_rng(2).normal(size=(17, 5)).astype("f4")
Y = X.sum(-1, keepdims=True)


class Training:
    """A linear model whose Adam state is in shards, and how many steps it has taken."""

    def __init__(self, strategy, directory):
        self.strategy = strategy
        with strategy.scope():
            # 5 x 3 is no multiple of 2, 3 or 4: some shards are padded.
            self.weights = mirrored.Variable(np.full((5, 3), 0.5, "f4"), name="weights")
            self.steps = mirrored.Variable(
                0.0, synchronization="on_read", aggregation="sum", name="steps"
            )
            self.optimizer = mirrored.Optimizer(optax.adam(0.1), shard_state=True)
        state = {"weights": self.weights, "steps": self.steps, "optimizer": self.optimizer}
        self.checkpoint = mirrored.checkpoint.Checkpoint(directory, state)
        self.step = mirrored.function(lambda x, y: strategy.run(self.replica, args=(x, y)))

    def replica(self, x, y):
        def loss_fn():
            return mirrored.mean(((x @ self.weights - y) ** 2).sum(-1))

        loss, (gradient,) = mirrored.value_and_grad(loss_fn, [self.weights], reduce=False)
        self.optimizer.apply_gradients([(gradient, self.weights)])
        self.steps.assign_add(1.0 / self.strategy.num_replicas_in_sync)
        return loss

    def epoch(self):
        data = self.strategy.distribute_dataset((X, Y), batch_size=8)
        return [float(self.step(x, y)) for x, y in data]

    def save(self, step):
        self.checkpoint.save(step)
        self.checkpoint.wait()


def save_one_epoch(strategy, directory):
    """Trains an epoch and saves it, for others to go on with."""
    training = Training(strategy, directory)
    losses = training.epoch()
    training.save(3)
    return losses


def go_on(strategy, directory):
    """Goes on for an epoch from what was saved, on whatever replicas."""
    training = Training(strategy, directory)
    step = training.checkpoint.restore()
    losses = training.epoch()
    return {
        "step": step,
        "losses": losses,
        "weights": training.weights.numpy().tolist(),
        "steps": float(training.steps),
    }


def train_nnx(strategy):
    """Trains an NNX model with batch norm and returns its losses and parameters."""
    with strategy.scope():
        rngs = nnx.Rngs(0)
        norm = mirrored.nnx.BatchNorm(4, rngs=rngs)
        model = nnx.Sequential(nnx.Linear(5, 4, rngs=rngs), norm, nnx.Linear(4, 1, rngs=rngs))
        # Not Adam: in front of a norm the gradient of a bias is rounding alone, which it scales up.
        optimizer = mirrored.nnx.Optimizer(model, optax.sgd(0.05), wrt=nnx.Param)

    def replica(model, optimizer, x, y):
        def loss_fn(model):
            return mirrored.mean(((model(x) - y) ** 2)[:, 0])

        loss, gradients = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, gradients)
        return loss

    @mirrored.function
    def step(model, optimizer, x, y):
        losses = strategy.run(replica, args=(model, optimizer, x, y))
        return strategy.reduce("mean", losses)

    data = strategy.distribute_dataset((X, Y), batch_size=8)
    losses = [float(step(model, optimizer, x, y)) for _ in range(2) for x, y in data]
    return {"losses": losses, "mean": np.asarray(norm.mean[...]).tolist()}


def find(strategy, own, given):
    """Saves in the directory ``own``; goes on from ``given``, which other replicas saved."""
    found = {"first": save_one_epoch(strategy, own)}
    return found | {"on": go_on(strategy, given), "nnx": train_nnx(strategy)}
