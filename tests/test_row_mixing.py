"""Padded rows reach no result: functions that combine rows of a padded batch are refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirrored

ROWS, COLUMNS = 7, 3
W = np.arange(12.0, dtype="f").reshape(3, 4)
KEY = jax.random.key(0)


def own(value):
    return mirrored.get_replica_context().own(value)


ROW_BY_ROW = {
    "linear": lambda x: x @ W,
    # The second matrix has as many rows as a replica's batch.
    "square": lambda x: (x @ W) @ np.ones((4, 4), "f"),
    "softmax": lambda x: jax.nn.softmax(x @ W),
    "layer norm": lambda x: (x - x.mean(1, keepdims=True)) / (1 + x.std(1, keepdims=True)),
    "sorted within a row": lambda x: jnp.sort(x, 1)[:, ::-1],
    "columns rolled": lambda x: jnp.pad(jnp.roll(x, 1, 1), ((0, 0), (1, 1))),
    "transposed": lambda x: (W.T @ x.T).T,
    "jit": lambda x: jax.jit(jax.nn.relu)(x - 4),
    "vmap": jax.vmap(lambda row: row * jnp.sum(row)),
    "lax.map": lambda x: jax.lax.map(lambda row: row * 2, x),
    "scan over columns": lambda x: jax.lax.scan(lambda c, t: (c + t, c), x[:, 0] * 0, x.T)[1].T,
    "labels": lambda x: (x @ W)[jnp.arange(x.shape[0]), x[:, 0].astype(int) % 4],
    "embedding": lambda x: jnp.asarray(W)[x[:, 0].astype(int) % 3],
    "outer product": lambda x: jnp.einsum("bi,bj->bij", x, x),
    "convolution": lambda x: jax.lax.conv(x[:, None], jnp.ones((2, 1, 2)), (1,), "SAME"),
    "gradient of inputs": lambda x: jax.grad(lambda x: (x**3).sum())(x),
}
MIXING = {
    "flipped": lambda x: x[::-1],
    "centred": lambda x: x - x.mean(0),
    "over the batch's maximum": lambda x: jax.jit(lambda x: x / x.max())(x),
    "sorted": lambda x: jnp.sort(x, 0),
    "added up": lambda x: jnp.cumsum(x, 0),
    "rolled": lambda x: jnp.roll(x, 1, 0),
    "products of rows": lambda x: x @ (x.T @ x),
    "scan over rows": lambda x: jax.lax.scan(lambda c, r: (c + r, c + r), own(jnp.zeros(3)), x)[1],
    "chosen by the batch": lambda x: jax.lax.cond(x.sum() > 0, lambda x: x, lambda x: 2 * x, x),
    "gradient of a square": lambda x: jax.grad(lambda x: x.sum() ** 2)(x),
}


@pytest.fixture(scope="module")
def two():
    return mirrored.MirroredStrategy(["cpu:0", "cpu:1"])


@pytest.fixture(scope="module")
def x():
    return np.arange(ROWS * COLUMNS, dtype="f").reshape(ROWS, COLUMNS)


@pytest.fixture(scope="module")
def batch(two, x):
    (batch,) = two.distribute_dataset(x, batch_size=ROWS)
    return batch


@pytest.mark.parametrize("name", ROW_BY_ROW)
def test_what_treats_each_row_alone_gives_the_rows_of_one_device(two, x, batch, name):
    function = ROW_BY_ROW[name]
    found = two.gather(two.run(function, (batch,)), axis=0)
    np.testing.assert_allclose(found, function(jnp.asarray(x)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", MIXING)
def test_what_combines_rows_of_a_padded_batch_is_refused(two, x, batch, name):
    with pytest.raises(mirrored.PaddingError, match="combines rows with each other"):
        two.run(MIXING[name], (batch,))
    # Without padding each replica does what it says with its own rows.
    (even,) = two.distribute_dataset(x[:6], batch_size=6)
    halves = two.local_results(two.run(MIXING[name], (even,)))
    if name != "scan over rows":
        for half, rows in zip(halves, (x[:3], x[3:6])):
            np.testing.assert_allclose(half, MIXING[name](jnp.asarray(rows)), rtol=1e-5)


def test_a_function_that_asks_for_the_weights_may_combine_rows(two, batch, x):
    def centred(x):
        weights = mirrored.get_replica_context().example_weights[:, None]
        return x - (x * weights).sum(0) / weights.sum()

    found = two.local_results(two.run(centred, (batch,)))
    for part, rows in zip(found, (x[:4], x[4:])):
        np.testing.assert_allclose(part, rows - rows.mean(0), rtol=1e-6)


def test_it_is_seen_inside_other_programs_too(two, batch):
    with pytest.raises(mirrored.PaddingError, match="combines rows"):
        jax.jit(lambda batch: two.run(lambda x: x - x.mean(0), (batch,)))(batch)
    with pytest.raises(mirrored.PaddingError, match="combines rows"):
        mirrored.function(lambda batch: two.run(lambda x: x - x.mean(0), (batch,)))(batch)
