"""``fit``, ``evaluate`` and ``predict`` of a model on a strategy.

Owns what happens around the passes, with Keras's meaning of every argument: epochs,
validation, callbacks, the state of metrics, what is returned.
"""

from __future__ import annotations

from typing import Any

import keras

from mirrored._parameter_server import ParameterServerStrategy
from mirrored.keras import _private, _scope
from mirrored.keras._backup import backup_among
from mirrored.keras._interrupts import Interrupts
from mirrored.keras._ownership import require_whole
from mirrored.keras._pass import Pass
from mirrored.keras._served_data import WorkerData
from mirrored.keras._served_pass import ServedPass
from mirrored.keras._served_pass import prepare as prepare_served
from mirrored.keras._source import Source


def fit(
    model: Any,
    strategy: Any,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: Any = "auto",
    callbacks: Any = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    shuffle: Any = True,
    class_weight: Any = None,
    sample_weight: Any = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: Any = 1,
) -> Any:
    """Trains; see ``keras.Model.fit``."""
    _private.require_compiled(model, "fit")
    _private.warn_if_trainable_changed(model)
    epochs = _private.most_epochs(epochs)
    _private.keep_evaluation(model, None)
    if validation_split and validation_data is None:
        x, y, sample_weight, validation_data = _private.split_validation(
            (x, y, sample_weight), validation_split
        )
    validation = None if validation_data is None else _private.unpack(validation_data)
    source: Any = None
    if callable(x) and is_served(strategy):
        source = WorkerData(x, steps_per_epoch, strategy.worker_count)
    else:
        source = Source(
            x=x,
            y=y,
            sample_weight=sample_weight,
            batch_size=batch_size,
            steps_per_epoch=steps_per_epoch,
            shuffle=shuffle,
            class_weight=class_weight,
            steps_per_execution=model.steps_per_execution,
        )
    prepare(model, strategy, iterator=source)
    source.reset()
    callbacks = _callback_list(model, callbacks, verbose, epochs, source, add_history=True)
    interrupts = Interrupts()
    epoch_pass = make_pass(model, "train", strategy, source, callbacks, interrupts)
    backup = backup_among(callbacks)
    model.stop_training = False
    finished = False
    epoch_logs: dict[str, Any] = {}
    with interrupts.watched():
        callbacks.on_train_begin()
        try:
            first = _private.first_epoch(model, initial_epoch)
            for epoch in range(first, epochs):
                model.reset_metrics()
                callbacks.on_epoch_begin(epoch)
                skipped = backup.enter(source, first_here=epoch == first) if backup else 0
                epoch_logs = dict(epoch_pass.run(backup, skipped))
                if validation is not None and _private.should_evaluate(
                    model, epoch, validation_freq
                ):
                    epoch_logs |= _validate(
                        model,
                        validation,
                        validation_batch_size or batch_size,
                        validation_steps,
                        callbacks,
                    )
                callbacks.on_epoch_end(epoch, epoch_logs)
                if backup is not None:
                    backup.leave(epoch)
                if model.stop_training:
                    break
            finished = True
        finally:
            if isinstance(model.optimizer, keras.optimizers.Optimizer) and epochs > 0:
                model.optimizer.finalize_variable_values(model.trainable_weights)
            _private.keep_evaluation(model, None)
            if finished:
                callbacks.on_train_end(logs=epoch_logs)
    return model.history


def _validate(
    model: Any,
    data: tuple[Any, Any, Any],
    batch_size: int | None,
    steps: int | None,
    callbacks: Any,
) -> dict[str, Any]:
    x, y, sample_weight = data
    if _private.cached_evaluation(model) is None:
        source = Source(
            x=x,
            y=y,
            sample_weight=sample_weight,
            batch_size=batch_size,
            steps_per_execution=model.steps_per_execution,
            steps_per_epoch=steps,
            shuffle=False,
        )
        _private.keep_evaluation(model, source)
    # Through the model, whose class may have an evaluate of its own.
    logs = model.evaluate(
        x=x,
        y=y,
        sample_weight=sample_weight,
        batch_size=batch_size,
        steps=steps,
        callbacks=callbacks,
        return_dict=True,
        _use_cached_eval_dataset=True,
    )
    return {f"val_{name}": value for name, value in logs.items()}


