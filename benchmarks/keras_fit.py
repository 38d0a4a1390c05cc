"""Keras's fit against its peers: mirrored, stock Keras, hand-written JAX, tf.distribute.

    python benchmarks/keras_fit.py --tensorflow-python tf-env/bin/python

784-128-10 on one and two virtual CPU devices, and a small CNN with batch norm on two; batches of
32. Every peer trains the same data from the same weights in the same order. A round is an epoch.
"""

from __future__ import annotations

import os

import driver

STEPS, BATCH = 400, 32
TOLERANCE = 1e-3
CAVEATS = [
    "Virtual CPU devices: overhead, not arithmetic.",
    "A round is one call of fit: an epoch of 400 steps, host batches and callbacks included.",
    "tf.distribute normalizes each replica's part of a batch by itself, so the losses of its CNN "
    "are not compared.",
]


def data(model: str, steps: int):
    import numpy as np

    rng = np.random.default_rng(0)
    shape = (784,) if model == "mlp" else (28, 28, 1)
    x = rng.random((steps * BATCH, *shape), dtype=np.float32)
    y = rng.integers(0, 10, steps * BATCH).astype("int32")
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


def jax_peers(devices: int, model: str, steps: int):
    """Returns the peers that run in one JAX process: name -> one epoch -> mean loss."""
    os.environ["KERAS_BACKEND"] = "jax"
    import mirrored.testing

    mirrored.testing.use_cpu_devices(devices)
    import keras

    import mirrored

    x, y = data(model, steps)

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
        peers["hand-written JAX, scan"] = by_hand(
            strategy.mesh, weights, x, y, scan=min(steps, 100)
        )
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
        return float(carry[2][0]) / (len(x) // BATCH)

    return epoch


def tensorflow_peers(devices: int, model: str, steps: int):
    """tf.distribute's peer, for a process of its own."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import tensorflow as tf

    cpus = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpus[0], [tf.config.LogicalDeviceConfiguration()] * devices
    )
    strategy = tf.distribute.MirroredStrategy([f"cpu:{i}" for i in range(devices)])
    with strategy.scope():
        built = build(model)
    x, y = data(model, steps)

    def epoch():
        history = built.fit(x, y, batch_size=BATCH, epochs=1, shuffle=False, verbose=0)
        return history.history["loss"][0]

    return {"TensorFlow MirroredStrategy fit": epoch}


SERVERS = {"jax": jax_peers, "tensorflow": tensorflow_peers}
CONTENDERS = {
    "mirrored fit": "jax",
    "stock Keras DataParallel fit": "jax",
    "mirrored fit, batch callback": "jax",
    "stock Keras fit, batch callback": "jax",
    "hand-written JAX, scan": "jax",
    "hand-written JAX, per step": "jax",
    "TensorFlow MirroredStrategy fit": "tensorflow",
}
OURS_READ, STOCK_READ = "mirrored fit, batch callback", "stock Keras fit, batch callback"
CASES = (("mlp", 1), ("mlp", 2), ("cnn", 2))


def main() -> None:
    given = driver.options(__doc__, rounds=7, peers=["tensorflow"])
    if given.serve:
        peer, model, devices, steps = given.serve
        epochs = SERVERS[peer](int(devices), model, int(steps))
        driver.serve(epochs.__getitem__, lambda loss: None)
        return
    cases, versions = [], {}
    steps = 20 if given.small else STEPS
    for model, devices in CASES[1:2] if given.small else CASES:
        with driver.start(__file__, given.pythons, model, devices, steps) as started:
            runners = {
                name: started[peer]
                for name, peer in CONTENDERS.items()
                if peer in started and not (model == "cnn" and "hand" in name)
            }
            case = driver.measure(
                f"{model}, R = {devices}",
                runners,
                losses=1,
                tolerance=TOLERANCE,
                rounds=given.rounds,
                steps=1,
                # tf.distribute normalizes each replica's part of a batch by itself.
                apart=["TensorFlow MirroredStrategy fit"] if model == "cnn" else [],
                warm=0,
                steps_a_call=steps,
            )
            contenders = case["contenders"]
            read = driver.ratio(contenders, OURS_READ, STOCK_READ)
            case["ratios"][f"{OURS_READ} / {STOCK_READ}"] = read
            ours, stock = list(contenders)[:2]
            threads = contenders[ours]["thread"] / contenders[stock]["thread"]
            case["ratios"][f"{ours} / {stock}, thread"] = threads
            versions = {peer: process.versions for peer, process in started.items()}
        # Two trainings with and without a callback are no peers of each other.
        del case["ratios"][f"{ours} / {OURS_READ}"], case["ratios"][f"{ours} / {STOCK_READ}"]
        cases.append(case)
        driver.show(case)
    driver.write_result(given.json, "keras-fit", cases, versions, CAVEATS)


if __name__ == "__main__":
    main()
