"""Law 4: a gradient is reduced exactly once, whatever the loss and the way to it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import make_strategy

import mirrored
from mirrored import PerReplica

X = np.arange(1.0, 9.0, dtype="f")
# loss = mean (w x)^2 with w = 1: gradient 2 mean(x^2).
GRADIENT = 2 * float((X**2).mean())
LOSS = float((X**2).mean())


def batch_of(strategy, array=X, rows=None):
    """Splits an array; with ``rows``, into batches whose last row may be padding."""
    replicas = strategy.num_replicas_in_sync
    length = -(-len(array) // replicas)
    pieces = [array[r * length : (r + 1) * length] for r in range(replicas)]
    placed = PerReplica(pieces).placed(strategy.placement)
    return PerReplica.from_stacked(placed.stacked, placed.row_counts, is_batch=True)


@pytest.mark.parametrize("replicas", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", ["own mean", "global mean", "all_reduce"])
@pytest.mark.parametrize("style", ["variables", "pytree", "captured"])
def test_value_and_grad(replicas, kind, style):
    strategy = make_strategy(replicas)
    with strategy.scope():
        w = mirrored.Variable(1.0, name="w")
    captured = jnp.asarray(1.0)

    def loss_of(w, x):
        per_example = (w * x) ** 2
        if kind == "own mean":
            return per_example.mean()
        if kind == "global mean":
            return mirrored.mean(per_example)
        return mirrored.get_replica_context().all_reduce("sum", per_example.sum()) / 8

    def replica_function(x):
        if style == "variables":
            return mirrored.value_and_grad(lambda: loss_of(w, x), w)
        return mirrored.value_and_grad(loss_of)(captured, x)

    def with_argument(p, x):
        return mirrored.value_and_grad(loss_of)(p, x)

    if style == "pytree":
        loss, gradient = strategy.run(with_argument, (captured, batch_of(strategy)))
    else:
        loss, gradient = strategy.run(replica_function, (batch_of(strategy),))
    assert not isinstance(gradient, PerReplica)
    assert float(gradient) == pytest.approx(GRADIENT, rel=1e-6)
    assert isinstance(loss, PerReplica) == (kind == "own mean")
    assert float(strategy.reduce("mean", loss)) == pytest.approx(LOSS, rel=1e-6)


@pytest.mark.parametrize("replicas", [1, 2, 8])
def test_plain_grad_of_the_global_mean_averages_to_the_gradient(replicas):
    strategy = make_strategy(replicas)
    with strategy.scope():
        w = mirrored.Variable(1.0, name="w")
        optimizer = mirrored.Optimizer(optax.sgd(1.0))

    def replica_function(p, x):
        loss, gradient = jax.value_and_grad(lambda p: mirrored.mean((p * x) ** 2))(p)
        optimizer.apply_gradients([(gradient, w)])
        return loss, gradient

    loss, gradient = strategy.run(replica_function, (jnp.asarray(1.0), batch_of(strategy)))
    assert float(strategy.reduce("mean", gradient)) == pytest.approx(GRADIENT, rel=1e-6)
    assert float(strategy.reduce("mean", loss)) == pytest.approx(LOSS, rel=1e-6)
    assert float(w) == pytest.approx(1 - GRADIENT, rel=1e-6)


@pytest.mark.parametrize("replicas", [1, 2, 8])
def test_optimizer_reduces_only_what_varies(replicas):
    strategy = make_strategy(replicas)
    with strategy.scope():
        own, reduced, summed = (mirrored.Variable(0.0, name=n) for n in ("own", "reduced", "sum"))
        first = mirrored.Optimizer(optax.sgd(1.0))
        second = mirrored.Optimizer(optax.sgd(1.0))
        third = mirrored.Optimizer(optax.sgd(1.0), reduce="sum")
        strict = mirrored.Optimizer(optax.sgd(1.0), reduce=None)

    def replica_function():
        context = mirrored.get_replica_context()
        gradient = context.replica_id_in_sync_group + 1.0
        first.apply_gradients([(gradient, own)])
        second.apply_gradients([(context.all_reduce("mean", gradient), reduced)])
        third.apply_gradients([(gradient, summed)])

    strategy.run(replica_function)
    total = replicas * (replicas + 1) / 2
    assert float(own) == float(reduced) == -total / replicas
    assert float(summed) == -total

    def refused():
        rank = mirrored.get_replica_context().replica_id_in_sync_group
        strict.apply_gradients([(rank + 1.0, own)])

    with pytest.raises(ValueError, match="'own' differs between replicas"):
        strategy.run(refused)


@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("rows", [1, 5, 7, 13, 16])
@pytest.mark.parametrize("weighted", [False, True])
def test_mean_is_exact_on_uneven_batches(replicas, rows, weighted):
    strategy = make_strategy(replicas)
    x = np.linspace(1, 2, rows, dtype="f")[:, None] * np.ones((1, 3), "f")
    weights = np.linspace(0, 1, rows, dtype="f") + 0.5

    def replica_function(x, weights):
        # Were padded rows zeros, 1 / x would make a NaN of the gradient.
        def loss_fn(p):
            return mirrored.mean(p / x, weights if weighted else None)

        return mirrored.value_and_grad(loss_fn)(jnp.float32(2.0))

    batch = (batch_of(strategy, x), batch_of(strategy, weights))
    loss, gradient = strategy.run(replica_function, batch)
    kept = weights if weighted else np.ones_like(weights)
    expected = (kept[:, None] / x).sum() / (kept.sum() * 3)
    assert float(gradient) == pytest.approx(expected, rel=1e-5)
    assert float(loss) == pytest.approx(2 * expected, rel=1e-5)


def test_a_padded_batch_nobody_asked_about_is_refused(two):
    batch = batch_of(two, np.arange(7, dtype="f"))
    with pytest.raises(mirrored.PaddingError, match=r"hint: use mirrored\.mean"):
        two.run(lambda x: x.mean(), (batch,))
    with pytest.raises(mirrored.PaddingError, match="one value for each example"):
        two.run(lambda x: mirrored.mean(x.mean()), (batch,))
    # Row by row functions are exact: their rows are counted on the way out.
    doubled = two.run(lambda x: 2 * x, (batch,))
    assert [part.tolist() for part in two.local_results(doubled)] == [[0, 2, 4, 6], [8, 10, 12]]
    assert float(two.reduce("mean", doubled, axis=0)) == 6.0
    # A matrix that happens to have as many rows as the batch is not a batch.
    square = two.run(
        lambda x: jnp.ones((4, 2)) * mirrored.get_replica_context().example_weights.sum(),
        (batch,),
    )
    assert [part.shape for part in two.local_results(square)] == [(4, 2), (4, 2)]


@pytest.mark.conformance(43)
def test_empty_replicas_make_no_nan(two):
    batch = batch_of(two, np.array([5.0], "f"))
    assert float(two.reduce("mean", batch, axis=0)) == 5.0
    loss, gradient = two.run(
        lambda x: mirrored.value_and_grad(lambda p: mirrored.mean(p * x))(jnp.float32(1)), (batch,)
    )
    assert (float(loss), float(gradient)) == (5.0, 5.0)


@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("rows", [8, 7, 16, 13])
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
@pytest.mark.parametrize("style", ["variables", "pytree"])
def test_accumulation_equals_the_large_batch(replicas, rows, steps, style):
    strategy = make_strategy(replicas)
    x = np.linspace(-1, 1, rows * 3, dtype="f").reshape(rows, 3)
    y = np.linspace(0, 2, rows, dtype="f")
    with strategy.scope():
        w = mirrored.Variable(np.ones(3, "f"))
        b = mirrored.Variable(0.5)

    def loss_of(p, x, y):
        return mirrored.mean(jnp.tanh(x @ p["w"] + p["b"] - y) ** 2)

    def replica_function(x, y):
        if style == "pytree":
            accumulate = mirrored.accumulated_value_and_grad(loss_of, steps=steps)
            return accumulate({"w": jnp.ones(3), "b": jnp.float32(0.5)}, x, y)
        named = {"w": w, "b": b}
        accumulate = mirrored.accumulated_value_and_grad(
            lambda x, y: loss_of(named, x, y), named, steps=steps
        )
        return accumulate(x, y)

    loss, gradients = strategy.run(replica_function, (batch_of(strategy, x), batch_of(strategy, y)))

    def reference(p):
        return (jnp.tanh(x @ p["w"] + p["b"] - y) ** 2).mean()

    expected_loss, expected = jax.value_and_grad(reference)({"w": jnp.ones(3), "b": 0.5})
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-5)
    np.testing.assert_allclose(gradients["w"], expected["w"], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(gradients["b"], expected["b"], rtol=1e-5, atol=1e-7)


def test_accumulation_of_own_means_and_its_refusals(two):
    batch = batch_of(two)
    w = jnp.float32(1.0)

    def own(w, x):
        return ((w * x) ** 2).mean()

    accumulate = mirrored.accumulated_value_and_grad(own, steps=2)
    loss, gradient = two.run(accumulate, (w, batch))
    assert float(gradient) == pytest.approx(GRADIENT, rel=1e-6)
    assert float(two.reduce("mean", loss)) == pytest.approx(LOSS, rel=1e-6)
    with pytest.raises(mirrored.PaddingError, match=r"mirrored\.mean"):
        two.run(mirrored.accumulated_value_and_grad(own, steps=3), (w, batch))
    with pytest.raises(ValueError, match="2 times"):
        twice = mirrored.accumulated_value_and_grad(
            lambda w, x: mirrored.mean(w * x) + mirrored.mean(w * x), steps=2
        )
        two.run(twice, (w, batch))


def test_gradients_in_cross_replica_and_default_context(two):
    with two.scope():
        w = mirrored.Variable([1.0, 2.0])
        assert mirrored.grad(lambda: (w**2).sum(), [w])[0].tolist() == [2.0, 4.0]
    gradients, aux = mirrored.grad(lambda p: (p**2, "aux"), has_aux=True)(3.0)
    assert (float(gradients), aux) == (6.0, "aux")
    with pytest.raises(ValueError, match=r"an array of shape \(2,\) among the variables"):
        mirrored.grad(lambda: 1.0, [jnp.ones(2)])
    with pytest.raises(ValueError, match="no variables"):
        mirrored.value_and_grad(lambda: 1.0, [])
    with pytest.raises(ValueError, match="has no gradient"):
        mirrored.grad(lambda: 1.0, [mirrored.Variable(1)])


def test_writes_inside_the_loss_function(two):
    with two.scope():
        w = mirrored.Variable(1.0, name="w")
        seen = mirrored.Variable(0.0, aggregation="mean", name="seen")

    def replica_function(x):
        def loss_fn():
            seen.assign((w * x).mean())
            return (w * x).mean()

        return mirrored.value_and_grad(loss_fn, w)

    _, gradient = two.run(replica_function, (batch_of(two),))
    assert float(seen) == float(gradient) == 4.5
    with pytest.raises(mirrored.VariableError, match="inside the loss function"):
        two.run(lambda: mirrored.grad(lambda: w.assign_add(1.0) * 1.0, w))


def test_optimizer_refuses_what_does_not_fit(two):
    with two.scope():
        w = mirrored.Variable([1.0, 2.0], name="w")
        optimizer = mirrored.Optimizer(optax.adam(0.1), name="inside")
    outside = mirrored.Optimizer(optax.adam(0.1), name="outside")
    stray = mirrored.Variable([1.0, 2.0], name="stray")
    ones = jnp.ones(2)
    with pytest.raises(mirrored.OwnershipError, match="'outside' was created outside any scope"):
        outside.apply_gradients([(ones, w)])
    with pytest.raises(mirrored.OwnershipError, match="'stray'"):
        optimizer.apply_gradients([(ones, stray)])
    with pytest.raises(ValueError, match="no gradients"):
        optimizer.apply_gradients([])
    with pytest.raises(ValueError, match="in this order"):
        optimizer.apply_gradients([(w, ones)])
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        optimizer.apply_gradients([(jnp.ones(3), w)])
    with pytest.raises(ValueError, match="None"):
        optimizer.apply_gradients([(None, w)])
    with pytest.raises(ValueError, match="Optax"):
        mirrored.Optimizer("adam")
    optimizer.apply_gradients([(ones, w)])
    with two.scope():
        other = mirrored.Variable([1.0, 2.0], name="other")
    with pytest.raises(ValueError, match=r"\['w'\].*\['other'\]"):
        optimizer.apply_gradients([(ones, other)])


def test_check_finite_names_the_variable_and_skips_the_update(two):
    with two.scope():
        good = mirrored.Variable(1.0, name="good")
        bad = mirrored.Variable(1.0, name="bad")
        optimizer = mirrored.Optimizer(optax.adam(0.1), check_finite=True)

    @mirrored.function
    def step(x):
        def replica_function(x):
            rank = mirrored.get_replica_context().replica_id_in_sync_group
            poisoned = jnp.where(rank == 1, x, 1.0)
            optimizer.apply_gradients([(jnp.ones(()), good), (poisoned, bad)])

        two.run(replica_function, (x,))

    step(2.0)
    values = [float(good), float(bad)]
    with pytest.raises(mirrored.NonFiniteError, match="'bad'"):
        step(float("nan"))
    assert [float(good), float(bad)] == values
    with pytest.raises(mirrored.NonFiniteError, match=r"\['x'\]"):
        two.check_finite({"x": jnp.array([1.0, jnp.inf]), "y": jnp.ones(2)})
    two.check_finite([good, bad, PerReplica([1.0, 2.0])])
    two.check_finite({"a": PerReplica([np.ones(2), np.ones(3)]), "b": None, "c": "x", "d": 3})
    for hole in (
        float("nan"),
        PerReplica([1.0, float("inf")]),
        PerReplica([np.ones(2), np.full(3, np.nan)]),
        jnp.array([1.0, jnp.nan], jnp.bfloat16),
    ):
        with pytest.raises(mirrored.NonFiniteError, match=r"\['hole'\]"):
            two.check_finite({"fine": 1.0, "hole": hole})


def test_check_finite_inside_a_program(two):
    with two.scope():
        v = mirrored.Variable([1.0, 2.0], name="v")
        parts = mirrored.Variable([1.0, 2.0], name="parts", synchronization="on_read")

    @mirrored.function
    def step(x):
        two.run(lambda x: parts.assign_add(x), (x,))
        two.check_finite({"x": x, "v": v, "parts": parts})
        v.assign(v * x)
        two.check_finite(v)

    step(np.ones(2, "f"))
    with pytest.raises(mirrored.NonFiniteError, match="'v'"):
        step(np.full(2, 3e38, "f"))
    v.assign([1.0, 1.0])
    with pytest.raises(mirrored.NonFiniteError, match="'parts'"):
        step(np.full(2, 3e38, "f"))
    assert step.trace_count == 1
    with pytest.raises(RuntimeError, match=r"mirrored\.function"):
        jax.jit(lambda x: two.check_finite(x))(jnp.ones(2))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"communication_dtype": jnp.float16},
        {"communication_dtype": jnp.float32},
        {"reduction": "reproducible"},
        {"shard_state": True},
        {"shard_state": True, "communication_dtype": jnp.float32},
    ],
    ids=lambda options: ",".join(options) or "plain",
)
def test_the_mean_of_half_gradients_does_not_overflow(options):
    strategy = make_strategy(4)
    with strategy.scope():
        w = mirrored.Variable(jnp.ones(3, jnp.float16), name="w")
        optimizer = mirrored.Optimizer(optax.sgd(1e-4), **options)

    def replica_function(x):
        gradient = jax.grad(lambda w: (w * x).sum())(w.value)
        optimizer.apply_gradients([(gradient, w)])

    strategy.run(replica_function, (np.full(3, 40000, "float16"),))
    np.testing.assert_allclose(w.numpy(), [-3.0] * 3, rtol=2e-3)


def test_sparse_gradients_reach_the_optimizer(two):
    with two.scope():
        table = mirrored.Variable(np.zeros((5, 2), "f"))
        optimizer = mirrored.Optimizer(optax.sgd(1.0), reduce="sum")

    def replica_function(values, indices):
        rows = mirrored.IndexedSlices(values, indices, (5, 2))
        optimizer.apply_gradients([(rows, table)])

    values = PerReplica([np.array([[1, 2], [9, 9]], "f"), np.array([[3, 4], [5, 6]], "f")])
    two.run(replica_function, (values, PerReplica([[1, 5], [1, 3]])))
    assert table.numpy().tolist() == [[0, 0], [-4, -6], [0, 0], [-5, -6], [0, 0]]
