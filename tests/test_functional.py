"""Plain pytrees, Equinox modules and train states in run, in the style of JAX."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import make_strategy
from hypothesis import given, settings
from hypothesis import strategies as st

import mirrored

PARAMETERS = {"w": jnp.array([[1.0, -2.0], [0.5, 3.0]]), "b": jnp.array([0.1, -0.1])}


def per_example(parameters, x):
    return (jnp.tanh(x @ parameters["w"] + parameters["b"]) ** 2).sum(-1)


def batches(rows, steps=3):
    return np.random.default_rng(rows).normal(size=(steps, rows, 2)).astype(np.float32)


def alone(tx, rows):
    parameters, state = PARAMETERS, tx.init(PARAMETERS)
    losses = []
    for x in batches(rows):
        loss, gradients = jax.value_and_grad(lambda p, x=x: per_example(p, x).mean())(parameters)
        updates, state = tx.update(gradients, state, parameters)
        parameters = optax.apply_updates(parameters, updates)
        losses.append(float(loss))
    return losses, parameters


def assert_close(actual, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), actual, expected
    )


TRANSFORMATIONS = {
    "adam": optax.adam(1e-2),
    "multi steps": optax.MultiSteps(optax.adam(1e-2), 2),
    "masked": optax.masked(optax.sgd(0.1), {"w": True, "b": False}),
    "chain": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "injected": optax.inject_hyperparams(optax.sgd)(learning_rate=0.1, momentum=0.9),
    "if finite": optax.apply_if_finite(optax.sgd(0.1), 2),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TrainState:
    parameters: Any
    optimizer_state: Any
    tx: Any = dataclasses.field(metadata={"static": True})

    def apply_gradients(self, gradients):
        updates, state = self.tx.update(gradients, self.optimizer_state, self.parameters)
        parameters = optax.apply_updates(self.parameters, updates)
        return dataclasses.replace(self, parameters=parameters, optimizer_state=state)


@pytest.mark.parametrize("name", TRANSFORMATIONS)
@pytest.mark.parametrize("rows", [8, 5])
def test_reduced_outside_the_replicas(name, rows):
    tx = TRANSFORMATIONS[name]
    strategy = make_strategy(4)

    def loss_fn(parameters, x):
        return mirrored.mean(per_example(parameters, x))

    @jax.jit
    def train_step(state, x):
        loss, gradients = strategy.run(jax.value_and_grad(loss_fn), args=(state.parameters, x))
        loss, gradients = strategy.reduce("mean", (loss, gradients))
        return state.apply_gradients(gradients), loss

    state = TrainState(PARAMETERS, tx.init(PARAMETERS), tx)
    losses = []
    for x in strategy.distribute_dataset(batches(rows).reshape(-1, 2), batch_size=rows):
        state, loss = train_step(state, x)
        losses.append(float(loss))
    expected_losses, expected = alone(tx, rows)
    assert_close(losses, expected_losses)
    assert_close(state.parameters, expected)


@pytest.mark.parametrize("name", TRANSFORMATIONS)
@pytest.mark.parametrize("rows", [8, 5])
def test_updated_inside_the_replicas(name, rows):
    tx = TRANSFORMATIONS[name]
    strategy = make_strategy(4)

    def loss_fn(parameters, x):
        return mirrored.mean(per_example(parameters, x))

    def train_step(state, x):
        loss, gradients = jax.value_and_grad(loss_fn)(state.parameters, x)
        gradients = mirrored.get_replica_context().all_reduce("mean", gradients)
        return mirrored.as_mirrored(state.apply_gradients(gradients)), loss

    state = TrainState(PARAMETERS, tx.init(PARAMETERS), tx)
    for x in strategy.distribute_dataset(batches(rows).reshape(-1, 2), batch_size=rows):
        state, _ = strategy.run(train_step, args=(state, x))
    _, expected = alone(tx, rows)
    assert_close(state.parameters, expected)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))


def test_a_transformation_that_chooses(two):
    """Both branches of its lax.cond must have one type: the gradients join the parameters'."""
    tx = optax.apply_if_finite(optax.adam(1e-2), 2)

    def train_step(parameters, state, x):
        ctx = mirrored.get_replica_context()
        gradients = jax.grad(lambda p: mirrored.mean(per_example(p, x)))(parameters)
        gradients = ctx.own(ctx.all_reduce("mean", gradients))
        updates, state = tx.update(gradients, state, parameters)
        return mirrored.as_mirrored((optax.apply_updates(parameters, updates), state))

    parameters, state = PARAMETERS, tx.init(PARAMETERS)
    for x in two.distribute_dataset(batches(5).reshape(-1, 2), batch_size=5):
        parameters, state = two.run(train_step, args=(parameters, state, x))
    assert_close(parameters, alone(tx, 5)[1])


