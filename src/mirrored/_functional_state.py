"""Optimizer state in shards for programs without Variables.

Owns ``shard_state``: an Optax transformation whose state is this replica's part.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from mirrored import _replica
from mirrored._collectives import Communicator
from mirrored._errors import ContextError
from mirrored._shards import ShardedUpdate, gather_whole, own_shard, reduced_shards
from mirrored._types import ReduceOp


def shard_state(tx: Any, *, communication_dtype: Any = None) -> optax.GradientTransformation:
    """Divides the state of an Optax transformation between the replicas (ZeRO stage 1).

    The functional form of ``Optimizer(tx, shard_state=True)``, for use inside
    ``strategy.run``: ``init`` returns this replica's part of the state, ``update`` takes
    this replica's own gradients, averages them in a reduce-scatter, updates the own part
    and returns whole updates, the same on all replicas. Transformations it cannot divide
    are refused.

    Args:
      tx: any Optax transformation.
      communication_dtype: what gradients are reduced in, if not in their own dtype.

    >>> import jax, jax.numpy as jnp, optax
    >>> import mirrored
    >>> strategy = mirrored.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> tx = mirrored.shard_state(optax.sgd(0.5, momentum=0.9))
    >>> params = jnp.array([1.0, 2.0, 3.0, 4.0])
    >>> state = strategy.run(tx.init, args=(params,))
    >>> def train_step(params, state, batch):
    ...     gradients = jax.grad(lambda p: (p * batch).sum())(params)
    ...     updates, state = tx.update(gradients, state, params)
    ...     return mirrored.as_mirrored(optax.apply_updates(params, updates)), state
    >>> batch = mirrored.PerReplica([[1.0, 1.0, 1.0, 1.0], [3.0, 3.0, 3.0, 3.0]])
    >>> params, state = strategy.run(train_step, args=(params, state, batch))
    >>> params.tolist(), jax.tree.leaves(state)[0].shape
    ([0.0, 1.0, 2.0, 3.0], (2, 2))
    """

    def init(params: Any) -> Any:
        communicator = _communicator("init")
        state = tx.init(params)
        leaves, structure = jax.tree.flatten(state)
        divided = ShardedUpdate(tx, params).is_divided
        plain = [leaf for leaf, own in zip(leaves, divided, strict=True) if not own]
        whole = iter(_agreed(plain, communicator))
        return structure.unflatten(
            [
                own_shard(leaf, communicator).values if own else next(whole)
                for leaf, own in zip(leaves, divided, strict=True)
            ]
        )

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        communicator = _communicator("update")
        arrays, structure = jax.tree.flatten(updates)
        # Transformations that never look at the parameters may be given none.
        values = updates if params is None else params
        sharded = ShardedUpdate(tx, values)
        leaves = jax.tree.leaves(state)
        divided = sharded.is_divided
        plain = [leaf for leaf, own in zip(leaves, divided, strict=True) if not own]
        whole = iter(_agreed(plain, communicator))
        leaves = [leaf if own else next(whole) for leaf, own in zip(leaves, divided, strict=True)]
        parts = reduced_shards(
            [jnp.asarray(array) for array in arrays],
            communicator,
            mean=True,
            dtype=communication_dtype,
        )
        shards = [own_shard(jnp.asarray(value), communicator) for value in jax.tree.leaves(values)]
        changes, new_state = sharded(parts, leaves, shards, communicator)
        return (
            structure.unflatten(gather_whole(changes, communicator)),
            sharded.state_structure.unflatten(new_state),
        )

    return optax.GradientTransformation(init, update)


def _communicator(what: str) -> Communicator:
    replica = _replica.get_replica_context()
    if replica is None:
        raise ContextError(
            fact=f"{what} of a transformation with sharded state was called outside the replicas.",
            expected=f"{what} in the function given to strategy.run.",
            hint="write state = strategy.run(tx.init, args=(params,)).",
        )
    return replica.communicator


def _agreed(leaves: list[Any], communicator: Communicator) -> list[Any]:
    """Gives numbers that are equal everywhere the type of such, by their maximum."""
    own = [index for index, leaf in enumerate(leaves) if communicator.is_own(leaf)]
    sent = [jnp.asarray(leaves[index]) for index in own]
    numbers = [leaf.astype(jnp.int32) if leaf.dtype == jnp.bool_ else leaf for leaf in sent]
    results = list(leaves)
    if numbers:
        for index, leaf, value in zip(
            own, sent, communicator.extreme(ReduceOp.MAX, numbers), strict=True
        ):
            results[index] = value.astype(leaf.dtype)
    return results
