"""Host time of an NNX step: mirrored against the same program written by hand.

    python benchmarks/nnx_overhead.py

The program written by hand splits and merges the objects with nnx.split and nnx.merge around a
donated jit of shard_map: in each step as an object-oriented loop has to, or once before the loop.
Two and eight virtual CPU devices; each step is waited for.
"""

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
import mirrored.testing


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(32, 32, rngs=rngs) for _ in range(8)])

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return x


def build(optimizer_class):
    model = Mlp(nnx.Rngs(0))
    return model, optimizer_class(model, optax.adam(1e-3), wrt=nnx.Param)


def loss_of(model, x, y):
    return ((model(x) - y) ** 2).mean()


def ours(strategy):
    with strategy.scope():
        model, optimizer = build(mirrored.nnx.Optimizer)

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

    return run


def by_hand(strategy, *, every_step):
    """Splits and merges in every step, or once before the loop (state kept apart)."""
    mesh = strategy.mesh
    model, optimizer = build(nnx.Optimizer)
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

    return run


def make(name, replicas):
    strategy = mirrored.MirroredStrategy(jax.devices()[:replicas])
    random = np.random.default_rng(0)
    x, y = (
        jax.device_put(
            jnp.asarray(random.normal(size=(replicas, 4, 32)), jnp.float32),
            strategy.placement.split,
        )
        for _ in range(2)
    )
    run = CONTENDERS[name](strategy)
    # Each step to its end: queued steps of eight devices would wait for two cores.
    return lambda: jax.block_until_ready(run(x, y))


CONTENDERS = {
    "mirrored": ours,
    "by hand, split and merged each step": lambda strategy: by_hand(strategy, every_step=True),
    "by hand, split once": lambda strategy: by_hand(strategy, every_step=False),
}
CAVEATS = [
    "Virtual CPU devices: overhead, not arithmetic. Eight Linear layers and Adam: 50 arrays.",
    "`split once` holds the state outside the objects: the fastest form, but no longer NNX's.",
]


def main():
    given = driver.options(__doc__, rounds=15, steps=30)
    if given.serve:
        replicas = int(given.serve[1])
        mirrored.testing.use_cpu_devices(replicas)
        driver.serve(lambda name: make(name, replicas), jax.block_until_ready)
        return
    cases, versions = [], {}
    for replicas in (2,) if given.small else (2, 8):
        with driver.start(__file__, given.pythons, replicas) as started:
            case = driver.measure(
                f"R = {replicas}",
                dict.fromkeys(CONTENDERS, started["jax"]),
                losses=4,
                tolerance=1e-5,
                rounds=given.rounds,
                steps=given.steps,
            )
            versions = {peer: process.versions for peer, process in started.items()}
        cases.append(case)
        driver.show(case)
    driver.write_result(given.json, "nnx", cases, versions, CAVEATS)


if __name__ == "__main__":
    main()
