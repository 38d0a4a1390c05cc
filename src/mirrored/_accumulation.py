"""Gradients of a large batch, taken microbatch by microbatch.

Owns the weighting that makes the sum over microbatches equal to the whole batch,
uneven and padded ones included, with one reduction at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mirrored import _context, _replica
from mirrored._collectives import SingleCommunicator
from mirrored._errors import ArgumentError, PaddingError
from mirrored._gradients import flatten_variables, in_place_of, reduce_by_loss


def accumulated_value_and_grad(
    loss_fn: Callable[..., Any],
    variables: Any = None,
    *,
    steps: int,
) -> Callable[..., Any]:
    """Like ``value_and_grad``, over ``steps`` microbatches one after the other.

    The result equals that of the whole batch, uneven batches included, at a
    fraction of the memory. Gradients are reduced once, at the end.

    Args:
      loss_fn: with ``variables``, a function of the batch; without, of the parameters
        and the batch. It returns a scalar: this replica's mean over the microbatch, or
        ``mirrored.mean`` of the per-example losses (needed for uneven batches).
      variables: a Variable or a nest of Variables, or None for plain parameters.
      steps: the number of microbatches.

    Returns:
      A function of ``(*batch)`` (of ``(params, *batch)`` without variables) that
      returns ``(loss, gradients)``; every batch argument is a nest of arrays whose
      first axis is the examples.

    >>> import jax.numpy as jnp
    >>> import mirrored
    >>> weight = mirrored.Variable(2.0)
    >>> def loss_fn(x):
    ...     return mirrored.mean((weight * x) ** 2)
    >>> step = mirrored.accumulated_value_and_grad(loss_fn, weight, steps=2)
    >>> loss, gradient = step(jnp.array([1.0, 2.0, 3.0]))
    >>> round(float(loss), 4), round(float(gradient), 4)
    (18.6667, 18.6667)
    """
    if not isinstance(steps, int) or steps < 1:
        raise ArgumentError(
            fact=f"accumulated_value_and_grad was given steps={steps!r}.",
            expected="a positive integer.",
            hint="steps=1 takes the batch whole.",
        )

    def accumulate(*args: Any) -> Any:
        if variables is None:
            return _accumulate(loss_fn, args[0], args[1:], steps)
        leaves, structure = flatten_variables(variables)

        def of_values(values: list[Any], *microbatch: Any) -> Any:
            with in_place_of(leaves, values):
                return loss_fn(*microbatch)

        values = [leaf.read(lend=False) for leaf in leaves]
        loss, gradients = _accumulate(of_values, values, args, steps)
        return loss, structure.unflatten(gradients)

    return accumulate


def _accumulate(function: Callable[..., Any], parameters: Any, batch: Any, steps: int) -> Any:
    context = _context.current()
    inside = context.replica is not None and not context.merging
    replica = context.replica or _replica.ReplicaContext(context.strategy, SingleCommunicator())
    communicator = replica.communicator
    rows = _row_count(batch)
    length = math.ceil(rows / steps)
    mask = None if replica.rows is None else replica.rows.mask()
    padded = mask is not None or length * steps != rows
    real = jnp.ones(rows, bool) if mask is None else mask
    parts = jax.tree.map(lambda array: _microbatches(array, steps, length), (batch, real))
    if inside:
        parameters = jax.tree.map(communicator.own, parameters)

    def one(microbatch: Any, mask: Any) -> Any:
        validity = _replica.RowValidity(length, mask if padded else None)
        inner = _replica.ReplicaContext(replica.strategy, communicator, validity)

        def weighted_loss(values: Any) -> Any:
            denominators: list[Any] = []
            with (
                _context.entered(replica=inner, denominators=denominators, reduces_gradients=True),
                jax.named_scope("mirrored.forward"),
            ):
                loss = function(values, *microbatch)
            _check_denominators(len(denominators), padded, rows, steps)
            weight = denominators[0] if denominators else jnp.ones((), jnp.float32)
            return loss * weight.astype(loss.dtype), (loss, weight)

        (_, noted), gradients = jax.value_and_grad(weighted_loss, has_aux=True)(parameters)
        return gradients, noted

    def add(total: Any, part: Any) -> Any:
        gradients, noted = one(*part)
        return jax.tree.map(jnp.add, total, gradients), noted

    zeros = jax.tree.map(lambda array: communicator.own(jnp.zeros_like(array)), parameters)
    gradients, (losses, weights) = jax.lax.scan(add, zeros, parts)
    total = weights.sum()
    total = jnp.where(total == 0, 1, total)
    loss = (losses * weights.astype(losses.dtype)).sum() / total.astype(losses.dtype)
    gradients = jax.tree.map(lambda array: array / total.astype(array.dtype), gradients)
    if inside:
        gradients = reduce_by_loss(loss, gradients, communicator)
    return loss, gradients


def _check_denominators(count: int, padded: bool, rows: int, steps: int) -> None:
    if count > 1:
        raise ArgumentError(
            fact=f"the loss function calls mirrored.mean {count} times.",
            expected="one mirrored.mean, by whose count the microbatches are weighted.",
            hint="add up the per-example losses and take one mean.",
        )
    if padded and not count:
        raise PaddingError(
            fact=f"{rows} rows a replica do not split evenly into {steps} microbatches, or some of "
            "them are padding, and the loss function never asks which rows are real.",
            expected="a loss made with mirrored.mean(per_example_losses).",
            hint="use mirrored.mean, or a number of steps that divides the rows.",
        )


def _row_count(batch: Any) -> int:
    shapes = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
    if len(shapes) != 1 or shapes == {()}:
        raise ArgumentError(
            fact=f"the arrays of the batch have the leading sizes {sorted(shapes)}.",
            expected="one number of examples in all of them.",
            hint="give what is not per example to the loss function by closure.",
        )
    return shapes.pop()[0]


def _microbatches(array: Any, steps: int, length: int) -> Any:
    array = jnp.asarray(array)
    missing = steps * length - array.shape[0]
    if missing:
        array = jnp.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1))
    return array.reshape(steps, length, *array.shape[1:])
