"""Data that cannot be split as it is: every message has the fact, the expectation and a hint."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest

import mirrored
from mirrored import ArgumentError, DataError

ROWS = np.arange(6)


def first_batch(strategy, *args, **options):
    return next(iter(strategy.distribute_dataset(*args, **options)))


@pytest.mark.conformance(41)
def test_a_batch_size_that_does_not_divide():
    context = mirrored.InputContext(num_replicas_in_sync=2)
    assert context.get_per_replica_batch_size(6) == 3
    with pytest.raises(ValueError, match=r"global batch size 5 .* 2 replicas.*\n.*\nhint:.* 6"):
        context.get_per_replica_batch_size(5)


@pytest.mark.conformance(42)
@pytest.mark.parametrize("element", [np.int32(1), 2.5, np.array(3.0)])
def test_an_unbatched_source(two, element):
    with pytest.raises(DataError, match=r"batch 0: element\[1\] is a single .*\n.*\nhint: batch"):
        first_batch(two, [(np.ones(2), element)])


@pytest.mark.conformance(42)
def test_examples_of_unequal_length(two):
    with pytest.raises(DataError, match=r"element\['x'\] \(4, 2\), element\['y'\] \(5,\)"):
        first_batch(two, [{"x": np.ones((4, 2)), "y": np.ones(5)}])
    with pytest.raises(DataError, match=r"the data set has leaves with different"):
        two.distribute_dataset((np.ones((4, 2)), np.ones(5)), 2)


@pytest.mark.parametrize(
    ("element", "message"),
    [
        ({"a": np.ones(2), "name": ["x", "y"]}, r"element\['name'\]\[0\] is 'x', a str"),
        (np.array(["x", "y"]), r"element is an array of <U1"),
        (np.array([b"x", b"y"], object), r"element is an array of object"),
        (np.array(["2020-01-01"], "M8[D]"), r"element is an array of datetime64"),
        (np.ma.masked_array([1, 2], [True, False]), r"element is a MaskedArray of int64"),
        ((np.ones(2), object()), r"element\[1\] is <object object.*, a object"),
        (jax.random.split(jax.random.key(0), 2), r"of key<fry>"),
        (None, r"batch 0 is None, which holds no array"),
        (np.ones((0, 3)), r"batch 0 has no rows: element \(0, 3\)"),
        (mirrored.PerReplica([1, 2]), r"a PerReplica"),
    ],
)
def test_elements_that_are_no_batches(two, element, message):
    with pytest.raises(DataError, match=message) as caught:
        first_batch(two, [element])
    assert "\nhint: " in str(caught.value)


@pytest.mark.parametrize("size", [0, -1, 2.0, "4", True])
def test_a_batch_size_that_is_none(two, size):
    with pytest.raises(ArgumentError, match=re.escape(f"batch_size={size!r}")):
        two.distribute_dataset(ROWS, size)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (ROWS, {}, "the data set is an array and no batch_size"),
        ((ROWS, ROWS), {}, "a tuple of arrays and no batch_size"),
        ({"x": ROWS}, {}, "a dict of arrays and no batch_size"),
        ("train.csv", {}, "'train.csv' .str. is not a source of data"),
        (None, {}, "None .NoneType. is not a source"),
        (7, {}, "7 .int. is not a source"),
        (ROWS, {"batch_size": 2, "remainder": "keep"}, 'remainder=\'keep\'.*\n.*"pad".*"drop"'),
        (ROWS, {"batch_size": 2, "prefetch": -1}, "prefetch=-1"),
        (ROWS, {"batch_size": 2, "prefetch": 1.5}, "prefetch=1.5"),
        (ROWS, {"batch_size": 2, "shuffle": True, "seed": -1}, "seed=-1"),
        ([ROWS], {"shuffle": True}, "shuffle=True was given with a list"),
        (iter([ROWS]), {"batch_size": 2}, "batch_size=2 was given with a list_iterator"),
    ],
)
def test_arguments_that_do_not_fit(two, source, options, message):
    with pytest.raises(ArgumentError, match=message):
        two.distribute_dataset(source, **options)


def test_a_distributed_dataset_is_not_distributed_again(two):
    dataset = two.distribute_dataset(ROWS, 2)
    with pytest.raises(ArgumentError, match="is distributed already"):
        two.distribute_dataset(dataset)


# --- remainder ------------------------------------------------------------------------------


def test_error_refuses_a_batch_that_does_not_split_evenly(two):
    iterator = iter(two.distribute_dataset(np.arange(7), 4, remainder="error"))
    next(iterator)
    with pytest.raises(DataError, match=r"batch 1 has 3 rows, .* 2 replicas.*\n.*multiple of 2"):
        next(iterator)


def test_error_takes_a_partial_batch_that_does_split_evenly(two):
    assert len(list(two.distribute_dataset(np.arange(6), 4, remainder="error"))) == 2


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([4, 2, 4], "batch 1 has 2 rows, and more batches follow; the first has 4"),
        ([4, 4, 5], "batch 2 has 5 rows, more than the first; the first has 4"),
    ],
)
def test_drop_does_not_drop_from_the_middle(two, sizes, message):
    dataset = two.distribute_dataset([np.ones(size) for size in sizes], remainder="drop")
    with pytest.raises(DataError, match=message):
        list(dataset)


# --- nothing there --------------------------------------------------------------------------


@pytest.mark.parametrize("source", [[], lambda: iter([])])
def test_an_empty_source(two, source):
    dataset = two.distribute_dataset(source)
    for _ in range(2):
        with pytest.raises(DataError, match=r"there is no batch in .*\n.*\nhint: a generator"):
            list(dataset)


def test_empty_arrays_and_arrays_that_are_dropped_whole(two):
    with pytest.raises(DataError, match="there is no batch in arrays of 0 rows"):
        list(two.distribute_dataset(np.ones((0, 3)), 2))
    with pytest.raises(DataError, match=r"drop' leaves the partial batch out.*\n.*\nhint: use a s"):
        list(two.distribute_dataset(ROWS, 8, remainder="drop"))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_generator_is_not_silently_empty_the_second_time(two, prefetch):
    dataset = two.distribute_dataset((np.ones(2) for _ in range(3)), prefetch=prefetch)
    assert len(list(dataset)) == 3
    with pytest.raises(DataError, match=r"from a generator was iterated a second time"):
        list(dataset)


def test_a_function_that_returns_no_iterable(two):
    with pytest.raises(DataError, match="returned NoneType"):
        list(two.distribute_dataset(lambda: None))


# --- per-replica batches --------------------------------------------------------------------


def test_pieces_of_different_kinds(two):
    pieces = [np.ones((2, 3)), np.ones((2, 4))]
    dataset = two.distribute_datasets_from_function(lambda context: pieces)
    with pytest.raises(DataError, match=r"float64\(2, 3\) and float64\(2, 4\)"):
        list(dataset)


def test_a_function_that_returns_arrays(two):
    with pytest.raises(ArgumentError, match="no batch_size was given"):
        two.distribute_datasets_from_function(lambda context: np.ones(3))


def test_the_length_is_known_or_refused(two):
    assert len(two.distribute_dataset(ROWS, 4)) == 2
    assert len(two.distribute_dataset(ROWS, 4, remainder="drop")) == 1
    assert len(two.distribute_dataset([ROWS, ROWS])) == 2
    endless = two.distribute_dataset(lambda: iter([ROWS]))
    assert endless
    with pytest.raises(TypeError, match="the number of batches of global batches from a function"):
        len(endless)
