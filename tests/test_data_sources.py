"""Sources people have: Grain, tf.data, torch and Keras loaders, and batches for one replica."""

from __future__ import annotations

import grain
import jax
import numpy as np
import pytest
from conftest import make_strategy

import mirrored
from mirrored import ArgumentError


def rows_of(batch):
    return np.concatenate([np.asarray(part) for part in batch.components()]).tolist()


def parts(value):
    return [np.asarray(part).tolist() for part in value.components()]


# --- Grain ----------------------------------------------------------------------------------


def test_grain_datasets_and_loaders(two):
    examples = grain.MapDataset.source([{"x": np.full(2, n), "y": n} for n in range(10)])
    loader = grain.DataLoader(
        data_source=[{"x": np.full(2, n), "y": n} for n in range(10)],
        sampler=grain.samplers.SequentialSampler(10),
        operations=[grain.transforms.Batch(4)],
        worker_count=0,
    )
    for source in (examples.batch(4), examples.to_iter_dataset().batch(4), loader):
        dataset = two.distribute_dataset(source)
        for _ in range(2):
            batches = list(dataset)
            assert [parts(batch["y"]) for batch in batches] == [
                [[0, 1], [2, 3]],
                [[4, 5], [6, 7]],
                [[8], [9]],
            ]
            assert parts(batches[-1]["x"]) == [[[8, 8]], [[9, 9]]]
    assert len(two.distribute_dataset(examples.batch(4))) == 3


def test_grain_without_end(two):
    endless = grain.MapDataset.source(np.arange(6)).batch(4, drop_remainder=True).repeat()
    dataset = two.distribute_dataset(endless)
    with pytest.raises(TypeError, match="is not known"):
        len(dataset)
    first = [rows_of(batch) for batch, _ in zip(dataset, range(3))]
    assert first == [[0, 1, 2, 3]] * 3


def test_a_grain_dataset_of_examples(two):
    examples = grain.MapDataset.range(10)
    with pytest.raises(ArgumentError, match=r"RangeMapDataset.*\n.*\nhint: .*dataset.batch.4."):
        two.distribute_dataset(examples, 4)
    with pytest.raises(mirrored.DataError, match=r"single int64.*examples.*\n.*\nhint: batch in"):
        list(two.distribute_dataset(examples))


# --- torch ----------------------------------------------------------------------------------


class Tensor:
    """What a torch tensor looks like from outside: NumPy must ask it to let go first."""

    # No NumPy type either.
    dtype = object()

    def __init__(self, array, attached=True):
        self._array, self._attached = array, attached

    def detach(self):
        return Tensor(self._array, attached=False)

    def cpu(self):
        return self

    def __array__(self, *args, **kwargs):
        if self._attached:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad.")
        return self._array


def test_tensors_that_take_part_in_autograd(two):
    (batch,) = two.distribute_dataset([(Tensor(np.arange(4)), Tensor(np.ones((4, 2))))])
    assert parts(batch[0]) == [[0, 1], [2, 3]]
    (batch,) = two.distribute_dataset(Tensor(np.arange(4)), 4)
    assert parts(batch) == [[0, 1], [2, 3]]


def test_torch_data_loader(two):
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.arange(10), torch.ones(10, 3))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    dataset = two.distribute_dataset(loader)
    assert len(dataset) == 3
    for _ in range(2):
        batches = list(dataset)
        assert [parts(index) for index, _ in batches] == [
            [[0, 1], [2, 3]],
            [[4, 5], [6, 7]],
            [[8], [9]],
        ]
        assert batches[0][1].stacked.dtype == np.float32
    iterator = iter(dataset)
    next(iterator)
    resumed = iter(two.distribute_dataset(loader))
    resumed.set_state(iterator.get_state())
    assert [rows_of(index) for index, _ in resumed] == [[4, 5, 6, 7], [8, 9]]


