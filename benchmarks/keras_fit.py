"""Keras's fit against its peers: mirrored, stock Keras, hand-written JAX, tf.distribute.

    python benchmarks/keras_fit.py --devices 2 --tensorflow-python tf-env/bin/python
    python benchmarks/keras_fit.py --devices 2 --model cnn

Every peer trains the same data from the same weights in the same order; the losses of the
first epoch are compared before any time is printed. Rounds alternate; the median of the
rounds after warm-up is shown, in microseconds a step, and its ratio to the first line.
TensorFlow runs in a process of its own environment, in the same alternation. Times are
taken with virtual CPU devices: they show overhead, not what accelerators do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import driver

STEPS, BATCH = 400, 32
FIRST_LOSS_TOLERANCE = 2e-3


def data(model: str):
    import numpy as np

    rng = np.random.default_rng(0)
    shape = (784,) if model == "mlp" else (28, 28, 1)
    x = rng.random((STEPS * BATCH, *shape), dtype=np.float32)
    y = rng.integers(0, 10, STEPS * BATCH).astype("int32")
    return x, y


def build(model: str):
    import keras
    import numpy as np

    keras.utils.set_random_seed(0)
    layers = keras.layers
    if model == "mlp":
        body = [layers.Dense(128, activation="relu")]
    else:
        body = []
        for filters in (8, 16, 16):
            body += [
                layers.Conv2D(filters, 3, strides=2, padding="same", use_bias=False),
                layers.BatchNormalization(),
                layers.ReLU(),
            ]
        body.append(layers.Flatten())
    shape = (784,) if model == "mlp" else (28, 28, 1)
    built = keras.Sequential([keras.Input(shape), *body, layers.Dense(10)])
    # Keras's initializers agree on one backend only; these kernels are the same on all.
    rng = np.random.default_rng(1)
    built.set_weights(
        [
            (rng.normal(size=w.shape) / np.prod(w.shape[:-1]) ** 0.5).astype("f4")
            if w.ndim > 1
            else w
            for w in built.get_weights()
        ]
    )
    built.compile(
        keras.optimizers.Adam(1e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return built


def reader():
    """A batch callback that reads its logs."""
    import keras

    class Reader(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.last = logs["loss"]

    return Reader()


def jax_peers(devices: int, model: str):
    """Returns the peers that run in one JAX process: name -> one epoch -> mean loss."""
    os.environ["KERAS_BACKEND"] = "jax"
    import mirrored.testing

    mirrored.testing.use_cpu_devices(devices)
    import keras

    import mirrored

    x, y = data(model)

    def fit(built, callbacks=None):
        history = built.fit(
            x, y, batch_size=BATCH, epochs=1, shuffle=False, verbose=0, callbacks=callbacks
        )
        return history.history["loss"][0]

    strategy = mirrored.MirroredStrategy()
    with strategy.scope():
        ours, ours_read = build(model), build(model)
    stock = keras.distribution.DataParallel(devices=[f"cpu:{i}" for i in range(devices)])
    with stock.scope():
        theirs, theirs_read = build(model), build(model)

    def in_stock(built, callbacks=None):
        with stock.scope():
            return fit(built, callbacks)

    peers = {
        "mirrored fit": lambda: fit(ours),
        "stock Keras DataParallel fit": lambda: in_stock(theirs),
        "mirrored fit, batch callback": lambda: fit(ours_read, [reader()]),
        "stock Keras fit, batch callback": lambda: in_stock(theirs_read, [reader()]),
    }
    if model == "mlp":
        weights = build(model).get_weights()
        peers["hand-written JAX, scan"] = by_hand(strategy.mesh, weights, x, y, scan=100)
        peers["hand-written JAX, per step"] = by_hand(strategy.mesh, weights, x, y, scan=0)
    return peers


def keras_adam(rate: float):
    """Adam as Keras rounds it: epsilon is added before the bias correction."""
    import jax
    import jax.numpy as jnp
    import optax

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return jnp.zeros((), "int32"), zeros, jax.tree.map(jnp.zeros_like, params)

    def update(grads, state, params=None):
        count, means, squares = state
        count = count + 1
        means = jax.tree.map(lambda m, g: m + (g - m) * (1 - 0.9), means, grads)
        squares = jax.tree.map(lambda v, g: v + (g * g - v) * (1 - 0.999), squares, grads)
        alpha = rate * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
        updates = jax.tree.map(lambda m, v: -alpha * m / (jnp.sqrt(v) + 1e-7), means, squares)
        return updates, (count, means, squares)

    return optax.GradientTransformation(init, update)


def by_hand(mesh, weights, x, y, scan: int):
    """The same training in plain JAX, with the loss and the accuracy kept as Keras does."""
    import functools

    import jax
    import numpy as np
    import optax
    from jax.sharding import NamedSharding, PartitionSpec

    everywhere = NamedSharding(mesh, PartitionSpec())
    optimizer = keras_adam(1e-3)
    params = jax.device_put([np.array(array) for array in weights], everywhere)
    zeros = (np.float32(0), np.float32(0))
    state = [params, jax.device_put(optimizer.init(params), everywhere)]

    def loss_fn(params, images, labels):
        logits = jax.nn.relu(images @ params[0] + params[1]) @ params[2] + params[3]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), (logits.argmax(-1) == labels).mean()

    def step(carry, batch):
        params, moments, (loss_sum, right_sum) = carry
        (loss, right), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, *batch)
        updates, moments = optimizer.update(grads, moments)
        params = optax.apply_updates(params, updates)
        return (params, moments, (loss_sum + loss, right_sum + right)), None

    @functools.partial(jax.jit, donate_argnums=0)
    def run(carry, images, labels):
        if not scan:
            return step(carry, (images, labels))[0]
        return jax.lax.scan(step, carry, (images, labels))[0]

    split = NamedSharding(mesh, PartitionSpec(*([None, "replica"] if scan else ["replica"])))
    size = BATCH * max(scan, 1)
    shape = (scan, BATCH) if scan else (BATCH,)

    def epoch():
        carry = (*state, jax.device_put(zeros, everywhere))
        for start in range(0, len(x), size):
            images = jax.device_put(x[start : start + size].reshape(*shape, -1), split)
            labels = jax.device_put(y[start : start + size].reshape(shape), split)
            # The CPU's collectives hang if many steps are queued.
            carry[2][0].block_until_ready()
            carry = run(carry, images, labels)
        state[:] = carry[:2]
        return float(carry[2][0]) / STEPS

    return epoch


def tensorflow_peers(devices: int, model: str):
    """tf.distribute's peer, for a process of its own."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import tensorflow as tf

    cpus = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpus[0], [tf.config.LogicalDeviceConfiguration()] * devices
    )
    strategy = tf.distribute.MirroredStrategy([f"cpu:{i}" for i in range(devices)])
    with strategy.scope():
        built = build(model)
    x, y = data(model)

    def epoch():
        history = built.fit(x, y, batch_size=BATCH, epochs=1, shuffle=False, verbose=0)
        return history.history["loss"][0]

    return {"TensorFlow MirroredStrategy fit": epoch}


