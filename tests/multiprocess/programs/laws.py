"""What several workers must agree on: run by each of them, and by one process to compare."""

import json
import os
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mirrored


def pieces(context):
    """Another number of rows in each batch and in each process."""
    first = 10 * context.input_pipeline_id
    return [np.full(2 - number % 2, first + number) for number in range(3)]


def find(strategy):
    worker, replicas = jax.process_index(), strategy.num_replicas_in_sync
    found = {"replicas": replicas, "local": list(strategy.placement.local_replica_ids)}
    found["sum"] = float(strategy.reduce("sum", 1.0)) if jax.process_count() > 1 else 1.0
    found["mean"] = float(strategy.reduce("mean", worker))
    with strategy.scope():
        # Each worker draws its own numbers; worker 0's are taken.
        own = np.random.default_rng(worker).normal(size=(4, 3)).astype("f4")
        weights = mirrored.Variable(own, name="weights")
        large = mirrored.Variable(np.full((700, 700), -0.0 if worker == 0 else 1.0, "f4"))
        bias = mirrored.Variable(jnp.zeros(3), name="bias")
        count = mirrored.Variable(
            float(worker + 1), synchronization="on_read", aggregation="sum", name="count"
        )
        optimizer = mirrored.Optimizer(optax.adam(0.1))
    found["initial"] = weights.numpy().tolist()
    found["large"] = [bool(np.signbit(large.numpy()).all()), float(np.abs(large.numpy()).max())]
    found["count"] = float(count)

    def replica(x, y):
        def loss_fn():
            return mirrored.mean(((x @ weights + bias - y) ** 2).sum(-1))

        loss, gradients = mirrored.value_and_grad(loss_fn, [weights, bias])
        optimizer.apply_gradients(zip(gradients, [weights, bias]))
        count.assign_add(1.0)
        return loss, x.sum(-1)

    @mirrored.function
    def train_step(x, y):
        return strategy.run(replica, args=(x, y))

    x = np.arange(14 * 4, dtype="f4").reshape(14, 4) / 50
    y = np.ones((14, 3), "f4")
    losses, means, gathered = [], [], []
    for epoch in range(2):
        for images, labels in strategy.distribute_dataset((x, y), batch_size=8):
            loss, sums = train_step(images, labels)
            losses.append(float(loss))
            if epoch == 0:
                means.append(float(strategy.reduce("mean", sums, axis=0)))
                gathered.append(strategy.gather(sums, axis=0).tolist())
    ids = strategy.run(lambda: mirrored.get_replica_context().replica_id_in_sync_group + 1)
    found |= {"losses": losses, "means": means, "gathered": gathered}
    found |= {"final": weights.numpy().tolist(), "steps": float(count)}
    found["ids"] = [int(strategy.reduce(op, ids)) for op in ("sum", "min", "max")]
    key = strategy.run(
        lambda k: jax.random.uniform(mirrored.get_replica_context().random_key(k, 3)),
        args=(jax.random.key(1),),
    )
    found["random"] = np.asarray(
        strategy.gather(strategy.run(lambda u: u[None], args=(key,)), 0)
    ).tolist()
    weights.assign(np.ones((4, 3), "f4"))
    found["assigned"] = weights.numpy().tolist()
    text = train_step.lower(images, labels).compile().as_text()
    found["collectives"] = [line for line in text.splitlines() if " all-reduce(" in line]
    found["threads"] = os.environ.get("NPROC")
    uneven = strategy.distribute_values_from_function(
        lambda context: np.arange(context.replica_id_in_sync_group + 1)
    )
    found["uneven"] = [float(strategy.reduce("mean", uneven, axis=0))]
    found["uneven"].append(strategy.gather(uneven, axis=0).tolist())

    def local(batch):
        return [np.asarray(part).tolist() for part in strategy.local_results(batch)]

    arrays = strategy.distribute_dataset(np.arange(14), batch_size=8)
    found["rows"] = [local(batch) for batch in arrays]
    batches = strategy.distribute_dataset([np.arange(8), np.arange(8, 14)], prefetch=0)
    own = strategy.distribute_datasets_from_function(pieces)
    found["batches"] = [local(batch) for batch in batches]
    found["pieces"] = [local(batch) for batch in own]
    found["explained"] = arrays.explain_input().splitlines()
    found["explained pieces"] = own.explain_input().splitlines()
    # Worker 1 has other files than worker 0.
    different = strategy.distribute_dataset(np.arange(40) + (worker == 1), batch_size=2, prefetch=0)
    try:
        for _ in different:
            time.sleep(0.02)
        found["refused"] = ""
    except mirrored.DataError as error:
        found["refused"] = str(error)
    return found


if __name__ == "__main__":
    import state

    directory, given, *how = sys.argv[1:]
    if how == ["initialize"]:
        # As a program does that knew several processes before.
        jax.distributed.initialize(
            os.environ["MIRRORED_COORDINATOR"],
            int(os.environ["MIRRORED_PROCESS_COUNT"]),
            int(os.environ["MIRRORED_PROCESS_ID"]),
        )
    strategy = mirrored.MultiWorkerMirroredStrategy(timeout=60)
    result = find(strategy)
    result["state"] = state.find(strategy, directory, given)
    print("FOUND " + json.dumps(result), flush=True)
