"""What callbacks may do at a batch, and so how many steps may run between two calls.

Owns the judgement only: Keras's own CallbackList makes the calls.
"""

from __future__ import annotations

import enum
from typing import Any

import keras

from mirrored._workers import Workers
from mirrored.keras import _private


@enum.unique
class BatchCalls(enum.Enum):
    """What the callbacks of a run want of each batch.

    NO_CALLS: none has a hook for batches. NOTHING: some have, and do not mind how many
    batches went by. LOGS: a call for each batch, with its logs. EVERYTHING: that, and the
    model as it is after this batch.
    """

    NO_CALLS = "no calls"
    NOTHING = "nothing"
    LOGS = "logs"
    EVERYTHING = "everything"


_HOOKS = {
    "train": ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end"),
    "test": ("on_test_batch_begin", "on_test_batch_end"),
    "predict": ("on_predict_batch_begin", "on_predict_batch_end"),
}


def common_calls(own: BatchCalls, workers: Workers | None) -> BatchCalls:
    """Says what the callbacks of all workers want: all must run the same programs.

    A callback that reads the model after each batch, on one worker only, lets all of them
    run one step at a time.
    """
    if workers is None:
        return own
    word = workers.turn("keras/calls")
    workers.tell(f"{word}/{workers.process_id}", own.value)
    if workers.process_id == 0:
        others = [
            workers.hear(f"{word}/{number}", number) for number in range(workers.process_count)
        ]
        everything = BatchCalls.EVERYTHING.value
        workers.tell(word, everything if everything in others else "")
    return BatchCalls(workers.hear(word, 0) or own.value)


def batch_calls(callbacks: Any, kind: str) -> BatchCalls:
    """Judges a CallbackList: the most demanding of its callbacks decides."""
    wants = [_wants(callback, kind) for callback in callbacks.callbacks]
    if type(callbacks) is not keras.callbacks.CallbackList:
        wants.append(_wants_of_list(callbacks, kind))
    for level in (BatchCalls.EVERYTHING, BatchCalls.LOGS, BatchCalls.NOTHING):
        if level in wants:
            return level
    return BatchCalls.NO_CALLS


def _wants_of_list(callbacks: Any, kind: str) -> BatchCalls:
    own = all(_is_from(callbacks, hook, keras.callbacks.CallbackList) for hook in _HOOKS[kind])
    return BatchCalls.NO_CALLS if own else BatchCalls.EVERYTHING


def _wants(callback: Any, kind: str) -> BatchCalls:
    hooked = [
        hook for hook in _HOOKS[kind] if not _is_from(callback, hook, keras.callbacks.Callback)
    ]
    if not hooked:
        return BatchCalls.NO_CALLS
    for known, judge in _KNOWN.items():
        if isinstance(callback, known) and all(_is_from(callback, hook, known) for hook in hooked):
            return judge(callback)
    # Keras's own word for "only reads the logs it is given".
    if getattr(callback, "async_safe", False):
        return BatchCalls.LOGS
    return BatchCalls.EVERYTHING


def _is_from(callback: Any, hook: str, owner: type) -> bool:
    """Says whether a hook is the one ``owner`` has, not overridden below it."""
    method = getattr(callback, hook)
    return getattr(method, "__func__", None) is getattr(owner, hook)


def _saver(callback: Any) -> BatchCalls:
    return BatchCalls.NOTHING if callback.save_freq == "epoch" else BatchCalls.EVERYTHING


def _tensorboard(callback: Any) -> BatchCalls:
    # A profile and a stopwatch look at single steps.
    return BatchCalls.EVERYTHING if _private.profiles_batches(callback) else BatchCalls.LOGS


_KNOWN = {
    keras.callbacks.ProgbarLogger: lambda _: BatchCalls.NOTHING,
    keras.callbacks.ModelCheckpoint: _saver,
    keras.callbacks.BackupAndRestore: _saver,
    keras.callbacks.TensorBoard: _tensorboard,
}
# New in Keras 3.13.
_orbax_checkpoint = getattr(keras.callbacks, "OrbaxCheckpoint", None)
if _orbax_checkpoint is not None:
    _KNOWN[_orbax_checkpoint] = _saver
