"""Optimizer: an Optax transformation whose state is mirrored like its variables.

Owns the state and the update from the stored values, by which the new state is the
same on all replicas. How gradients become one is in ``_gradient_reduction``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, final

import jax
import jax.numpy as jnp
import optax

from mirrored import _context, _optimizer_checks
from mirrored._collectives import Communicator
from mirrored._errors import ArgumentError
from mirrored._finite import finite_flags, raise_if_not_finite
from mirrored._gradient_reduction import GradientReduction
from mirrored._placement import Placement, default_placement
from mirrored._sharded_state import StateShards, component
from mirrored._shards import reduced_shards, shard_flags
from mirrored._sparse import IndexedSlices
from mirrored._types import OPTIMIZER_STATE, ReduceOp
from mirrored._values import is_object_leaf
from mirrored._variable import Variable


@final
class Optimizer:
    """Updates Variables by an Optax gradient transformation.

    Args:
      tx: any ``optax.GradientTransformation``.
      reduce: how gradients that still differ between replicas become one: "mean"
        (the default), "sum", or None to refuse them. Gradients that are already the
        same on all replicas are used as they are.
      shard_state: whether each replica keeps only its part of the state (ZeRO stage 1):
        gradients are reduce-scattered, each replica updates its part, and the variables
        are gathered again. The numbers are the same. Transformations that look at whole
        arrays in other ways than norms (adafactor, muon, ...) are refused.
      communication_dtype: what gradients are reduced in, for example ``jnp.bfloat16``.
      reduction: "fast", or "reproducible": gradients are summed in one fixed order
        whatever the number of replicas; see ``reproducible_value_and_grad``.
      check_finite: whether to look for NaN and infinity in the gradients of each step,
        skip the update and raise NonFiniteError naming the first variable. Costs a
        wait for every step.
      name: prefix of the names of the state's variables.

    >>> import optax
    >>> import mirrored
    >>> weight = mirrored.Variable(1.0, name="weight")
    >>> optimizer = mirrored.Optimizer(optax.sgd(0.5))
    >>> loss, gradient = mirrored.value_and_grad(lambda: weight * weight, weight)
    >>> optimizer.apply_gradients([(gradient, weight)])
    >>> float(weight)
    0.0
    """

    def __init__(
        self,
        tx: Any,
        *,
        reduce: ReduceOp | str | None = ReduceOp.MEAN,
        shard_state: bool = False,
        communication_dtype: Any = None,
        reduction: str = "fast",
        check_finite: bool = False,
        name: str = "optimizer",
    ) -> None:
        _optimizer_checks.require_transformation(tx)
        context = _context.current()
        self._tx = tx
        self._reduction = GradientReduction(reduce, communication_dtype, reduction)
        self._shards = StateShards(tx) if shard_state else None
        if shard_state and self._reduction.reproducible:
            raise ArgumentError(
                fact='Optimizer was given shard_state=True and reduction="reproducible".',
                expected="one of them.",
                hint="leave shard_state out where the order of sums must be fixed.",
            )
        self._check_finite = check_finite
        self.name = name
        self._strategy = context.strategy
        self._placement: Placement | None = context.placement
        self._home = context.home
        self._eager_step: Any = None
        self._variables: list[Variable] | None = None
        self._state: Any = None
        self._when_built: list[Callable[[], None]] = []
        if self._home is not None:
            self._home.adopt_optimizer(self, tx)

    @property
    def variables(self) -> list[Variable]:
        """The variables it updates; empty before the first update or ``build``."""
        return list(self._variables or [])

    @property
    def state(self) -> Any:
        """The Optax state, with a Variable in place of every array; None before ``build``.

        With ``optax.inject_hyperparams``, a learning rate is changed by
        ``optimizer.state.hyperparams["learning_rate"].assign(0.1)``.
        """
        return self._state

    @property
    def state_shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the state's leaves, whole ones for what is kept in shards."""
        if self._variables is None:
            return []
        values = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in self._variables]
        return [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(self._tx.init, values))]

    @property
    def home(self) -> Any:
        """Where its state is, if that is on parameter servers; for the library's modules."""
        return self._home

    @property
    def strategy(self) -> Any:
        """The strategy in whose scope it was made, or None."""
        return self._strategy

    def build(self, variables: Iterable[Variable]) -> None:
        """Creates the state for ``variables``; otherwise done by the first update."""
        chosen = list(variables)
        for variable in chosen:
            _optimizer_checks.require_owner(self.name, self._placement, variable)
        placement = chosen[0].placement if chosen else self._placement or default_placement()
        values = [variable.storage for variable in chosen]
        # In one compiled call: states are made of many small arrays of zeros.
        with _context.entered(
            strategy=self._strategy, placement=placement, frame=None, replica=None, merging=False
        ):
            if self._sharded(placement):
                assert self._shards is not None
                self._state = self._shards.build(values, placement, self.name)
            else:
                state = placement.computed(self._tx.init, placement.mirrored, values)
                self._state = jax.tree_util.tree_map_with_path(self._state_variable, state)
        for variable in jax.tree.leaves(self._state, is_leaf=is_object_leaf):
            variable.role = OPTIMIZER_STATE
        self._variables = chosen
        waiting, self._when_built = self._when_built, []
        for callback in waiting:
            callback()

    def when_built(self, callback: Callable[[], None]) -> None:
        """Calls ``callback`` once the state exists: now, or right after ``build``.

        This is how a checkpoint is restored before the first step.
        """
        if self._state is not None:
            callback()
        else:
            self._when_built.append(callback)

    def _sharded(self, placement: Placement) -> bool:
        return self._shards is not None and placement.replica_count > 1

    def _state_variable(self, path: Any, leaf: Any) -> Any:
        label = f"{self.name}{jax.tree_util.keystr(path)}"
        return Variable(leaf, trainable=False, name=label)

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Variable]]) -> None:
        """Updates the variables by one step.

        Args:
          grads_and_vars: pairs of (gradient, variable), the same variables in every step.

        Inside ``strategy.run`` gradients that still vary are reduced first, all in one
        collective; reduced ones are left alone.
        """
        pairs = list(grads_and_vars)
        if not pairs:
            raise ArgumentError(
                fact="apply_gradients was given no gradients.",
                expected="at least one pair of (gradient, variable).",
                hint="a zip or generator can be used only once.",
            )
        if self._home is not None:
            self._home.apply_gradients(self, pairs)
            return
        _optimizer_checks.require_pairs(self.name, self._placement, pairs)
        gradients = [gradient for gradient, _ in pairs]
        variables = [variable for _, variable in pairs]
        if self._variables is None:
            self._build_for(variables)
        _optimizer_checks.require_same(self.name, self._variables or [], variables)
        context = _context.current()
        sharded = self._sharded(variables[0].placement)
        if sharded and context.replica is None:
            # Outside the replicas: the parts of the state are inside.
            def update(gradients: list[Any]) -> None:
                self.apply_gradients(zip(gradients, variables, strict=True))

            _strategy_of(self, variables[0]).run(update, args=(gradients,))
        elif sharded:
            self._update_shards(gradients, variables)
        elif context.replica is not None and not context.merging:
            gradients = self._reduced(gradients, variables, context.replica.communicator)
            with _context.entered(merging=True):
                self._update(gradients, variables)
        else:
            self._update(gradients, variables)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._home is None:
            return super().__reduce_ex__(protocol)
        return self._home.pickled(self)

    def _build_for(self, variables: list[Variable]) -> None:
        frame = _context.current().frame
        if frame is None or frame.is_concrete:
            self.build(variables)
            return
        # Inside a trace nothing can be created: leave it, create the state, trace again.
        raise _context.RetraceWith(lambda: self.build(variables))

    def _reduced(
        self, gradients: list[Any], variables: list[Variable], communicator: Communicator
    ) -> list[Any]:
        names = [variable.name for variable in variables]
        return self._reduction(gradients, names, self.name, communicator)

    def _update_shards(self, gradients: list[Any], variables: list[Variable]) -> None:
        context = _context.current()
        if context.replica is None or context.merging:
            raise ArgumentError(
                fact=f"optimizer {self.name!r} with shard_state=True was called in merge_call.",
                expected="apply_gradients directly in the replica function, or outside.",
                hint="take the call out of merge_call.",
            )
        assert self._shards is not None
        communicator = context.replica.communicator
        dense = [
            gradient.to_dense() if isinstance(gradient, IndexedSlices) else jnp.asarray(gradient)
            for gradient in gradients
        ]
        reduction = self._reduction
        if reduction.op is None and any(map(communicator.is_own, dense)):
            self._reduced(dense, variables, communicator)  # which refuses them
        mean = reduction.op is ReduceOp.MEAN
        parts = reduced_shards(dense, communicator, mean=mean, dtype=reduction.dtype)
        with _context.entered(merging=True):
            values = [variable.read(lend=False) for variable in variables]
            state = [
                component(leaf) for leaf in jax.tree.leaves(self._state, is_leaf=is_object_leaf)
            ]
        flags = shard_flags(parts, communicator) if self._check_finite else None
        with jax.named_scope("mirrored.update"):
            new_values, new_state = self._shards.update(parts, state, values, communicator, flags)
        with _context.entered(merging=True):
            for variable, value in zip(variables, new_values, strict=True):
                variable.assign(value)
        for leaf, value in zip(
            jax.tree.leaves(self._state, is_leaf=is_object_leaf), new_state, strict=True
        ):
            with _context.entered(merging=not leaf.on_read):
                leaf.assign(value)
        if flags is not None and context.frame is not None:
            context.frame.checks.append((flags, self._check(variables)))

    def _update(self, gradients: list[Any], variables: list[Variable]) -> None:
        gradients = [
            gradient.to_dense() if isinstance(gradient, IndexedSlices) else jnp.asarray(gradient)
            for gradient in gradients
        ]
        context = _context.current()
        if context.frame is None:
            self._update_eagerly(gradients, variables)
            return
        values = [variable.read(lend=False) for variable in variables]
        state = jax.tree.map(_read, self._state, is_leaf=is_object_leaf)
        new_values, new_state, flags = self._step(gradients, values, state)
        self._store(variables, new_values, new_state)
        if flags is not None:
            context.frame.checks.append((flags, self._check(variables)))

    def _update_eagerly(self, gradients: list[Any], variables: list[Variable]) -> None:
        values = [variable.read(lend=False) for variable in variables]
        state = jax.tree.map(_read, self._state, is_leaf=is_object_leaf)
        step = self._compiled_step()
        new_values, new_state, flags = step(gradients, values, state)
        self._store(variables, new_values, new_state)
        if flags is not None:
            self._check(variables)(jax.device_get(flags))

    def _compiled_step(self) -> Any:
        if self._eager_step is None:
            self._eager_step = jax.jit(self._step)
        return self._eager_step

    def _step(self, gradients: Any, values: Any, state: Any) -> tuple[Any, Any, Any]:
        with jax.named_scope("mirrored.update"):
            updates, new_state = self._tx.update(gradients, state, values)
            new_values = optax.apply_updates(values, updates)
        if not self._check_finite:
            return new_values, new_state, None
        flags = finite_flags(gradients)
        fine = jnp.all(flags)

        def keep(new: Any, old: Any) -> Any:
            return jnp.where(fine, new, old)

        return (
            jax.tree.map(keep, new_values, values),
            jax.tree.map(keep, new_state, state),
            flags,
        )

    def _store(self, variables: list[Variable], new_values: Any, new_state: Any) -> None:
        for variable, value in zip(variables, new_values, strict=True):
            variable.assign(value)
        jax.tree.map(Variable.assign, self._state, new_state, is_leaf=is_object_leaf)

    def _check(self, variables: list[Variable]) -> Callable[[Any], None]:
        names = [f"the gradient of variable {variable.name!r}" for variable in variables]
        return raise_if_not_finite(names, f"optimizer {self.name!r}")


def _strategy_of(optimizer: Any, variable: Variable) -> Any:
    strategy = optimizer.strategy
    if strategy is None:
        raise ArgumentError(
            fact=f"optimizer {optimizer.name!r} with shard_state=True belongs to no strategy, and "
            f"variable {variable.name!r} to {variable.placement.describe()}.",
            expected="variables and optimizer of one strategy.",
            hint="create the optimizer inside `with strategy.scope():`.",
        )
    return strategy


def _read(variable: Variable) -> Any:
    return variable.read(lend=False)
