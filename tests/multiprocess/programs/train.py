"""Trains a small model to its end, wherever it was interrupted, and writes down everything."""

import json
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mirrored
import mirrored.checkpoint

out, epochs, pause = pathlib.Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
strategy = mirrored.MultiWorkerMirroredStrategy(timeout=60)
with strategy.scope():
    W = mirrored.Variable(np.random.default_rng().normal(size=(20, 10)).astype("f4"), name="W")
    W.assign(np.random.default_rng(0).normal(size=(20, 10)).astype("f4"))
    b = mirrored.Variable(jnp.zeros(10), name="b")
    steps = mirrored.Variable(0.0, synchronization="on_read", aggregation="sum", name="steps")
    optimizer = mirrored.Optimizer(optax.adam(1e-2))


def step(x, y, ids, key):
    noise = jax.random.normal(mirrored.get_replica_context().random_key(key), (20,))

    def loss_fn():
        losses = optax.softmax_cross_entropy_with_integer_labels((x + 0.01 * noise) @ W + b, y)
        return mirrored.mean(losses)

    loss, gradients = mirrored.value_and_grad(loss_fn, [W, b])
    optimizer.apply_gradients(zip(gradients, [W, b]))
    steps.assign_add(1.0)
    return loss, ids


@mirrored.function
def train_step(x, y, ids, key):
    return strategy.run(step, args=(x, y, ids, key))


generator = np.random.default_rng(1)
features = generator.normal(size=(203, 20)).astype("f4")
labels = generator.integers(0, 10, 203)
dataset = strategy.distribute_dataset(
    (features, labels, np.arange(203)), batch_size=16, shuffle=True
)
host_random = np.random.default_rng(7)
checkpoint = mirrored.checkpoint.Checkpoint(
    out / "checkpoints",
    {"W": W, "b": b, "optimizer": optimizer, "steps": steps, "host_random": host_random},
    every=7,
)


def is_variable(leaf):
    return isinstance(leaf, mirrored.Variable)


number = jax.process_index()
began = time.time()
with (out / f"seen-{number}").open("a") as seen:
    for x, y, ids in checkpoint.batches(dataset, epochs):
        key = jax.random.key(int(host_random.integers(2**31)))
        loss, back = train_step(x, y, ids, key)
        loss.block_until_ready()
        rows = [np.asarray(part).tolist() for part in strategy.local_results(back)]
        seen.write(json.dumps({"step": checkpoint.step, "rows": rows, "time": time.time()}) + "\n")
        seen.flush()
        time.sleep(pause)
checkpoint.save()
checkpoint.wait()
total = float(steps)
if number == 0:
    state = jax.tree.leaves(optimizer.state, is_leaf=is_variable)
    arrays = [W.numpy(), b.numpy(), np.float32(total), *(leaf.numpy() for leaf in state)]
    np.savez(out / "final.npz", *arrays, generator=host_random.integers(2**31))
print(f"ended after step {checkpoint.step}")
