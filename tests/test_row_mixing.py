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

# What is tested here is what is let through, and what comes out; not how fast.
pytestmark = pytest.mark.usefixtures("quick_compilation")


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
    "labels by numpy": lambda x: (x @ W)[np.arange(len(x)), x[:, 0].astype(int) % 4],
    "take along a row": lambda x: jnp.take_along_axis(x @ W, x.astype(int) % 4, axis=1),
    "gradient of taking along a row": jax.grad(
        lambda x: (jnp.take_along_axis(x, x.astype(int) % 3, axis=1) ** 2).sum()
    ),
    "embedding of a sequence": lambda x: jnp.take(W, x.astype(int) % 3, axis=0).sum(1),
    "one element of each row": jax.vmap(lambda row: row[row[0].astype(int) % 3]),
    "one element of each row set": jax.vmap(lambda row: row.at[row[0].astype(int) % 3].set(9.0)),
    "a window of each row": jax.vmap(
        lambda row: jax.lax.dynamic_slice(row, (row[0].astype(int) % 2,), (2,))
    ),
    "set by row numbers": lambda x: x.at[jnp.arange(len(x)), x[:, 1].astype(int) % 3].set(9.0),
    "one-hot": lambda x: jax.nn.one_hot(x[:, 0].astype(int) % 4, 4),
    "one-hot by scattering": lambda x: (
        jnp.zeros((len(x), 3)).at[jnp.arange(len(x)), x[:, 0].astype(int) % 3].set(1.0)
    ),
    "columns of a table": lambda x: x[:, np.array([2, 0, 0])],
    "a column set": lambda x: x.at[:, 1].set(0.0),
    "a column updated in place": lambda x: jax.lax.dynamic_update_slice(x, x[:, :1] * 2, (0, 1)),
    "time and batch as one axis": lambda x: (
        (x[:, :, None] * W[None]).reshape(-1, 4) @ np.ones((4, 2), "f")
    ).reshape(len(x), 3, 2),
    "time first": lambda x: (x.T.reshape(-1, 1) @ np.ones((1, 2), "f")).reshape(3, -1, 2)[1],
    "attention within a row": lambda x: jax.nn.dot_product_attention(
        *[(x[:, :, None, None] * W[:, None, :]) for _ in range(3)]
    ),
    "heads": lambda x: jnp.einsum("bthd,bshd->bhts", *2 * [(x[:, :, None, None] * W[:, None, :])]),
    "recurrence over time": lambda x: jax.lax.scan(
        lambda c, t: (jnp.tanh(c + t @ W), c),
        jnp.zeros((len(x), 4)) + own(0.0),
        x.T[..., None] * np.ones(3, "f"),
    )[0],
    "microbatches": lambda x: jax.lax.map(lambda row: row * row.sum(), x, batch_size=2),
    "microbatches with a rest": lambda x: jax.lax.map(lambda r: r * r.sum(), x, batch_size=3),
    "parts put together again": lambda x: (
        jnp.concatenate([x[:1] * 2, x[1:] * 3])[:, 1:] * 0 + x[:, 1:]
    ),
    "rows one after the other": lambda x: jnp.stack([jax.nn.softmax(x[i]) for i in range(len(x))]),
    "a key for each row": lambda x: jax.vmap(
        lambda key, row: row + 0 * jax.random.normal(key, row.shape)
    )(jax.random.split(KEY, len(x)), x),
    "dropout": lambda x: jnp.where(jax.random.bernoulli(KEY, 1.0, x.shape), x, 0),
    "pooling": lambda x: jax.lax.reduce_window(x, -np.inf, jax.lax.max, (1, 2), (1, 1), "VALID"),
    "greatest of a row": lambda x: jax.lax.top_k(x, 2)[0] + jnp.argmax(x, 1)[:, None],
    "inverse of a matrix a row": lambda x: jnp.linalg.inv(jnp.eye(3) * (1 + x[:, :, None]) + 0.1),
    "fourier of a row": lambda x: jnp.abs(jnp.fft.rfft(x, axis=1)),
    "so many rounds": lambda x: jax.lax.fori_loop(0, 3, lambda i, x: x / 2 + i, x),
    "flipped columns": lambda x: x[:, ::-1],
    "checkpointed": jax.checkpoint(lambda x: jnp.sin(x @ W)),
    "a mask of row and column": lambda x: jnp.einsum("b,bc->bc", x[:, 0], x),
    "the batch's numbers": lambda x: x + 0 * jnp.arange(len(x))[:, None],
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
    "the first row": lambda x: x - x[0],
    "the last row": lambda x: x - x[-1],
    "some row": lambda x: x + jax.lax.dynamic_slice(x, (x[0, 0].astype(int) * 0 + 1, 0), (1, 3)),
    "rows picked": lambda x: x[jnp.arange(len(x))[::-1]],
    "rows taken": lambda x: jnp.take(x, (jnp.arange(len(x)) + 1) % len(x), axis=0),
    "rows picked by the batch": lambda x: x[jnp.argsort(x[:, 0])],
    "rows in random order": lambda x: jax.random.permutation(KEY, x),
    "each row its neighbour's element": lambda x: x[
        jnp.arange(len(x)), jnp.flip(x[:, 0]).astype(int) % 3
    ],
    "counted": lambda x: x + jnp.zeros(4).at[x[:, 0].astype(int) % 4].add(1.0)[0],
    "segment sums": lambda x: jax.ops.segment_sum(x, x[:, 0].astype(int) % 2, 2)[
        x[:, 0].astype(int) % 2
    ],
    "a row set": lambda x: x.at[0].set(x[1]),
    "rows written backwards": lambda x: jnp.zeros_like(x).at[jnp.arange(len(x))[::-1]].set(x),
    "added by number": lambda x: x.at[x[:, 0].astype(int) % len(x)].add(x),
    "scrambled by reshaping": lambda x: x.reshape(3, -1).T,
    "pairs": lambda x: (x @ x.T).max(1),
    "unreduced pairs": lambda x: x @ x.T,
    "microbatches summed": lambda x: (
        jax.lax.map(lambda part: part * part.sum(), x.reshape(len(x), 1, 3)).reshape(-1, 3)
        + x.sum()
    ),
    "parts the wrong way round": lambda x: jnp.concatenate([x[1:], x[:1]]),
    "over all replicas": lambda x: x - mirrored.get_replica_context().all_reduce("sum", x),
    "until all are small": lambda x: jax.lax.while_loop(
        lambda x: (x > 1).any(), lambda x: x / 2, x
    ),
    "inverse of a matrix of rows": lambda x: x + jnp.linalg.pinv(x[:, :2]).sum(),
    "fourier over rows": lambda x: jnp.abs(jnp.fft.fft(x, axis=0)),
    "pooled over rows": lambda x: jax.lax.reduce_window(
        x, -np.inf, jax.lax.max, (2, 1), (1, 1), "SAME"
    ),
    "convolution over rows": lambda x: (
        jax.lax.conv(x.T[:, None], jnp.ones((1, 1, 3)), (1,), "SAME")[:, 0].T
    ),
}
OF_ALL_REPLICAS = ("scan over rows", "over all replicas")


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
def test_what_treats_each_row_alone_is_let_through(two, batch, name):
    jax.eval_shape(lambda batch: two.run(ROW_BY_ROW[name], (batch,)), batch)


