"""The same model on parameter servers and in lockstep: when is which one faster?

    python benchmarks/servers_or_lockstep.py

Two workers on this machine, each with batches of its own. "dense" is 784-128-10, batch 64 a
worker; "table" looks 26 zipf ids of each of 128 examples up in 200,000 rows of 64 numbers, and
ends in one dense layer; SGD for both. In lockstep the table is a Variable, whose gradient is all
rows. "slow" is dense with one worker that takes 20 ms longer for every step. What is counted is
examples a second over all workers, waited for at the end. Rounds alternate.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

WORKERS = 2
ROWS, FEATURES, IDS = 200_000, 64, 26
CASES = {"dense": 64, "table": 128, "slow": 64}
STEPS = {"dense": 400, "table": 20, "slow": 60}
PAUSE_SECONDS = 0.02


def batches(case, worker):
    """A few batches, used again and again."""
    generator = np.random.default_rng(worker)
    size = CASES[case]
    for _ in range(8):
        if case == "table":
            ids = generator.zipf(1.2, (size, IDS)) % ROWS
            yield ids.astype("i4"), generator.normal(size=size).astype("f4")
        else:
            labels = generator.integers(0, 10, size)
            yield generator.normal(size=(size, 784)).astype("f4"), labels


def make(case, lockstep):
    """Variables and the loss of a batch."""
    import jax
    import jax.numpy as jnp
    import optax

    import mirrored

    generator = np.random.default_rng(0)
    if case == "table":
        if lockstep:
            table = mirrored.Variable(np.zeros((ROWS, FEATURES), "f4"), name="table")
        else:
            zeros = jax.nn.initializers.zeros
            table = mirrored.EmbeddingTable(ROWS, FEATURES, zeros, name="table")
        last = mirrored.Variable(np.ones(FEATURES, "f4") / FEATURES, name="last")

        def loss(ids, y):
            rows = table.value[ids] if lockstep else table.lookup(ids)
            return jnp.mean((rows.sum(axis=1) @ last - y) ** 2)

        return [table, last], loss
    first = generator.normal(size=(784, 128)).astype("f4") / 28
    last = generator.normal(size=(128, 10)).astype("f4") / 11
    variables = [mirrored.Variable(first, name="first"), mirrored.Variable(last, name="last")]

    def loss(x, y):
        logits = jax.nn.relu(x @ variables[0]) @ variables[1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    return variables, loss


def train_step_of(variables, loss):
    import mirrored

    def make_step(optimizer):
        def step(*batch):
            value, gradients = mirrored.value_and_grad(lambda: loss(*batch), variables)
            optimizer.apply_gradients(zip(gradients, variables))
            return value

        return step

    return make_step


def lockstep(case, seconds_file):
    """One of the two processes that train in lockstep."""
    import jax
    import optax

    import mirrored

    strategy = mirrored.MultiWorkerMirroredStrategy(timeout=60)
    worker = jax.process_index()
    with strategy.scope():
        variables, loss = make(case, lockstep=True)
        optimizer = mirrored.Optimizer(optax.sgd(0.1))
    step = train_step_of(variables, loss)(optimizer)

    @mirrored.function
    def train(*batch):
        return strategy.reduce("mean", strategy.run(step, args=batch))

    own = [
        jax.tree.map(
            lambda leaf: mirrored.PerReplica([leaf] * WORKERS).placed(strategy.placement), batch
        )
        for batch in batches(case, worker)
    ]
    value = None
    for count in (4, STEPS[case]):
        began = time.perf_counter()
        for number in range(count):
            if case == "slow" and worker == 0:
                time.sleep(PAUSE_SECONDS)
            value = train(*own[number % len(own)])
            value.block_until_ready()
        seconds = time.perf_counter() - began
    if worker == 0:
        with open(seconds_file, "w") as file:
            json.dump({"seconds": seconds, "loss": float(value)}, file)


def in_lockstep(case):
    with tempfile.TemporaryDirectory() as directory:
        seconds_file = os.path.join(directory, "seconds")
        subprocess.run(
            [
                *(sys.executable, "-m", "mirrored", "launch", "-n", str(WORKERS)),
                *("--cpu-devices", "1", __file__, "--lockstep", case, seconds_file),
            ],
            check=True,
            timeout=200,
            stdout=subprocess.DEVNULL,
        )
        with open(seconds_file) as file:
            found = json.load(file)
    return WORKERS * CASES[case] * STEPS[case] / found["seconds"], found["loss"]


class OnServers:
    """Two workers and a server, each a process; kept through all rounds."""

    def __init__(self, case):
        import mirrored

        self.case = case
        self.strategy = mirrored.ParameterServerStrategy(
            worker_count=WORKERS, server_count=1, engine="ray"
        )
        self.coordinator = mirrored.ClusterCoordinator(self.strategy)
        with self.strategy.scope():
            variables, loss = make(case, lockstep=False)
            import optax

            optimizer = mirrored.Optimizer(optax.sgd(0.1))
        step = train_step_of(variables, loss)(optimizer)
        strategy, is_slow, pause = self.strategy, case == "slow", PAUSE_SECONDS

        def closure(own, count):
            value = None
            for number in range(count):
                if is_slow and mirrored.current_worker_index() == 0:
                    time.sleep(pause)
                value = strategy.run(step, args=own[number % len(own)])
            return value

        self.closure = closure
        self.own = self.coordinator.create_per_worker_value(
            lambda: list(batches(case, mirrored.current_worker_index()))
        )
        for _ in range(2 * WORKERS):
            self.coordinator.schedule(closure, args=(self.own, 4))
        self.coordinator.join(120)

    def run(self):
        # Small enough that the faster worker can take what the slower one leaves.
        each = 10 if self.case == "dense" else 2
        closures = WORKERS * STEPS[self.case] // each
        began = time.perf_counter()
        results = [
            self.coordinator.schedule(self.closure, args=(self.own, each)) for _ in range(closures)
        ]
        self.coordinator.join(200)
        seconds = time.perf_counter() - began
        loss = float(self.coordinator.fetch(results[-1]))
        return CASES[self.case] * each * closures / seconds, loss


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lockstep", nargs=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    options = parser.parse_args()
    if options.lockstep:
        lockstep(*options.lockstep)
        return
    for case in options.cases:
        servers = OnServers(case)
        rates = {"lockstep": [], "servers": []}
        for _ in range(options.rounds):
            for name, run in (
                ("lockstep", functools.partial(in_lockstep, case)),
                ("servers", servers.run),
            ):
                rate, loss = run()
                assert np.isfinite(loss), name
                rates[name].append(rate)
        servers.strategy.close()
        middle = {name: statistics.median(found) for name, found in rates.items()}
        print(
            f"{case}: servers / lockstep {middle['servers'] / middle['lockstep']:.2f}; examples/s: "
            + "; ".join(
                f"{name} {middle[name]:,.0f} ({min(found):,.0f} to {max(found):,.0f})"
                for name, found in rates.items()
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
