"""Host time of an NNX step: mirrored against the same program written by hand.

The program written by hand splits and merges the objects with nnx.split and nnx.merge
around a donated jit of shard_map. Alternating rounds in one process; medians. Run with
``python benchmarks/nnx_overhead.py [replicas]`` on virtual CPU devices.
"""

import argparse
import statistics
import time

import mirrored.testing

mirrored.testing.use_cpu_devices(8)

import driver
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mirrored
import mirrored.nnx


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(32, 32, rngs=rngs) for _ in range(8)])

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return x


def make(optimizer_class):
    model = Mlp(nnx.Rngs(0))
    return model, optimizer_class(model, optax.adam(1e-3), wrt=nnx.Param)


def loss_of(model, x, y):
    return ((model(x) - y) ** 2).mean()


def ours(strategy):
    with strategy.scope():
        model, optimizer = make(mirrored.nnx.Optimizer)

    def train_step(model, optimizer, x, y):
        loss, gradients = nnx.value_and_grad(loss_of)(model, x, y)
        optimizer.update(model, gradients)
        return loss

    @mirrored.function
    def step(model, optimizer, x, y):
        return strategy.reduce("mean", strategy.run(train_step, args=(model, optimizer, x, y)))

    def run(x, y):
        split = mirrored.PerReplica.from_stacked
        return step(model, optimizer, split(x), split(y))

    return run, model


def by_hand(strategy, *, every_step):
    """Splits and merges in every step, or once before the loop (state kept apart)."""
    mesh = strategy.mesh
    model, optimizer = make(nnx.Optimizer)
    graphdef, state = nnx.split((model, optimizer))
    state = jax.device_put(state, NamedSharding(mesh, P()))
    nnx.update((model, optimizer), state)

    def replica(state, x, y):
        model, optimizer = nnx.merge(graphdef, state)
        own = jax.tree.map(lambda a: jax.lax.pcast(a, "replica", to="varying"), nnx.state(model))
        loss, gradients = nnx.value_and_grad(loss_of)(
            nnx.merge(nnx.graphdef(model), own), x[0], y[0]
        )
        gradients = jax.lax.pmean(gradients, "replica")
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), jax.lax.pmean(loss, "replica")

    program = jax.jit(
        jax.shard_map(
            replica, mesh=mesh, in_specs=(P(), P("replica"), P("replica")), out_specs=(P(), P())
        ),
        donate_argnums=0,
    )
    held = [state]

    def run(x, y):
        if every_step:
            _, state = nnx.split((model, optimizer))
            new, loss = program(state, x, y)
            nnx.update((model, optimizer), new)
        else:
            held[0], loss = program(held[0], x, y)
        return loss

    return run, model


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("replicas", type=int, nargs="?", default=2)
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    replica_count = options.replicas
    strategy = mirrored.MirroredStrategy(jax.devices()[:replica_count])
    random = np.random.default_rng(0)
    shape = (replica_count, 4, 32)
    x, y = (
        jax.device_put(
            jnp.asarray(random.normal(size=shape), jnp.float32), strategy.placement.split
        )
        for _ in range(2)
    )
    peers = {
        "mirrored": ours(strategy)[0],
        "by hand, split and merged each step": by_hand(strategy, every_step=True)[0],
        "by hand, split once": by_hand(strategy, every_step=False)[0],
    }
    losses = {name: [float(run(x, y)) for _ in range(5)] for name, run in peers.items()}
    for name, values in losses.items():
        np.testing.assert_allclose(values, losses["mirrored"], rtol=1e-5, err_msg=name)
    times = {name: [] for name in peers}
    for _ in range(30):
        for name, run in peers.items():
            start = time.perf_counter()
            for _ in range(10):
                jax.block_until_ready(run(x, y))
            times[name].append((time.perf_counter() - start) / 10)
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(f"{replica_count} replicas, 8 layers, adam (50 arrays of state); us a step:")
    for name, value in medians.items():
        print(f"  {medians['mirrored'] / value:5.2f} x  {name}: {value * 1e6:.0f} us")
    contenders = {
        name: {
            "median": medians[name] * 1e6,
            "unit": "us a step",
            "rounds": [round(value * 1e6, 2) for value in values],
            "losses": losses[name],
        }
        for name, values in times.items()
    }
    found = {
        f"mirrored / {name}": driver.ratio(contenders, "mirrored", name)
        for name in contenders
        if name != "mirrored"
    }
    case = {"name": f"{replica_count} replicas", "contenders": contenders, "ratios": found}
    driver.write_result(
        options.json,
        f"nnx-{replica_count}",
        [case],
        {"jax": driver.versions()},
        ["Virtual CPU devices: overhead, not arithmetic."],
    )


if __name__ == "__main__":
    main()
