"""``train_on_batch``, ``test_on_batch`` and ``predict_on_batch`` on a strategy.

Owns one step outside any epoch: state out of the variables and back, one batch placed.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from mirrored._errors import ArgumentError
from mirrored.keras import _private, _scope
from mirrored.keras._chunk import place_batches, place_whole
from mirrored.keras._fit import is_served, prepare
from mirrored.keras._flight import Flight
from mirrored.keras._interrupts import Interrupts
from mirrored.keras._ownership import require_whole
from mirrored.keras._program import Program, program_for
from mirrored.keras._served_pass import one_served


def train_on_batch(
    model: Any,
    strategy: Any,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    class_weight: Any = None,
    return_dict: bool = False,
) -> Any:
    """Takes one training step; see ``keras.Model.train_on_batch``."""
    _private.require_compiled(model, "train_on_batch")
    if class_weight is not None:
        if sample_weight is not None:
            raise ArgumentError(
                fact=f"Arguments `sample_weight` and `class_weight` cannot be specified at the "
                f"same time (class_weight={class_weight!r}).",
                expected="one of them.",
                hint="multiply the weights of the classes into sample_weight.",
            )
        sample_weight = _private.class_weight_to_sample_weights(y, class_weight)
    return _logs_of_one(model, strategy, "train", (x, y, sample_weight), return_dict)


def evaluate_on_batch(
    model: Any,
    strategy: Any,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    return_dict: bool = False,
) -> Any:
    """Evaluates one batch; see ``keras.Model.test_on_batch``."""
    _private.require_compiled(model, "test_on_batch")
    return _logs_of_one(model, strategy, "test", (x, y, sample_weight), return_dict)


def predict_on_batch(model: Any, strategy: Any, x: Any) -> Any:
    """Predicts one batch; see ``keras.Model.predict_on_batch``."""
    if not _private.is_built(model):
        with _scope.variables_of(strategy):
            _private.build_by_call(model, x)
    require_whole(model, strategy)
    return _one(model, strategy, "predict", (x,))


def _logs_of_one(model: Any, strategy: Any, kind: str, data: Any, return_dict: bool) -> Any:
    data = jax.tree.map(_as_array, data, is_leaf=_private.is_sparse)
    prepare(model, strategy, data_batch=data)
    _private.begin_lone_step(model)
    logs = _private.lone_logs(_one(model, strategy, kind, data))
    return logs if return_dict else _private.in_metric_order(model, logs)


def _as_array(leaf: Any) -> Any:
    on_devices = isinstance(leaf, jax.Array) or _private.is_sparse(leaf)
    return leaf if on_devices else np.asarray(leaf)


def _one(model: Any, strategy: Any, kind: str, data: Any) -> Any:
    if is_served(strategy):
        return one_served(model, strategy, kind, data)
    placement = strategy.placement
    program: Program = program_for(model, kind, placement)
    leaves = jax.tree.leaves(data, is_leaf=_private.is_sparse)
    numbers = [(0, 0)]
    if program.compiled and not any(_private.is_sparse(leaf) for leaf in leaves):
        chunk = place_batches(placement, [data], numbers, 1)
    else:
        chunk = place_whole(placement, data, numbers)
    lists = _private.variable_lists(model, kind)
    interrupts = Interrupts()
    flight = Flight(placement)
    with interrupts.watched(), flight.turn():
        state = tuple(_private.values_of(variables) for variables in lists)
        interrupts.hold()
        try:
            returned, state, token = program.run(state, chunk, 0, 1, looped=False, keep_all=False)
            for variables, values in zip(lists, state, strict=True):
                _private.set_values(variables, values)
            if token is not None:
                token.block_until_ready()
        finally:
            interrupts.release()
    if kind != "predict":
        return returned
    flat, structure = jax.tree.flatten(returned)
    return structure.unflatten(program.true_rows(lists, chunk, [np.array(leaf) for leaf in flat]))
