"""Which strategy a model belongs to, and whether all of it does.

Owns the classic pitfall: a model, layer or optimizer made outside the scope of the
strategy that trains it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mirrored._errors import OwnershipError
from mirrored.keras import _private, _scope


def strategy_of(model: Any) -> Any:
    """Returns the strategy a Keras model trains on, or None.

    >>> import keras, mirrored, mirrored.keras
    >>> strategy = mirrored.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> with strategy.scope():
    ...     model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> mirrored.keras.strategy_of(model) is strategy
    True
    """
    strategy = _scope.made_in(model)
    if strategy is not None:
        return strategy
    for variable in _all_variables(model):
        strategy = _scope.owner_of(variable)
        if strategy is not None:
            return strategy
    return None


def _all_variables(model: Any) -> Iterable[Any]:
    yield from model.variables
    yield from model.metrics_variables
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        yield from optimizer.variables


def require_whole(model: Any, strategy: Any) -> None:
    """Checks that all of a model is on its strategy, and moves what compile made outside.

    Building in the scope and compiling outside it is fine: what compile made is moved.
    Weights are never moved, since whoever made them outside may use them there.
    """
    for variable in [*model.trainable_variables, *model.non_trainable_variables]:
        owner = _scope.owner_of(variable)
        if owner is not strategy:
            _refuse_weight(model, variable, strategy, owner)
    distribution = _scope.distribution_of(strategy)
    marker = _private.compile_marker(model)
    compiled_inside = marker is not None and _scope.owner_of(marker) is strategy
    optimizer = getattr(model, "optimizer", None)
    for variable in [] if optimizer is None else optimizer.variables:
        owner = _scope.owner_of(variable)
        if owner is strategy:
            continue
        if owner is not None or compiled_inside:
            _refuse_optimizer(model, optimizer, variable, strategy, owner)
        _private.adopt(variable, distribution.layout_for(variable))
    for variable in model.metrics_variables:
        # Metrics are reset before every use, so moving one takes nothing from anybody.
        if _scope.owner_of(variable) is not strategy:
            _private.adopt(variable, distribution.layout_for(variable))


def refuse_outsider(model: Any, strategy: Any, method: str) -> None:
    """Raises for a model of no strategy that is trained inside a scope."""
    raise OwnershipError(
        fact=f"model {model.name!r} was made outside the scope of {strategy!r}, "
        f"and {method} was called on it inside.",
        expected="the model made in the scope, or trained outside it on one device.",
        hint="move the line that makes the model into `with strategy.scope():`, "
        f"or call {method} after the block.",
    )


def _refuse_weight(model: Any, variable: Any, strategy: Any, owner: Any) -> None:
    if owner is not None:
        where = f"in the scope of another strategy, {owner!r}"
    else:
        where = "outside any scope"
    if _scope.made_in(model) is strategy:
        what, line = f"its weight {variable.path!r} was made {where}", "the layer of that weight"
    else:
        what, line = f"its weights, {variable.path!r} first, were made {where}", "the model"
    raise OwnershipError(
        fact=f"model {model.name!r} is used with {strategy!r}, but {what}.",
        expected="model, optimizer and weights made in the scope of one strategy.",
        hint=f"move the line that makes {line} into `with strategy.scope():`, above compile.",
    )


def _refuse_optimizer(model: Any, optimizer: Any, variable: Any, strategy: Any, owner: Any) -> None:
    where = "outside any scope" if owner is None else f"in the scope of {owner!r}"
    raise OwnershipError(
        fact=f"model {model.name!r} was compiled in the scope of {strategy!r}, but its optimizer "
        f"{optimizer.name!r} (variable {variable.path!r}) was made {where}.",
        expected="model, optimizer and compile in the scope of one strategy.",
        hint=f"move the line that makes the {type(optimizer).__name__} into "
        "`with strategy.scope():`, for example into the call of compile.",
    )
