"""What a distributed data set yields: the split rule, the remainder, and every row once."""

from __future__ import annotations

import collections
import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conftest import make_strategy
from hypothesis import given, settings
from hypothesis import strategies as st

import mirrored
from mirrored import PerReplica

DTYPES = ["bool", "int8", "uint8", "int32", "int64", "float16", "float32", "float64", "complex64"]


def parts(value):
    """The components of a PerReplica as lists, as they stand in the conformance page."""
    return [np.asarray(part).tolist() for part in value.components()]


def batches_of(replicas, count, size, **options):
    dataset = make_strategy(replicas).distribute_dataset(np.arange(count), size, **options)
    return [parts(batch) for batch in dataset]


# --- the split rule -------------------------------------------------------------------------

SPLITS = [
    (2, 7, 4, [[[0, 1], [2, 3]], [[4, 5], [6]]]),
    (2, 5, 4, [[[0, 1], [2, 3]], [[4], []]]),
    (2, 6, 3, [[[0, 1], [2]], [[3, 4], [5]]]),
    (2, 14, 8, [[[0, 1, 2, 3], [4, 5, 6, 7]], [[8, 9, 10], [11, 12, 13]]]),
    (4, 13, 8, [[[0, 1], [2, 3], [4, 5], [6, 7]], [[8, 9], [10, 11], [12], []]]),
    (4, 10, 8, [[[0, 1], [2, 3], [4, 5], [6, 7]], [[8], [9], [], []]]),
]


@pytest.mark.conformance(39)
@pytest.mark.parametrize(("replicas", "count", "size", "expected"), SPLITS)
def test_pieces_are_consecutive_and_none_is_lost(replicas, count, size, expected):
    assert batches_of(replicas, count, size) == expected


@pytest.mark.conformance(39)
@pytest.mark.parametrize(("replicas", "count", "size", "expected"), SPLITS)
def test_drop_leaves_out_exactly_the_partial_batch(replicas, count, size, expected):
    full = expected if count % size == 0 else expected[:-1]
    assert batches_of(replicas, count, size, remainder="drop") == full


@pytest.mark.conformance(39)
@pytest.mark.parametrize(("replicas", "count", "size", "expected"), SPLITS)
def test_batches_from_an_iterable_are_split_alike(replicas, count, size, expected):
    pieces = [np.arange(count)[start : start + size] for start in range(0, count, size)]
    dataset = make_strategy(replicas).distribute_dataset(pieces)
    assert [parts(batch) for batch in dataset] == expected


@pytest.mark.conformance(42)
def test_the_end_is_the_end_again_and_again(two):
    for prefetch in (0, 2):
        iterator = iter(two.distribute_dataset(np.arange(8), 4, prefetch=prefetch))
        next(iterator)
        assert two.gather(iterator.get_next(), axis=0).tolist() == [4, 5, 6, 7]
        for _ in range(3):
            with pytest.raises(StopIteration):
                next(iterator)


@pytest.mark.conformance(43)
def test_the_mean_over_rows_counts_real_rows_only(two):
    (three,) = two.distribute_dataset(np.array([1.0, 2.0, 3.0]), 4)
    assert float(two.reduce("mean", three, axis=0)) == 2.0
    (one,) = two.distribute_dataset(np.array([5.0]), 4)
    assert float(two.reduce("mean", one, axis=0)) == 5.0


