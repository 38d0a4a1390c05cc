"""Conformance 1 to 9, 21, 22, 24, 38: values, reduce, gather."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_strategy, replica_id

import mirrored
from mirrored import PerReplica


@pytest.mark.conformance(1)
def test_reduce_scalars(two):
    value = PerReplica([1.0, 3.0])
    assert float(two.reduce("sum", value, axis=None)) == 4.0
    assert float(two.reduce(mirrored.ReduceOp.MEAN, value, axis=None)) == 2.0


@pytest.mark.conformance(2)
def test_reduce_vectors(two):
    value = PerReplica([[1, 2], [3, 4]])
    assert int(two.reduce("sum", value, axis=0)) == 10
    assert float(two.reduce("mean", value, axis=0)) == 2.5
    assert two.reduce("sum", value, axis=None).tolist() == [4, 6]


@pytest.mark.conformance(3)
def test_reduce_uneven(two):
    value = PerReplica([[0, 1, 2, 3], [4, 5]])
    assert float(two.reduce("mean", value, axis=0)) == 2.5
    assert int(two.reduce("sum", value, axis=0)) == 15
    assert int(two.reduce("max", value, axis=0)) == 5
    assert int(two.reduce("min", value, axis=0)) == 0
    with pytest.raises(ValueError, match=r"(?s)\(4,\) \| \(2,\).*hint: .*axis=0"):
        two.reduce("sum", value, axis=None)


@pytest.mark.conformance(4)
def test_reduce_empty_component(two):
    value = PerReplica([np.array([1.0, 2.0], "f"), np.zeros((0,), "f")])
    assert float(two.reduce("mean", value, axis=0)) == 1.5
    assert float(two.reduce("sum", value, axis=0)) == 3.0
    assert float(two.reduce("max", value, axis=0)) == 2.0


@pytest.mark.conformance(5)
def test_reduce_several_axes(two):
    value = PerReplica([np.arange(1, 5).reshape(2, 2), np.arange(5, 9).reshape(2, 2)])
    assert int(two.reduce("sum", value, axis=(0, 1))) == 36
    assert float(two.reduce("mean", value, axis=(0, 1))) == 4.5
    assert two.reduce("sum", value, axis=-1).tolist() == [14, 22]
    assert two.reduce("mean", value, axis=-1).tolist() == [3.5, 5.5]


def test_reduce_components_that_differ_in_a_later_axis(two):
    value = PerReplica([np.ones((2, 1)), np.ones((2, 3))])
    assert two.reduce("sum", value, axis=1).tolist() == [4.0, 4.0]
    assert two.reduce("mean", value, axis=1).tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match=r"\(2, 1\) \| \(2, 3\)"):
        two.reduce("sum", value, axis=0)


@pytest.mark.conformance(6)
@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_reduce_growing_components(replicas, dtype):
    strategy = make_strategy(replicas)
    value = strategy.distribute_values_from_function(
        lambda c: np.full(c.replica_id_in_sync_group + 1, c.replica_id_in_sync_group, dtype)
    )
    expected = sum(r * (r + 1) for r in range(replicas)) / sum(r + 1 for r in range(replicas))
    result = strategy.reduce("mean", value, axis=0)
    assert result.dtype == jnp.float32
    assert float(result) == pytest.approx(expected, rel=1e-6)


@pytest.mark.conformance(7)
def test_mean_of_integers_is_float32(two):
    result = two.reduce("mean", PerReplica([np.int32(1), np.int32(2)]))
    assert result.dtype == jnp.float32
    assert float(result) == 1.5


@pytest.mark.conformance(8)
def test_reduce_nest(two):
    nest = {"a": PerReplica([1, 3]), "b": PerReplica([2, 2])}
    assert jax.tree.map(int, two.reduce("sum", nest, axis=None)) == {"a": 4, "b": 4}
    nest = {"a": PerReplica([[1, 2], [3]]), "b": (PerReplica([[1.0], [2.0]]),)}
    result = two.reduce("sum", nest, axis=0)
    assert int(result["a"]) == 6
    assert float(result["b"][0]) == 3.0


@pytest.mark.conformance(9)
def test_reduce_min_max_and_unknown(two):
    value = PerReplica([[1, 5], [3, 4]])
    assert two.reduce("max", value).tolist() == [3, 5]
    assert two.reduce("MIN", value).tolist() == [1, 4]
    with pytest.raises(ValueError, match=r"'sum', 'mean', 'min', 'max'"):
        two.reduce("median", value)


@pytest.mark.conformance(21)
def test_reduce_plain_values(strategy):
    plain = jnp.array([1.0, 2.0])
    with pytest.raises(ValueError, match="not a per-replica"):
        strategy.reduce("sum", plain, axis=None)
    assert strategy.reduce("mean", plain, axis=None).tolist() == [1.0, 2.0]
    with pytest.raises(ValueError, match="not a per-replica"):
        strategy.reduce("mean", plain, axis=0)


@pytest.mark.conformance(22)
def test_gather(two):
    assert two.gather(PerReplica([[1, 2], [3]]), axis=0).tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match=r"\(1, 2\) \| \(1, 3\)"):
        two.gather(PerReplica([np.ones((1, 2)), np.ones((1, 3))]), axis=0)
    for axis in (None, "0", 2):
        with pytest.raises(ValueError, match="gather"):
            two.gather(PerReplica([[1], [2]]), axis=axis)
    wide = two.gather(PerReplica([np.zeros((2, 1)), np.ones((2, 3))]), axis=1)
    assert wide.tolist() == [[0, 1, 1, 1]] * 2
    even = two.gather(PerReplica([[[1], [2]], [[3], [4]]]), axis=-1)
    assert even.tolist() == [[1, 3], [2, 4]]


@pytest.mark.conformance(24)
def test_local_results(two):
    assert two.local_results(PerReplica([1, 2])) == (1, 2)
    assert two.local_results("plain") == ("plain",)
    nested = two.local_results({"a": PerReplica([1, 2]), "b": 3})
    assert nested == ({"a": 1, "b": 3}, {"a": 2, "b": 3})
    ran = two.run(lambda: replica_id() * 10)
    assert [int(part) for part in two.local_results(ran)] == [0, 10]


@pytest.mark.conformance(38)
def test_sparse_rows(two):
    a = mirrored.IndexedSlices([[1.0, 2.0]], [1], (5, 2))
    b = mirrored.IndexedSlices([[3.0, 4.0], [5.0, 6.0]], [1, 3], (5, 2))
    total = two.reduce("sum", PerReplica([a, b])).to_dense()
    assert total.tolist() == [[0, 0], [4, 6], [0, 0], [5, 6], [0, 0]]
    mean = two.reduce("mean", PerReplica([a, b])).to_dense()
    assert mean.tolist() == [[0, 0], [2, 3], [0, 0], [2.5, 3], [0, 0]]

    def replica_function(values, indices):
        rows = mirrored.IndexedSlices(values, indices, (5, 2))
        context = mirrored.get_replica_context()
        return context.all_reduce("sum", rows).to_dense(), rows

    values = PerReplica([np.array([[1, 2], [0, 0]], "f"), np.array([[3, 4], [5, 6]], "f")])
    dense, rows = two.run(replica_function, (values, PerReplica([[1, 5], [1, 3]])))
    assert dense.tolist() == total.tolist()
    assert two.reduce("mean", rows).to_dense().tolist() == mean.tolist()


@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
def test_the_mean_of_half_floats_does_not_overflow(replicas):
    strategy = make_strategy(replicas)
    value = PerReplica([np.full(3, 40000, "float16")] * replicas)

    def replica_function(x):
        context = mirrored.get_replica_context()
        merged = context.merge_call(lambda s, v: s.reduce("mean", v), (x,))
        return context.all_reduce("mean", x), merged

    results = [strategy.reduce("mean", value, axis=axis) for axis in (None, 0, (0,))]
    for result in [*results, *strategy.run(replica_function, (value,))]:
        assert result.dtype == jnp.float16
        assert np.asarray(result).ravel().tolist() == [40000.0] * result.size
    ragged = PerReplica([np.full((2, r + 1), 40000, "float16") for r in range(replicas)])
    assert strategy.reduce("mean", ragged, axis=1).tolist() == [40000.0] * 2


@pytest.mark.parametrize("op", ["mean", "min", "max"])
def test_nothing_at_all_has_no_mean_and_no_extreme(two, op):
    with pytest.raises(ValueError, match=f"{op} of a value without any element"):
        two.reduce(op, PerReplica([np.zeros((0, 2), "f")] * 2), axis=0)
    with pytest.raises(ValueError, match=f"{op} of a value without any element"):
        two.reduce(op, PerReplica([np.zeros((0, 2)), np.zeros((0, 3))]), axis=(0, 1))
    some = PerReplica([np.zeros((2, 0), "f"), np.full((2, 3), -1.0, "f")])
    assert two.reduce(op, some, axis=1).tolist() == [-1.0, -1.0]


def test_extremes_keep_the_dtype(two):
    for dtype in ("bool", "int8", "float16", "bfloat16"):
        value = PerReplica([jnp.zeros(2, dtype), jnp.ones(2, dtype)])
        result = two.reduce("max", value)
        assert result.dtype == jnp.dtype(dtype)
        assert result.tolist() == [1, 1]


def test_values_of_one_strategy_do_not_fit_another(two):
    with pytest.raises(ValueError, match="2 components"):
        make_strategy(4).run(lambda x: x, (PerReplica([1, 2]),))


def test_values_on_other_devices_do_not_fit_either(two):
    # As many replicas, but elsewhere: it would be moved in every step, without a word.
    other = mirrored.MirroredStrategy(["cpu:2", "cpu:3"])
    (batch,) = other.distribute_dataset(np.arange(4), batch_size=4)
    uses = {
        "run": lambda: two.run(lambda x: x, (batch,)),
        "reduce": lambda: two.reduce("sum", batch, axis=0),
        "gather": lambda: two.gather(batch, axis=0),
        "function": lambda: mirrored.function(lambda b: two.run(lambda x: x, (b,)))(batch),
    }
    for use in uses.values():
        with pytest.raises(ValueError, match=r"cpu:2, cpu:3 was given.*cpu:0, cpu:1"):
            use()
    assert [int(p[0]) for p in other.local_results(other.run(lambda x: x, (batch,)))] == [0, 2]
    # The same devices by another object are as good.
    again = mirrored.MirroredStrategy(["cpu:2", "cpu:3"])
    assert int(again.reduce("sum", batch, axis=0)) == 6
    # What is on one device only is placed.
    alone = PerReplica.from_stacked(jax.device_put(np.arange(2), jax.devices()[0]))
    assert int(two.reduce("sum", alone)) == 1


def test_per_replica_is_not_a_single_value(two):
    value = two.run(lambda: replica_id() + 1)
    for use in (float, bool, np.asarray, iter):
        with pytest.raises(TypeError, match="one component for each replica"):
            use(value)
