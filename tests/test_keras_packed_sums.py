"""What a step sums over the replicas travels in one array, and is what it was."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_strategy

from mirrored.keras._packed_sums import can_be_packed, packed_sums
from mirrored.keras._per_replica import _sum_once

X = np.arange(48, dtype="float32").reshape(8, 6) / 48
Y = np.arange(8, dtype="int32") % 3
W = np.linspace(-1, 1, 36, dtype="float32").reshape(6, 6)


def network(w, v, x, y):
    hidden = jax.nn.relu(x @ w + v)
    scores = jax.jit(lambda h: h @ w)(hidden)
    losses = jax.nn.logsumexp(scores, axis=1) - jnp.sum(scores * jax.nn.one_hot(y, 6), axis=1)
    return losses.mean()


def train(w, v, x, y):
    """Gradients of a weight used twice and of a bias, a loss, and counts."""
    loss, gradients = jax.value_and_grad(network, (0, 1))(w, v, x, y)
    return loss, gradients, jnp.sum(y == 1), x.sum(0), jnp.float32(2), w


def normalized(w, v, x, y):
    """Two sums of which the second needs the first."""
    mean = x.mean(0)
    return ((x - mean) ** 2).mean(0) @ w + v


def rows_as_wide_as_the_batch(w, v, x, y):
    """Every axis is 8 long: a wrong guess would show."""
    square = jnp.concatenate([x, x[:, :2]], axis=1)
    return square @ square, square.T @ square, (square @ square.T).sum(1), square.sum((0, 1))


def over_two_axes(w, v, x, y):
    cube = jnp.tile(x[:, None], (1, 3, 1)) * jnp.arange(3.0)[:, None]
    merged = cube.reshape(24, 6)
    return jnp.einsum("nti,ntj->ij", cube, cube), merged.T @ merged, jnp.sum(cube, (0, 1))


def product(w, v, x, y):
    return x.T @ x


def in_a_loop(w, v, x, y):
    return jax.lax.scan(lambda total, row: (total + row, row * 2), v, x)


def programs(function, replicas, rows=8):
    """The function as it is, and packed; with rows split over the replicas."""
    strategy = make_strategy(replicas)
    placement = strategy.placement

    def step(w, v, x, y):
        x, y = (jax.lax.with_sharding_constraint(each[:rows], placement.split) for each in (x, y))
        return function(w, v, x, y)

    arguments = [placement.mirror(each) for each in (W, W[0], X, Y)]
    traced, shapes = jax.make_jaxpr(step, return_shape=True)(*arguments)
    structure = jax.tree.structure(shapes)
    packed = packed_sums(traced, placement)
    return (
        jax.jit(lambda *given: structure.unflatten(packed(*given))),
        jax.jit(step),
        arguments,
    )


def arrays_summed(compiled):
    """How many arrays each all-reduce of a program takes."""
    found = re.findall(r" all-reduce(?:-start)?\((.*?)\), channel_id", compiled.as_text())
    return [len(re.findall("%", operands)) for operands in found]


@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize(
    "function", [train, normalized, rows_as_wide_as_the_batch, over_two_axes, in_a_loop]
)
def test_packed_sums_are_the_sums(function, replicas):
    packed, plain, arguments = programs(function, replicas)
    found, expected = packed(*arguments), plain(*arguments)
    for got, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert got.dtype == wanted.dtype
        np.testing.assert_allclose(got, wanted, rtol=2e-6, atol=2e-6)


def test_what_is_summed_at_one_time_is_one_array_for_each_type():
    packed, plain, arguments = programs(train, 2)
    assert sum(arrays_summed(plain.lower(*arguments).compile())) > 5
    # The count of labels is an integer.
    assert sum(arrays_summed(packed.lower(*arguments).compile())) == 2


def test_a_sum_that_needs_another_waits_for_it_only():
    packed, _, arguments = programs(normalized, 2)
    assert arrays_summed(packed.lower(*arguments).compile()) == [1, 1]


def test_rows_that_do_not_divide_are_left_to_the_compiler():
    packed, plain, arguments = programs(product, 2, rows=5)
    np.testing.assert_allclose(packed(*arguments), plain(*arguments), rtol=1e-6)


def test_a_program_that_does_more_than_compute_keeps_its_order():
    def telling(x):
        jax.debug.print("{}", x)
        return x.sum()

    assert not can_be_packed(jax.make_jaxpr(telling)(X))
    assert can_be_packed(jax.make_jaxpr(jnp.sum)(X))


def test_half_precision_is_rounded_once():
    # One replica's part of the product, -90000 or 90000, is no number in float16.
    strategy = make_strategy(2)
    rows = np.array([[300.0]] * 4, "float16")
    signs = np.array([[-300.0], [0], [300.0], [1]], "float16")

    def step(x, y):
        x, y = (jax.lax.with_sharding_constraint(each, strategy.placement.split) for each in (x, y))
        return x.T @ y, jnp.sum(x * 40)

    traced = jax.make_jaxpr(step)(rows, signs)
    product, total = jax.jit(packed_sums(traced, strategy.placement))(rows, signs)
    assert product.dtype == total.dtype == jnp.float16
    assert (float(product[0, 0]), float(total)) == (300, 48000)


def test_what_travels_together_is_computed_once_each():
    # In one computation with what is joined, XLA's CPU compiler would compute all of it anew
    # for each element of the joined array.
    placement = make_strategy(2).placement

    def local(rows):
        leaves = [jnp.exp(rows).sum(0), (rows * rows).sum(0), rows.T @ rows, jnp.log(rows).sum()]
        return [leaf for leaf, _ in _sum_once(leaves)]

    mapped = jax.jit(
        jax.shard_map(
            local,
            mesh=placement.mesh,
            in_specs=placement.split.spec,
            out_specs=placement.mirrored.spec,
        )
    )
    text = mapped.lower(np.ones((8, 96), "float32")).compile().as_text()
    computations = [part for part in text.split("\n\n") if " concatenate(" in part]
    assert computations
    assert not [part for part in computations if "ENTRY" not in part and " reduce(" in part]
