"""Parameter servers: mirrored on Ray beside TensorFlow's ParameterServerStrategy.

    python benchmarks/parameter_servers.py --tensorflow-python PYTHON

Two workers and one server, each a process of this machine, asynchronous SGD. The MLP is
784-128-10 with batches of 64, one and fifty steps a closure; the embedding table has 1M rows of
64 and batches of 256 x 26 ids that follow Zipf's law, and is trained by SGD and by Adagrad.
TensorFlow looks ids up in two ways: as they are, and the different ones among them; the faster one
counts. Its Adagrad is the operation that updates the rows used alone, which wants different ids.
Both train the same batches from the same weights, and their losses after as many steps are compared
before anything is timed.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
from typing import Any

import driver
import numpy as np
import results
import serving

WORKERS = 2
BATCHES = 16
RATE = 0.1
CAVEATS = [
    "Two workers, a server and the program itself share two cores.",
    "Asynchronous: the order of updates differs from run to run, and losses agree only roughly.",
]
SIZES = {
    "mlp": {"steps": 1000, "check": 400},
    "embedding": {"steps": 200, "check": 100},
    "embedding-adagrad": {"steps": 200, "check": 100},
}
# Of the sums of squares, as Optax begins with.
FIRST_SUM = 0.1
# How TensorFlow looks ids up.
KINDS = {"mlp": ["plain"], "embedding": ["plain", "unique"], "embedding-adagrad": ["unique"]}
ROWS, FEATURES, BATCH, IDS = 1_000_000, 64, 256, 26


def mlp_data(worker):
    """All workers have the same batches, and begin at different ones."""
    generator = np.random.default_rng(0)
    images = generator.normal(size=(BATCHES, 64, 784)).astype("f4")
    labels = (images[:, :, :10].argmax(-1)).astype("i4")
    return np.roll(images, 5 * worker, 0), np.roll(labels, 5 * worker, 0)


def mlp_weights():
    generator = np.random.default_rng(7)
    return [
        generator.normal(size=(784, 128)).astype("f4") / 28,
        np.zeros(128, "f4"),
        generator.normal(size=(128, 10)).astype("f4") / 11,
        np.zeros(10, "f4"),
    ]


def embedding_data(worker, rows):
    generator = np.random.default_rng(0)
    ids = (generator.zipf(1.2, size=(BATCHES, BATCH, IDS)) % rows).astype("i4")
    labels = (ids[:, :, 0] % 2).astype("f4")
    return np.roll(ids, 5 * worker, 0), np.roll(labels, 5 * worker, 0)


def embedding_weights():
    return np.random.default_rng(7).normal(size=FEATURES).astype("f4") / 8


# --- mirrored -----------------------------------------------------------------------------------


class PerWorker:
    """A worker's batches, again and again; travels to it by its name alone."""

    def __init__(self, case, rows):
        self.case, self.rows = case, rows

    def __call__(self, context):
        worker = context.input_pipeline_id
        data = mlp_data(worker) if self.case == "mlp" else embedding_data(worker, self.rows)
        while True:
            yield from zip(*data)


def serve_mirrored(case, rows):
    import jax
    import jax.numpy as jnp
    import optax

    import mirrored

    strategy = mirrored.ParameterServerStrategy(worker_count=WORKERS, server_count=1, engine="ray")
    coordinator = mirrored.ClusterCoordinator(strategy)
    with strategy.scope():
        rule = optax.adagrad(RATE, FIRST_SUM) if case == "embedding-adagrad" else optax.sgd(RATE)
        optimizer = mirrored.Optimizer(rule)
        if case == "mlp":
            variables = [mirrored.Variable(value) for value in mlp_weights()]
        else:
            table = mirrored.EmbeddingTable(
                rows, FEATURES, lambda key, shape, dtype: jnp.full(shape, 0.01, dtype)
            )
            W = mirrored.Variable(embedding_weights())
            variables = [table, W]

    def loss_of(x, y):
        if case == "mlp":
            w1, b1, w2, b2 = variables
            logits = jax.nn.relu(x @ w1 + b1) @ w2 + b2
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
        logits = table.lookup(x).mean(1) @ W
        return optax.sigmoid_binary_cross_entropy(logits, y).mean()

    def step(x, y):
        loss, gradients = mirrored.value_and_grad(lambda: loss_of(x, y), variables)
        optimizer.apply_gradients(zip(gradients, variables))
        return loss

    def closure(iterator, count):
        for _ in range(count):
            loss = strategy.run(step, args=next(iterator))
        return loss

    iterator = iter(coordinator.create_per_worker_dataset(PerWorker(case, rows)))

    def train(steps, a_closure):
        for _ in range(steps // a_closure):
            coordinator.schedule(closure, args=(iterator, a_closure))
        coordinator.join()

    def loss():
        x, y = mlp_data(0) if case == "mlp" else embedding_data(0, rows)
        return float(np.mean([float(strategy.run(loss_of, args=pair)) for pair in zip(x, y)]))

    answer(train, loss)


# --- TensorFlow ---------------------------------------------------------------------------------


def tensorflow_cluster():
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(WORKERS + 1)]
    addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    for one in sockets:
        one.close()
    return {"worker": addresses[:WORKERS], "ps": addresses[WORKERS:]}


