"""The state of an optimizer whose arrays are divided between replicas.

Owns making its variables, with a component for each replica where an array is divided,
and one update of this replica's parts.
"""

from __future__ import annotations

from typing import Any, final

import jax
import jax.numpy as jnp
import optax

from mirrored import _context
from mirrored._placement import Placement
from mirrored._shards import Shard, ShardedUpdate, as_rows, gather_whole, own_shard
from mirrored._variable import Variable


@final
class StateShards:
    """The state of a transformation, divided between replicas as far as it can be."""

    def __init__(self, tx: Any) -> None:
        self._tx = tx
        self._sharded: ShardedUpdate | None = None

    def build(self, values: list[Any], placement: Placement, name: str) -> Any:
        """Makes the state's variables: components where divided, mirrored otherwise."""
        sharded = self._sharded = ShardedUpdate(self._tx, values)
        count = placement.replica_count

        def init(values: list[Any]) -> list[Any]:
            leaves = jax.tree.leaves(self._tx.init(values))
            return [
                as_rows(leaf, count) if divided else leaf
                for leaf, divided in zip(leaves, sharded.is_divided, strict=True)
            ]

        shardings = [
            placement.split if divided else placement.mirrored for divided in sharded.is_divided
        ]
        leaves = placement.computed(init, shardings, values)
        example = jax.eval_shape(self._tx.init, values)
        paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(example)[0]]
        variables = []
        for path, leaf, divided in zip(paths, leaves, sharded.is_divided, strict=True):
            label = f"{name}{jax.tree_util.keystr(path)}"
            if not divided:
                variables.append(Variable(leaf, trainable=False, name=label))
                continue
            variable = Variable(
                jnp.zeros(leaf.shape[1:], leaf.dtype),
                trainable=False,
                name=label,
                synchronization="on_read",
            )
            variable.storage = leaf
            variables.append(variable)
        return sharded.state_structure.unflatten(variables)

    def update(
        self, parts: list[Shard], state: list[Any], values: list[Any], communicator: Any, flags: Any
    ) -> tuple[list[Any], list[Any]]:
        """Runs the update on this replica's parts; returns whole values and the state."""
        assert self._sharded is not None
        shards = [own_shard(value, communicator) for value in values]
        updates, new_state = self._sharded(parts, state, shards, communicator)
        new: Any = optax.apply_updates(
            [shard.values for shard in shards], [update.values for update in updates]
        )
        if flags is not None:
            fine = jnp.all(flags)
            new = [
                jnp.where(fine, value, shard.values)
                for value, shard in zip(new, shards, strict=True)
            ]
            new_state = [
                jnp.where(fine, value, old) for value, old in zip(new_state, state, strict=True)
            ]
        whole = [Shard(value, shard.shape) for value, shard in zip(new, shards, strict=True)]
        return gather_whole(whole, communicator), new_state


def component(variable: Variable) -> Any:
    """Reads the stored value, or this replica's component of a divided one."""
    with _context.entered(merging=not variable.on_read):
        return variable.read(lend=False)
