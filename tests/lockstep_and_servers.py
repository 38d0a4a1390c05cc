"""A dense part in lockstep with a table on servers: one program for any number of processes.

Run as a script it is one process of several: `python lockstep_and_servers.py ADDRESS COUNT NUMBER`.
"""

from __future__ import annotations

import json
import sys

import mirrored.testing

if __name__ == "__main__":
    mirrored.testing.use_cpu_devices(int(sys.argv[4]))
    import jax

    jax.distributed.initialize(
        sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), initialization_timeout=60
    )

import numpy as np
import optax

import mirrored

TABLE = np.random.default_rng(3).normal(size=(30, 4)).astype("f")


def batches():
    generator = np.random.default_rng(4)
    for _ in range(3):
        yield generator.integers(0, 30, (13, 3)), generator.normal(size=13).astype("f")


def squared_error(rows, w, y):
    return mirrored.mean((rows.sum(axis=1) @ w.value - y) ** 2)


def train(strategy, servers, *, table_rule=None):
    """Trains; returns the losses, the table, the dense weights, and the sizes that were traced."""
    with servers.scope():
        table = mirrored.EmbeddingTable(30, 4, name="table")
        table.assign(TABLE)
        table_optimizer = mirrored.Optimizer(table_rule or optax.adagrad(0.1))
    with strategy.scope():
        w = mirrored.Variable(np.ones(4, "f"), name="w")
        optimizer = mirrored.Optimizer(optax.adam(0.1))
    sizes, losses = [], []

    def step(rows, y):
        sizes.append(rows.values.shape[0])

        def loss_fn():
            return squared_error(rows.lookup(), w, y)

        loss, (of_rows, of_w) = mirrored.value_and_grad(loss_fn, [rows, w])
        optimizer.apply_gradients([(of_w, w)])
        return loss, of_rows

    @mirrored.function
    def train_step(rows, y):
        return strategy.run(step, args=(rows, y))

    for ids, y in strategy.distribute_dataset(list(batches())):
        rows = table.pull(ids)
        loss, of_rows = train_step(rows, y)
        table_optimizer.apply_gradients([(rows.gradient(of_rows), table)])
        losses.append(float(loss))
    return losses, table, w.numpy(), sizes


def main():
    strategy = mirrored.MultiWorkerMirroredStrategy()
    with mirrored.ParameterServerStrategy(
        server_count=2, engine="ray", shared_with=strategy, checkpoint_directory=sys.argv[5]
    ) as servers:
        losses, table, w, _ = train(strategy, servers, table_rule=optax.adam(0.1))
        trained = table.numpy()
        coordinator = mirrored.ClusterCoordinator(servers)
        state = coordinator.get_state()
        table.assign(np.zeros_like(TABLE))
        zeros = float(np.abs(table.numpy()).max())
        coordinator.set_state(state)
        again = bool(np.array_equal(table.numpy(), trained))
        found = {"losses": losses, "table": trained.tolist(), "w": w.tolist()}
        print("RESULT" + json.dumps({**found, "zeros": zeros, "again": again}), flush=True)
        if jax.process_index() == 0:
            # Alone: reading waits for nobody.
            table.numpy()


if __name__ == "__main__":
    main()