def all_of(functions, x):
    return {name: function(x) for name, function in functions.items()}


def test_what_treats_each_row_alone_gives_the_rows_of_one_device(two, x, batch):
    found = two.gather(two.run(lambda x: all_of(ROW_BY_ROW, x), (batch,)), axis=0)
    expected = jax.jit(lambda x: all_of(ROW_BY_ROW, x))(x)
    for name in ROW_BY_ROW:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("name", MIXING)
def test_what_combines_rows_of_a_padded_batch_is_refused(two, batch, name):
    with pytest.raises(mirrored.PaddingError, match="combines rows with each other"):
        jax.eval_shape(lambda batch: two.run(MIXING[name], (batch,)), batch)


def test_without_padding_each_replica_does_what_it_says_with_its_own_rows(two, x):
    alone = {name: MIXING[name] for name in MIXING if name not in OF_ALL_REPLICAS}
    (even,) = two.distribute_dataset(x[:6], batch_size=6)
    found = two.run(lambda x: all_of(alone, x), (even,))
    program = jax.jit(lambda x: all_of(alone, x))
    for replica, rows in enumerate((x[:3], x[3:6])):
        for name, expected in program(rows).items():
            half = two.local_results(found[name])[replica]
            np.testing.assert_allclose(half, expected, rtol=1e-5, atol=1e-6, err_msg=name)


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
