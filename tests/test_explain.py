"""Where the time and the memory of a step go; traces that others can read."""

from __future__ import annotations

import dataclasses
import gzip
import json
import sys
import types

import jax
import jax.numpy as jnp
import keras
import matplotlib.image
import numpy as np
import optax
import pytest
from flax import nnx

import mirrored
import mirrored.nnx
from mirrored._compiled import Collective
from mirrored._timeline import _length, _read

X = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
Y = X[:, :4]
WEIGHT_BYTES = 32 * 4 * 4


@pytest.fixture(scope="module")
def strategy():
    return mirrored.MirroredStrategy(["cpu:0", "cpu:1"])


@pytest.fixture(scope="module")
def program(strategy):
    """A step over Variables, its variables, and batches for it."""
    with strategy.scope():
        weights = mirrored.Variable(jnp.zeros((32, 4)), name="weights")
        optimizer = mirrored.Optimizer(optax.adam(1e-2))

    def train_step(x, y):
        loss, gradient = mirrored.value_and_grad(
            lambda: mirrored.mean(((x @ weights - y) ** 2).mean(-1)), weights
        )
        optimizer.apply_gradients([(gradient, weights)])
        return loss

    @mirrored.function
    def one_step(x, y):
        return strategy.reduce("mean", strategy.run(train_step, args=(x, y)))

    return one_step, weights, optimizer, strategy.distribute_dataset((X, Y), batch_size=16)


def test_a_mirrored_function(strategy, program, tmp_path, capsys):
    step, weights, optimizer, dataset = program
    batch = next(iter(dataset))
    step(*batch)
    state = jax.tree.leaves(
        optimizer.state, is_leaf=lambda leaf: isinstance(leaf, mirrored.Variable)
    )
    before = [variable.numpy() for variable in (weights, *state)]
    position = dataset.get_state()
    with strategy.scope():
        mirrored.Variable(jnp.zeros(1000))  # not of this step
    found = strategy.explain(
        step, *batch, dataset=dataset, steps=2, picture=tmp_path / "picture.png"
    )
    # Looking at a step is not training.
    for variable, value in zip((weights, *state), before):
        np.testing.assert_array_equal(variable.numpy(), value)
    assert dataset.get_state() == position
    assert step.trace_count == 1
    assert found.rows == 8
    assert 0 < found.compute <= found.step
    assert found.compute + found.collectives_time + found.idle == pytest.approx(found.step)
    assert found.host > 0
    assert found.input > 0
    # The gradient, and the loss twice: as mirrored.mean, and reduced.
    (reduction,) = found.collectives
    assert reduction == Collective("all-reduce", reduction.count, reduction.bytes)
    assert WEIGHT_BYTES < reduction.bytes <= WEIGHT_BYTES + 16
    (described,) = found.programs
    assert described.name == "one_step"
    assert described.flops > 2 * (2 * 8 * 32 * 4)
    assert found.memory["parameters"] == WEIGHT_BYTES
    assert found.memory["optimizer state"] == 2 * WEIGHT_BYTES + 4
    assert found.memory["batch"] == 8 * (32 + 4) * 4
    text = capsys.readouterr().out
    assert text.strip() == str(found)
    assert "all-reduce" in text
    pixels = matplotlib.image.imread(tmp_path / "picture.png")
    assert pixels.shape[0] > 300
    assert len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 20


def test_a_trace_that_names_no_program(strategy, program, monkeypatch):
    """The program is compiled once more, and read."""
    monkeypatch.setattr("mirrored._explain._programs", lambda placement, timeline: [])
    step, _, _, dataset = program
    found = strategy.explain(step, *next(iter(dataset)), steps=1)
    assert [one.kind for one in found.collectives] == ["all-reduce"]
    assert found.programs[0].name == "one_step"
    assert found.memory["parameters"] == WEIGHT_BYTES