def serve(peers) -> None:
    """Answers each name read from standard input with one epoch's times and loss."""
    print(json.dumps(list(peers)), flush=True)
    for line in sys.stdin:
        began, worked = time.perf_counter(), time.thread_time()
        loss = peers[line.strip()]()
        seconds, host = time.perf_counter() - began, time.thread_time() - worked
        answer = [seconds / STEPS * 1e6, host / STEPS * 1e6, float(loss)]
        print("answer " + json.dumps(answer), flush=True)


def start(python: str, kind: str, options: argparse.Namespace):
    command = [python, os.path.abspath(__file__), "--serve", kind, "--model", options.model]
    command += ["--devices", str(options.devices)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL
    )
    while True:
        line = process.stdout.readline()
        if line.startswith("["):
            return process, json.loads(line)
        if not line:
            sys.exit(f"the {kind} peer did not start: {' '.join(command)}")


def ask(process, name: str):
    process.stdin.write(name + "\n")
    process.stdin.flush()
    while True:
        line = process.stdout.readline()
        if line.startswith("answer "):
            return json.loads(line.removeprefix("answer "))
        if not line:
            sys.exit(f"{name} ended early")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--model", choices=["mlp", "cnn"], default="mlp")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tensorflow-python", help="a Python that has tensorflow")
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--serve", choices=["jax", "tensorflow"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        make = jax_peers if options.serve == "jax" else tensorflow_peers
        serve(make(options.devices, options.model))
        return
    servers = [start(sys.executable, "jax", options)]
    if options.tensorflow_python:
        servers.append(start(options.tensorflow_python, "tensorflow", options))
    peers = [(process, name) for process, names in servers for name in names]
    losses = {name: ask(process, name)[2] for process, name in peers}
    first = next(iter(losses.values()))
    for name, loss in losses.items():
        # tf.distribute normalizes each replica's part of a batch by itself: another training.
        other_norm = options.model == "cnn" and "TensorFlow" in name
        if not other_norm and abs(loss - first) > FIRST_LOSS_TOLERANCE:
            sys.exit(f"{name} trains something else: loss {loss:.6f}, not {first:.6f}")
    print(f"{options.model}, {options.devices} CPU devices, batch {BATCH}: first epochs' losses")
    for name, loss in losses.items():
        print(f"  {name}: {loss:.6f}")
    times = {name: ([], []) for _, name in peers}
    for turn in range(options.rounds + 1):
        for process, name in peers:
            wall, host, _ = ask(process, name)
            if turn:
                times[name][0].append(wall)
                times[name][1].append(host)
    base = statistics.median(times[peers[0][1]][0])
    print("us a step: wall (ratio to the first), Python thread")
    for name, (walls, hosts) in times.items():
        wall = statistics.median(walls)
        print(f"  {name}: {wall:.0f} ({wall / base:.2f}), {statistics.median(hosts):.0f}")
    for process, _ in servers:
        process.stdin.close()
        process.wait()
    contenders = {
        name: {
            "median": statistics.median(walls),
            "unit": "us a step",
            "rounds": [round(wall, 2) for wall in walls],
            "thread": statistics.median(hosts),
            "losses": [losses[name]],
        }
        for name, (walls, hosts) in times.items()
    }
    ours = peers[0][1]
    found = {
        f"{ours} / {name}": driver.ratio(contenders, ours, name)
        for name in contenders
        if name != ours
    }
    case = {"name": f"{options.model}, {options.devices} replicas", "contenders": contenders}
    driver.write_result(
        options.json,
        f"keras-fit-{options.model}-{options.devices}",
        [case | {"ratios": found}],
        {"jax": driver.versions()},
        ["Virtual CPU devices: overhead, not arithmetic.", "One epoch of 400 steps a round."],
    )


if __name__ == "__main__":
    main()
