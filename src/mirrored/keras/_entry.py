"""The way from ``model.fit`` and its siblings into this package.

Owns the wrapping of ``keras.Model``'s methods, done once, and the mixin that says the
same in a class of the user's own. A model of no strategy goes on to Keras untouched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras

from mirrored.keras import _fit, _on_batch, _private, _scope
from mirrored.keras._ownership import refuse_outsider, strategy_of

_METHODS: dict[str, Callable[..., Any]] = {
    "fit": _fit.fit,
    "evaluate": _fit.evaluate,
    "predict": _fit.predict,
    "train_on_batch": _on_batch.train_on_batch,
    "test_on_batch": _on_batch.evaluate_on_batch,
    "predict_on_batch": _on_batch.predict_on_batch,
}
_TRAINING = ("fit", "train_on_batch")


def install() -> None:
    """Wraps the methods of ``keras.Model`` and notes where models are made; once."""
    if _private.wraps_twice(keras.Model.fit):
        return
    for name, mirrored_method in _METHODS.items():
        setattr(keras.Model, name, _wrapped(getattr(keras.Model, name), name, mirrored_method))
    keras.Model.__new__ = _noting(keras.Model.__new__)


def _wrapped(
    original: Callable[..., Any], name: str, mirrored_method: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = strategy_of(self)
        if strategy is not None:
            return mirrored_method(self, strategy, *args, **kwargs)
        current = _scope.current_strategy()
        if current is None:
            return original(self, *args, **kwargs)
        if name in _TRAINING:
            refuse_outsider(self, current, name)
        with _scope.outside():
            return original(self, *args, **kwargs)

    return _private.mark_wrapper(method)


def _noting(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        model = original(cls, *args, **kwargs)
        if isinstance(model, keras.Model):
            _scope.note(model)
        return model

    return new


class Mirrored:
    """A mixin for ``keras.Model`` classes that says where ``fit`` and its siblings are.

    Put it first: ``class MyModel(mirrored.keras.Mirrored, keras.Model)``. Without it
    everything works the same, since ``strategy.scope()`` wraps ``keras.Model`` itself.

    >>> import keras, mirrored, mirrored.keras
    >>> class Doubling(mirrored.keras.Mirrored, keras.Model):
    ...     def call(self, inputs):
    ...         return 2 * inputs
    >>> with mirrored.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
    ...     model = Doubling()
    >>> import numpy as np
    >>> model.predict(np.ones((3, 1)), verbose=0).tolist()
    [[2.0], [2.0], [2.0]]
    """


def _mixed(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = strategy_of(self)
        if strategy is None:
            return getattr(super(Mirrored, self), name)(*args, **kwargs)
        return _METHODS[name](self, strategy, *args, **kwargs)

    method.__name__ = name
    method.__doc__ = _METHODS[name].__doc__
    return method


for _name in _METHODS:
    setattr(Mirrored, _name, _mixed(_name))
