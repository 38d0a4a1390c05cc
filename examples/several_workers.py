"""One program, from one process to many: saved, preempted and resumed.

python examples/several_workers.py
mirrored launch -n 2 --max-restarts 3 examples/several_workers.py /tmp/checkpoints 500
"""

import os
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mirrored
import mirrored.checkpoint

directory = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
epochs = int(sys.argv[2]) if len(sys.argv) > 2 else 5

strategy = mirrored.MultiWorkerMirroredStrategy()
with strategy.scope():
    W = mirrored.Variable(jnp.zeros((784, 10)), name="weights")
    b = mirrored.Variable(jnp.zeros(10), name="biases")
    optimizer = mirrored.Optimizer(optax.adam(1e-3))

generator = np.random.default_rng(0)
images = generator.normal(size=(2000, 784)).astype("f4")
labels = np.argmax(images @ generator.normal(size=(784, 10)), axis=1)
dataset = strategy.distribute_dataset((images, labels), batch_size=64, shuffle=True)


def replica_step(images, labels):
    def loss_fn():
        logits = images @ W + b
        return mirrored.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))

    loss, gradients = mirrored.value_and_grad(loss_fn, [W, b])
    optimizer.apply_gradients(zip(gradients, [W, b]))
    return loss


@mirrored.function
def train_step(images, labels):
    return strategy.run(replica_step, args=(images, labels))


checkpoint = mirrored.checkpoint.Checkpoint(
    directory,
    {"weights": W, "biases": b, "optimizer": optimizer},
    every=50,
    preemption_code=int(os.environ.get("PREEMPTION_CODE", "0")),
)
for images, labels in checkpoint.batches(dataset, epochs):
    loss = train_step(images, labels)
    if checkpoint.step % 20 == 0:
        print(f"worker {jax.process_index()}, step {checkpoint.step}: loss {float(loss):.4f}")
checkpoint.save()
checkpoint.wait()
print(f"worker {jax.process_index()} ended after step {checkpoint.step}")
