"""The custom loop (784-10, batch 64, Adam): mirrored beside JAX, TensorFlow and PyTorch.

    python benchmarks/custom_loop.py --tensorflow-python PYTHON --torch-python PYTHON

Virtual CPU devices: the times are overhead, not arithmetic. A step of hand-written JAX is
``jax.jit`` of ``shard_map`` with donated state; its scanned form trains 16 batches in one call.
PyTorch's replicas are processes (Gloo), TensorFlow's and JAX's are devices of one process.
"""

from __future__ import annotations

import os
import statistics
from typing import Any

import driver
import torch_replica
import workloads

TOLERANCE = 1e-4
CAVEATS = [
    "Virtual CPU devices of one small machine: what is compared is overhead, not arithmetic.",
    "PyTorch's replicas are processes that talk over Gloo; the others' are devices of one process.",
    "Batches lie on their devices before the clock starts, for every peer.",
    "Scanned: 16 steps in one call; nothing can look at a step in between.",
]


# --- mirrored and hand-written JAX, in one process --------------------------------------------


def jax_step(name: str, replicas: int) -> Any:
    import jax
    import jax.numpy as jnp
    import optax

    import mirrored

    images, labels, initial = workloads.loop_data()
    count = len(images)
    strategy = mirrored.MirroredStrategy(jax.devices()[:replicas])
    position = -1

    if name == "mirrored":
        with strategy.scope():
            W = mirrored.Variable(initial, name="weights")
            b = mirrored.Variable(jnp.zeros(10), name="biases")
            optimizer = mirrored.Optimizer(optax.adam(workloads.LEARNING_RATE))

        def train_step(images, labels):
            def loss_fn():
                return optax.softmax_cross_entropy(images @ W + b, labels).mean()

            loss, gradients = mirrored.value_and_grad(loss_fn, [W, b])
            optimizer.apply_gradients(zip(gradients, [W, b]))
            return loss

        @mirrored.function
        def distributed_train_step(images, labels):
            per_replica_losses = strategy.run(train_step, args=(images, labels))
            return strategy.reduce(mirrored.ReduceOp.MEAN, per_replica_losses, axis=None)

        data = (images.reshape(-1, 784), labels.reshape(-1, 10))
        batches = list(strategy.distribute_dataset(data, batch_size=workloads.LOOP_BATCH))

        def call():
            nonlocal position
            position = (position + 1) % count
            return distributed_train_step(*batches[position])

        return call

    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = strategy.mesh
    tx = optax.adam(workloads.LEARNING_RATE)
    params = {"W": initial, "b": jnp.zeros(10)}
    state = jax.device_put((params, tx.init(params)), NamedSharding(mesh, P()))

    def replica_step(state, images, labels):
        params, optimizer_state = state
        own = jax.tree.map(lambda p: jax.lax.pcast(p, "replica", to="varying"), params)

        def loss_fn(params):
            logits = images @ params["W"] + params["b"]
            return optax.softmax_cross_entropy(logits, labels).mean()

        loss, gradients = jax.lax.pmean(jax.value_and_grad(loss_fn)(own), "replica")
        updates, optimizer_state = tx.update(gradients, optimizer_state, params)
        return (optax.apply_updates(params, updates), optimizer_state), loss

    if name == "hand-written JAX":
        split = P("replica")
        mapped = jax.shard_map(
            replica_step, mesh=mesh, in_specs=(P(), split, split), out_specs=(P(), P())
        )
        batches = [jax.device_put(pair, NamedSharding(mesh, split)) for pair in zip(images, labels)]
    else:

        def many_steps(state, images, labels):
            return jax.lax.scan(
                lambda state, pair: replica_step(state, *pair), state, (images, labels)
            )

        split = P(None, "replica")
        mapped = jax.shard_map(
            many_steps, mesh=mesh, in_specs=(P(), split, split), out_specs=(P(), P())
        )
        stacked = jax.device_put((images, labels), NamedSharding(mesh, split))
    step = jax.jit(mapped, donate_argnums=0)
    pending: list[Any] = []

    def call():
        nonlocal state, position
        position = (position + 1) % count
        if name == "hand-written JAX":
            state, loss = step(state, *batches[position])
            return loss
        # The scanned form trains all batches when the first one is asked for.
        if position == 0:
            state, losses = step(state, *stacked)
            pending[:] = [losses]
        return _Lazy(pending[0], position)

    return call


class _Lazy:
    """One loss out of an array of them, taken when it is looked at."""

    def __init__(self, losses: Any, position: int) -> None:
        self.losses, self._position = losses, position

    def __float__(self) -> float:
        return float(self.losses[self._position])


