"""Law 3 across a restart: a resumed run sees neither a repeated nor a skipped batch."""

from __future__ import annotations

import json

import grain
import numpy as np
import pytest
from conftest import make_strategy
from hypothesis import given, settings
from hypothesis import strategies as st

from mirrored import ArgumentError, DataError


def rows_of(batch):
    return np.concatenate([np.asarray(part) for part in batch.components()]).tolist()


def stored(state):
    """A state as it comes back from a checkpoint."""
    return json.loads(json.dumps(state))


def generator_function():
    for number in range(7):
        yield np.arange(4) + 10 * number


def grain_map_dataset():
    return grain.MapDataset.source(np.arange(26)).shuffle(seed=3).batch(4)


def grain_iter_dataset():
    examples = grain.MapDataset.source(np.arange(52)).shuffle(seed=3).to_iter_dataset()
    return examples.filter(lambda number: number % 2 == 0).batch(4)


def grain_loader():
    return grain.DataLoader(
        data_source=np.arange(26),
        sampler=grain.samplers.IndexSampler(26, shuffle=True, seed=1, num_epochs=1),
        operations=[grain.transforms.Batch(4)],
        worker_count=0,
    )


# A name, how the data set is made, and how many batches it has.
KINDS = {
    "arrays": (lambda s, **o: s.distribute_dataset(np.arange(26), 4, **o), 7),
    "shuffled": (lambda s, **o: s.distribute_dataset(np.arange(26), 4, shuffle=True, **o), 7),
    "list": (lambda s, **o: s.distribute_dataset(list(generator_function()), **o), 7),
    "function": (lambda s, **o: s.distribute_dataset(generator_function, **o), 7),
    "generator": (lambda s, **o: s.distribute_dataset(generator_function(), **o), 7),
    "dropping": (
        lambda s, **o: s.distribute_dataset(grain_map_dataset(), remainder="drop", **o),
        6,
    ),
    "map_dataset": (lambda s, **o: s.distribute_dataset(grain_map_dataset(), **o), 7),
    "iter_dataset": (lambda s, **o: s.distribute_dataset(grain_iter_dataset(), **o), 7),
    "grain_iterator": (lambda s, **o: s.distribute_dataset(iter(grain_map_dataset()), **o), 7),
    "grain_loader": (lambda s, **o: s.distribute_dataset(grain_loader(), **o), 7),
    "pieces": (
        lambda s, **o: s.distribute_datasets_from_function(
            lambda c: list(generator_function()), **o
        ),
        4,
    ),
    "grain_pieces": (
        lambda s, **o: s.distribute_datasets_from_function(lambda c: grain_map_dataset(), **o),
        4,
    ),
}


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_iterator_goes_on_where_it_was(two, kind, prefetch):
    make, count = KINDS[kind]
    whole = [rows_of(batch) for batch in make(two, prefetch=prefetch)]
    assert len(whole) == count
    for taken in range(count + 1):
        iterator = iter(make(two, prefetch=prefetch))
        assert [rows_of(next(iterator)) for _ in range(taken)] == whole[:taken]
        state = stored(iterator.get_state())
        iterator.close()
        assert (state["epoch"], state["batch"]) == (0, taken)
        resumed = iter(make(two, prefetch=prefetch))
        resumed.set_state(state)
        assert [rows_of(batch) for batch in resumed] == whole[taken:]


@pytest.mark.parametrize("kind", ["shuffled", "list", "map_dataset", "pieces"])
def test_the_same_iterator_goes_back(two, kind):
    iterator = iter(KINDS[kind][0](two))
    next(iterator)
    state = iterator.get_state()
    rest = [rows_of(batch) for batch in iterator]
    for _ in range(2):
        iterator.set_state(state)
        assert [rows_of(batch) for batch in iterator] == rest


@settings(deadline=None, max_examples=40)
@given(
    count=st.integers(1, 30),
    size=st.integers(1, 9),
    stop=st.integers(0, 12),
    replicas=st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4])),
    prefetch=st.sampled_from([0, 2]),
)
def test_a_run_resumed_on_other_replicas_sees_every_batch_once(
    count, size, stop, replicas, prefetch
):
    """Two shuffled epochs, stopped after any number of batches, in a loop as users write it."""

    def make(replica_count):
        return make_strategy(replica_count).distribute_dataset(
            np.arange(count), size, shuffle=True, seed=7, prefetch=prefetch
        )

    def train(dataset, first_epoch, at_most):
        seen = []
        for epoch in range(first_epoch, 2):
            for batch in dataset:
                seen.append(rows_of(batch))
                if len(seen) == at_most:
                    return seen, epoch
        return seen, 2

    whole, _ = train(make(replicas[0]), 0, None)
    before, dataset = [], make(replicas[0])
    if stop:
        before, _ = train(dataset, 0, stop)
    state = stored(dataset.get_state())
    resumed = make(replicas[1])
    resumed.set_state(state)
    after, _ = train(resumed, state["epoch"], None)
    assert before + after == whole


