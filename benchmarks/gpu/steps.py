"""One training step in three styles: hand-written JAX, mirrored functional, mirrored Variables.

Owns nothing of the models: each style is given a ``Problem`` and makes a ``Step``, which trains
one step a call and returns the loss. All three do the same arithmetic in the same order, so that
what differs in time or memory is the style.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax

import mirrored


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is trained.

    ``loss_fn(weights, statistics, *batch)`` returns the loss and the new statistics (running
    means of batch norm, say; an empty dictionary where there are none).
    """

    weights: dict[str, Any]
    statistics: dict[str, Any]
    batch: tuple[Any, ...]
    loss_fn: Callable[..., Any]
    tx: optax.GradientTransformation


class Step:
    """A compiled step with its state and its batch."""

    def __init__(self, program: Any, batch: Any, state: Any = None) -> None:
        self._program, self._batch, self._state = program, batch, state

    def __call__(self) -> Any:
        if self._state is None:
            return self._program(self._batch)
        self._state, loss = self._program(self._state, self._batch)
        return loss

    def lower(self) -> Any:
        """Lowers the program as it is called."""
        given = () if self._state is None else (self._state,)
        return self._program.lower(*given, self._batch)


def hand_written(problem: Problem, compiler_options: dict[str, Any]) -> Step:
    """Plain ``jax.jit`` with donated state, on one device."""
    tx, gradient_of = problem.tx, jax.value_and_grad(problem.loss_fn, has_aux=True)

    def step(state, batch):
        weights, statistics, optimizer_state = state
        (loss, statistics), gradients = gradient_of(weights, statistics, *batch)
        updates, optimizer_state = tx.update(gradients, optimizer_state, weights)
        return (optax.apply_updates(weights, updates), statistics, optimizer_state), loss

    compiled = jax.jit(step, donate_argnums=0, compiler_options=compiler_options or None)
    return Step(compiled, jax.device_put(problem.batch), _initial(problem, lambda nest: nest))


def functional_step(problem: Problem, strategy: mirrored.Strategy) -> Any:
    """Compiles (state, batch) -> (state, loss) for all replicas of a strategy."""
    tx, gradient_of = problem.tx, jax.value_and_grad(problem.loss_fn, has_aux=True)

    def step(state, batch):
        weights, statistics, optimizer_state = state
        result = strategy.run(gradient_of, args=(weights, statistics, *batch))
        (loss, statistics), gradients = strategy.reduce("mean", result)
        updates, optimizer_state = tx.update(gradients, optimizer_state, weights)
        return (optax.apply_updates(weights, updates), statistics, optimizer_state), loss

    return jax.jit(step, donate_argnums=0)


def functional(problem: Problem, compiler_options: dict[str, Any]) -> Step:
    """``strategy.run`` and ``strategy.reduce`` inside ``jax.jit``."""
    strategy = mirrored.MirroredStrategy()
    state = _initial(problem, lambda nest: jax.device_put(nest, strategy.placement.mirrored))
    (batch,) = strategy.distribute_dataset(problem.batch, batch_size=len(problem.batch[0]))
    return Step(functional_step(problem, strategy), batch, state)


def with_variables(problem: Problem, compiler_options: dict[str, Any]) -> Step:
    """Variables, ``mirrored.Optimizer`` and ``mirrored.function``."""
    strategy = mirrored.MirroredStrategy()
    with strategy.scope():
        weights = {
            name: mirrored.Variable(value, name=name) for name, value in problem.weights.items()
        }
        statistics = {
            name: mirrored.Variable(value, name=name, trainable=False, aggregation="mean")
            for name, value in problem.statistics.items()
        }
        optimizer = mirrored.Optimizer(problem.tx)
    names, variables, loss_of = list(weights), list(weights.values()), problem.loss_fn

    def replica_step(*batch):
        def loss_fn():
            values = dict(zip(names, (variable.value for variable in variables)))
            before = {name: variable.value for name, variable in statistics.items()}
            return loss_of(values, before, *batch)

        (loss, after), gradients = mirrored.value_and_grad(loss_fn, variables, has_aux=True)
        optimizer.apply_gradients(zip(gradients, variables))
        for name, variable in statistics.items():
            variable.assign(after[name])
        return loss

    @mirrored.function
    def step(batch):
        return strategy.reduce("mean", strategy.run(replica_step, args=batch))

    (batch,) = strategy.distribute_dataset(problem.batch, batch_size=len(problem.batch[0]))
    return Step(step, batch)


def _initial(problem: Problem, place: Callable[[Any], Any]) -> Any:
    state = place((problem.weights, problem.statistics, jax.jit(problem.tx.init)(problem.weights)))
    # Copies, because the state is donated and must not be the arrays of the problem.
    return jax.tree.map(lambda leaf: leaf.copy(), jax.device_put(state))


STYLES = {"jax": hand_written, "functional": functional, "variables": with_variables}