@pytest.mark.parametrize("rows", [8, 5])
def test_equinox(rows):
    strategy = make_strategy(4)
    model = equinox.nn.MLP(2, 3, 8, 1, key=jax.random.key(0))
    tx = optax.adam(1e-2)

    def loss_fn(model, x):
        return mirrored.mean((jax.vmap(model)(x) ** 2).sum(-1))

    def train_step(model, state, x):
        loss, gradients = equinox.filter_value_and_grad(loss_fn)(model, x)
        gradients = mirrored.get_replica_context().all_reduce("mean", gradients)
        updates, state = tx.update(gradients, state, equinox.filter(model, equinox.is_array))
        return mirrored.as_mirrored((equinox.apply_updates(model, updates), state)), loss

    state = tx.init(equinox.filter(model, equinox.is_array))
    other, other_state = model, state
    data = batches(rows)
    for x, whole in zip(strategy.distribute_dataset(data.reshape(-1, 2), batch_size=rows), data):
        (model, state), _ = strategy.run(train_step, args=(model, state, x))
        (other, other_state), _ = train_step_alone(other, other_state, whole, loss_fn, tx)
    assert_close(equinox.filter(model, equinox.is_array), equinox.filter(other, equinox.is_array))


def train_step_alone(model, state, x, loss_fn, tx):
    loss, gradients = equinox.filter_value_and_grad(loss_fn)(model, x)
    updates, state = tx.update(gradients, state, equinox.filter(model, equinox.is_array))
    return (equinox.apply_updates(model, updates), state), loss


@pytest.mark.parametrize("rows", [8, 5])
@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda f: lambda p, x: scanned(f, p, x)])
def test_mirrored_mean_is_exact_in_a_compiled_loss(wrap, rows):
    """Inside jit, checkpoint or scan the mean cannot see that it is differentiated."""
    strategy = make_strategy(4)
    loss_fn = wrap(lambda p, x: mirrored.mean(per_example(p, x)))
    (x,) = strategy.distribute_dataset(batches(rows)[0], batch_size=rows)

    def replica(parameters, x):
        gradients = jax.grad(loss_fn)(parameters, x)
        ours = mirrored.value_and_grad(loss_fn)(parameters, x)[1]
        return mirrored.get_replica_context().all_reduce("mean", gradients), ours

    expected = jax.grad(lambda p: per_example(p, batches(rows)[0]).mean())(PARAMETERS)
    gradients, ours = strategy.run(replica, args=(PARAMETERS, x))
    assert_close(gradients, expected)
    assert_close(ours, expected)


def scanned(loss_fn, parameters, x):
    return jax.lax.scan(lambda _, x: (None, loss_fn(parameters, x)), None, x[None])[1][0]


# --- what counts as the same on all replicas -----------------------------------------


