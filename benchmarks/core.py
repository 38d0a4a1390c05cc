"""The custom-loop step and a function with many Variables, against hand-written JAX.

Run it with ``python benchmarks/core.py``; it prints ratios first.
"""

from __future__ import annotations

import argparse
import json
import time

import mirrored.testing

mirrored.testing.use_cpu_devices(8)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from measure import Contender, check_equal_losses, measure, ratios

import mirrored


def make_batch(rows: int = 64) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    images = generator.normal(size=(rows, 784)).astype("f")
    return images, np.eye(10, dtype="f")[generator.integers(0, 10, rows)]


def mirrored_loop(devices: int) -> Contender:
    strategy = mirrored.MirroredStrategy(jax.devices()[:devices])
    key = jax.random.key(0)
    with strategy.scope():
        W = mirrored.Variable(jax.random.normal(key, (784, 10)) * 0.01, name="weights")
        b = mirrored.Variable(jnp.zeros(10), name="biases")
        optimizer = mirrored.Optimizer(optax.adam(1e-3))

    def train_step(images, labels):
        def loss_fn():
            return optax.softmax_cross_entropy(images @ W + b, labels).mean()

        loss, gradients = mirrored.value_and_grad(loss_fn, [W, b])
        optimizer.apply_gradients(zip(gradients, [W, b]))
        return loss

    @mirrored.function
    def distributed_train_step(images, labels):
        losses = strategy.run(train_step, args=(images, labels))
        return strategy.reduce(mirrored.ReduceOp.MEAN, losses, axis=None)

    (batch,) = strategy.distribute_dataset(make_batch(), batch_size=64)
    return Contender("mirrored", lambda: distributed_train_step(*batch))


def hand_written_loop(devices: int) -> Contender:
    mesh = jax.make_mesh(
        (devices,),
        ("replica",),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=jax.devices()[:devices],
    )
    split, whole = PartitionSpec("replica"), PartitionSpec()
    tx = optax.adam(1e-3)
    params = {"W": jax.random.normal(jax.random.key(0), (784, 10)) * 0.01, "b": jnp.zeros(10)}
    state = [params, tx.init(params)]
    state = jax.device_put(state, NamedSharding(mesh, whole))
    batch = jax.device_put(make_batch(), NamedSharding(mesh, split))

    def replica_step(state, images, labels):
        params, optimizer_state = state
        own = jax.tree.map(lambda p: jax.lax.pcast(p, "replica", to="varying"), params)

        def loss_fn(params):
            logits = images @ params["W"] + params["b"]
            return optax.softmax_cross_entropy(logits, labels).mean()

        loss, gradients = jax.value_and_grad(loss_fn)(own)
        loss, gradients = jax.lax.pmean((loss, gradients), "replica")
        updates, optimizer_state = tx.update(gradients, optimizer_state, params)
        return [optax.apply_updates(params, updates), optimizer_state], loss

    step = jax.jit(
        jax.shard_map(
            replica_step,
            mesh=mesh,
            in_specs=(whole, split, split),
            out_specs=(whole, whole),
        ),
        donate_argnums=0,
    )

    def call():
        nonlocal state
        state, loss = step(state, *batch)
        return loss

    return Contender("hand-written", call)


def many_variables(count: int) -> list[Contender]:
    strategy = mirrored.MirroredStrategy(jax.devices()[:1])
    values = [np.full(16, index, "f") for index in range(count)]
    with strategy.scope():
        variables = [mirrored.Variable(value) for value in values]

    @mirrored.function
    def with_variables():
        total = 0.0
        for variable in variables:
            variable.assign(variable.value * 0.999)
            total = total + variable.value[0]
        return total

    def on_arrays(arrays):
        new = [array * 0.999 for array in arrays]
        total = 0.0
        for array in new:
            total = total + array[0]
        return new, total

    jitted = jax.jit(on_arrays, donate_argnums=0)
    # On the same one-device mesh: PJRT's dispatch depends on the sharding.
    arrays = jax.device_put(values, strategy.placement.mirrored)

    def plain():
        nonlocal arrays
        arrays, total = jitted(arrays)
        return total

    return [Contender("hand-written", plain), Contender("mirrored", with_variables)]


def trace_counts() -> dict[int, dict[str, float]]:
    """First-step time and traces of the replica function, by number of replicas."""
    found = {}
    for devices in (1, 2, 4, 8):
        start = time.perf_counter()
        contender = mirrored_loop(devices)
        float(contender.step())
        found[devices] = {"first_step_s": time.perf_counter() - start}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    results = {}
    for devices in (1, 2):
        contenders = [hand_written_loop(devices), mirrored_loop(devices)]
        check_equal_losses(contenders, 20)
        timed = measure(contenders, options.rounds, options.steps)
        results[f"custom loop, {devices} device(s)"] = (
            timed,
            ratios(timed, "mirrored", "hand-written"),
        )
    contenders = many_variables(400)
    check_equal_losses(contenders, 5)
    timed = measure(contenders, options.rounds, max(options.steps // 3, 1))
    comparison = ratios(timed, "mirrored", "hand-written")
    comparison["host_ratio"] = timed["mirrored"]["host"] / timed["hand-written"]["host"]
    results["400 variables"] = (timed, comparison)
    for name, (timed, comparison) in results.items():
        print(name, {key: round(value, 3) for key, value in comparison.items()})
        for contender, figures in timed.items():
            shown = {key: round(value, 2) for key, value in figures.items()}
            print(f"    {contender:14}", shown)
    firsts = trace_counts()
    print("first step, seconds:", {k: round(v["first_step_s"], 2) for k, v in firsts.items()})
    if options.json:
        with open(options.json, "w") as file:
            json.dump({name: {"timed": t, "ratios": r} for name, (t, r) in results.items()}, file)


if __name__ == "__main__":
    main()
