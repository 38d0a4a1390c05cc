"""What sharded optimizer state saves and the reproducible sum costs, at R = 2, 4, 8.

    python benchmarks/reduction_cost.py

Four 256 x 256 layers and Adam on virtual CPU devices; each step is waited for.
"""

import driver
import jax
import jax.numpy as jnp
import numpy as np
import optax

import mirrored
import mirrored.testing

WIDTH, LAYERS, ROWS = 256, 4, 64


def program(replica_count, *, reproducible=False, **options):
    strategy = mirrored.MirroredStrategy(jax.devices()[:replica_count])
    random = np.random.default_rng(0)
    with strategy.scope():
        variables = [
            mirrored.Variable(random.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 16)
            for _ in range(LAYERS)
        ]
        optimizer = mirrored.Optimizer(optax.adam(1e-4), **options)
    optimizer.build(variables)
    x = jnp.asarray(random.normal(size=(ROWS, WIDTH)), jnp.float32)

    def loss_fn(x):
        for variable in variables:
            x = jnp.tanh(x @ variable)
        return (x**2).mean()

    micro = mirrored.reproducible_value_and_grad(loss_fn, variables, micro_shards=8)

    def train_step(x):
        if reproducible:
            loss, gradients = micro(x)
        else:
            loss, gradients = mirrored.value_and_grad(lambda: loss_fn(x), variables, reduce=False)
        optimizer.apply_gradients(zip(gradients, variables))
        return loss

    step = mirrored.function(lambda x: strategy.reduce("mean", strategy.run(train_step, args=(x,))))
    stacked = jax.device_put(x.reshape(replica_count, -1, WIDTH), strategy.placement.split)
    batch = mirrored.PerReplica.from_stacked(stacked)
    leaves = jax.tree.leaves(optimizer.state, is_leaf=lambda v: isinstance(v, mirrored.Variable))
    memory = sum(leaf.storage.addressable_shards[0].data.nbytes for leaf in leaves)
    return (lambda: jax.block_until_ready(step(batch))), memory


CONTENDERS = {
    "all-reduce": {},
    "bfloat16": {"communication_dtype": jnp.bfloat16},
    "sharded state": {"shard_state": True},
    "reproducible sum": {"reduction": "reproducible"},
    "reproducible, 8 micro-shards": {"reproducible": True},
}
CAVEATS = [
    "Virtual CPU devices: sums over memory that all share. XLA emulates bfloat16 on CPUs.",
    "Optimizer memory is that of Adam's moments on one device.",
]


def serve(replicas):
    mirrored.testing.use_cpu_devices(replicas)
    memories = {}

    def make(name):
        step, memories[name] = program(replicas, **CONTENDERS[name])
        return step

    driver.serve(
        make,
        jax.block_until_ready,
        more={"optimizer": lambda name: {"optimizer_bytes": memories[name]}},
    )


def main():
    given = driver.options(__doc__, rounds=15, steps=12)
    if given.serve:
        serve(int(given.serve[1]))
        return
    cases, versions = [], {}
    for replicas in (2,) if given.small else (2, 4, 8):
        with driver.start(__file__, given.pythons, replicas) as started:
            process = started["jax"]
            case = driver.measure(
                f"R = {replicas}",
                dict.fromkeys(CONTENDERS, process),
                losses=2,
                tolerance=2e-3,
                rounds=given.rounds,
                steps=given.steps,
            )
            contenders = case["contenders"]
            for name in contenders:
                contenders[name] |= process.ask(optimizer=name)
            versions = {"jax": process.versions}
        # Here the plain all-reduce is what the others are held against.
        base, *others = contenders
        case["ratios"] = {
            f"{name} / {base}": driver.ratio(contenders, name, base) for name in others
        }
        memory = contenders["sharded state"]["optimizer_bytes"]
        share = memory / contenders[base]["optimizer_bytes"]
        case["ratios"][f"sharded state / {base}, optimizer memory"] = share
        cases.append(case)
        driver.show(case)
    driver.write_result(given.json, "reductions", cases, versions, CAVEATS)


if __name__ == "__main__":
    main()