@settings(deadline=None, max_examples=60)
@given(
    replicas=st.sampled_from([1, 2, 3, 4, 8]),
    count=st.integers(1, 40),
    size=st.integers(1, 17),
    dtype=st.sampled_from([*DTYPES, "bfloat16"]),
    shuffle=st.booleans(),
)
def test_every_row_is_there_once_in_order(replicas, count, size, dtype, shuffle):
    dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    values = (np.arange(3 * count) % 101).reshape(count, 3).astype(dtype)
    data = {"x": values, "id": np.arange(count)}
    dataset = make_strategy(replicas).distribute_dataset(data, size, shuffle=shuffle)
    assert len(dataset) == -(-count // size)
    ids = []
    for batch in dataset:
        own = [np.asarray(part) for part in batch["id"].components()]
        total = sum(len(part) for part in own)
        most = -(-total // replicas)
        expected = [max(0, min(most, total - most * replica)) for replica in range(replicas)]
        assert [len(part) for part in own] == expected
        assert batch["id"].row_counts is batch["x"].row_counts
        if total == most * replicas:
            assert batch["id"].row_counts is None
        else:
            assert batch["id"].row_counts.tolist() == expected
            assert batch["id"].row_counts.dtype == np.int32
        assert batch["x"].is_batch
        assert batch["x"].stacked.shape == (replicas, most, 3)
        assert batch["x"].stacked.dtype == jax.dtypes.canonicalize_dtype(dtype)
        ids.extend(np.concatenate(own).tolist())
        seen = np.concatenate([np.asarray(part) for part in batch["x"].components()])
        np.testing.assert_array_equal(seen, values[ids[-total:]].astype(seen.dtype))
    assert sorted(ids) == list(range(count))
    assert shuffle or ids == list(range(count))


@settings(deadline=None, max_examples=30)
@given(
    replicas=st.sampled_from([1, 2, 3, 4, 8]),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6),
)
def test_batches_of_any_sizes_keep_every_row(replicas, sizes):
    ends = np.cumsum(sizes)
    source = [np.arange(end - size, end) for end, size in zip(ends, sizes)]
    dataset = make_strategy(replicas).distribute_dataset(source)
    seen = [np.concatenate([np.asarray(part) for part in batch.components()]) for batch in dataset]
    assert [batch.tolist() for batch in seen] == [batch.tolist() for batch in source]


def test_padding_repeats_a_real_row_so_that_it_cannot_make_a_nan(two):
    (batch,) = two.distribute_dataset(np.array([4.0, 5.0, 6.0]), 4)
    assert batch.stacked.tolist() == [[4.0, 5.0], [6.0, 6.0]]
    source = [np.array([4.0]), np.array([5.0, 6.0]), np.array([7.0])]
    dataset = two.distribute_datasets_from_function(lambda context: source)
    assert [batch.stacked.tolist() for batch in dataset] == [[[4, 4], [5, 6]], [[7], [7]]]


def test_arrays_lie_on_the_devices_of_their_replicas():
    strategy = mirrored.MirroredStrategy(["cpu:5", "cpu:1", "cpu:3"])
    (batch,) = strategy.distribute_dataset(np.arange(7), 8)
    assert batch.stacked.sharding == strategy.placement.split
    assert batch.row_counts.sharding == strategy.placement.split
    shards = {shard.device.id: shard.data.tolist() for shard in batch.stacked.addressable_shards}
    assert shards == {5: [[0, 1, 2]], 1: [[3, 4, 5]], 3: [[6, 6, 6]]}


def test_a_step_needs_no_transfer(strategy):
    @mirrored.function
    def step(batch):
        return strategy.reduce("mean", batch, axis=0)

    means = []
    with jax.transfer_guard("disallow"):
        for batch in strategy.distribute_dataset(np.arange(10.0), 4):
            means.append(step(batch))
    assert [float(mean) for mean in means] == [1.5, 5.5, 8.5]


# --- structures and types -------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Example:
    image: object
    label: object


Pair = collections.namedtuple("Pair", ["left", "right"])


@pytest.mark.parametrize(
    "element",
    [
        (np.ones(4), [np.ones((4, 2)), None]),
        {"b": np.ones(4), "a": {"c": np.ones(4)}},
        Pair(np.ones(4), np.ones(4)),
        Example(np.ones((4, 1)), np.ones(4)),
    ],
    ids=["tuple", "dict", "namedtuple", "dataclass"],
)
def test_the_structure_of_a_batch_is_kept(two, element):
    (batch,) = two.distribute_dataset([element])
    assert type(batch) is type(element)
    leaves, structure = jax.tree.flatten(batch, is_leaf=lambda leaf: isinstance(leaf, PerReplica))
    assert structure == jax.tree.structure(element)
    assert all(isinstance(leaf, PerReplica) for leaf in leaves)


def test_a_list_of_arrays_is_batches_or_with_batch_size_a_nest(two):
    arrays = [np.arange(4), np.arange(4) * 10]
    assert [parts(batch) for batch in two.distribute_dataset(arrays)] == [
        [[0, 1], [2, 3]],
        [[0, 10], [20, 30]],
    ]
    (batch,) = two.distribute_dataset(arrays, 4)
    assert [parts(leaf) for leaf in batch] == [[[0, 1], [2, 3]], [[0, 10], [20, 30]]]


@pytest.mark.parametrize(
    ("given", "kept"), [("float64", "float32"), ("int64", "int32"), (">f4", "float32")]
)
def test_types_become_what_jax_keeps_of_them(two, given, kept):
    (batch,) = two.distribute_dataset(np.array([1, -2, 3, 4], given), 4)
    assert batch.stacked.dtype == kept
    assert parts(batch) == [[1, -2], [3, 4]]


def test_an_integer_that_would_wrap_is_refused(two):
    dataset = two.distribute_dataset(np.array([1, 2**31]), 2)
    with pytest.raises(mirrored.DataError, match=r"2147483648.*\n.*int32\.\nhint:.*enable_x64"):
        next(iter(dataset))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_thread_keeps_64_bits_where_its_consumer_does(two, prefetch):
    dataset = two.distribute_dataset(np.array([0.1, 2**40 + 0.5]), 2, prefetch=prefetch)
    with jax.enable_x64(True):
        (batch,) = dataset
        assert batch.stacked.dtype == np.float64
        assert parts(batch) == [[0.1], [2**40 + 0.5]]


def test_other_arrays_than_numpys(two):
    for array in (jnp.arange(5), range(5), np.arange(10)[::2] // 2, np.arange(5).astype(">i2")):
        seen = [parts(batch) for batch in two.distribute_dataset(array, 4)]
        assert seen == [[[0, 1], [2, 3]], [[4], []]]


def test_memory_mapped_arrays(two, tmp_path):
    np.save(tmp_path / "x.npy", np.arange(6))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert batches_of(2, 6, 4) == [parts(batch) for batch in two.distribute_dataset(mapped, 4)]


# --- order ----------------------------------------------------------------------------------


def test_shuffling_depends_on_seed_and_epoch_only():
    def orders(seed, replicas):
        dataset = make_strategy(replicas).distribute_dataset(
            np.arange(20), 8, shuffle=True, seed=seed
        )
        return [
            [row for batch in dataset for part in parts(batch) for row in part] for _ in range(3)
        ]

    first = orders(1, 2)
    assert first == orders(1, 4)
    assert all(sorted(order) == list(range(20)) for order in first)
    assert len({tuple(order) for order in [*first, *orders(2, 2)]}) == 6
    # The stream is part of the promise: a run is resumed with a later version, too.
    assert first[0][:8] == [1, 10, 8, 16, 15, 17, 5, 3]


def test_every_leaf_is_shuffled_alike(two):
    data = (np.arange(9), np.arange(9) * 2.0)
    for index, double in two.distribute_dataset(data, 4, shuffle=True):
        assert [[2.0 * row for row in part] for part in parts(index)] == parts(double)
