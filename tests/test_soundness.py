"""Differences that JAX's types do not show, and gradients that it sums by itself."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import components, replica_id

import mirrored
from mirrored import PerReplica


def test_control_flow_cannot_hide_a_difference(two):
    with two.scope():
        v = mirrored.Variable(0.0, name="v")

    def by_cond():
        rank = replica_id()
        v.assign(jax.lax.cond(rank == 0, lambda: 1.0, lambda: 2.0))

    def by_write_in_cond():
        jax.lax.cond(replica_id() == 0, lambda: [v.assign(5.0), None][1], lambda: None)

    def by_loop():
        v.assign(jax.lax.while_loop(lambda c: c < 3 + replica_id(), lambda c: c + 1, 0))

    def by_fori():
        v.assign(jax.lax.fori_loop(0, replica_id(), lambda i, c: c + 1.0, 0.0))

    def by_write_in_loop():
        jax.lax.while_loop(
            lambda c: c < replica_id(), lambda c: [v.assign_add(1.0), c + 1][1], jnp.int32(0)
        )

    def by_jit_in_scan():
        def body(carry, _):
            return jax.jit(lambda c: jax.lax.cond(replica_id() == 0, lambda: c, lambda: 0.0))(
                carry
            ), None

        v.assign(jax.lax.scan(body, 1.0, None, length=2)[0])

    for hidden in (by_cond, by_write_in_cond, by_loop, by_fori, by_write_in_loop, by_jit_in_scan):
        with pytest.raises(mirrored.VariableError, match="'v' would differ"):
            two.run(hidden)
    assert float(v) == 0.0
    result = two.run(lambda: jax.lax.cond(replica_id() == 0, lambda: 1.0, lambda: 2.0))
    assert components(two, result) == [1.0, 2.0]


def test_a_carry_that_becomes_a_replicas_own_says_how_to_start(two):
    def scan(start):
        return two.run(
            lambda x: jax.lax.scan(lambda c, row: (c + row, None), start(), x)[0],
            (PerReplica([[1.0, 2.0], [3.0, 4.0]]),),
        )

    with pytest.raises(mirrored.TracingError, match=r"hint: .*\.own\("):
        scan(lambda: jnp.zeros(()))
    result = scan(lambda: mirrored.get_replica_context().own(jnp.zeros(())))
    assert components(two, result) == [3.0, 7.0]


def test_a_collective_only_some_replicas_reach_is_refused(two):
    def replica_function():
        context = mirrored.get_replica_context()
        rank = context.replica_id_in_sync_group
        return jax.lax.cond(
            rank == 0, lambda: context.all_reduce("sum", rank), lambda: jnp.int32(0)
        )

    with pytest.raises(RuntimeError, match="wait there for ever"):
        two.run(replica_function)

    def agreed():
        context = mirrored.get_replica_context()
        rank = context.replica_id_in_sync_group
        anybody = context.all_reduce("max", rank) > 0
        return jax.lax.cond(anybody, lambda: context.all_reduce("sum", rank), lambda: jnp.int32(0))

    assert int(two.run(agreed)) == 1


def test_gradient_of_a_captured_array_is_refused(two):
    w = jnp.array([1.0, 2.0])

    def replica_function(x):
        return jax.grad(lambda w: (w * x).sum())(w)

    with pytest.raises(mirrored.GradientError, match="args="):
        two.run(replica_function, (PerReplica([1.0, 2.0]),))

    # Averaged once more, as in tf.distribute, it would be wrong by a factor of two.
    def averaged(x):
        return mirrored.get_replica_context().all_reduce("mean", replica_function(x))

    with pytest.raises(mirrored.GradientError, match="args="):
        two.run(averaged, (PerReplica([1.0, 2.0]),))

    @jax.jit
    def jitted(w, x):
        return two.run(lambda x: jax.grad(lambda w: (w * x).sum())(w), (x,))

    with pytest.raises(mirrored.GradientError, match="args="):
        jitted(w, PerReplica([1.0, 2.0]).placed(two.placement))
    # Captured arrays that are not differentiated are fine.
    assert components(two, two.run(lambda x: (w * x).sum(), (PerReplica([1.0, 2.0]),))) == [3, 6]


@pytest.mark.conformance(19)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["", "jit", "remat"])
def test_gradient_of_an_array_made_in_the_replica_function_is_never_summed(two, wrap):
    captured = jnp.array([1.0, 2.0])

    def gradient_of(make):
        def replica_function(x):
            # Summed before it meets anything of this replica: what JAX adds up is a scalar.
            return jax.grad(wrap(lambda w: x * (w * w).sum()))(make())

        return two.run(replica_function, (PerReplica([1.0, 2.0]),))

    for make in (lambda: captured, lambda: jnp.array([1.0, 2.0]), lambda: jnp.arange(1.0, 3.0)):
        with pytest.raises(mirrored.GradientError, match=r"\.own\(params\)"):
            gradient_of(make)
    found = gradient_of(lambda: mirrored.get_replica_context().own(captured))
    np.testing.assert_array_equal(components(two, found), [[2, 4], [4, 8]])


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["", "jit", "remat"])
def test_gradients_through_what_a_collective_made_are_summed(two, wrap):
    def replica_function(x):
        def loss_fn(x):
            total = mirrored.get_replica_context().all_reduce("sum", x)
            # Reshaped and added up before it meets what differs: no longer the sum's shape.
            return (mirrored.get_replica_context().replica_id + 1) * (total * 3.0).reshape(
                2, 1
            ).sum()

        return jax.grad(wrap(loss_fn))(x)

    found = two.run(replica_function, (PerReplica([[1.0, 2.0], [3.0, 4.0]]),))
    np.testing.assert_array_equal(components(two, found), [[9, 9], [9, 9]])
