"""A fit that was interrupted goes on with the next batch and ends with the same bits."""

import jax
import keras
import numpy as np
import pytest
from conftest import make_strategy
from jax.experimental.compilation_cache import compilation_cache

import mirrored
import mirrored.keras
from mirrored.checkpoint import Checkpoint

ROWS = 90
X = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("f4")
Y = np.random.default_rng(1).integers(0, 3, ROWS)


class InterruptionError(Exception):
    """Stands for whatever ends a run between two batches."""


class Sequence(keras.utils.PyDataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        rows = slice(8 * index, 8 * index + 8)
        return X[rows], Y[rows]


def endless():
    draw = np.random.default_rng(5)
    while True:
        order = draw.permutation(ROWS)
        for start in range(0, 80, 8):
            yield X[order[start : start + 8]], Y[order[start : start + 8]]


ARRAYS = {"x": X, "y": Y, "batch_size": 8}
# For each: the data, after how many batches to save, and the batches that may be saved last
# when the run is interrupted in its second epoch.
CASES = {
    "arrays": (ARRAYS, 5, (15, 20)),
    "epochs only": (ARRAYS, 0, (12,)),
    "sequence": ({"x": Sequence}, 5, (15, 20)),
    "generator": ({"x": endless, "steps_per_epoch": 12, "shuffle": False}, 5, (15, 20)),
}


def train(directory, data, every, *, seed, stop_at=None):
    """Runs fit, maybe until so many batches are done; returns weights, optimizer, logs."""
    keras.utils.set_random_seed(0)
    with make_strategy(2).scope():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(8, activation="relu"),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.3),
                keras.layers.Dense(3),
            ]
        )
        model.compile(
            optimizer=keras.optimizers.Adam(0.01),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    # What this process would draw the order of the rows from; restored as well.
    keras.utils.set_random_seed(seed)
    arguments = dict(data)
    if callable(arguments["x"]):
        arguments["x"] = arguments["x"]()
    checkpoint = Checkpoint(directory, {}, every=every)
    backup = mirrored.keras.Backup(checkpoint)
    noted = backup.after_batches

    def after_batches(done, is_last):
        noted(done, is_last)
        if stop_at is not None and checkpoint.step >= stop_at:
            raise InterruptionError

    backup.after_batches = after_batches
    try:
        history = model.fit(epochs=3, verbose=0, callbacks=[backup], **arguments).history
    except InterruptionError:
        checkpoint.wait()
        return None
    bits = [np.asarray(v.value).tobytes() for v in [*model.variables, *model.optimizer.variables]]
    # A fit after one that was resumed starts with its own first epoch.
    assert model.fit(X[:8], Y[:8], verbose=0).epoch == [0]
    return bits, {name: values[-1:] for name, values in history.items()}, checkpoint.step


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
    """The same model is made many times: each but the first finds its programs compiled."""
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = [getattr(jax.config, name) for name in names]
    for name, value in zip(names, (str(tmp_path_factory.mktemp("compiled")), 0, -1)):
        jax.config.update(name, value)
    yield
    for name, value in zip(names, before):
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Runs that were not interrupted, one for each kind of data."""
    known = {}

    def of(kind):
        data, _, _ = CASES[kind]
        if id(data) not in known:
            known[id(data)] = train(tmp_path_factory.mktemp("whole"), data, 0, seed=1)
        return known[id(data)]

    return of


@pytest.mark.parametrize("kind", list(CASES))
def test_goes_on_with_the_next_batch(tmp_path, whole, kind):
    data, every, last_saved = CASES[kind]
    assert whole(kind)[-1] == 36
    assert train(tmp_path, data, every, seed=1, stop_at=18) is None
    assert int(max(tmp_path.iterdir()).name[-10:]) in last_saved
    assert train(tmp_path, data, every, seed=2) == whole(kind)


def test_a_model_of_no_strategy_is_refused(tmp_path):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    backup = mirrored.keras.Backup(Checkpoint(tmp_path, {}))
    with pytest.raises(mirrored.ArgumentError, match="belongs to no strategy"):
        model.fit(X, np.ones((ROWS, 3)), verbose=0, callbacks=[backup])