def evaluate(
    model: Any,
    strategy: Any,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    verbose: Any = "auto",
    sample_weight: Any = None,
    steps: int | None = None,
    callbacks: Any = None,
    return_dict: bool = False,
    _use_cached_eval_dataset: bool = False,
) -> Any:
    """Evaluates; see ``keras.Model.evaluate``."""
    _private.require_compiled(model, "evaluate")
    source = _private.cached_evaluation(model) if _use_cached_eval_dataset else None
    if source is None:
        source = Source(
            x=x,
            y=y,
            sample_weight=sample_weight,
            batch_size=batch_size,
            steps_per_epoch=steps,
            shuffle=False,
            steps_per_execution=model.steps_per_execution,
        )
    prepare(model, strategy, iterator=source)
    source.reset()
    callbacks = _callback_list(model, callbacks, verbose, 1, source)
    interrupts = Interrupts()
    model.stop_evaluating = False
    with interrupts.watched():
        callbacks.on_test_begin()
        model.reset_metrics()
        logs = make_pass(model, "test", strategy, source, callbacks, interrupts).run()
        logs = _private.pythonify_logs(logs)
        callbacks.on_test_end(logs)
    return logs if return_dict else _private.in_metric_order(model, logs)


def predict(
    model: Any,
    strategy: Any,
    x: Any,
    batch_size: int | None = None,
    verbose: Any = "auto",
    steps: int | None = None,
    callbacks: Any = None,
) -> Any:
    """Predicts, one row for each row of the data; see ``keras.Model.predict``."""
    source = Source(
        x=x,
        batch_size=batch_size,
        steps_per_epoch=steps,
        shuffle=False,
        steps_per_execution=model.steps_per_execution,
    )
    if not _private.is_built(model):
        with _scope.variables_of(strategy):
            for _, _, iterator in source:
                inputs, _, _ = _private.unpack(next(iterator))
                _private.build_by_call(model, inputs)
                break
        source.reset()
    require_whole(model, strategy)
    callbacks = _callback_list(model, callbacks, verbose, 1, source)
    interrupts = Interrupts()
    model.stop_predicting = False
    with interrupts.watched():
        callbacks.on_predict_begin()
        outputs = make_pass(model, "predict", strategy, source, callbacks, interrupts).run()
        callbacks.on_predict_end()
    return outputs


def is_served(strategy: Any) -> bool:
    """Says whether a strategy's variables are on parameter servers."""
    return isinstance(strategy, ParameterServerStrategy)


def make_pass(model: Any, kind: str, strategy: Any, *others: Any) -> Any:
    """Chooses between the strategy's devices and its workers."""
    return (ServedPass if is_served(strategy) else Pass)(model, kind, strategy, *others)


def prepare(model: Any, strategy: Any, **data: Any) -> None:
    """Makes what is not made yet, on the strategy, and checks that all of the model is."""
    if is_served(strategy):
        prepare_served(model, strategy, **data)
        return
    _private.reset_step_state(model)
    with _scope.variables_of(strategy):
        _private.symbolic_build(model, **data)
    require_whole(model, strategy)


def _callback_list(
    model: Any,
    callbacks: Any,
    verbose: Any,
    epochs: int,
    source: Source,
    *,
    add_history: bool = False,
) -> Any:
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    return keras.callbacks.CallbackList(
        callbacks,
        add_history=add_history,
        add_progbar=verbose != 0,
        verbose=verbose,
        epochs=epochs,
        steps=source.num_batches,
        model=model,
    )
