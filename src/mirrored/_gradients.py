"""Gradients of the global loss, each reduced exactly once, and the exact mean.

Owns value_and_grad and grad (with Variables and for plain pytrees), and mean.
Whether gradients are averaged or summed follows from the type of the loss, so no
user has to remember it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirrored import _compat, _context, _replica
from mirrored._collectives import Communicator
from mirrored._errors import ArgumentError, PaddingError
from mirrored._gradient_reduction import reduce_gradients
from mirrored._home import Remote
from mirrored._types import ReduceOp
from mirrored._values import PerReplica, is_object_leaf
from mirrored._variable import Variable


def mean(per_example: Any, weights: Any = None) -> Any:
    """Returns the mean over all examples of all replicas.

    It divides by the global number of elements (or the global sum of weights), and
    leaves out the padded rows of a batch that did not split evenly, so it is exact
    on every batch. Inside ``strategy.run`` it is a collective, the same on all
    replicas (inside a jax.jit, jax.checkpoint or jax.lax.scan there, only its value is,
    not its type); the gradient of a loss made with it is the global gradient.

    Args:
      per_example: values whose first axis is this replica's examples.
      weights: optional weights, broadcast from the left over ``per_example``.

    Returns:
      A scalar; 0 where there is no example, or the weights sum to 0.

    >>> import mirrored
    >>> strategy = mirrored.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> dataset = strategy.distribute_dataset([1.0, 2.0, 6.0], batch_size=4)
    >>> [float(strategy.run(mirrored.mean, args=(batch,))) for batch in dataset]
    [3.0]
    """
    replica = _replica.get_replica_context()
    if replica is None:
        if isinstance(per_example, PerReplica):
            raise ArgumentError(
                fact="mirrored.mean was given a PerReplica value in cross-replica context.",
                expected="arrays, or a call inside the function given to strategy.run.",
                hint='use strategy.reduce("mean", value, axis=0).',
            )
        return _plain_mean(jnp.asarray(per_example), weights)
    values = jnp.asarray(per_example)
    with jax.named_scope("mirrored.mean"):
        result = _global_mean(values, weights, replica)
    if _compat.is_differentiated(values) and not _context.current().reduces_gradients:
        # Differentiated by jax.grad itself, whose gradients are averaged over replicas
        # later. As a value that varies, each replica's gradient is that of the sum of
        # all replicas' losses, of which the average is the global gradient.
        return replica.communicator.own(result)
    if not _compat.is_differentiated(values) and replica.is_in_inner_trace():
        # Inside jax.jit, checkpoint or scan nobody can see whether a gradient is taken
        # outside, and JAX keeps the trace for other callers: the same holds there.
        return replica.communicator.own(result)
    return replica.communicator.agree(result)


def _wide(values: Any) -> Any:
    """Half floats are added up in float32, as jnp.mean does."""
    if not jnp.issubdtype(values.dtype, jnp.inexact):
        return values.astype(jnp.float32)
    return values.astype(jnp.float32) if values.dtype.itemsize < 4 else values


def _result_dtype(values: Any) -> Any:
    return values.dtype if jnp.issubdtype(values.dtype, jnp.inexact) else jnp.float32


def _weights_like(values: Any, weights: Any) -> Any:
    weights = jnp.asarray(weights)
    if weights.ndim > values.ndim or weights.shape != values.shape[: weights.ndim]:
        trailing = weights.ndim == values.ndim and all(
            size in (1, wanted) for size, wanted in zip(weights.shape, values.shape, strict=True)
        )
        if not trailing:
            raise ArgumentError(
                fact=f"mirrored.mean was given values of shape {values.shape} and weights of shape "
                f"{weights.shape}.",
                expected="weights for the leading axes of the values, one for each example.",
                hint="drop or reshape the axes that do not match.",
            )
    weights = weights.reshape(weights.shape + (1,) * (values.ndim - weights.ndim))
    return jnp.broadcast_to(weights, values.shape)


def _plain_mean(values: Any, weights: Any) -> Any:
    wide = _wide(values)
    kept = jnp.ones((), wide.dtype) if weights is None else _weights_like(values, weights)
    count = jnp.asarray(wide.size if weights is None else jnp.sum(kept), wide.dtype)
    _note_denominator(count)
    return _ratio(jnp.sum(wide * kept.astype(wide.dtype)), count).astype(_result_dtype(values))


def _ratio(total: Any, count: Any) -> Any:
    empty = count == 0
    return jnp.where(empty, 0, total) / jnp.where(empty, 1, count)


def _global_mean(values: Any, weights: Any, replica: _replica.ReplicaContext) -> Any:
    mask = None if replica.rows is None else replica.rows.mask()
    if mask is not None and values.shape[:1] != mask.shape:
        raise PaddingError(
            fact=f"mirrored.mean was given a value of shape {values.shape} while the batch has "
            f"{mask.shape[0]} rows a replica, some of them padding.",
            expected="one value for each example: padding can be left out of no other.",
            hint="give mirrored.mean the per-example losses, before they are averaged.",
        )
    wide = _wide(values)
    communicator = replica.communicator
    if mask is None and weights is None:
        total = communicator.sum([jnp.sum(wide)])[0]
        count: Any = max(wide.size * communicator.replica_count, 1)
        _note_denominator(jnp.asarray(count, wide.dtype))
        return (total / count).astype(_result_dtype(values))
    kept = jnp.ones(values.shape, wide.dtype)
    if weights is not None:
        kept = _weights_like(values, weights).astype(wide.dtype)
    if mask is not None:
        shown = mask.reshape(mask.shape + (1,) * (values.ndim - 1))
        kept = jnp.where(shown, kept, 0)
        # A loss of a row of zeros may be infinite; times 0 it would be NaN.
        wide = jnp.where(shown, wide, 0)
    total, count = communicator.sum([jnp.sum(wide * kept), jnp.sum(kept)])
    _note_denominator(count)
    return _ratio(total, count).astype(_result_dtype(values))


def _note_denominator(count: Any) -> None:
    """Tells an accumulation over microbatches what this mean divided by."""
    denominators = _context.current().denominators
    if denominators is not None:
        denominators.append(count)


# --- gradients -----------------------------------------------------------------


def value_and_grad(
    loss_fn: Callable[..., Any],
    variables: Any = None,
    *,
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    reduce: bool = True,
) -> Any:
    """Computes a loss and the gradient of the global loss, reduced once.

    With ``variables``, ``loss_fn`` takes no arguments and reads them; the result is
    returned at once. Without, it returns a function of ``loss_fn``'s arguments that
    differentiates with respect to argument ``argnums``, like ``jax.value_and_grad``.

    Inside ``strategy.run`` the gradients are the same on every replica and reduced:
    averaged where the loss is this replica's mean (its type may differ between
    replicas), summed where it is already global (made with ``mirrored.mean`` or
    ``ctx.all_reduce``). Outside, they are plain gradients.

    Args:
      loss_fn: returns a scalar loss, or ``(loss, aux)`` with ``has_aux``.
      variables: a Variable, or a nest of Variables.
      argnums: which arguments to differentiate, without ``variables``.
      has_aux: whether ``loss_fn`` returns more than the loss.
      reduce: False leaves each replica its own gradients, whose mean over the replicas
        is the gradient of the global loss. For an Optimizer that is to reduce them
        itself (``shard_state``, ``communication_dtype``, ``reproducible``).

    Returns:
      ``(loss, gradients)`` or ``((loss, aux), gradients)``, gradients in the structure
      of ``variables``; the loss is the replica's own where it varies.

    >>> import mirrored
    >>> weights = mirrored.Variable([1.0, 2.0])
    >>> loss, gradient = mirrored.value_and_grad(lambda: (weights * weights).sum(), weights)
    >>> float(loss), gradient.tolist()
    (5.0, [2.0, 4.0])
    """
    if variables is None:

        def differentiated(*args: Any, **kwargs: Any) -> Any:
            return _of_arguments(loss_fn, args, kwargs, argnums, has_aux, reduce)

        return differentiated
    return _of_variables(loss_fn, variables, has_aux, reduce)


def grad(
    loss_fn: Callable[..., Any],
    variables: Any = None,
    *,
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
) -> Any:
    """The gradient alone; see ``value_and_grad``. With ``has_aux``, ``(gradients, aux)``.

    >>> import mirrored
    >>> mirrored.grad(lambda x: x * x)(3.0).item()
    6.0
    """

    def without_value(result: Any) -> Any:
        value, gradients = result
        return (gradients, value[1]) if has_aux else gradients

    both = value_and_grad(loss_fn, variables, argnums=argnums, has_aux=has_aux)
    if variables is not None:
        return without_value(both)
    return lambda *args, **kwargs: without_value(both(*args, **kwargs))


def _no_variable(leaf: Any) -> ArgumentError:
    kind = type(leaf)
    if kind.__module__.partition(".")[0] == "keras":
        return ArgumentError(
            fact=f"value_and_grad was given the Keras variable {leaf.path!r} among the variables.",
            expected="mirrored.Variable objects.",
            hint="use model.fit, with a train_step of your own if need be; or differentiate "
            "model.stateless_call with respect to plain arrays: see the guide on Keras, "
            '"A loop of your own".',
        )
    shown = f"an array of shape {leaf.shape}" if isinstance(leaf, (jax.Array, np.ndarray)) else leaf
    return ArgumentError(
        fact=f"value_and_grad was given {shown} among the variables.",
        expected="mirrored.Variable objects.",
        hint="for plain arrays write mirrored.value_and_grad(loss_fn)(params, ...).",
    )


def flatten_variables(variables: Any) -> tuple[list[Any], Any]:
    """Flattens a nest of Variables, refusing everything that has no gradient."""
    leaves, structure = jax.tree.flatten(
        variables, is_leaf=lambda leaf: is_object_leaf(leaf) or isinstance(leaf, Remote)
    )
    for leaf in leaves:
        if not isinstance(leaf, (Variable, Remote)):
            raise _no_variable(leaf)
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise ArgumentError(
                fact=f"variable {leaf.name!r} has dtype {leaf.dtype}, which has no gradient.",
                expected="floating variables.",
                hint="leave it out of the list.",
            )
    if not leaves:
        raise ArgumentError(
            fact=f"value_and_grad was given no variables: {variables!r}.",
            expected="at least one mirrored.Variable to differentiate with respect to.",
            hint="make them before the call; layers that were not built yet have none.",
        )
    return leaves, structure


def in_place_of(variables: list[Any], values: list[Any]) -> Any:
    """Lets code that reads ``variables`` see ``values``, those being differentiated."""
    together = {**_context.current().differentiated, **dict(zip(variables, values, strict=True))}
    return _context.entered(differentiated=together)


def _of_variables(loss_fn: Callable[[], Any], variables: Any, has_aux: bool, reduce: bool) -> Any:
    leaves, structure = flatten_variables(variables)

    def of_values(values: list[Any]) -> Any:
        with in_place_of(leaves, values):
            return loss_fn()

    values = [leaf.read(lend=False) for leaf in leaves]
    result, gradients = _differentiate(of_values, (values,), {}, 0, has_aux, reduce)
    return result, structure.unflatten(gradients)


def _of_arguments(
    loss_fn: Callable[..., Any],
    args: Any,
    kwargs: Any,
    argnums: Any,
    has_aux: bool,
    reduce: bool,
) -> Any:
    replica = _context.current().replica
    if replica is not None and not _context.current().merging:
        # Parameters that are the same by type would have their gradient summed by JAX.
        positions = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        positions = tuple(position % len(args) for position in positions)
        own = replica.communicator.own
        args = tuple(
            jax.tree.map(own, argument) if position in positions else argument
            for position, argument in enumerate(args)
        )
    return _differentiate(loss_fn, args, kwargs, argnums, has_aux, reduce)


def _differentiate(
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
    argnums: Any,
    has_aux: bool,
    reduce: bool,
) -> Any:
    def forward(*args: Any, **kwargs: Any) -> Any:
        # In traces the backward pass is this name, transposed.
        with jax.named_scope("mirrored.forward"):
            return function(*args, **kwargs)

    with _context.entered(reduces_gradients=True):
        result, gradients = jax.value_and_grad(forward, argnums=argnums, has_aux=has_aux)(
            *args, **kwargs
        )
    context = _context.current()
    if context.replica is None or context.merging:
        return result, gradients
    loss = result[0] if has_aux else result
    if not reduce:
        communicator = context.replica.communicator
        # Contributions to a loss that is global already are summed: as a mean of R times.
        factor = 1 if communicator.loss_is_own(loss) else communicator.replica_count
        return result, jax.tree.map(lambda leaf: communicator.own(leaf * factor), gradients)
    return result, reduce_by_loss(loss, gradients, context.replica.communicator)


def reduce_by_loss(loss: Any, gradients: Any, communicator: Communicator) -> Any:
    op = ReduceOp.MEAN if communicator.loss_is_own(loss) else ReduceOp.SUM
    with jax.named_scope(f"mirrored.gradients_{op.name.lower()}"):
        return reduce_gradients(gradients, op, communicator)
