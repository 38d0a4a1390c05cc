"""Training steps in which each replica normalizes its own rows, with one all-reduce.

Owns the other meaning of a batch: batch norm and the loss are each replica's, as in
tf.distribute, gradients, moving statistics and metrics are combined in one collective.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from mirrored._compat import REPLICA_AXIS, varies_over_replicas
from mirrored._errors import ArgumentError
from mirrored._placement import Placement
from mirrored.keras import _private

_CHOSEN: weakref.WeakSet[Any] = weakref.WeakSet()


def per_replica(model: Any) -> Any:
    """Lets each replica normalize its own rows while ``model`` trains.

    Batch norm then needs no communication: moving statistics are the mean of the
    replicas', and a step has one all-reduce. The loss is the mean of the replicas'
    losses, so a loss that is no mean over rows (``reduction="sum"``) counts a replica's
    rows only. Metrics are counts and sums over all rows. Batches that do not divide by
    the number of replicas, ``evaluate`` and ``predict`` keep the global meaning.

    Args:
      model: a model made in a strategy's scope, with Keras's own ``train_step``.

    Returns:
      The same model.

    >>> import keras, mirrored, mirrored.keras
    >>> with mirrored.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
    ...     model = keras.Sequential([keras.Input((2,)), keras.layers.BatchNormalization()])
    ...     model.compile("sgd", "mse")
    >>> mirrored.keras.per_replica(model) is model
    True
    """
    if _private.has_own_train_step(model):
        raise ArgumentError(
            fact=f"per_replica was given {model.name!r}, whose class has a train_step of its own.",
            expected="a model with Keras's own train_step.",
            hint="without per_replica a custom train_step sees the global batch.",
        )
    _CHOSEN.add(model)
    _private.set_step_function(model, "train", None)
    return model


def is_per_replica(model: Any, rows: tuple[int | None, ...], replica_count: int) -> bool:
    """Says whether a batch with these rows trains one replica at a time."""
    return model in _CHOSEN and all(size is not None and size % replica_count == 0 for size in rows)


def per_replica_step(model: Any, placement: Placement) -> Callable[..., tuple[Any, Any]]:
    """Makes the step ``(state, data) -> (logs, state)`` of a model."""
    _refuse_random(model)

    def local(state: Any, data: Any) -> Any:
        trainable, non_trainable, optimizer, metrics = state
        # Cast so that gradients are this replica's: they are combined below, once.
        own = jax.lax.pcast(trainable, REPLICA_AXIS, to="varying")
        gradients, new_non_trainable, new_metrics = _private.local_updates(
            model, own, non_trainable, optimizer, metrics, data
        )
        _refuse_integers(model, new_non_trainable)
        changes = [new - old for new, old in zip(new_metrics, metrics, strict=True)]
        count = placement.replica_count
        combined = _sum_once([*gradients, *new_non_trainable, *changes])
        first, second = len(gradients), len(gradients) + len(new_non_trainable)
        means = [leaf / count if varied else leaf for leaf, varied in combined[:second]]
        # What a metric adds on every replica alike, its count of rows say, counts as often.
        metrics = [
            old + (change if varied else change * count)
            for old, (change, varied) in zip(metrics, combined[second:], strict=True)
        ]
        trainable, optimizer = model.optimizer.stateless_apply(optimizer, means[:first], trainable)
        non_trainable = [
            mean.astype(old.dtype) for mean, old in zip(means[first:], non_trainable, strict=True)
        ]
        return trainable, non_trainable, optimizer, metrics

    everywhere, split = PartitionSpec(), PartitionSpec(REPLICA_AXIS)
    mapped = jax.shard_map(
        local, mesh=placement.mesh, in_specs=(everywhere, split), out_specs=everywhere
    )

    def step(state: Any, data: Any) -> tuple[Any, Any]:
        state = mapped(state, data)
        return _private.metric_results(model, state[3]), state

    return step


def _sum_once(leaves: list[Any]) -> list[tuple[Any, bool]]:
    """Sums what varies over the replicas in one collective; says of each whether it did."""
    varied = [varies_over_replicas(leaf) for leaf in leaves]
    flat = [
        leaf.astype(jnp.float32).reshape(1, -1)
        for leaf, varies in zip(leaves, varied, strict=True)
        if varies
    ]
    # Joined along a second axis: of a flat array XLA's CPU compiler makes every element anew
    # from all that is joined, sums over rows included, in a hundred times the time of a step.
    total = jax.lax.psum(jnp.concatenate(flat, axis=1), REPLICA_AXIS)[0]
    results, position = [], 0
    for leaf, varies in zip(leaves, varied, strict=True):
        if varies:
            part = total[position : position + leaf.size].reshape(leaf.shape)
            results.append((part.astype(leaf.dtype), True))
            position += leaf.size
        else:
            results.append((leaf, False))
    return results


def _refuse_random(model: Any) -> None:
    for variable in model.non_trainable_variables:
        if _private.is_seed(variable):
            raise ArgumentError(
                fact=f"model {model.name!r} draws random numbers ({variable.path!r}), and "
                "per_replica would draw the same on every replica.",
                expected="a model without dropout and other random layers.",
                hint="without per_replica dropout draws one mask for the global batch.",
            )


def _refuse_integers(model: Any, values: list[Any]) -> None:
    for variable, value in zip(model.non_trainable_variables, values, strict=True):
        if varies_over_replicas(value) and not jnp.issubdtype(value.dtype, jnp.floating):
            raise ArgumentError(
                fact=f"{variable.path!r} ({value.dtype}) would differ between replicas, "
                "and integers have no mean.",
                expected="layers whose own state is the same on every replica, or float.",
                hint="without per_replica the layer sees the global batch.",
            )
