"""Rules: what a server computes of values and gradients.

Owns the interface that Optax transformations and other optimizers are seen through, and
the question whether a rule treats every element by itself. Only such a rule can act on
some rows of an array, or on an array whose rest is on another server.
"""

from __future__ import annotations

import abc
from typing import Any, final

import jax
import optax
from jax.extend.core import Literal

from mirrored import _compat
from mirrored._errors import ArgumentError
from mirrored._shards import ELEMENTWISE


class Rule(abc.ABC):
    """How gradients change values; pure, since it is traced."""

    name: str

    @abc.abstractmethod
    def init(self, values: list[Any]) -> Any:
        """The state to begin with."""

    @abc.abstractmethod
    def update(self, gradients: list[Any], state: Any, values: list[Any]) -> tuple[Any, Any]:
        """Returns the new values and the new state."""


@final
class OptaxRule(Rule):
    """An Optax gradient transformation."""

    def __init__(self, tx: Any, name: str) -> None:
        self._tx = tx
        self.name = name

    def init(self, values: list[Any]) -> Any:
        return self._tx.init(values)

    def update(self, gradients: list[Any], state: Any, values: list[Any]) -> tuple[Any, Any]:
        updates, state = self._tx.update(gradients, state, values)
        return optax.apply_updates(values, updates), state


def require_elementwise(rule: Rule, shapes: list[Any], what: str) -> None:
    """Raises unless each element's update depends on that element alone.

    Args:
      rule: the rule.
      shapes: the arrays it is for, as shapes and dtypes.
      what: why it matters here, for the message.
    """
    state = jax.eval_shape(rule.init, shapes)
    jaxpr = jax.make_jaxpr(rule.update)(shapes, state, shapes)
    whole = [bool(variable.aval.shape) for variable in jaxpr.jaxpr.invars]
    found = _across(jaxpr.jaxpr, whole)
    if found is not None:
        raise ArgumentError(
            fact=f"the transformation of optimizer {rule.name!r} uses {found!r} across the "
            f"elements of an array, and {what}.",
            expected="a transformation that treats every element by itself (sgd, adagrad, adam, "
            "adamw, lion, ...) where no server has all of the variables.",
            hint="clip gradients by their global norm in the step, before apply_gradients; or use "
            "one server and no partitioner.",
        )


def _across(jaxpr: Any, inputs: list[bool]) -> str | None:
    """Finds the first operation that mixes elements of an array."""
    known = dict.fromkeys(jaxpr.constvars, False)
    known.update(zip(jaxpr.invars, inputs, strict=True))

    def of(atom: Any) -> bool:
        return False if isinstance(atom, Literal) else known[atom]

    for equation in jaxpr.eqns:
        flags = [of(atom) for atom in equation.invars]
        name = equation.primitive.name
        if any(flags) and name not in ELEMENTWISE and not _same_shape(equation):
            called = _called(equation)
            if called is None:
                return name
            if name == "cond":
                programs, flags = equation.params["branches"], flags[1:]
            else:
                programs = [called]
            for program in programs:
                found = _across(_compat.open_program(program), flags)
                if found is not None:
                    return found
        known.update(dict.fromkeys(equation.outvars, any(flags)))
    return None


def _called(equation: Any) -> Any:
    if equation.primitive.name in ("scan", "while"):
        return None
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr", "branches"):
        if equation.params.get(key) is not None:
            return equation.params[key]
    return None


def _same_shape(equation: Any) -> bool:
    names = ("broadcast_in_dim", "reshape", "squeeze", "expand_dims")
    shape = equation.outvars[0].aval.shape
    return equation.primitive.name in names and equation.invars[0].aval.shape == shape
