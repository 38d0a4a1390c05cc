"""A training step of two processes over Gloo: mirrored beside torch's DistributedDataParallel.

python benchmarks/several_workers.py --torch /path/to/python/with/torch

Both train 784-128-10 on the same batches of 64 (32 a process) with SGD from the same weights;
rounds alternate. The losses are compared before a time is printed.
"""

import argparse
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys

import driver
import numpy as np

WORKERS = 2
BATCH = 64
WARM_UP = 200
STEPS = 1000
HERE = pathlib.Path(__file__)


def data():
    generator = np.random.default_rng(0)
    images = generator.normal(size=(BATCH * 16, 784)).astype("f4")
    labels = generator.integers(0, 10, BATCH * 16)
    weights = [
        generator.normal(size=(784, 128)).astype("f4") / 28,
        generator.normal(size=(128, 10)).astype("f4") / 11,
    ]
    return images, labels, weights


def measure(step, wait):
    """Times the steps after the warm-up, each to its end, and keeps the losses."""
    import time

    losses, seconds = [], []
    for number in range(WARM_UP + STEPS):
        began = time.perf_counter()
        loss = step(number % 16)
        wait(loss)
        seconds.append(time.perf_counter() - began)
        losses.append(float(loss))
    return {"losses": losses[::100], "us": statistics.median(seconds[WARM_UP:]) * 1e6}


def run_mirrored():
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
    result = measure(
        lambda number: strategy.local_results(train_step(*batches[number]))[0],
        lambda loss: loss.block_until_ready(),
    )
    text = train_step.lower(*batches[0]).compile().as_text()
    return jax.process_index(), result | {"collectives": text.count(" all-reduce(")}


def run_torch():
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
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), 0.1)
    criterion = torch.nn.CrossEntropyLoss()
    rows = BATCH // WORKERS
    batches = []
    for number in range(16):
        start = number * BATCH + rank * rows
        batches.append(
            (
                torch.from_numpy(images[start : start + rows]),
                torch.from_numpy(labels[start : start + rows]),
            )
        )

    def step(number):
        x, y = batches[number]
        optimizer.zero_grad()
        loss = criterion(parallel(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    result = measure(step, lambda loss: None)
    torch.distributed.destroy_process_group()
    return rank, result


def start(python, peer):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    processes = []
    for number in range(WORKERS):
        environment = os.environ | {
            "MIRRORED_COORDINATOR": f"127.0.0.1:{port}",
            "MIRRORED_PROCESS_COUNT": str(WORKERS),
            "MIRRORED_PROCESS_ID": str(number),
            "JAX_PLATFORMS": "cpu",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(WORKERS),
            "RANK": str(number),
        }
        command = [python, str(HERE), "--worker", peer]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE))
    found = {}
    for process in processes:
        output = process.communicate(timeout=120)[0].decode()
        line = next(line for line in output.splitlines() if line.startswith("RESULT "))
        number, result = json.loads(line.removeprefix("RESULT "))
        found[number] = result
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", choices=["mirrored", "torch"])
    parser.add_argument("--torch", help="a Python that has torch", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="also write the figures to this file")
    given = parser.parse_args()
    if given.worker:
        result = run_mirrored() if given.worker == "mirrored" else run_torch()
        print("RESULT " + json.dumps(result), flush=True)
        return
    times = {"mirrored": [], "torch": []}
    for _ in range(given.rounds):
        both = {"mirrored": start(sys.executable, "mirrored"), "torch": start(given.torch, "torch")}
        losses = [
            np.mean([both[peer][n]["losses"] for n in range(WORKERS)], axis=0) for peer in both
        ]
        np.testing.assert_allclose(*losses, rtol=2e-3, atol=2e-4)
        for peer, found in both.items():
            times[peer].append(max(result["us"] for result in found.values()))
        collectives = both["mirrored"][0]["collectives"]
        print({peer: round(values[-1]) for peer, values in times.items()}, flush=True)
    medians = {peer: statistics.median(values) for peer, values in times.items()}
    print(f"mirrored {medians['mirrored']:.0f} us, torch DDP {medians['torch']:.0f} us a step")
    print(f"ratio {medians['mirrored'] / medians['torch']:.2f}; {collectives} collective a step")
    contenders = {
        peer: {"median": medians[peer], "unit": "us a step", "rounds": values}
        for peer, values in times.items()
    }
    found = {"mirrored / torch": driver.ratio(contenders, "mirrored", "torch")}
    case = {"name": f"{WORKERS} processes", "contenders": contenders, "ratios": found}
    driver.write_result(
        given.json,
        "several-workers",
        [case],
        {"jax": driver.versions()},
        ["Loopback of one machine, over Gloo; each round starts its processes anew."],
    )


if __name__ == "__main__":
    main()