@pytest.mark.parametrize("donated", [(), (0, 1)])
def test_a_function_under_jit(strategy, donated):
    """Also one that takes the memory of its arguments away."""
    tx = optax.adam(1e-2)
    parameters = jax.device_put({"w": jnp.zeros((32, 4))}, strategy.placement.mirrored)
    state = jax.device_put(tx.init(parameters), strategy.placement.mirrored)

    def loss_fn(parameters, x, y):
        return mirrored.mean(((x @ parameters["w"] - y) ** 2).mean(-1))

    def step(parameters, state, x, y):
        gradients = strategy.run(jax.grad(loss_fn), args=(parameters, x, y))
        updates, state = tx.update(strategy.reduce("mean", gradients), state, parameters)
        return optax.apply_updates(parameters, updates), state

    batch = next(iter(strategy.distribute_dataset((X, Y), batch_size=16)))
    compiled = jax.jit(step, donate_argnums=donated)
    found = strategy.explain(compiled, parameters, state, *batch, steps=2)
    assert float(parameters["w"].sum()) == 0.0
    assert found.memory["parameters"] == WEIGHT_BYTES
    assert found.memory["optimizer state"] == 2 * WEIGHT_BYTES + 4
    assert found.memory["batch"] == 8 * (32 + 4) * 4
    # Copying what is donated is no part of the step.
    assert [program.name for program in found.programs] == ["step"]
    results = found.memory.get("results", 0)
    assert (results < WEIGHT_BYTES) == bool(donated)
    (reduction,) = found.collectives
    assert reduction.kind == "all-reduce"
    assert reduction.bytes >= WEIGHT_BYTES


def test_nnx_objects(strategy):
    with strategy.scope():
        model = nnx.Linear(32, 4, use_bias=False, rngs=nnx.Rngs(0))
        optimizer = mirrored.nnx.Optimizer(model, optax.adam(1e-2))
    before = jax.tree.map(np.asarray, nnx.state((model, optimizer)))

    def train_step(model, optimizer, x, y):
        gradients = nnx.grad(lambda model: mirrored.mean(((model(x) - y) ** 2).mean(-1)))(model)
        optimizer.update(model, gradients)

    @mirrored.function
    def step(*args):
        strategy.run(train_step, args=args)

    batch = next(iter(strategy.distribute_dataset((X, Y), batch_size=16)))
    found = strategy.explain(step, model, optimizer, *batch, steps=1)
    jax.tree.map(np.testing.assert_array_equal, nnx.state((model, optimizer)), before)
    assert found.memory["parameters"] == WEIGHT_BYTES
    assert found.memory["optimizer state"] >= 2 * WEIGHT_BYTES


def test_the_step_of_a_keras_model(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(4, use_bias=False)])
        model.compile(optimizer=keras.optimizers.Adam(0.1), loss="mse")
        model.build((None, 32))
    model.train_on_batch(X, Y)
    before = [np.asarray(value) for value in (*model.get_weights(), *model.optimizer.variables)]
    found = strategy.explain(model.train_on_batch, X, Y, steps=2)
    after = [np.asarray(value) for value in (*model.get_weights(), *model.optimizer.variables)]
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)
    assert found.rows == 32
    assert found.memory["parameters"] == WEIGHT_BYTES
    assert found.memory["optimizer state"] >= 2 * WEIGHT_BYTES
    assert sum(one.bytes for one in found.collectives if one.kind == "all-reduce") >= WEIGHT_BYTES


# --- what it advises, from made-up figures ----------------------------------------------------


EXPLANATION = mirrored.Explanation(
    name="step",
    where="8 GPUs",
    replica_count=8,
    rows=4,
    step=10e-3,
    host=1e-3,
    input=2e-3,
    compute=8e-3,
    collectives_time=1e-3,
    programs=(),
    memory={"parameters": 3 << 20, "temporaries": 5},
)


def test_the_advice():
    assert EXPLANATION.warnings == ()
    (slow,) = dataclasses.replace(EXPLANATION, input=11e-3).warnings
    assert "input is the bottleneck: a batch takes 11 ms, a step 10 ms" in slow
    (exchange,) = dataclasses.replace(EXPLANATION, compute=2e-3, collectives_time=5e-3).warnings
    assert "of 4 rows for each replica is too small: devices exchange values for 5 ms" in exchange
    (idle,) = dataclasses.replace(EXPLANATION, compute=2e-3).warnings
    assert "wait for Python" in idle
    assert dataclasses.replace(EXPLANATION, compute=None).warnings == ()
    assert dataclasses.replace(EXPLANATION, compute=None).idle is None
    assert "do not tell" in str(dataclasses.replace(EXPLANATION, compute=None))
    text = str(EXPLANATION)
    assert "compute                8 ms    80%" in text
    assert "idle                   1 ms    10%" in text
    assert "parameters            3 MiB" in text


