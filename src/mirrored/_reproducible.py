"""Gradients that are the same to the last bit on 1, 2, 4 and 8 devices.

Owns dividing the batch into a fixed number of micro-shards, each computed by the same
program wherever it runs, and adding them up in one binary tree: first those of a
replica, then the replicas', by recursive halving.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import jax
import jax.numpy as jnp

from mirrored import _context, _replica
from mirrored._collectives import Communicator, SingleCommunicator
from mirrored._errors import ArgumentError, PaddingError
from mirrored._gradient_reduction import tree_sums
from mirrored._gradients import flatten_variables, in_place_of
from mirrored._types import ReduceOp


@final
class _MicroShardCommunicator(Communicator):
    """A micro-shard alone: its collectives are about itself, its number is fixed."""

    replica_count = 1

    def __init__(self, number: Any, outer: Communicator) -> None:
        self._number = number
        self._outer = outer

    @property
    def replica_id(self) -> Any:
        return self._number

    def sum(self, values: list[Any]) -> list[Any]:
        return values

    def extreme(self, op: ReduceOp, values: list[Any]) -> list[Any]:
        return values

    def gather(self, value: Any, axis: int, *, tiled: bool) -> Any:
        return jnp.asarray(value) if tiled else jnp.expand_dims(value, axis)

    def own(self, value: Any) -> Any:
        return self._outer.own(value)

    def is_own(self, value: Any) -> bool:
        return self._outer.is_own(value)


def reproducible_value_and_grad(
    loss_fn: Callable[..., Any], variables: Any = None, *, micro_shards: int
) -> Callable[..., Any]:
    """Like ``value_and_grad``, with the same bits on 1, 2, 4, ... replicas.

    The global batch is divided into ``micro_shards`` equal parts. Each part's gradient is
    computed by one and the same program, and the parts are added up in one fixed binary
    tree, whatever the number of replicas. Training is then reproducible to the last bit
    when it goes on with fewer or more devices (of the same kind, with the same software).
    Random numbers must be those of ``ctx.random_key(seed, step)``, which inside
    ``loss_fn`` depend on the micro-shard instead of the replica.

    Args:
      loss_fn: with ``variables``, a function of the batch; without, of the parameters and
        the batch. It returns a scalar, the mean over the examples it is given (also by
        ``mirrored.mean``).
      variables: a Variable or a nest of Variables, or None for plain parameters.
      micro_shards: how many parts the global batch has: a power of two, and a multiple of
        the number of replicas.

    Returns:
      A function of ``(*batch)`` (of ``(params, *batch)`` without variables) that returns
      ``(loss, gradients)``, mirrored.

    >>> import jax.numpy as jnp
    >>> import mirrored
    >>> strategy = mirrored.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> loss_fn = lambda weight, x: mirrored.mean((weight * x) ** 2)
    >>> step = mirrored.reproducible_value_and_grad(loss_fn, micro_shards=4)
    >>> batch = mirrored.PerReplica([[1.0, 2.0], [3.0, 4.0]])
    >>> loss, gradient = strategy.run(step, args=(1.0, batch))
    >>> float(loss), float(gradient)
    (7.5, 15.0)
    """
    if not isinstance(micro_shards, int) or micro_shards < 1 or micro_shards & (micro_shards - 1):
        raise ArgumentError(
            fact=f"reproducible_value_and_grad was given micro_shards={micro_shards!r}.",
            expected="a power of two: 1, 2, 4, 8, ...",
            hint="take the largest number of devices that training may run on.",
        )

    def differentiate(*args: Any) -> Any:
        if variables is None:
            return _differentiate(loss_fn, args[0], args[1:], micro_shards)
        leaves, structure = flatten_variables(variables)

        def of_values(values: list[Any], *batch: Any) -> Any:
            with in_place_of(leaves, values):
                return loss_fn(*batch)

        values = [leaf.read(lend=False) for leaf in leaves]
        loss, gradients = _differentiate(of_values, values, args, micro_shards)
        return loss, structure.unflatten(gradients)

    return differentiate


def _differentiate(
    function: Callable[..., Any], parameters: Any, batch: Any, micro_shards: int
) -> Any:
    context = _context.current()
    replica = context.replica or _replica.ReplicaContext(context.strategy, SingleCommunicator())
    communicator = replica.communicator
    here = _parts_here(batch, micro_shards, replica)
    parts = jax.tree.map(lambda array: _divided(array, here), batch)
    parameters = jax.tree.map(communicator.own, parameters)
    # XLA must not see how often the loop runs: it would write a single round out and
    # compile it together with what surrounds it, to other bits.
    rounds = jax.lax.optimization_barrier(jnp.asarray(here, jnp.int32))

    def one(index: Any) -> Any:
        microbatch = jax.tree.map(
            lambda array: jax.lax.dynamic_index_in_dim(array, index, keepdims=False), parts
        )

        def forward(values: Any) -> Any:
            with jax.named_scope("mirrored.forward"):
                return function(values, *microbatch)

        number = communicator.replica_id * here + index
        inner = _MicroShardCommunicator(number, communicator)
        with _context.entered(
            replica=_replica.ReplicaContext(replica.strategy, inner), reduces_gradients=True
        ):
            return jax.value_and_grad(forward)(parameters)

    shapes = jax.eval_shape(one, jnp.zeros((), jnp.int32))
    results = jax.tree.map(
        lambda leaf: communicator.own(jnp.zeros((here, *leaf.shape), leaf.dtype)), shapes
    )

    def add_one(state: Any) -> Any:
        index, results = state
        own = jax.tree.map(communicator.own, one(index))
        stored = jax.tree.map(
            lambda array, leaf: jax.lax.dynamic_update_index_in_dim(array, leaf, index, 0),
            results,
            own,
        )
        return index + 1, stored

    _, results = jax.lax.while_loop(
        lambda state: state[0] < rounds, add_one, (jnp.zeros((), jnp.int32), results)
    )
    leaves, structure = jax.tree.flatten(results)
    totals = tree_sums([_tree(leaf) for leaf in leaves], communicator)
    means = [jax.lax.optimization_barrier(total / micro_shards) for total in totals]
    return structure.unflatten(means)


def _tree(parts: Any) -> Any:
    """Adds neighbours, then pairs of neighbours, and so on."""
    while len(parts) > 1:
        parts = jax.lax.optimization_barrier(parts[0::2] + parts[1::2])
    return parts[0]


def _parts_here(batch: Any, micro_shards: int, replica: _replica.ReplicaContext) -> int:
    if replica.rows is not None and replica.rows.mask() is not None:
        raise PaddingError(
            fact="a batch that does not split evenly was given to a reproducible gradient.",
            expected=f"batches whose rows divide by {micro_shards} micro-shards.",
            hint="pass remainder='drop' to distribute_dataset.",
        )
    count = replica.num_replicas_in_sync
    rows = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
    here = micro_shards // count
    if micro_shards % count or len(rows) != 1 or () in rows or next(iter(rows))[0] % here:
        shown = sorted(size[0] if size else "scalar" for size in rows)
        raise ArgumentError(
            fact=f"{micro_shards} micro-shards were asked for on {count} replicas, each with "
            f"{', '.join(map(str, shown))} rows.",
            expected="a multiple of the number of replicas, by whose share the rows divide.",
            hint="choose the batch size as a multiple of the micro-shards.",
        )
    return here


def _divided(array: Any, parts: int) -> Any:
    array = jnp.asarray(array)
    return array.reshape(parts, array.shape[0] // parts, *array.shape[1:])
