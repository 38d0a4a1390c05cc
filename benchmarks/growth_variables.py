"""What many variables cost, 10 to 1000 in one step: mirrored, hand-written JAX, TensorFlow.

    python benchmarks/growth_variables.py --tensorflow-python PYTHON

Small variables, on one and on two virtual CPU devices; the host time of a step is its call alone,
with idle devices.
"""

from __future__ import annotations

from typing import Any

import driver
import workloads

# 400 is the number of which the goal speaks.
VARIABLES = (10, 100, 400, 1000)
OURS, HAND, TENSORFLOW = "mirrored", "hand-written JAX", "TensorFlow MirroredStrategy"
PEERS = {OURS: "jax", HAND: "jax", TENSORFLOW: "tensorflow"}
CAVEATS = [
    "Each step multiplies every variable by 0.999: no arithmetic to speak of, all bookkeeping.",
    "Host time is that of the call alone while all devices are idle: Python, and PJRT's dispatch. "
    "Both JAX contenders have the same mesh.",
]


def jax_variables(name: str, count: int, replicas: int) -> Any:
    import jax

    import mirrored

    strategy = mirrored.MirroredStrategy(jax.devices()[:replicas])
    values = workloads.variable_values(count)
    if name == "mirrored":
        with strategy.scope():
            variables = [mirrored.Variable(value) for value in values]

        @mirrored.function
        def with_variables():
            total = 0.0
            for variable in variables:
                variable.assign(variable.value * 0.999)
                total = total + variable.value[0]
            return total

        return with_variables

    def on_arrays(arrays):
        new = [array * 0.999 for array in arrays]
        total = 0.0
        for array in new:
            total = total + array[0]
        return new, total

    jitted = jax.jit(on_arrays, donate_argnums=0)
    # On the same mesh: PJRT's dispatch depends on the sharding.
    arrays = jax.device_put(values, strategy.placement.mirrored)

    def call():
        nonlocal arrays
        arrays, total = jitted(arrays)
        return total

    return call


def make_jax(name: str, replicas: int) -> Any:
    """Makes a step by a name such as ``mirrored/100``."""
    kind, _, count = name.partition("/")
    return jax_variables(kind, int(count), replicas)


def serve_jax(replicas: int) -> None:
    import mirrored.testing

    mirrored.testing.use_cpu_devices(replicas)
    import jax

    driver.serve(lambda name: make_jax(name, replicas), jax.block_until_ready)


def make_tensorflow(name: str, replicas: int) -> Any:
    import tensorflow as tf

    count = int(name.partition("/")[2])
    strategy = tf.distribute.MirroredStrategy([f"cpu:{index}" for index in range(replicas)])
    with strategy.scope():
        variables = [tf.Variable(value) for value in workloads.variable_values(count)]

    @tf.function
    def with_variables():
        total = tf.constant(0.0)
        for variable in variables:
            variable.assign(variable * 0.999)
            total += variable[0]
        return total

    return with_variables


def serve_tensorflow(replicas: int) -> None:
    import tensorflow as tf

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * replicas,
    )
    driver.serve(lambda name: make_tensorflow(name, replicas), lambda loss: loss.numpy())


def measure(count: int, replicas: int, started: Any, given: Any) -> dict[str, Any]:
    """So many variables on so many devices: a case."""
    peers = {name: peer for name, peer in PEERS.items() if peer in started}
    runners = {f"{name}/{count}": started[peer] for name, peer in peers.items()}
    curves, seconds = {}, {}
    for name, process in runners.items():
        found = process.ask(make=name)
        seconds[name] = found["seconds"]
        curves[name] = [found["loss"], *process.ask(losses=4, of=name)["losses"]]
    driver.compare_curves(curves, 1e-5)
    figures = driver.single_rounds(runners, given.rounds, max(given.steps * 10 // count, 10))
    contenders = {}
    for name in peers:
        contenders[name] = figures[f"{name}/{count}"]
        contenders[name]["first_step_s"] = seconds[f"{name}/{count}"]
    for name, process in runners.items():
        process.ask(drop=name)
    found = {
        f"{OURS} / {base}, host": driver.ratio(contenders, OURS, base)
        for base in contenders
        if base != OURS
    }
    name = f"{count} variables, R = {replicas}"
    return {"name": name, "contenders": contenders, "ratios": found}


def main() -> None:
    given = driver.options(__doc__, rounds=11, steps=40, peers=["tensorflow"])
    if given.serve:
        peer, replicas = given.serve
        {"jax": serve_jax, "tensorflow": serve_tensorflow}[peer](int(replicas))
        return
    cases, versions = [], {}
    for replicas in (2,) if given.small else (1, 2):
        with driver.start(__file__, given.pythons, replicas) as started:
            for count in (10,) if given.small else VARIABLES:
                cases.append(measure(count, replicas, started, given))
                driver.show(cases[-1])
            versions |= {peer: process.versions for peer, process in started.items()}
    driver.write_result(given.json, "growth-variables", cases, versions, CAVEATS)


if __name__ == "__main__":
    main()