def test_bad_arguments(strategy, program, monkeypatch):
    step, _, _, dataset = program
    batch = next(iter(dataset))
    with pytest.raises(mirrored.ArgumentError, match=r"steps=0"):
        strategy.explain(step, *batch, steps=0)
    with pytest.raises(mirrored.ArgumentError, match="cannot be called"):
        strategy.explain(step(*batch))
    with pytest.raises(mirrored.ArgumentError, match="before its fourth batch"):
        strategy.explain(step, *batch, dataset=[batch], steps=1)
    with pytest.raises(mirrored.ContextError, match="explain"):
        strategy.run(lambda: strategy.explain(step))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(mirrored.MissingDependencyError, match="plot"):
        EXPLANATION.save_picture("nowhere.png")


def test_a_step_that_fails_leaves_the_state(strategy):
    with strategy.scope():
        total = mirrored.Variable(0.0)
    calls = []

    def step():
        calls.append(1)
        total.assign_add(1.0)
        if len(calls) == 4:
            raise ZeroDivisionError
        return total.value

    with pytest.raises(ZeroDivisionError):
        strategy.explain(step)
    assert float(total) == 0.0


# --- reading traces ---------------------------------------------------------------------------


def events(*told):
    return [
        types.SimpleNamespace(
            name=name, start_ns=start, duration_ns=end - start, stats=list(stats.items())
        )
        for name, start, end, stats in told
    ]


def test_a_trace_of_gpus():
    """Kernels of a CUDA graph name no operation; what runs on the host is not counted."""
    second = 1_000_000_000
    nccl = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage)"
    told = {"hlo_op": "fusion.1", "hlo_module": "jit_step"}
    streams = [
        ("Stream #1(Compute)", events(("fusion.1", 0, 2 * second, told), ("gemm", 5, 10, {}))),
        ("Stream #2", events((nccl, second, 4 * second, {}))),
    ]
    host = [("python", events(("call", 0, 9 * second, {})))]
    planes = [
        types.SimpleNamespace(
            name=name,
            lines=[types.SimpleNamespace(name=line, events=found) for line, found in lines],
        )
        for name, lines in (("/device:GPU:0", streams), ("/device:GPU:1", []), ("/host:CPU", host))
    ]
    found = _read(types.SimpleNamespace(planes=planes), 5.0)
    assert (found.compute, found.collectives) == (2.0, 2.0)
    assert found.operations == {"jit_step": {"fusion.1"}}
    assert _read(types.SimpleNamespace(planes=planes[1:]), 5.0) is None


def test_intervals_that_overlap_count_once():
    assert _length([]) == 0
    assert _length([(0, 10), (2, 3), (5, 12), (20, 21)]) == 13


def test_a_profile_names_the_parts_of_a_step(strategy, program, tmp_path):
    step, _, _, dataset = program
    batch = next(iter(dataset))
    step(*batch)
    with mirrored.profile(tmp_path / "logs") as directory:
        step(*batch)
        with (
            pytest.raises(mirrored.ContextError, match="one trace at a time"),
            mirrored.profile(tmp_path / "inner"),
        ):
            pass
        with pytest.raises(mirrored.ContextError, match="explain records a trace"):
            strategy.explain(step, *batch)
    (trace,) = directory.rglob("perfetto_trace.json.gz")
    with gzip.open(trace) as file:
        events = json.load(file)
    events = events["traceEvents"] if isinstance(events, dict) else events
    names = {event.get("name") for event in events}
    assert any("PjitFunction(one_step)" in str(name) for name in names)
    assert any(str(name).startswith("all-reduce") for name in names)
    assert list(directory.rglob("*.xplane.pb"))
    # XProf joins operations with these names by the program.
    text = step.lower(*batch).compile().as_text()
    for part in ("jvp(mirrored.forward)", "transpose(jvp(mirrored.forward))", "mirrored.update"):
        assert part in text
    assert "mirrored.gradients_" in text


def test_each_of_several_processes_profiles_into_a_directory_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with mirrored.profile(tmp_path) as directory:
        pass
    assert directory == tmp_path / "process_1"
    assert list(directory.rglob("*.xplane.pb"))
