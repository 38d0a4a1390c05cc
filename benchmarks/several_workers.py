"""A training step of two processes over Gloo: mirrored beside PyTorch's DistributedDataParallel.

    python benchmarks/several_workers.py --torch-python PYTHON

Both train 784-128-10 on the same batches of 64 (32 a process) with SGD from the same weights; each
step is waited for.
"""

from __future__ import annotations

import driver
import numpy as np
import torch_replica

WORKERS = 2
BATCH = 64
BATCHES = 16
CAVEATS = ["Two processes on one machine, over Gloo and loopback; each step is waited for."]


def data():
    generator = np.random.default_rng(0)
    images = generator.normal(size=(BATCH * BATCHES, 784)).astype("f4")
    labels = generator.integers(0, 10, BATCH * BATCHES)
    weights = [
        generator.normal(size=(784, 128)).astype("f4") / 28,
        generator.normal(size=(128, 10)).astype("f4") / 11,
    ]
    return images, labels, weights


def serve_mirrored():
    import jax
    import jax.numpy as jnp
    import optax

    import mirrored

    strategy = mirrored.MultiWorkerMirroredStrategy(timeout=60)
    images, labels, initial = data()
    with strategy.scope():
        variables = [
            mirrored.Variable(initial[0]),
            mirrored.Variable(jnp.zeros(128)),
            mirrored.Variable(initial[1]),
            mirrored.Variable(jnp.zeros(10)),
        ]
        optimizer = mirrored.Optimizer(optax.sgd(0.1))

    def replica(x, y):
        def loss_fn():
            w1, b1, w2, b2 = variables
            logits = jax.nn.relu(x @ w1 + b1) @ w2 + b2
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        loss, gradients = mirrored.value_and_grad(loss_fn, variables)
        optimizer.apply_gradients(zip(gradients, variables))
        return loss

    @mirrored.function
    def train_step(x, y):
        return strategy.run(replica, args=(x, y))

    batches = list(strategy.distribute_dataset((images, labels), batch_size=BATCH))
    position = -1

    def step():
        nonlocal position
        position = (position + 1) % BATCHES
        loss = strategy.local_results(train_step(*batches[position]))[0]
        return loss.block_until_ready()

    def collectives(_):
        text = train_step.lower(*batches[0]).compile().as_text()
        return {"collectives": text.count(" all-reduce(")}

    driver.serve(lambda name: step, lambda loss: None, more={"compiled": collectives})


def serve_torch():
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    images, labels, initial = data()
    model = torch.nn.Sequential(
        torch.nn.Linear(784, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
    )
    with torch.no_grad():
        for layer, weights in zip((model[0], model[2]), initial):
            layer.weight.copy_(torch.from_numpy(weights.T))
            layer.bias.zero_()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rows = BATCH // WORKERS
    batches = []
    for number in range(BATCHES):
        start = number * BATCH + rank * rows
        batches.append(
            (
                torch.from_numpy(images[start : start + rows]),
                torch.from_numpy(labels[start : start + rows]),
            )
        )

    step = torch_replica.ddp_step(model, optimizer, batches)
    driver.serve(lambda name: step, lambda loss: None)


def main():
    given = driver.options(__doc__, rounds=11, steps=500, peers=["torch"])
    if given.serve:
        {"jax": serve_mirrored, "torch": serve_torch}[given.serve[0]]()
        return
    counts = {"jax": WORKERS, "torch": WORKERS}
    with driver.start(__file__, given.pythons, counts=counts) as started:
        names = {"mirrored": "jax", "PyTorch DDP": "torch"}
        case = driver.measure(
            f"{WORKERS} processes",
            {name: started[peer] for name, peer in names.items() if peer in started},
            losses=given.steps,
            tolerance=2e-3,
            rounds=given.rounds,
            steps=given.steps,
        )
        case["contenders"]["mirrored"] |= started["jax"].ask(compiled=1)
        versions = {peer: process.versions for peer, process in started.items()}
    driver.show(case)
    driver.write_result(given.json, "several-workers", [case], versions, CAVEATS)


if __name__ == "__main__":
    main()