def test_torch_shuffles_anew_unless_told(two):
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.arange(640))
    loader = torch.utils.data.DataLoader(data, batch_size=64, shuffle=True)
    dataset = two.distribute_dataset(loader)
    first, second = ([row for (batch,) in dataset for row in rows_of(batch)] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(640))
    assert first != second
    iterator = iter(dataset)
    next(iterator)
    dataset.set_state(iterator.get_state())
    with pytest.raises(mirrored.DataError, match="other data than before"):
        list(dataset)


def test_torch_types(two):
    torch = pytest.importorskip("torch")
    weights = torch.ones(4, requires_grad=True)
    half = torch.arange(4, dtype=torch.bfloat16)
    ((one, other),) = two.distribute_dataset([(weights, half)])
    assert one.stacked.dtype == np.float32
    assert other.stacked.dtype == jax.numpy.bfloat16
    assert parts(other) == [[0, 1], [2, 3]]
    with pytest.raises(ArgumentError, match="the data set is an array and no batch_size"):
        two.distribute_dataset(torch.ones(4))


# --- tf.data --------------------------------------------------------------------------------


class NumpyIterable:
    """What tf.data looks like from outside; its own iteration gives eager tensors."""

    def __iter__(self):
        raise AssertionError("slow")

    def as_numpy_iterator(self):
        return iter([np.arange(4), np.arange(4, 7)])


def test_as_numpy_iterator_is_preferred(two):
    dataset = two.distribute_dataset(NumpyIterable())
    for _ in range(2):
        assert [rows_of(batch) for batch in dataset] == [[0, 1, 2, 3], [4, 5, 6]]


def test_tf_data(two):
    tf = pytest.importorskip("tensorflow")
    examples = tf.data.Dataset.range(10)
    dataset = two.distribute_dataset(examples.batch(4).map(lambda x: {"x": x}))
    assert len(dataset) == 3
    for _ in range(2):
        assert [parts(batch["x"]) for batch in dataset] == [
            [[0, 1], [2, 3]],
            [[4, 5], [6, 7]],
            [[8], [9]],
        ]
    iterator = iter(dataset)
    next(iterator)
    dataset.set_state(iterator.get_state())
    assert [rows_of(batch["x"]) for batch in dataset] == [[4, 5, 6, 7], [8, 9]]
    with pytest.raises(TypeError, match="is not known"):
        len(two.distribute_dataset(examples.batch(4).repeat()))
    with pytest.raises(mirrored.DataError, match="examples, not batches"):
        list(two.distribute_dataset(examples))
    with pytest.raises(ArgumentError, match=r"dataset.batch.4."):
        two.distribute_dataset(examples, 4)
    words = tf.data.Dataset.from_tensor_slices(["a", "b"]).batch(2)
    with pytest.raises(mirrored.DataError, match="array of object"):
        list(two.distribute_dataset(words))


# --- Keras and plain Python -----------------------------------------------------------------


class Numbers:
    """What a keras.utils.PyDataset looks like from outside."""

    def __init__(self):
        self.epochs = 0

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return np.arange(4) + 10 * index + 100 * self.epochs

    def on_epoch_end(self):
        self.epochs += 1


def test_keras_py_dataset(two):
    dataset = two.distribute_dataset(Numbers())
    assert len(dataset) == 3
    assert [rows_of(batch)[0] for batch in dataset] == [0, 10, 20]
    assert [rows_of(batch)[0] for batch in dataset] == [100, 110, 120]


def test_a_sequence_without_iter_ends_at_its_length(two):
    class Batches:
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return np.arange(2) + index

    assert [rows_of(batch) for batch in two.distribute_dataset(Batches())] == [[0, 1], [1, 2]]


def test_a_function_makes_a_new_generator_each_epoch(two):
    dataset = two.distribute_dataset(lambda: (np.full(2, n) for n in range(2)))
    for _ in range(2):
        assert [rows_of(batch) for batch in dataset] == [[0, 0], [1, 1]]


