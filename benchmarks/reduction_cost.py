"""What sharded optimizer state saves and the reproducible sum costs, at R = 2, 4, 8.

Alternating rounds in one process; medians; ratios first. On virtual CPU devices.
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

import mirrored

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
    losses = [float(step(batch)) for _ in range(3)]
    return (lambda: step(batch)), memory, losses


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    cases = []
    for replica_count in (2, 4, 8):
        peers = {
            "all-reduce": program(replica_count),
            "bfloat16": program(replica_count, communication_dtype=jnp.bfloat16),
            "sharded state": program(replica_count, shard_state=True),
            "reproducible sum": program(replica_count, reduction="reproducible"),
            "reproducible, 8 micro-shards": program(replica_count, reproducible=True),
        }
        for name, (_, _, losses) in peers.items():
            np.testing.assert_allclose(losses, peers["all-reduce"][2], rtol=2e-3, err_msg=name)
        times = {name: [] for name in peers}
        for _ in range(15):
            for name, (run, _, _) in peers.items():
                start = time.perf_counter()
                for _ in range(4):
                    jax.block_until_ready(run())
                times[name].append((time.perf_counter() - start) / 4)
        base = statistics.median(times["all-reduce"])
        print(f"R = {replica_count}")
        for name, values in times.items():
            median, memory = statistics.median(values), peers[name][1]
            share = memory / peers["all-reduce"][1]
            print(
                f"  {median / base:5.2f} x time, {share:6.3f} x optimizer "
                f"memory  {name} ({median * 1e3:.2f} ms, {memory / 2**20:.2f} MiB a device)"
            )
        contenders = {
            name: {
                "median": statistics.median(values) * 1e6,
                "unit": "us a step",
                "rounds": [round(value * 1e6, 2) for value in values],
                "optimizer_bytes": peers[name][1],
                "losses": peers[name][2],
            }
            for name, values in times.items()
        }
        found = {
            f"{name} / all-reduce": driver.ratio(contenders, name, "all-reduce")
            for name in contenders
            if name != "all-reduce"
        }
        case = {"name": f"{replica_count} replicas", "contenders": contenders, "ratios": found}
        cases.append(case)
    driver.write_result(
        options.json,
        "reductions",
        cases,
        {"jax": driver.versions()},
        ["Virtual CPU devices; XLA emulates bfloat16 on CPUs."],
    )


if __name__ == "__main__":
    main()
