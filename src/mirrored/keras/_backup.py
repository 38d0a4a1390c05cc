"""Backup: a run of ``fit`` that is saved, preempted and resumed, on all workers.

Owns the callback; the checkpoint it drives is the user's ``mirrored.checkpoint.Checkpoint``.
"""

from __future__ import annotations

from typing import Any, final

import keras

from mirrored._errors import ArgumentError

_EPOCH = "keras_epoch"


@final
class Backup(keras.callbacks.Callback):
    """Saves the model and its optimizer after each epoch, and resumes ``fit`` from there.

    What keras.callbacks.BackupAndRestore does, on any number of workers: give it to
    ``fit`` on all of them. After SIGTERM on one worker all save at the end of the same
    epoch and end the program.

    Args:
      checkpoint: a ``mirrored.checkpoint.Checkpoint`` whose state may be ``{}``; made
        with ``every=1`` it saves each epoch. Its steps are epochs.
    """

    def __init__(self, checkpoint: Any) -> None:
        super().__init__()
        if not callable(getattr(checkpoint, "completed", None)):
            raise ArgumentError(
                fact=f"Backup was given {checkpoint!r}.",
                expected="a mirrored.checkpoint.Checkpoint.",
                hint='write Backup(mirrored.checkpoint.Checkpoint("directory", {}, every=1)).',
            )
        self._checkpoint = checkpoint

    def on_train_begin(self, logs: Any = None) -> None:
        """Restores the newest checkpoint and lets ``fit`` start after its epoch."""
        model = self.model
        assert model is not None
        state = self._checkpoint.state
        state["keras_model"] = list(model.variables)
        state["keras_optimizer"] = list(model.optimizer.variables)
        state[_EPOCH] = 0
        self._checkpoint.restore()
        if state[_EPOCH]:
            # Keras's own way for a callback to say where to start.
            model._initial_epoch = state[_EPOCH]  # noqa: SLF001

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Notes a completed epoch, which saves it when that is due."""
        self._checkpoint.state[_EPOCH] = epoch + 1
        self._checkpoint.completed(epoch + 1)
