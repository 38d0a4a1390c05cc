"""The words in which variables refuse to be read or written.

Owns the errors, which say where a variable was made and what to write instead. When
they are raised is the rules of ``_variable``.
"""

from __future__ import annotations

import inspect
from typing import Any

from mirrored._errors import (
    ArgumentError,
    ArgumentTypeError,
    ContextError,
    DeviceError,
    OwnershipError,
    VariableError,
)
from mirrored._placement import Placement, default_placement
from mirrored._types import VariableAggregation


def caller() -> str:
    """Finds the line outside this library that is creating a variable."""
    frame = inspect.currentframe()
    assert frame is not None
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("mirrored."):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def created_inside(name: str) -> ContextError:
    """A variable made in a replica function or a compiled function."""
    return ContextError(
        fact=f"variable {name!r} was created inside a replica function or a mirrored.function.",
        expected="variables created once, before training starts.",
        hint="create it outside, inside `with strategy.scope():`.",
    )


def no_array(name: str, action: str, value: Any, dtype: Any) -> ArgumentTypeError:
    """A value that JAX makes no array of."""
    wanted = "" if dtype is None else f" and dtype={dtype!r}"
    return ArgumentTypeError(
        fact=f"{action} of variable {name!r} was given {value!r} ({type(value).__name__}){wanted}.",
        expected="an array, a number or a list of numbers.",
        hint="a variable holds one array; keep other values in Python.",
    )


def created_in_trace(name: str) -> ContextError:
    """A variable made while JAX traces."""
    return ContextError(
        fact=f"variable {name!r} was created while JAX traces a program.",
        expected="variables created once, outside jax.jit and jax.grad.",
        hint="create it before the compiled function is called.",
    )


def created_while_traced(name: str) -> ContextError:
    """A variable that came to be after the trace that uses it had begun."""
    return ContextError(
        fact=f"variable {name!r} was created while the function using it was traced.",
        expected="variables created before the function is called.",
        hint="create it outside the function.",
    )


def frozen(name: str, action: str) -> ContextError:
    """A variable used inside jax.jit, which would freeze its value."""
    return ContextError(
        fact=f"variable {name!r} was {action} inside jax.jit (or another JAX "
        "transformation that compiles), which would freeze its value.",
        expected="variables used inside mirrored.function or strategy.run, or eagerly.",
        hint="replace @jax.jit by @mirrored.function, or pass variable.value as an argument.",
    )


def only_compiled_for(name: str, action: str, placement: Placement) -> DeviceError:
    """A variable used where a value would be needed, on devices that only serve to compile."""
    return DeviceError(
        fact=f"variable {name!r} was {action}, and has no value: {placement.describe()} is there "
        "to compile for.",
        expected="its use in a step that mirrored.plan.plan compiles.",
        hint="to train, make it in the scope of a strategy over devices that are there.",
    )


def mean_of_integers(name: str, dtype: Any) -> VariableError:
    """Aggregation MEAN of a dtype that cannot hold a mean."""
    return VariableError(
        fact=f"variable {name!r} has dtype {dtype} and aggregation MEAN.",
        expected="a floating dtype for MEAN, since the mean of integers is not one.",
        hint='use aggregation="sum" or "only_first_replica", or a float dtype.',
    )


def key_of_components(name: str) -> VariableError:
    """A random key that was to be kept by each replica, or summed."""
    return VariableError(
        fact=f"variable {name!r} holds random keys and was to have one component a replica, or "
        "their sum.",
        expected="one key (ON_WRITE), which every replica reads as a key of its own.",
        hint="leave synchronization and aggregation out.",
    )


def not_one_value(name: str) -> VariableError:
    """A cross-replica read of components that nothing aggregates."""
    return VariableError(
        fact=f"variable {name!r} (ON_READ, aggregation NONE) was read in "
        "cross-replica context, where its components have no single value.",
        expected="an aggregation, or a read inside a replica function.",
        hint='create it with aggregation="sum", "mean" or "only_first_replica".',
    )


def other_owner(name: str, own: Placement, created_at: str, placement: Placement) -> OwnershipError:
    """A variable of one strategy, or of none, used in another."""
    if own is default_placement():
        return OwnershipError(
            fact=f"variable {name!r}, created outside any scope at {created_at}, "
            f"was used in {placement.describe()}.",
            expected="variables of a strategy created inside its scope.",
            hint=f"move the line {created_at} inside `with strategy.scope():`.",
        )
    return OwnershipError(
        fact=f"variable {name!r} of {own.describe()} was used in {placement.describe()}.",
        expected="a variable of the strategy that runs.",
        hint=f"create it in the scope of the strategy that runs ({created_at}), or run "
        "with the strategy it belongs to.",
    )


def written_in_loss(name: str) -> VariableError:
    """A write of what is being differentiated."""
    return VariableError(
        fact=f"variable {name!r} was written inside the loss function that is "
        "differentiated with respect to it.",
        expected="writes after the gradient is taken.",
        hint="move the write behind value_and_grad.",
    )


def given_per_replica(name: str, action: str) -> VariableError:
    """A PerReplica value where one value belongs."""
    return VariableError(
        fact=f"{action} of variable {name!r} was given a PerReplica value in "
        "cross-replica context.",
        expected="one value for all replicas.",
        hint='reduce it first: strategy.reduce("mean", value); or write inside '
        "strategy.run with an aggregation.",
    )


def other_shape(name: str, shape: Any, action: str, given: Any) -> VariableError:
    """A value of another shape."""
    return VariableError(
        fact=f"{action} of variable {name!r} of shape {shape} was given a value of shape {given}.",
        expected=f"shape {shape}.",
        hint="check the axes of the value; a variable never changes its shape.",
    )


def other_dtype(name: str, dtype: Any, action: str, given: Any) -> VariableError:
    """A value that the variable's dtype cannot hold."""
    return VariableError(
        fact=f"{action} of variable {name!r} of dtype {dtype} was given {given}.",
        expected=f"a value that {dtype} can hold.",
        hint=f"convert it with .astype({dtype}), or give the variable another dtype.",
    )


def would_differ(name: str, aggregation: VariableAggregation, action: str) -> VariableError:
    """A write that would leave replicas with different values."""
    return VariableError(
        fact=f"{action} of variable {name!r} (aggregation {aggregation.name}) was "
        "given a value that may differ between replicas.",
        expected="a value that is provably the same on all replicas, or an aggregation that "
        "makes it so.",
        hint='reduce it first with ctx.all_reduce("mean", value); or create the variable with '
        "an aggregation; or, to compute from the stored values, write inside "
        "ctx.merge_call(lambda strategy: variable.assign(...)).",
    )


def no_cross_write(name: str, aggregation: VariableAggregation, action: str) -> VariableError:
    """A cross-replica write of components that has no meaning."""
    return VariableError(
        fact=f"{action} of variable {name!r} (ON_READ, aggregation "
        f"{aggregation.name}) was called in cross-replica context.",
        expected="a write inside strategy.run, or an aggregation for which it has a meaning.",
        hint="write inside strategy.run"
        + (", or use assign." if aggregation is VariableAggregation.SUM else "."),
    )


def not_copyable(name: str) -> ArgumentError:
    """A variable given to copy or deepcopy."""
    return ArgumentError(
        fact=f"variable {name!r} was copied.",
        expected="one object for each variable, since programs refer to it.",
        hint="create a new mirrored.Variable(variable.value) in the scope.",
    )
