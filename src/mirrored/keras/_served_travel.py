"""A Keras model on its way to a worker's own process.

Owns what is said of a model (its configuration, and classes and functions of the user's
own; no weights) and making a copy of it whose embedding layers use tables on servers.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras

from mirrored._errors import ArgumentError
from mirrored.keras import _private
from mirrored.keras._served_tables import install, layer_of, table_of, tables_by_layer


class Content(NamedTuple):
    """What a copy is made of.

    Attributes:
      config: of the model and of its compilation, as JSON.
      custom: classes and functions that Keras does not know, by name.
      layers: the names of the embedding layers, in the order of their tables.
      places: where these tables are among the weights.
    """

    config: str
    custom: dict[str, Any]
    layers: list[str]
    places: list[int]


def content_of(model: Any) -> Content:
    """Describes a model."""
    layers, places = [], []
    weights = [*model.trainable_variables, *model.non_trainable_variables]
    for layer in _private.all_layers(model):
        weight = table_of(layer)
        if weight is not None:
            layers.append(layer_of(weight))
            places.append(next(at for at, each in enumerate(weights) if each is weight))
    if len(set(layers)) != len(layers):
        raise ArgumentError(
            fact=f"embedding layers of model {model.name!r} are called {layers}.",
            expected="a name of its own for each.",
            hint='write keras.layers.Embedding(..., name="items").',
        )
    compiled = model.get_compile_config() or {}
    if compiled:
        # The optimizer is on the servers; a copy needs none but to be called compiled.
        plain = keras.optimizers.SGD(0.01)
        compiled["optimizer"] = keras.saving.serialize_keras_object(plain)
    said = {"model": keras.saving.serialize_keras_object(model), "compile": compiled}
    said["model"].pop("compile_config", None)
    return Content(json.dumps(said), dict(_custom(model)), layers, places)


def copy_of(content: Content, weights: list[Any]) -> Any:
    """Makes a copy of a model."""
    # This process may never have entered a scope.
    install()
    said = json.loads(content.config)
    tables = {
        name: weights[place] for name, place in zip(content.layers, content.places, strict=True)
    }
    with tables_by_layer(tables), keras.saving.custom_object_scope(content.custom):
        model: Any = keras.saving.deserialize_keras_object(said["model"], safe_mode=False)
        if said["compile"]:
            model.compile_from_config(said["compile"])
    return model


def finish(model: Any, batch: Any) -> None:
    """Makes the state of a copy's metrics, whose shapes follow from a batch."""
    optimizer = getattr(model, "optimizer", None)
    with _private.without_slots(optimizer):
        _private.symbolic_build(model, data_batch=_private.unpack(batch))


_COMPILED = (keras.losses.Loss, keras.metrics.Metric)


def _custom(model: Any) -> Iterator[tuple[str, Any]]:
    """Classes and functions of the user's own that a model's configuration names."""
    for layer in [model, *_private.all_layers(model)]:
        kind = type(layer)
        if not kind.__module__.startswith("keras."):
            yield kind.__name__, kind
    pending = [_private.compile_arguments(model)]
    while pending:
        thing = pending.pop()
        if isinstance(thing, dict):
            pending += thing.values()
        elif isinstance(thing, (list, tuple)):
            pending += thing
        elif isinstance(thing, types.FunctionType):
            yield thing.__name__, thing
        elif isinstance(thing, _COMPILED) and not type(thing).__module__.startswith("keras."):
            yield type(thing).__name__, type(thing)
