"""What the tests of NNX train, by hand and on replicas."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import mirrored

ADAM = optax.adam(1e-2)


class Mlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, **parts) -> None:
        self.first = nnx.Linear(3, 4, rngs=rngs)
        self.second = nnx.Linear(4, 2, rngs=rngs)
        self.scale = jnp.array([1.0, 0.5, 2.0])  # an array without a Variable
        for name, part in parts.items():
            setattr(self, name, part)

    def __call__(self, x):
        return self.second(jax.nn.relu(self.first(x * self.scale)))


def per_replica_batch(replica_count, *arrays):
    """What distribute_dataset yields: pieces of ceil(n / R) rows, padded, with counts."""
    rows = len(arrays[0])
    length = -(-rows // replica_count)
    counts = np.clip(rows - length * np.arange(replica_count), 0, length).astype(np.int32)
    parts = []
    for array in arrays:
        padded = np.zeros((replica_count * length, *array.shape[1:]), array.dtype)
        padded[:rows] = array
        stacked = jnp.asarray(padded.reshape(replica_count, length, *array.shape[1:]))
        shown = None if (counts == length).all() else jnp.asarray(counts)
        parts.append(mirrored.PerReplica.from_stacked(stacked, shown, is_batch=True))
    return tuple(parts)


def data(rows, steps=3):
    random = np.random.default_rng(rows)
    shape = (steps, rows)
    return (
        random.normal(size=(*shape, 3)).astype(np.float32),
        random.normal(size=(*shape, 2)).astype(np.float32),
    )


def train_step(model, optimizer, batch):
    x, y = batch

    def loss_fn(model):
        return mirrored.mean(((model(x) - y) ** 2).mean(-1))

    loss, gradients = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


@functools.cache
def hand_written(rows, tx):
    """The same training on one device, in plain NNX."""
    model = Mlp(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, y):
        loss, gradients = nnx.value_and_grad(lambda m: ((m(x) - y) ** 2).mean())(model)
        optimizer.update(model, gradients)
        return loss

    losses = [float(step(model, optimizer, x, y)) for x, y in zip(*data(rows))]
    return losses, weights(model)


def weights(model):
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))


def compiled(how, strategy, step=train_step):
    def program(model, optimizer, batch):
        return strategy.reduce("mean", strategy.run(step, args=(model, optimizer, batch)))

    return {"eager": lambda f: f, "function": mirrored.function, "nnx.jit": nnx.jit}[how](program)


def assert_close(actual, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), actual, expected
    )
