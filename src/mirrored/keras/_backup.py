"""Backup: a run of ``fit`` that is saved, preempted and resumed, on all workers.

Owns the callback, and what of a ``fit`` is saved: the model, its optimizer and metrics,
how far in which epoch it is, and the random state that the order of the rows came from.
The checkpoint it drives is the user's ``mirrored.checkpoint.Checkpoint``.
"""

from __future__ import annotations

import random
import sys
from typing import Any, final

import keras
import numpy as np

from mirrored._errors import ArgumentError
from mirrored.keras._ownership import strategy_of
from mirrored.keras._source import Source


@final
class _Place:
    """Where ``fit`` is; saved and restored as data sets' positions are."""

    def __init__(self) -> None:
        self.epoch = 0
        self.batch = 0
        self.random: Any = None

    def get_state(self) -> dict[str, Any]:
        """What JSON can hold of it."""
        return {"epoch": self.epoch, "batch": self.batch, "random": self.random}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes where ``get_state`` was called."""
        self.epoch, self.batch = state["epoch"], state["batch"]
        self.random = state["random"]

    def keep_random_state(self) -> None:
        """Remembers what Keras draws the order of rows and batches from."""
        self.random = (np.random.get_state(), random.getstate())

    def set_random_state(self) -> None:
        """Lets the same order be drawn again."""
        of_numpy, of_python = self.random
        np.random.set_state(of_numpy)
        random.setstate(of_python)


@final
class Backup(keras.callbacks.Callback):
    """Saves ``fit`` as it goes on, and resumes it where it was, within the epoch too.

    What keras.callbacks.BackupAndRestore does, on any number of workers and to the exact
    batch: give it to ``fit`` on all of them. A run that was interrupted goes on with the
    batch after the last one saved, in the same order of rows, with the metrics of the
    epoch so far, and ends with the same weights as one that was not. After SIGTERM on one
    worker all save after the same batch and end the program.

    It saves at the end of each epoch, after the other callbacks, and in between after each
    ``every`` batches, as the checkpoint says.

    Data that is no array (a generator, a PyDataset, a loader) is read again up to that
    batch and must yield the same. What it draws from ``random`` and ``numpy.random`` is as
    it was on worker 0, on all workers: their batches must be equal, and there may be more
    workers than before.

    Args:
      checkpoint: a ``mirrored.checkpoint.Checkpoint`` whose state may be ``{}``. Its steps
        are batches.

    >>> import tempfile
    >>> import keras, numpy as np
    >>> import mirrored, mirrored.checkpoint, mirrored.keras
    >>> with mirrored.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
    ...     model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse")
    >>> checkpoint = mirrored.checkpoint.Checkpoint(tempfile.mkdtemp(), {}, every=100)
    >>> backup = mirrored.keras.Backup(checkpoint)
    >>> x = np.ones((12, 1))
    >>> history = model.fit(x, x, batch_size=4, epochs=2, verbose=0, callbacks=[backup])
    >>> checkpoint.step
    6
    """

    def __init__(self, checkpoint: Any) -> None:
        super().__init__()
        if not callable(getattr(checkpoint, "completed", None)):
            raise ArgumentError(
                fact=f"Backup was given {checkpoint!r}.",
                expected="a mirrored.checkpoint.Checkpoint.",
                hint='write Backup(mirrored.checkpoint.Checkpoint("directory", {}, every=100)).',
            )
        self._checkpoint = checkpoint
        self._place = _Place()
        self._metrics: list[Any] = []
        self._metric_values: list[Any] = []
        self._steps_before_epoch = 0
        self._batches = 0
        self._is_one_reading = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Restores the newest checkpoint and lets ``fit`` start in its epoch."""
        model = self.model
        assert model is not None
        if strategy_of(model) is None:
            raise ArgumentError(
                fact=f"Backup was given to fit of model {model.name!r}, which belongs to no "
                "strategy.",
                expected="a model made in strategy.scope().",
                hint="make the model in a scope, or use keras.callbacks.BackupAndRestore.",
            )
        state, place = self._checkpoint.state, self._place
        own = list(model.variables)
        ids = set(map(id, own))
        self._metrics = [metric for metric in model.metrics_variables if id(metric) not in ids]
        state["keras_model"] = own
        state["keras_optimizer"] = list(model.optimizer.variables)
        state["keras_metrics"] = self._metrics
        state["keras_place"] = place
        self._checkpoint.restore()
        # fit sets metrics back when an epoch begins.
        self._metrics = list(model.metrics_variables)
        self._metric_values = [np.asarray(metric.value) for metric in self._metrics]
        self._steps_before_epoch = self._checkpoint.step - place.batch
        if place.epoch:
            # Keras's own way for a callback to say where to start.
            model._initial_epoch = place.epoch  # noqa: SLF001

    def enter(self, source: Source, *, first_here: bool) -> int:
        """Comes to an epoch; returns how many batches of it were trained on before."""
        place = self._place
        # With a fixed number of steps, epochs are stretches of one reading of the data.
        self._is_one_reading = source.steps_per_epoch is not None
        if not first_here:
            if not self._is_one_reading:
                place.keep_random_state()
            return 0
        if place.random is None:
            place.keep_random_state()
        place.set_random_state()
        if self._is_one_reading:
            for _ in range(place.epoch):
                source.read_epoch()
        if place.batch:
            for metric, value in zip(self._metrics, self._metric_values, strict=True):
                metric.assign(value)
        return place.batch

    def batches_until_save(self, done: int) -> int:
        """How many batches may run before the next save; at least one."""
        every = self._checkpoint.every
        step = self._steps_before_epoch + done
        return every - step % every if every else sys.maxsize

    def after_batches(self, done: int, is_last: bool) -> None:
        """Notes how many batches of the epoch are done; saves when that is due."""
        self._batches = self._place.batch = done
        if not is_last:
            self._checkpoint.completed(self._steps_before_epoch + done)

    def leave(self, epoch: int) -> None:
        """Saves a completed epoch, after what other callbacks did at its end."""
        self._place.epoch, self._place.batch = epoch + 1, 0
        if not self._is_one_reading:
            self._place.keep_random_state()
        self._steps_before_epoch += self._batches
        self._checkpoint.completed(self._steps_before_epoch, save=True)


def backup_among(callbacks: Any) -> Backup | None:
    """Finds the Backup in a list of callbacks, if there is one."""
    return next((one for one in callbacks.callbacks if isinstance(one, Backup)), None)