def test_a_position_between_epochs(two):
    make, count = KINDS["shuffled"]
    dataset = make(two)
    epochs = [[rows_of(batch) for batch in dataset] for _ in range(3)]
    dataset = make(two)
    assert len(list(dataset)) == count
    state = stored(dataset.get_state())
    assert (state["epoch"], state["batch"]) == (1, 0)
    resumed = make(two)
    resumed.set_state(state)
    assert [[rows_of(batch) for batch in resumed] for _ in range(2)] == epochs[1:]


def test_after_break_the_next_loop_is_the_next_epoch(two):
    dataset = KINDS["shuffled"][0](two)
    epochs = [[rows_of(batch) for batch in dataset] for _ in range(2)]
    dataset = KINDS["shuffled"][0](two)
    for _ in dataset:
        break
    assert dataset.get_state()["batch"] == 1
    assert [rows_of(batch) for batch in dataset] == epochs[1]


def test_batches_read_ahead_do_not_count(two):
    iterator = iter(KINDS["map_dataset"][0](two, prefetch=5))
    next(iterator)
    assert iterator.get_state()["source"]["iterator"] == {"state": {"next_index": 1}}


# --- positions that do not fit --------------------------------------------------------------


def test_a_position_of_other_data(two):
    state = two.distribute_dataset(np.arange(26), 4, shuffle=True, seed=1).get_state()
    for options, message in [
        ({"seed": 2}, "seed 1 .now 2."),
        ({"batch_size": 8}, "batch_size 4 .now 8."),
        ({"shuffle": False}, "shuffle True .now False., seed 1 .now None."),
    ]:
        arguments = {"batch_size": 4, "shuffle": True, "seed": 1, **options}
        dataset = two.distribute_dataset(np.arange(26), **arguments)
        with pytest.raises(DataError, match=message):
            dataset.set_state(state)
        with pytest.raises(DataError, match=message):
            iter(dataset).set_state(state)


def test_pieces_are_not_resumed_on_another_number_of_replicas(two):
    make, _ = KINDS["pieces"]
    with pytest.raises(DataError, match=r"batches_per_step 2 .now 4."):
        make(make_strategy(4)).set_state(make(two).get_state())


def test_a_source_in_another_order_is_noticed(two):
    def shuffled_anew():
        order = np.random.default_rng().permutation(640)
        return [order[start : start + 64] for start in range(0, 640, 64)]

    iterator = iter(two.distribute_dataset(shuffled_anew()))
    for _ in range(3):
        next(iterator)
    state = stored(iterator.get_state())
    resumed = iter(two.distribute_dataset(shuffled_anew()))
    resumed.set_state(state)
    with pytest.raises(DataError, match=r"other data than before in batch 2,.*\n.*\nhint: give"):
        next(resumed)
    # The way out that the hint names.
    state["source"] = {}
    resumed.set_state(state)
    assert len(list(resumed)) == 7


def test_random_augmentation_is_not_taken_for_another_order(two):
    generator = np.random.default_rng()

    def augmented():
        for number in range(6):
            yield generator.normal(size=(8, 5)), np.arange(8) + number

    iterator = iter(two.distribute_dataset(augmented))
    next(iterator)
    state = iterator.get_state()
    resumed = iter(two.distribute_dataset(augmented))
    resumed.set_state(state)
    assert [int(labels.stacked[0, 0]) for _, labels in resumed] == [1, 2, 3, 4, 5]


def test_a_source_that_has_become_shorter(two):
    batches = list(generator_function())
    iterator = iter(two.distribute_dataset(batches))
    for _ in range(5):
        next(iterator)
    resumed = iter(two.distribute_dataset(batches[:3]))
    resumed.set_state(iterator.get_state())
    with pytest.raises(DataError, match=r"after 5 batches, but .* ended after 3"):
        next(resumed)


def test_an_iterator_that_has_begun_cannot_go_back(two):
    iterator = iter(two.distribute_dataset(generator_function()))
    state = iterator.get_state()
    next(iterator)
    iterator.set_state(state)
    with pytest.raises(DataError, match="iterated a second time"):
        next(iterator)


def test_a_state_that_is_none(two):
    with pytest.raises(ArgumentError, match="set_state was given 3"):
        two.distribute_dataset(np.arange(4), 2).set_state(3)
