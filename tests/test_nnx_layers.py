"""Layers and transformations that NNX users reach for, on replicas as on one device."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import make_strategy
from flax import nnx

import mirrored
import mirrored.nnx

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(11, 6)).astype(np.float32)
Y = RANDOM.integers(0, 4, size=11).astype(np.int32)
BATCH = 7  # 7 rows, then 4: uneven on 2 and 3 replicas


def losses_of(model, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y)


def alone(make, tx, wrt):
    """Plain NNX on one device."""
    model = make()
    optimizer = nnx.Optimizer(model, tx, wrt=wrt)

    @nnx.jit
    def step(model, optimizer, x, y):
        loss, gradients = nnx.value_and_grad(
            lambda model: losses_of(model, x, y).mean(), argnums=nnx.DiffState(0, wrt)
        )(model)
        optimizer.update(model, gradients)
        return loss

    batches = [(X[i : i + BATCH], Y[i : i + BATCH]) for i in range(0, len(X), BATCH)]
    return [float(step(model, optimizer, *batch)) for batch in batches], model, optimizer


def together(replica_count, make, tx, wrt):
    strategy = make_strategy(replica_count)
    with strategy.scope():
        model = make()
        optimizer = mirrored.nnx.Optimizer(model, tx, wrt=wrt)

    def train_step(model, optimizer, batch):
        loss, gradients = nnx.value_and_grad(
            lambda model: mirrored.mean(losses_of(model, *batch)), argnums=nnx.DiffState(0, wrt)
        )(model)
        optimizer.update(model, gradients)
        return loss

    @mirrored.function
    def step(model, optimizer, batch):
        return strategy.reduce("mean", strategy.run(train_step, args=(model, optimizer, batch)))

    batches = strategy.distribute_dataset((X, Y), batch_size=BATCH)
    return [float(step(model, optimizer, batch)) for batch in batches], model, optimizer


def arrays(*objects):
    leaves = jax.tree.leaves(nnx.state(objects))
    keys = jax.dtypes.prng_key
    return [
        np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, keys) else leaf)
        for leaf in leaves
    ]


def check(make, tx=None, wrt=nnx.Param, alone_make=None, replica_counts=(2, 3)):
    tx = tx or optax.sgd(0.5, momentum=0.9)
    losses, *objects = alone(alone_make or make, tx, wrt)
    for replica_count in replica_counts:
        ours, *others = together(replica_count, make, tx, wrt)
        np.testing.assert_allclose(ours, losses, rtol=2e-5)
        for mine, theirs in zip(arrays(*others), arrays(*objects), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=3e-5, atol=3e-6)


class Layers(nnx.Module):
    """A stack in one array a kind, run by nnx.scan."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=2)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs):
            return nnx.Linear(6, 6, rngs=rngs)

        self.layers = make(rngs)
        self.out = nnx.Linear(6, 4, rngs=rngs)

    def __call__(self, x):
        @nnx.remat
        def layer(x, layer):
            return nnx.relu(layer(x))

        scan = nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.out(scan(x, self.layers))


class Recurrent(nnx.Module):
    def __init__(self, rngs):
        cell = nnx.OptimizedLSTMCell(1, 3, rngs=rngs)
        backward = nnx.GRUCell(1, 3, rngs=rngs)
        self.rnn = nnx.Bidirectional(nnx.RNN(cell), nnx.RNN(backward))
        self.out = nnx.Linear(6, 4, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.remat(lambda rnn, x: rnn(x[..., None]))(self.rnn, x).mean(1))


class Lora(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.LoRALinear(6, 8, lora_rank=2, rngs=rngs)
        self.second = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)))


class Shared(nnx.Module):
    """Lists of modules, one of them twice, and a parameter of an own type."""

    class Scale(nnx.Param):
        pass

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(6, 6, rngs=rngs), nnx.LayerNorm(6, rngs=rngs)])
        self.layers.append(self.layers[0])
        self.scale = self.Scale(jnp.float32(0.5))
        self.seen = nnx.Variable(jnp.array(0))
        self.out = nnx.Linear(6, 4, rngs=rngs)

    def __call__(self, x):
        self.seen[...] += 1
        for layer in self.layers:
            x = nnx.relu(layer(x)) * self.scale
        return self.out(x)


class Normed(nnx.Module):
    def __init__(self, norm):
        self.first = nnx.Conv(1, 4, (2,), rngs=nnx.Rngs(0))
        self.norm = norm(4, momentum=0.5, rngs=nnx.Rngs(1))
        self.out = nnx.Linear(4, 4, rngs=nnx.Rngs(2))

    def __call__(self, x):
        return self.out(nnx.relu(self.norm(self.first(x[..., None]))).mean(1))


@pytest.mark.parametrize("make", [Layers, Recurrent, Shared])
def test_models(make):
    check(lambda: make(nnx.Rngs(0)), replica_counts=(3 if make is Shared else 2,))