def serve_tensorflow_task(job, index, cluster):
    import tensorflow as tf

    tf.distribute.Server(
        tf.train.ClusterSpec(json.loads(cluster)), job_name=job, task_index=int(index)
    ).join()


def serve_tensorflow(case, rows):
    cluster = tensorflow_cluster()
    for job, addresses in cluster.items():
        for index in range(len(addresses)):
            command = [sys.executable, __file__, "--serve", "task", job, str(index)]
            subprocess.Popen([*command, json.dumps(cluster)], stdin=subprocess.DEVNULL)
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), rpc_layer="grpc"
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        if case == "mlp":
            variables = [tf.Variable(value) for value in mlp_weights()]
        else:
            variables = [
                tf.Variable(tf.fill((rows, FEATURES), 0.01)),
                tf.Variable(embedding_weights()),
            ]

        sums = []
        if case == "embedding-adagrad":
            sums = [tf.Variable(tf.fill(one.shape, FIRST_SUM)) for one in variables]

    def loss_of(x, y):
        if case == "mlp":
            w1, b1, w2, b2 = variables
            logits = tf.nn.relu(x @ w1 + b1) @ w2 + b2
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
            return tf.reduce_mean(losses)
        logits = tf.linalg.matvec(
            tf.reduce_mean(tf.nn.embedding_lookup(variables[0], x), 1), variables[1]
        )
        return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(y, logits))

    def apply(gradients):
        if sums:
            of_table, of_last = gradients
            tf.raw_ops.ResourceSparseApplyAdagrad(
                var=variables[0].handle,
                accum=sums[0].handle,
                lr=RATE,
                grad=of_table.values,
                indices=of_table.indices,
            )
            tf.raw_ops.ResourceApplyAdagrad(
                var=variables[1].handle, accum=sums[1].handle, lr=RATE, grad=of_last
            )
            return
        for gradient, variable in zip(gradients, variables):
            if isinstance(gradient, tf.IndexedSlices):
                scaled = tf.IndexedSlices(RATE * gradient.values, gradient.indices)
                variable.scatter_sub(scaled)
            else:
                variable.assign_sub(RATE * gradient)

    def plain_step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(x, y)
        apply(tape.gradient(loss, variables))
        return loss

    def unique_step(x, y):
        table, W = variables
        ids, places = tf.unique(tf.reshape(x, [-1]))
        rows_used = tf.gather(table, ids)
        with tf.GradientTape() as tape:
            tape.watch(rows_used)
            found = tf.reshape(tf.gather(rows_used, places), [BATCH, IDS, FEATURES])
            logits = tf.linalg.matvec(tf.reduce_mean(found, 1), W)
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(y, logits))
        row_gradients, gradient = tape.gradient(loss, [rows_used, W])
        apply([tf.IndexedSlices(tf.convert_to_tensor(row_gradients), ids), gradient])
        return loss

    steps = {"plain": plain_step, "unique": unique_step}
    programs: dict[Any, Any] = {}

    def program(kind, count):
        if (kind, count) not in programs:

            @tf.function
            def many(iterator):
                loss = 0.0
                for _ in tf.range(count):
                    x, y = next(iterator)
                    loss = steps[kind](x, y)
                return loss

            programs[kind, count] = many
        return programs[kind, count]

    def dataset(context):
        worker = context.input_pipeline_id
        data = mlp_data(worker) if case == "mlp" else embedding_data(worker, rows)
        return tf.data.Dataset.from_tensor_slices(data).repeat().prefetch(2)

    iterator = iter(
        coordinator.create_per_worker_dataset(
            lambda: strategy.distribute_datasets_from_function(dataset)
        )
    )

    def train(steps, a_closure, kind="plain"):
        for _ in range(steps // a_closure):
            coordinator.schedule(program(kind, a_closure), args=(iterator,))
        coordinator.join()

    def loss():
        x, y = mlp_data(0) if case == "mlp" else embedding_data(0, rows)
        return float(np.mean([float(loss_of(*pair)) for pair in zip(x, y)]))

    answer(train, loss)


# --- both ---------------------------------------------------------------------------------------


def answer(train, loss):
    """Answers ``train`` and ``loss`` requests."""
    import time

    def timed(arguments):
        steps, *rest = arguments
        start = time.perf_counter()
        train(steps, *rest)
        return {"wall": (time.perf_counter() - start) * 1e6 / steps}

    serving.serve(
        lambda name: loss,
        lambda value: None,
        more={"train": timed, "loss": lambda _: {"loss": loss()}},
    )


def run_case(case, started, given, rows):
    steps, check = SIZES[case]["steps"], SIZES[case]["check"]
    if given.small:
        steps, check = 50, 50
    ways: dict[str, tuple[str, list[Any]]] = {}
    for a_closure in (1, 50):
        ways[f"mirrored, {a_closure} a closure"] = ("jax", [a_closure])
    if "tensorflow" in started:
        for a_closure in (1, 50):
            for kind in KINDS[case]:
                name = f"TensorFlow {kind}, {a_closure} a closure"
                ways[name.replace(" plain,", ",") if case == "mlp" else name] = (
                    "tensorflow",
                    [a_closure, kind],
                )
    losses = {}
    for peer, process in started.items():
        before = process.ask(loss=1)["loss"]
        process.ask(train=[check, 50, *KINDS[case][:1]] if peer == "tensorflow" else [check, 50])
        losses[peer] = [before, process.ask(loss=1)["loss"]]
    driver.compare_curves(losses, 0.05)
    rounds: dict[str, list[float]] = {name: [] for name in ways}
    for peer, arguments in ways.values():
        started[peer].ask(train=[steps // 4 // 50 * 50 or 50, *arguments])
    for number in range(given.rounds):
        for name in list(ways) if number % 2 == 0 else list(ways)[::-1]:
            peer, arguments = ways[name]
            count = steps if arguments[0] > 1 else max(50, steps // 4)
            rounds[name].append(started[peer].ask(train=[count, *arguments])["wall"])
    contenders = {
        name: {
            "median": statistics.median(figures),
            "unit": "us a step",
            "rounds": [round(figure, 1) for figure in figures],
            "losses": losses[ways[name][0]],
        }
        for name, figures in rounds.items()
    }
    ratios = {}
    for a_closure in (1, 50):
        ours = f"mirrored, {a_closure} a closure"
        theirs = [name for name in ways if name.startswith("Tens") and f" {a_closure} a" in name]
        if theirs:
            best = min(theirs, key=lambda name: contenders[name]["median"])
            ratios[f"{ours} / {best}"] = results.ratio(contenders, ours, best)
    return {"name": case, "contenders": contenders, "ratios": ratios}


def main():
    given = driver.options(
        __doc__,
        rounds=5,
        peers=["tensorflow"],
        more=lambda parser: parser.add_argument("--case", choices=list(SIZES)),
    )
    if given.serve:
        peer, *rest = given.serve
        if peer == "task":
            serve_tensorflow_task(*rest)
            return
        {"jax": serve_mirrored, "tensorflow": serve_tensorflow}[peer](rest[0], int(rest[1]))
        return
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    rows = 1000 if given.small else ROWS
    cases, versions = [], {}
    for case in [given.case] if given.case else SIZES:
        with driver.start(__file__, given.pythons, case, rows) as started:
            found = run_case(case, started, given, rows)
            versions = {peer: process.versions for peer, process in started.items()}
        results.show(found)
        cases.append(found)
    results.write_result(given.json, "parameter-servers", cases, versions, CAVEATS)


if __name__ == "__main__":
    main()
