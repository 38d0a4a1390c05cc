"""What bookkeeping costs as replicas grow: mirrored, hand-written JAX, TensorFlow.

    python benchmarks/growth_replicas.py --tensorflow-python PYTHON

A ten-layer MLP on 1 to 64 virtual CPU devices. For each number a process of its own tells how
often the function was traced, the time to trace and lower it, to compile it, of the whole first
step, the host time of a step (its call alone, with idle devices), and the memory of the process.
TensorFlow goes on until its first step takes longer than ``--patience`` seconds.
"""

from __future__ import annotations

import time
from typing import Any

import driver
import workloads

REPLICAS = (1, 2, 4, 8, 16, 32, 64)
RATE = 0.01
CAVEATS = [
    "Virtual CPU devices share the cores of one small machine; times of a first step grow with "
    "XLA's own work for R devices, which hand-written JAX does too.",
    "Host time is that of the call alone while all devices are idle: Python, and PJRT's dispatch "
    "to each device. `thread` is the calling thread's processor time in it.",
    "One process for each number of replicas, with both JAX contenders; TensorFlow in its own.",
]

_traces = {"mirrored": 0, "hand-written JAX": 0, "TensorFlow MirroredStrategy": 0}
OURS, HAND, TENSORFLOW = _traces


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


def make_jax(name: str, replicas: int) -> Any:
    function, arguments = jax_replicas(name, replicas)
    if name == OURS:
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
    x, y, initial = workloads.growth_data()
    # Every replica writes the same value, which tf.distribute must be told.
    with strategy.scope():
        weights = [
            tf.Variable(value, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
            for value in initial
        ]

    def train_step(x, y):
        _traces[name] += 1
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


def measure(replicas: int, given: Any, with_tensorflow: bool) -> Any:
    """One number of replicas: a case, and the versions of each peer."""
    contenders: dict[str, dict[str, Any]] = {}
    with driver.start(__file__, {"jax": given.pythons["jax"]}, replicas) as started:
        jax = started["jax"]
        versions = {"jax": jax.versions}
        for name in (HAND, OURS):
            contenders[name] = jax.ask(first=name)
        runners = {name: jax for name in (HAND, OURS)}
        for name in runners:
            found = jax.ask(make=name)
            contenders[name] |= {"first_step_s": found["seconds"], "losses": [found["loss"]]}
            contenders[name]["losses"] += jax.ask(losses=4, of=name)["losses"]
        driver.compare_curves({n: c["losses"] for n, c in contenders.items()}, 1e-5)
        singles = driver.single_rounds(runners, given.rounds, given.steps)
        for name in runners:
            contenders[name] |= singles[name]
        contenders[OURS]["peak_bytes"] = jax.ask(memory=1)["peak_bytes"]
    if with_tensorflow:
        pythons = {"tensorflow": given.pythons["tensorflow"]}
        with driver.start(__file__, pythons, replicas) as started:
            tensorflow = started["tensorflow"]
            versions["tensorflow"] = tensorflow.versions
            found = tensorflow.ask(make=TENSORFLOW)
            curve = [found["loss"], *tensorflow.ask(losses=4, of=TENSORFLOW)["losses"]]
            driver.compare_curves({HAND: contenders[HAND]["losses"], TENSORFLOW: curve}, 1e-4)
            figures = tensorflow.ask(first=TENSORFLOW) | {
                "first_step_s": found["seconds"],
                "losses": curve,
            }
            singles = driver.single_rounds({TENSORFLOW: tensorflow}, 3, given.steps)
            contenders[TENSORFLOW] = figures | singles[TENSORFLOW]
            contenders[TENSORFLOW]["peak_bytes"] = tensorflow.ask(memory=1)["peak_bytes"]
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
    return {"name": f"R = {replicas}", "contenders": contenders, "ratios": found}, versions


def main() -> None:
    def more(parser):
        parser.add_argument("--replicas", type=int, nargs="*", default=list(REPLICAS))
        parser.add_argument("--patience", type=float, default=20, help="seconds of a first step")

    given = driver.options(__doc__, rounds=11, steps=20, peers=["tensorflow"], more=more)
    if given.serve:
        peer, replicas = given.serve
        {"jax": serve_jax, "tensorflow": serve_tensorflow}[peer](int(replicas))
        return
    cases, versions, patient = [], {}, bool(given.pythons["tensorflow"])
    for replicas in [2] if given.small else given.replicas:
        case, found = measure(replicas, given, patient)
        versions |= found
        cases.append(case)
        driver.show(case)
        theirs = case["contenders"].get(TENSORFLOW)
        patient = bool(theirs) and theirs["first_step_s"] < given.patience
    driver.write_result(given.json, "growth-replicas", cases, versions, CAVEATS)


if __name__ == "__main__":
    main()
