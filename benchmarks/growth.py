"""What bookkeeping costs as replicas and variables grow: mirrored, hand-written JAX, TensorFlow.

    python benchmarks/growth.py --tensorflow-python PYTHON

Replicas: a ten-layer MLP on 1 to 64 virtual CPU devices. For each number a process of its own
tells how often the function was traced, the time to trace and lower it, to compile it, of the
whole first step, the host time of a step (its call alone, with idle devices), and the memory of
the process. TensorFlow goes on until its first step takes longer than ``--patience``.

Variables: 10, 100 and 1000 small variables written in one step, on one and on two devices.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

import driver
import workloads

REPLICAS = (1, 2, 4, 8, 16, 32, 64)
VARIABLES = (10, 100, 1000)
RATE = 0.01
REPLICA_CAVEATS = [
    "Virtual CPU devices share the cores of one small machine; times of a first step grow with "
    "XLA's own work for R devices, which hand-written JAX does too.",
    "Host time is that of the call alone while all devices are idle: Python, and PJRT's dispatch "
    "to each device. `thread` is the calling thread's processor time in it.",
    "One process for each number of replicas, with both JAX contenders; TensorFlow in its own.",
]
VARIABLE_CAVEATS = [
    "Each step multiplies every variable by 0.999: no arithmetic to speak of, all bookkeeping.",
    "Host time of single steps as above; one mesh for both JAX contenders.",
]

_traces = {"mirrored": 0, "hand-written JAX": 0, "TensorFlow MirroredStrategy": 0}


# --- mirrored and hand-written JAX ------------------------------------------------------------


def jax_replicas(name: str, replicas: int) -> tuple[Any, Any]:
    """Returns a compiled function that knows how to lower itself, and its arguments."""
    import jax
    import jax.numpy as jnp
    import optax

    import mirrored

    x, y, initial = workloads.growth_data()
    strategy = mirrored.MirroredStrategy(jax.devices()[:replicas])
    tx = optax.sgd(RATE)
    if name == "mirrored":
        with strategy.scope():
            variables = [mirrored.Variable(value) for value in initial]
            optimizer = mirrored.Optimizer(tx)

        def train_step(x, y):
            _traces[name] += 1

            def loss_fn():
                out = x
                for variable in variables:
                    out = jnp.tanh(out @ variable)
                return ((out - y) ** 2).mean()

            loss, gradients = mirrored.value_and_grad(loss_fn, variables)
            optimizer.apply_gradients(zip(gradients, variables))
            return loss

        step = mirrored.function(
            lambda x, y: strategy.reduce("mean", strategy.run(train_step, args=(x, y)))
        )
        (batch,) = strategy.distribute_dataset((x, y), batch_size=len(x))
        return step, lambda result: (batch, result)

    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh, split = strategy.mesh, P("replica")
    state = jax.device_put((list(initial), tx.init(list(initial))), NamedSharding(mesh, P()))
    batch = jax.device_put((x, y), NamedSharding(mesh, split))

    def replica_step(state, x, y):
        _traces[name] += 1
        weights, optimizer_state = state
        own = jax.tree.map(lambda w: jax.lax.pcast(w, "replica", to="varying"), weights)

        def loss_fn(weights):
            out = x
            for weight in weights:
                out = jnp.tanh(out @ weight)
            return ((out - y) ** 2).mean()

        loss, gradients = jax.lax.pmean(jax.value_and_grad(loss_fn)(own), "replica")
        updates, optimizer_state = tx.update(gradients, optimizer_state, weights)
        return loss, (optax.apply_updates(weights, updates), optimizer_state)

    mapped = jax.shard_map(
        replica_step, mesh=mesh, in_specs=(P(), split, split), out_specs=(P(), P())
    )
    held = [state]

    def arguments(result):
        if result is not None:
            held[0] = result[1]
        return (held[0], *batch), None if result is None else result[0]

    return jax.jit(mapped, donate_argnums=0), arguments


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
    """Makes a step by a name such as ``mirrored`` or ``mirrored/100`` (so many variables)."""
    kind, _, count = name.partition("/")
    if count:
        return jax_variables(kind, int(count), replicas)
    function, arguments = jax_replicas(name, replicas)
    if kind == "mirrored":
        batch = arguments(None)[0]
        return lambda: function(*batch)
    held = [None]

    def call():
        given, _ = arguments(held[0])
        held[0] = function(*given)
        return held[0][0]

    return call


def first_steps(name: str, replicas: int) -> dict[str, Any]:
    """Times the parts of a first step: trace and lower, compile; then the whole, anew."""
    function, arguments = jax_replicas(name, replicas)
    given = arguments(None)[0]
    start = time.perf_counter()
    lowered = function.lower(*given)
    traced = time.perf_counter()
    lowered.compile()
    compiled = time.perf_counter()
    return {
        "trace_s": traced - start,
        "compile_s": compiled - traced,
        "traces": _traces[name],
    }


def serve_jax(replicas: int) -> None:
    import mirrored.testing

    mirrored.testing.use_cpu_devices(replicas)
    import jax

    # Whatever JAX does only once in a process is done before a clock runs.
    jax.block_until_ready(jax.jit(lambda x: x + 1)(1.0))
    driver.serve(
        lambda name: make_jax(name, replicas),
        jax.block_until_ready,
        more={"first": lambda name: first_steps(name, replicas)},
    )


# --- TensorFlow -------------------------------------------------------------------------------


def make_tensorflow(name: str, replicas: int) -> Any:
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy([f"cpu:{index}" for index in range(replicas)])
    kind, _, count = name.partition("/")
    if count:
        with strategy.scope():
            variables = [tf.Variable(value) for value in workloads.variable_values(int(count))]

        @tf.function
        def with_variables():
            total = tf.constant(0.0)
            for variable in variables:
                variable.assign(variable * 0.999)
                total += variable[0]
            return total

        return with_variables
    x, y, initial = workloads.growth_data()
    # Every replica writes the same value, which tf.distribute must be told.
    with strategy.scope():
        weights = [
            tf.Variable(value, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
            for value in initial
        ]

    def train_step(x, y):
        _traces[kind] += 1
        with tf.GradientTape() as tape:
            out = x
            for weight in weights:
                out = tf.tanh(out @ weight)
            loss = tf.reduce_mean((out - y) ** 2)
        gradients = tape.gradient(loss, weights)
        context = tf.distribute.get_replica_context()
        gradients = context.all_reduce(tf.distribute.ReduceOp.MEAN, gradients)
        for weight, gradient in zip(weights, gradients):
            weight.assign_sub(RATE * gradient)
        return loss

    @tf.function
    def step(x, y):
        losses = strategy.run(train_step, args=(x, y))
        return strategy.reduce(tf.distribute.ReduceOp.MEAN, losses, axis=None)

    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(len(x))
    (batch,) = strategy.experimental_distribute_dataset(data)
    return lambda: step(*batch)


def serve_tensorflow(replicas: int) -> None:
    import tensorflow as tf

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * replicas,
    )
    driver.serve(
        lambda name: make_tensorflow(name, replicas),
        lambda loss: loss.numpy(),
        more={"first": lambda name: {"traces": _traces[name]}},
    )


# --- the benchmark ----------------------------------------------------------------------------

OURS, HAND, TENSORFLOW = _traces


def measure_replicas(replicas: int, options: argparse.Namespace, with_tensorflow: bool) -> Any:
    """One number of replicas: a case, and the versions of each peer."""
    command = [sys.executable, __file__, "--serve", "jax", str(replicas)]
    jax = driver.Process("jax", command)
    versions = {"jax": jax.versions}
    contenders: dict[str, dict[str, Any]] = {}
    try:
        for name in (HAND, OURS):
            contenders[name] = jax.ask(first=name)
        runners = {name: jax for name in (HAND, OURS)}
        for name in runners:
            found = jax.ask(make=name)
            contenders[name] |= {"first_step_s": found["seconds"], "losses": [found["loss"]]}
            contenders[name]["losses"] += jax.ask(losses=4, of=name)["losses"]
        driver.compare_curves({n: c["losses"] for n, c in contenders.items()}, 1e-5)
        singles = driver.single_rounds(runners, options.rounds, options.steps)
        for name in runners:
            contenders[name] |= singles[name]
        contenders[OURS]["peak_bytes"] = jax.ask(memory=1)["peak_bytes"]
    finally:
        jax.end()
    if with_tensorflow:
        command = [options.tensorflow_python, __file__, "--serve", "tensorflow", str(replicas)]
        tensorflow = driver.Process("tensorflow", command)
        versions["tensorflow"] = tensorflow.versions
        try:
            found = tensorflow.ask(make=TENSORFLOW)
            curve = [found["loss"], *tensorflow.ask(losses=4, of=TENSORFLOW)["losses"]]
            driver.compare_curves({HAND: contenders[HAND]["losses"], TENSORFLOW: curve}, 1e-4)
            figures = tensorflow.ask(first=TENSORFLOW) | {
                "first_step_s": found["seconds"],
                "losses": curve,
            }
            singles = driver.single_rounds({TENSORFLOW: tensorflow}, 3, options.steps)
            contenders[TENSORFLOW] = figures | singles[TENSORFLOW]
            contenders[TENSORFLOW]["peak_bytes"] = tensorflow.ask(memory=1)["peak_bytes"]
        finally:
            tensorflow.end()
    found = {
        f"{OURS} / {HAND}, host": driver.ratio(contenders, OURS, HAND),
        f"{OURS} / {HAND}, thread": contenders[OURS]["thread"] / contenders[HAND]["thread"],
        f"{OURS} / {HAND}, trace": contenders[OURS]["trace_s"] / contenders[HAND]["trace_s"],
        f"{OURS} / {HAND}, compile": contenders[OURS]["compile_s"] / contenders[HAND]["compile_s"],
    }
    if TENSORFLOW in contenders:
        for key, what in (("first_step_s", "first step"), ("median", "host")):
            found[f"{OURS} / {TENSORFLOW}, {what}"] = (
                contenders[OURS][key] / contenders[TENSORFLOW][key]
            )
    return {"name": f"{replicas} replicas", "contenders": contenders, "ratios": found}, versions


def measure_variables(replicas: int, options: argparse.Namespace) -> Any:
    """Cases for all numbers of variables on so many devices, and versions."""
    processes = {
        "jax": driver.Process("jax", [sys.executable, __file__, "--serve", "jax", str(replicas)])
    }
    peers = {OURS: "jax", HAND: "jax"}
    if options.tensorflow_python:
        command = [options.tensorflow_python, __file__, "--serve", "tensorflow", str(replicas)]
        processes["tensorflow"] = driver.Process("tensorflow", command)
        peers[TENSORFLOW] = "tensorflow"
    cases = []
    try:
        for count in VARIABLES:
            runners = {f"{name}/{count}": processes[peer] for name, peer in peers.items()}
            curves, seconds = {}, {}
            for name, process in runners.items():
                found = process.ask(make=name)
                seconds[name] = found["seconds"]
                curves[name] = [found["loss"], *process.ask(losses=4, of=name)["losses"]]
            driver.compare_curves(curves, 1e-5)
            steps = max(options.steps * 10 // count, 10)
            figures = driver.single_rounds(runners, options.rounds, steps)
            contenders = {}
            for name in peers:
                contenders[name] = figures[f"{name}/{count}"]
                contenders[name]["first_step_s"] = seconds[f"{name}/{count}"]
            found = {
                f"{OURS} / {base}, host": driver.ratio(contenders, OURS, base)
                for base in contenders
                if base != OURS
            }
            name = f"{count} variables, {replicas} replicas"
            cases.append({"name": name, "contenders": contenders, "ratios": found})
            driver.show(cases[-1])
    finally:
        for process in processes.values():
            process.end()
    return cases, {peer: process.versions for peer, process in processes.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensorflow-python", help="a Python that has tensorflow")
    parser.add_argument("--replicas", type=int, nargs="*", default=list(REPLICAS))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--patience", type=float, default=20, help="seconds of a first step")
    parser.add_argument("--only", choices=["replicas", "variables"])
    parser.add_argument("--json", help="folder for growth-replicas.json and growth-variables.json")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        peer, replicas = options.serve
        {"jax": serve_jax, "tensorflow": serve_tensorflow}[peer](int(replicas))
        return
    if options.only != "variables":
        cases, versions, patient = [], {}, bool(options.tensorflow_python)
        for replicas in options.replicas:
            case, found = measure_replicas(replicas, options, patient)
            versions |= found
            cases.append(case)
            driver.show(case)
            theirs = case["contenders"].get(TENSORFLOW)
            patient = bool(theirs) and theirs["first_step_s"] < options.patience
        write(options.json, "growth-replicas", cases, versions, REPLICA_CAVEATS)
    if options.only != "replicas":
        cases, versions = [], {}
        for replicas in (1, 2):
            found, of_peers = measure_variables(replicas, options)
            cases += found
            versions |= of_peers
        write(options.json, "growth-variables", cases, versions, VARIABLE_CAVEATS)


def write(folder: str | None, name: str, *rest: Any) -> None:
    driver.write_result(os.path.join(folder, f"{name}.json") if folder else None, name, *rest)


if __name__ == "__main__":
    main()