def test_only_what_is_asked_for_is_trained():
    check(lambda: Lora(nnx.Rngs(0)), optax.adam(1e-2), nnx.LoRAParam, replica_counts=(2,))
    last = nnx.All(nnx.Param, nnx.PathContains("second"))
    check(lambda: Lora(nnx.Rngs(0)), optax.adam(1e-2), last, replica_counts=(2,))


@pytest.mark.parametrize(
    "tx",
    [
        optax.apply_if_finite(optax.adam(1e-2), 3),
        optax.MultiSteps(optax.adam(1e-2), 2),
        optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(1e-2, 0.0, 4)),
        optax.chain(
            optax.clip_by_global_norm(0.1),
            optax.masked(optax.sgd(0.3), lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)),
        ),
    ],
    ids=["if finite", "multi steps", "injected", "masked"],
)
def test_transformations(tx):
    check(lambda: nnx.Linear(6, 4, rngs=nnx.Rngs(0)), tx, replica_counts=(2,))


def test_ways_to_reduce_gradients(two):
    """In bfloat16 1.001 and 3.001 are 1 and 3; in one order the sum is that of the tree."""
    gradients = [np.float32([1.001, 2.0]), np.float32([3.001, 4.0])]

    def updated(strategy, gradients, **options):
        with strategy.scope():
            model = nnx.Module()
            model.w = nnx.Param(jnp.zeros(2))
            optimizer = mirrored.nnx.Optimizer(model, optax.sgd(1.0), **options)

        def step(model, optimizer, gradient):
            state = nnx.state(model)
            optimizer.update(model, jax.tree.map(lambda _: gradient, state))

        strategy.run(step, args=(model, optimizer, mirrored.PerReplica(gradients)))
        return model.w[...].tolist()

    assert updated(two, gradients, communication_dtype=jnp.bfloat16) == [-2.0, -3.0]
    parts = RANDOM.normal(size=(4, 2)).astype(np.float32)
    tree = (parts[0] + parts[1]) + (parts[2] + parts[3])
    options = {"reduce": "sum", "reduction": "reproducible"}
    assert updated(make_strategy(4), list(parts), **options) == (-tree).tolist()
    with pytest.raises(mirrored.ArgumentError, match="reduce=None"):
        updated(two, gradients, reduce=None)
    with pytest.raises(mirrored.ArgumentError, match="'exact'"):
        updated(two, gradients, reduction="exact")