# --- batches for one replica ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("replicas", "count", "expected"),
    [
        (2, 4, [[[0], [1, 1]], [[2], [3, 3]]]),
        (2, 3, [[[0], [1, 1]], [[2], []]]),
        (4, 5, [[[0], [1, 1], [2], [3, 3]], [[4], [], [], []]]),
        (1, 2, [[[0]], [[1, 1]]]),
    ],
)
def test_consecutive_batches_go_to_consecutive_replicas(replicas, count, expected):
    strategy = make_strategy(replicas)
    contexts = []

    def dataset_fn(context):
        contexts.append(context)
        return [np.full(1 + number % 2, number) for number in range(count)]

    dataset = strategy.distribute_datasets_from_function(dataset_fn)
    assert len(dataset) == -(-count // replicas)
    for _ in range(2):
        assert [parts(batch) for batch in dataset] == expected
    (context,) = contexts
    assert repr(context) == (
        f"InputContext(num_input_pipelines=1, input_pipeline_id=0, num_replicas_in_sync={replicas})"
    )


def test_a_generator_function_is_called_for_each_epoch(two):
    def dataset_fn(context):
        for number in range(3):
            yield np.full(2, number)

    dataset = two.distribute_datasets_from_function(dataset_fn)
    for _ in range(2):
        assert [parts(batch) for batch in dataset] == [[[0, 0], [1, 1]], [[2, 2], []]]


def test_equal_pieces_need_no_padding_and_nests_share_their_counts(two):
    pieces = [{"a": np.ones((2, 3)), "b": np.arange(2)} for _ in range(4)]
    dataset = two.distribute_datasets_from_function(lambda context: pieces)
    assert all(batch["a"].row_counts is None for batch in dataset)
    assert dataset.global_batch_size == 4
    pieces[3] = {"a": np.ones((1, 3)), "b": np.arange(1)}
    *_, last = dataset
    assert last["a"].row_counts is last["b"].row_counts
    assert last["a"].row_counts.tolist() == [2, 1]


# --- what a data set says of itself ---------------------------------------------------------


def test_sizes_and_specs(two):
    dataset = two.distribute_dataset([(np.ones((5, 3)), np.arange(5))] * 2)
    assert dataset.global_batch_size is None
    assert dataset.element_spec == (
        jax.ShapeDtypeStruct((3, 3), np.float32),
        jax.ShapeDtypeStruct((3,), np.int32),
    )
    assert dataset.global_batch_size == 5
    assert dataset.num_replicas_in_sync == 2
    once = two.distribute_dataset(iter([np.arange(2)]))
    with pytest.raises(mirrored.DataError, match="not known before its first batch"):
        _ = once.element_spec
    next(iter(once))
    assert once.element_spec == jax.ShapeDtypeStruct((1,), np.int32)


def test_who_reads_what():
    four = make_strategy(4)
    text = four.distribute_dataset(np.arange(9), 6, remainder="drop", shuffle=True).explain_input()
    assert text.splitlines() == [
        "arrays of 9 rows, shuffled with seed 0, batches of 6; remainder='drop'",
        "process 0 (this one) reads every batch and keeps",
        "  replica 0 on cpu:0: rows 0 to 1 of 6",
        "  replica 1 on cpu:1: rows 2 to 3 of 6",
        "  replica 2 on cpu:2: rows 4 to 5 of 6",
        "  replica 3 on cpu:3: no row of 6",
    ]
    text = four.distribute_dataset([np.arange(9)]).explain_input()
    assert "replica 1 on cpu:1: piece 2 of 4, ceil(n/4) of n rows each" in text
    text = four.distribute_datasets_from_function(lambda context: [np.arange(9)]).explain_input()
    assert "process 0 (this one) reads its own pipeline, batch by batch for" in text
    assert text.endswith("replica 3 on cpu:3")


def test_what_a_dataset_and_its_iterator_print(two):
    dataset = two.distribute_dataset(grain.MapDataset.range(4).batch(2))
    assert repr(dataset) == (
        "<DistributedDataset of global batches from a grain BatchMapDataset, remainder='pad', on "
        "MirroredStrategy (2 devices: cpu:0, cpu:1)>"
    )
    iterator = iter(dataset)
    next(iterator)
    assert repr(iterator) == (
        "<DistributedIterator in epoch 0 after 1 batches of global batches from a grain "
        "BatchMapDataset>"
    )