def test_claims_that_do_not_hold_are_refused(two):
    x = mirrored.PerReplica([1.0, 2.0])
    key = jax.random.key(0)

    def number():
        return mirrored.get_replica_context().replica_id_in_sync_group

    wrong = {
        "data": lambda w: w * 1.0 + x_of[0],
        "number": lambda w: w + number(),
        "key": lambda w: w + jax.random.normal(key_of[0]),
        "branch": lambda w: jax.lax.cond(number() > 0, lambda: w, lambda: w + 1),
        "constant branch": lambda w: jax.lax.cond(number() > 0, lambda: 1.0, lambda: 2.0),
        "loop": lambda w: jax.lax.while_loop(lambda v: v < number() * 10.0, lambda v: v + 1, w),
        "fori": lambda w: jax.lax.fori_loop(0, number(), lambda _, v: v + 1, w),
        "scan": lambda w: jax.lax.scan(lambda c, v: (c + v, c), w, x_of[0][None])[0],
        "late in a scan": lambda w: jax.lax.scan(
            lambda c, _: ((c[1], c[2], c[2]), None), (w, w, w + x_of[0]), None, length=2
        )[0][0],
        "jit": lambda w: jax.jit(lambda v: v + number())(w),
        "ref": lambda w: through_ref(w, x_of[0]),
        "permuted": lambda w: jax.lax.ppermute(w, "replica", [(0, 1)]),
        "scattered": lambda w: jax.lax.psum_scatter(jnp.stack([w, w + 1]), "replica"),
    }
    for name, function in wrong.items():
        x_of, key_of = [], []

        def replica(w, x, key, function=function, x_of=x_of, key_of=key_of):
            x_of.append(x)
            key_of.append(key)
            return mirrored.as_mirrored({"weight": function(w)})

        globals_of = {"x_of": x_of, "key_of": key_of}
        function = rebound(function, globals_of)
        with pytest.raises(mirrored.VariableError, match=r"as_mirrored at \['weight'\]"):
            two.run(
                lambda w, x, key, f=function: replica(w, x, key, function=f),
                args=(5.0, x, key),
            )
        assert name


def rebound(function, names):
    """The function with the lists it closes over replaced."""
    cells = tuple(
        types.CellType(names.get(name, cell.cell_contents))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ())
    )
    return types.FunctionType(function.__code__, function.__globals__, None, None, cells)


def through_ref(w, x):
    ref = jax.new_ref(mirrored.get_replica_context().own(jnp.zeros(())))
    ref[...] = ref[...] + x
    return w + ref[...]


def test_claims_that_hold_come_back_whole(two):
    def replica(w, x):
        total = mirrored.get_replica_context().all_reduce("sum", x)
        looped = jax.lax.fori_loop(0, 3, lambda _, v: v * 0.5 + total, w)
        chosen = jax.lax.cond(total > 2, lambda v: v + 1, lambda v: v - 1, looped)
        return mirrored.as_mirrored((chosen, jnp.sort(jnp.stack([w, chosen]))))

    chosen, both = two.run(replica, args=(8.0, mirrored.PerReplica([1.0, 2.0])))
    assert isinstance(chosen, jax.Array)
    assert float(chosen) == 7.25
    assert both.tolist() == [7.25, 8.0]
    assert mirrored.as_mirrored(3.0) == 3.0
    with two.debug():
        assert float(two.run(replica, args=(8.0, mirrored.PerReplica([1.0, 2.0])))[0]) == 7.25
        with pytest.raises(mirrored.VariableError, match="as_mirrored"):
            two.run(mirrored.as_mirrored, args=(mirrored.PerReplica([1.0, 2.0]),))


OPERATIONS = [
    lambda a, b: a + b,
    lambda a, b: jax.jit(jnp.multiply)(a, b),
    lambda a, b: jax.lax.cond(a > b, lambda: a, lambda: b),
    lambda a, b: jax.lax.fori_loop(0, 2, lambda _, v: v * 0.5 + b, a),
    lambda a, b: jax.lax.scan(lambda c, v: (c + v, c * v), a, jnp.stack([b, a]))[1][1],
    lambda a, b: jax.lax.while_loop(lambda v: v < b, lambda v: v + 1.5, a),
    lambda a, b: mirrored.get_replica_context().all_reduce("sum", a) - b,
    lambda a, b: jnp.where(a > 0, b, a),
]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(range(len(OPERATIONS))), st.integers(0, 3), st.integers(0, 3)),
        min_size=1,
        max_size=5,
    )
)
def test_what_is_accepted_is_equal_on_all_replicas(program):
    """Whatever as_mirrored accepts is the same on both replicas, in value."""
    two = make_strategy(2)

    def replica(x, y, u, v):
        values = [x, y, u, v]
        for operation, left, right in program:
            values.append(OPERATIONS[operation](values[-1 - left], values[-1 - right]))
        return values[-1]

    args = (mirrored.PerReplica([0.5, 3.0]), mirrored.PerReplica([-1.0, 2.0]), 1.25, 2.5)
    with two.scope():
        pass
    try:
        two.run(lambda *a: mirrored.as_mirrored(replica(*a)), args=args)
    except (mirrored.VariableError, mirrored.ContextError):
        return
    result = two.run(replica, args=args)
    parts = [float(part) for part in two.local_results(result)]
    assert len(set(parts)) == 1
