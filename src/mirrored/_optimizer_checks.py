"""What an Optimizer refuses, and in which words.

Owns the checks of what users hand to an optimizer; it keeps no state.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from mirrored._errors import ArgumentError, OwnershipError
from mirrored._placement import Placement, default_placement
from mirrored._values import PerReplica
from mirrored._variable import Variable


def require_transformation(tx: Any) -> None:
    """Checks that ``tx`` has what Optax's transformations have."""
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        raise ArgumentError(
            fact=f"Optimizer was given {tx!r}.",
            expected="an Optax gradient transformation.",
            hint="write for example mirrored.Optimizer(optax.adam(1e-3)).",
        )


def require_owner(name: str, placement: Placement | None, variable: Any) -> None:
    """Checks that a variable is one, and of the strategy of the optimizer."""
    if not isinstance(variable, Variable):
        raise ArgumentError(
            fact=f"the optimizer was given {variable!r} where a variable belongs.",
            expected="pairs of (gradient, mirrored.Variable).",
            hint="write optimizer.apply_gradients(zip(gradients, variables)), in this order.",
        )
    if placement is not None and variable.placement is not placement:
        raise OwnershipError(
            fact=f"variable {variable.name!r} of {variable.placement.describe()} was given to "
            f"optimizer {name!r} of {placement.describe()}.",
            expected="variables and optimizer of one strategy.",
            hint=f"create both inside the same `with strategy.scope():` (the variable: "
            f"{variable.created_at}).",
        )
    if placement is None and variable.placement is not default_placement():
        raise OwnershipError(
            fact=f"optimizer {name!r} was created outside any scope, and variable "
            f"{variable.name!r} belongs to {variable.placement.describe()}.",
            expected="variables and optimizer of one strategy.",
            hint="move the line that creates the optimizer inside `with strategy.scope():`.",
        )


def require_pairs(name: str, placement: Placement | None, pairs: list[Any]) -> None:
    """Checks the pairs of (gradient, variable) of one step."""
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise ArgumentError(
                fact=f"apply_gradients was given {pair!r}.",
                expected="pairs of (gradient, variable).",
                hint="write optimizer.apply_gradients(zip(gradients, variables)).",
            )
        gradient, variable = pair
        require_owner(name, placement, variable)
        if isinstance(gradient, PerReplica):
            raise ArgumentError(
                fact=f"the gradient of variable {variable.name!r} is a PerReplica value.",
                expected="a reduced gradient in cross-replica context.",
                hint='reduce it with strategy.reduce("mean", gradients), or call '
                "apply_gradients inside strategy.run.",
            )
        if gradient is None:
            raise ArgumentError(
                fact=f"the gradient of variable {variable.name!r} is None.",
                expected="an array.",
                hint="leave the pair out.",
            )
        shape = getattr(gradient, "dense_shape", None) or jnp.shape(gradient)
        if tuple(shape) != variable.shape:
            raise ArgumentError(
                fact=f"the gradient of variable {variable.name!r} has shape {tuple(shape)}, "
                f"the variable {variable.shape}.",
                expected="equal shapes.",
                hint="check that gradients and variables are zipped in the same order.",
            )


def require_same(name: str, known: list[Variable], variables: list[Variable]) -> None:
    """Checks that the variables of a step are those the state was made for."""
    if len(known) == len(variables) and all(
        old is new for old, new in zip(known, variables, strict=True)
    ):
        return
    raise ArgumentError(
        fact=f"optimizer {name!r} keeps state for "
        f"{[variable.name for variable in known]} and was given gradients of "
        f"{[variable.name for variable in variables]}.",
        expected="the same variables in the same order in every step.",
        hint="use one Optimizer for each set of variables.",
    )