def serve_jax(replicas: int) -> None:
    import mirrored.testing

    mirrored.testing.use_cpu_devices(replicas)
    import jax

    def wait(loss):
        jax.block_until_ready(loss.losses if isinstance(loss, _Lazy) else loss)

    driver.serve(lambda name: jax_step(name, replicas), wait)


# --- TensorFlow -------------------------------------------------------------------------------


def tensorflow_step(replicas: int) -> Any:
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy([f"cpu:{index}" for index in range(replicas)])
    images, labels, initial = workloads.loop_data()
    with strategy.scope():
        W, b = tf.Variable(initial), tf.Variable(tf.zeros(10))
        # The optimizer that Keras 3 has on TensorFlow, as its users take it.
        import keras

        optimizer = keras.optimizers.Adam(workloads.LEARNING_RATE, epsilon=1e-8)
        optimizer.build([W, b])

    def train_step(images, labels):
        with tf.GradientTape() as tape:
            logits = images @ W + b
            losses = tf.nn.softmax_cross_entropy_with_logits(labels, logits)
            # A replica's share of the global mean: its optimizer sums over replicas.
            loss = tf.reduce_sum(losses) / workloads.LOOP_BATCH
        gradients = tape.gradient(loss, [W, b])
        optimizer.apply_gradients(zip(gradients, [W, b]))
        return loss

    @tf.function
    def distributed_train_step(images, labels):
        losses = strategy.run(train_step, args=(images, labels))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    data = tf.data.Dataset.from_tensor_slices((images.reshape(-1, 784), labels.reshape(-1, 10)))
    distributed = strategy.experimental_distribute_dataset(data.batch(workloads.LOOP_BATCH))
    batches, position = list(distributed), -1

    def call():
        nonlocal position
        position = (position + 1) % len(batches)
        return distributed_train_step(*batches[position])

    return call


def serve_tensorflow(replicas: int) -> None:
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import tensorflow as tf

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * replicas,
    )
    driver.serve(lambda _: tensorflow_step(replicas), lambda loss: loss.numpy())


# --- PyTorch ----------------------------------------------------------------------------------


def torch_step() -> Any:
    """One replica: each process of the group makes its own."""
    import torch

    rank, replicas = torch.distributed.get_rank(), torch.distributed.get_world_size()
    images, labels, initial = workloads.loop_data()
    model = torch.nn.Linear(784, 10)
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(initial.T))
        model.bias.zero_()
    optimizer = torch.optim.Adam(model.parameters(), lr=workloads.LEARNING_RATE)
    rows = workloads.LOOP_BATCH // replicas
    own = slice(rank * rows, (rank + 1) * rows)
    batches = [
        (torch.from_numpy(x[own].copy()), torch.from_numpy(y[own].argmax(-1)))
        for x, y in zip(images, labels)
    ]
    return torch_replica.ddp_step(model, optimizer, batches)


def serve_torch(replicas: int) -> None:
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    driver.serve(lambda _: torch_step(), lambda loss: None)


# --- the benchmark ----------------------------------------------------------------------------

SERVERS = {"jax": serve_jax, "tensorflow": serve_tensorflow, "torch": serve_torch}
CONTENDERS = {
    "mirrored": "jax",
    "hand-written JAX": "jax",
    "hand-written JAX, scanned": "jax",
    "TensorFlow MirroredStrategy": "tensorflow",
    "PyTorch DDP": "torch",
}


def main() -> None:
    given = driver.options(__doc__, rounds=21, steps=400, peers=("tensorflow", "torch"))
    if given.serve:
        SERVERS[given.serve[0]](int(given.serve[1]))
        return
    cases, versions = [], {}
    for replicas in (2,) if given.small else (1, 2):
        counts = {"torch": replicas}
        with driver.start(__file__, given.pythons, replicas, counts=counts) as started:
            runners = {name: started[peer] for name, peer in CONTENDERS.items() if peer in started}
            case = driver.measure(
                f"R = {replicas}",
                runners,
                losses=workloads.LOOP_BATCHES * 2 - 1,
                tolerance=TOLERANCE,
                rounds=given.rounds,
                steps=given.steps,
            )
            # What the calls alone take, with idle devices.
            ours, base, *_ = runners
            calls = driver.single_rounds(
                {name: runners[name] for name in (ours, base)}, given.rounds, given.steps
            )
            case["ratios"][f"{ours} / {base}, host"] = driver.ratio(calls, ours, base)
            case["contenders"][ours]["extra_host_us"] = statistics.median(
                a - b for a, b in zip(calls[ours]["rounds"], calls[base]["rounds"])
            )
            versions = {peer: process.versions for peer, process in started.items()}
        cases.append(case)
        driver.show(case)
    driver.write_result(given.json, "custom-loop", cases, versions, CAVEATS)


if __name__ == "__main__":
    main()
