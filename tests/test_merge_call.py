"""merge_call: reduce, gather and local_results of what replicas hand in."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_strategy

import mirrored
from mirrored import PerReplica


def merged(strategy, merge_fn, value=None, debug=False):
    """What ``merge_fn(strategy, value)`` gives, of each replica's number from 1 by default."""

    def replica_function(value):
        context = mirrored.get_replica_context()
        if value is None:
            value = jnp.array([context.replica_id_in_sync_group + 1.0])
        return context.merge_call(merge_fn, args=(value,))

    with strategy.debug() if debug else contextlib.nullcontext():
        return strategy.run(replica_function, (value,))


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_gather_sees_all_replicas(replicas, debug):
    strategy = make_strategy(replicas)
    numbers = [r + 1.0 for r in range(replicas)]
    gathered = merged(strategy, lambda s, v: s.gather({"a": v}, axis=-1)["a"], debug=debug)
    assert isinstance(gathered, jax.Array)
    assert gathered.tolist() == numbers


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_local_results_are_those_of_all_replicas(replicas):
    strategy = make_strategy(replicas)
    parts = merged(strategy, lambda s, v: s.local_results(v))
    assert [float(part[0]) for part in parts] == [r + 1.0 for r in range(replicas)]
    nest = merged(strategy, lambda s, v: s.local_results({"a": v, "b": 3})[-1])
    assert (float(nest["a"][0]), nest["b"]) == (replicas, 3)
    if replicas > 1:
        own = merged(strategy, lambda s, v: float(s.local_results(v)[-1][0]), debug=True)
        assert own == replicas


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_equal_values_of_replicas_stay_theirs(replicas, debug):
    strategy = make_strategy(replicas)
    counts = []

    def count(strategy, own, reduced):
        counts.append([len(strategy.local_results(value)) for value in (own, reduced, 3.0)])
        return own

    def replica_function(x):
        context = mirrored.get_replica_context()
        return context.merge_call(count, args=(x, context.all_reduce("sum", x)))

    with strategy.debug() if debug else contextlib.nullcontext():
        strategy.run(replica_function, (jnp.float32(3),))
    assert counts == [[replicas, 1, 1]] * (replicas if debug else 1)


@pytest.mark.parametrize("debug", [False, True])
def test_values_that_happen_to_be_equal_are_summed_all_the_same(two, debug):
    # Typed as each replica's own, since it entered run.
    total = merged(two, lambda s, v: s.reduce("sum", v, axis=None), value=3.0, debug=debug)
    assert float(total) == 6.0


def test_what_is_the_same_by_type_is_refused(two):
    for call in (
        lambda s, _: s.reduce("sum", jnp.ones(2), axis=None),
        lambda s, _: s.gather(jnp.ones(2), axis=0),
    ):
        with pytest.raises(ValueError, match=r"same on every replica|not a per-replica"):
            merged(two, call)


def test_one_replica_outside_every_scope():
    context = mirrored.get_replica_context()
    assert context.merge_call(lambda s, v: s.reduce("sum", v, axis=None), args=(3.0,)) == 3.0
    nest = context.merge_call(lambda s, v: s.reduce("mean", v, axis=None), args=([1.0, 2.0],))
    assert nest == [1.0, 2.0]
    assert context.merge_call(lambda s, v: s.reduce("mean", v, axis=0), args=(np.arange(3),)) == 1
    gathered = context.merge_call(lambda s, v: s.gather(v, axis=0), args=(np.arange(3),))
    assert gathered.tolist() == [0, 1, 2]
    assert context.merge_call(lambda s, v: s.local_results(v), args=(3.0,)) == (3.0,)


@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_sparse_rows(replicas, dtype):
    strategy = make_strategy(replicas)
    generator = np.random.default_rng(0)
    values = generator.integers(0, 5, (replicas, 3, 2))
    indices = generator.integers(0, 6, (replicas, 3))
    expected = np.zeros((6, 2))
    np.add.at(expected, indices.reshape(-1), values.reshape(-1, 2))

    def replica_function(values, indices):
        rows = mirrored.IndexedSlices(values, indices, (6, 2))
        context = mirrored.get_replica_context()

        def both(strategy, rows):
            return [strategy.reduce(op, {"r": rows})["r"] for op in ("sum", "mean")]

        return context.merge_call(both, args=(rows,))

    rows = PerReplica(list(jnp.asarray(values).astype(dtype))), PerReplica(list(indices))
    total, mean = strategy.run(replica_function, rows)
    np.testing.assert_array_equal(np.asarray(total.to_dense(), "f"), expected)
    np.testing.assert_allclose(
        np.asarray(mean.to_dense(), "f"), expected / replicas, rtol=1e-2 if dtype[0] == "b" else 0
    )