def test_the_same_bits_on_one_device_and_on_four():
    """A reproducible gradient is one of an nnx.State; batches are of 8 rows."""

    def train_step(model, optimizer, batch):
        graphdef, parameters = nnx.split(model)

        def loss_fn(parameters, x, y):
            return mirrored.mean(losses_of(nnx.merge(graphdef, parameters), x, y))

        step = mirrored.reproducible_value_and_grad(loss_fn, micro_shards=4)
        loss, gradients = step(parameters, *batch)
        optimizer.update(model, gradients)
        return loss

    def trained(replica_count):
        strategy = make_strategy(replica_count)
        with strategy.scope():
            model = Lora(nnx.Rngs(0))
            optimizer = mirrored.nnx.Optimizer(model, optax.adam(1e-2))
        for batch in strategy.distribute_dataset((X[:8], Y[:8]), batch_size=8):
            strategy.run(train_step, args=(model, optimizer, batch))
            strategy.run(train_step, args=(model, optimizer, batch))
        return arrays(model, optimizer)

    for mine, theirs in zip(trained(4), trained(1), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_the_state_of_a_model_in_functional_style(two):
    """An nnx.State goes in and comes out as a pytree; gradients of it are one too."""
    graphdef, parameters = nnx.split(nnx.Linear(6, 4, rngs=nnx.Rngs(0)))
    tx = optax.adam(1e-2)
    state = tx.init(parameters)

    def loss_fn(parameters, batch):
        return mirrored.mean(losses_of(nnx.merge(graphdef, parameters), *batch))

    def reduced(parameters, batch):
        return two.reduce("mean", two.run(jax.value_and_grad(loss_fn), args=(parameters, batch)))

    @jax.jit
    def step(parameters, state, batch):
        loss, gradients = reduced(parameters, batch)
        updates, state = tx.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, loss

    losses = []
    for batch in two.distribute_dataset((X, Y), batch_size=BATCH):
        eager = float(reduced(parameters, batch)[0])
        compiled = float(mirrored.function(reduced)(parameters, batch)[0])
        parameters, state, loss = step(parameters, state, batch)
        losses.append(float(loss))
        assert [eager, compiled] == pytest.approx([losses[-1]] * 2, rel=1e-6)
    expected, model, _ = alone(lambda: nnx.Linear(6, 4, rngs=nnx.Rngs(0)), tx, nnx.Param)
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    np.testing.assert_allclose(parameters["kernel"][...], model.kernel[...], rtol=2e-5)


def test_restored_and_python_values_in_variables(two):
    """nnx.update with a snapshot in NumPy, as checkpoints are restored."""
    with two.scope():
        model = nnx.Linear(6, 4, rngs=nnx.Rngs(0))
        optimizer = mirrored.nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9))
        seen = nnx.Variable(0)

    def train_step(model, optimizer, seen, batch):
        loss, gradients = nnx.value_and_grad(lambda model: mirrored.mean(losses_of(model, *batch)))(
            model
        )
        optimizer.update(model, gradients)
        seen[...] += 1
        return loss

    @mirrored.function
    def step(*objects_and_batch):
        return two.reduce("mean", two.run(train_step, args=objects_and_batch))

    first, second = two.distribute_dataset((X[:8], Y[:8]), batch_size=4)
    step(model, optimizer, seen, first)
    snapshot = jax.tree.map(np.asarray, nnx.state((model, optimizer, seen)))
    loss = float(step(model, optimizer, seen, second))
    after = arrays(model, optimizer, seen)
    nnx.update((model, optimizer, seen), snapshot)
    assert float(step(model, optimizer, seen, second)) == loss
    for mine, theirs in zip(arrays(model, optimizer, seen), after, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert int(seen[...]) == 2
    assert step.trace_count == 1


class Trainer:
    """As people write them: the model is an attribute."""

    def __init__(self, strategy):
        self.strategy = strategy
        with strategy.scope():
            self.parts = {"model": nnx.Linear(6, 4, rngs=nnx.Rngs(0))}

    def evaluate(self, x):
        return self.parts["model"](x).sum()


def test_a_model_that_a_method_or_a_partial_captured_is_an_error(two):
    """It would be frozen: evaluation would go on with the weights of the first call."""
    trainer = Trainer(two)
    model = trainer.parts["model"]
    for function in (
        trainer.evaluate,
        lambda x: trainer.evaluate(x),
        functools.partial(lambda model, x: model(x).sum(), model),
        functools.partial(lambda x, *, model: model(x).sum(), model=model),
    ):
        with pytest.raises(mirrored.ContextError, match="captured"):
            two.run(function, args=(jnp.asarray(X),))


@pytest.mark.parametrize("options", [{}, {"use_fast_variance": False, "use_scale": False}])
def test_batch_norm_of_the_global_batch(options):
    check(
        lambda: Normed(lambda *a, **k: mirrored.nnx.BatchNorm(*a, **k, **options)),
        alone_make=lambda: Normed(lambda *a, **k: nnx.BatchNorm(*a, **k, **options)),
        replica_counts=(3,) if options else (2,),
    )


def test_batch_norm_is_flax_outside_and_in_evaluation(two):
    ours, theirs = (
        kind(6, axis=0, momentum=0.5, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
        for kind in (mirrored.nnx.BatchNorm, nnx.BatchNorm)
    )
    x = jnp.asarray(X[:6])
    np.testing.assert_array_equal(ours(x), theirs(x))
    in_run = two.run(lambda norm, x: norm(x), args=(ours, x))
    theirs(x)
    np.testing.assert_allclose(ours.var[...], theirs.var[...], rtol=1e-6)
    assert two.local_results(in_run)[0].dtype == jnp.bfloat16
    ours.eval()
    theirs.eval()
    in_run = two.run(lambda norm, x: norm(x), args=(ours, x))
    np.testing.assert_array_equal(two.local_results(in_run)[1], theirs(x))


def test_batch_norm_with_a_mask_of_its_own(two):
    norm = mirrored.nnx.BatchNorm(1, momentum=0.0, rngs=nnx.Rngs(0))
    values = np.float32([[1.0, 2.0], [3.0, 90.0], [5.0, 90.0]])

    def step(norm, x):
        norm(x[..., None], mask=x[..., None] < 50)

    for batch in two.distribute_dataset(values, batch_size=3):
        two.run(step, args=(norm, batch))
    assert float(norm.mean[0]) == pytest.approx(11 / 4)

    def flattened(norm, x):
        norm(x.reshape(-1, 1))

    (batch,) = two.distribute_dataset(values, batch_size=3)
    with pytest.raises(mirrored.PaddingError, match=r"4 rows of a batch with 2 rows"):
        two.run(flattened, args=(norm, batch))


def test_batch_norm_of_flax_over_replicas_refuses_padded_rows(two):
    """It averages means of 4 and of 3 rows with equal weights."""
    norm = nnx.BatchNorm(6, axis_name="replica", rngs=nnx.Rngs(0))

    def step(norm, x):
        mask = mirrored.get_replica_context().example_weights
        return norm(x, mask=mask[:, None] > 0)

    uneven, even = two.distribute_dataset(X, batch_size=7)
    with pytest.raises(mirrored.PaddingError, match="axis_name='replica'") as error:
        two.run(step, args=(norm, uneven))
    assert "mirrored.nnx.BatchNorm" in error.value.hint
    two.run(step, args=(norm, even))
    norm.eval()
    two.run(step, args=(norm, uneven))
