"""An ``nnx.Optimizer`` that reduces gradients before it uses them."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from mirrored import _context
from mirrored._errors import ArgumentError
from mirrored._gradient_reduction import reduce_gradients
from mirrored._types import ReduceOp


class Optimizer(nnx.Optimizer):
    """An ``nnx.Optimizer`` that reduces gradients that still differ between replicas.

    Used exactly like ``nnx.Optimizer``. Inside ``strategy.run``, ``update`` first
    averages the gradients over the replicas in one all-reduce, unless they are the same
    on all replicas already (``mirrored.value_and_grad``, ``ctx.all_reduce``).

    Args:
      model: the module.
      tx: any Optax transformation.
      wrt: which variables to update, as in ``nnx.Optimizer``.
      reduce: "mean" or "sum".

    >>> import optax
    >>> from flax import nnx
    >>> import mirrored
    >>> import mirrored.nnx
    >>> strategy = mirrored.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> with strategy.scope():
    ...     model = nnx.Linear(1, 1, use_bias=False, rngs=nnx.Rngs(0))
    ...     optimizer = mirrored.nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    >>> def train_step(model, optimizer, x):
    ...     loss, gradients = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
    ...     optimizer.update(model, gradients)
    ...     return loss
    >>> batch = mirrored.PerReplica([[[1.0]], [[2.0]]])
    >>> before = float(model.kernel[0, 0])
    >>> losses = strategy.run(train_step, args=(model, optimizer, batch))
    >>> round(float(model.kernel[0, 0]) / before, 4)
    0.5
    """

    def __init__(
        self, model: Any, tx: Any, *, wrt: Any = nnx.Param, reduce: ReduceOp | str = "mean"
    ) -> None:
        super().__init__(model, tx, wrt=wrt)
        self.reduce = ReduceOp.parse(reduce)
        if self.reduce not in (ReduceOp.MEAN, ReduceOp.SUM):
            raise ArgumentError(
                fact=f"mirrored.nnx.Optimizer was given reduce={reduce!r}.",
                expected='"mean" or "sum".',
                hint="gradients are averaged over replicas by default.",
            )

    def update(self, model: Any, grads: Any, /, **kwargs: Any) -> Any:
        """Reduces the gradients where they vary and updates the model."""
        return super().update(model, _reduced(self.reduce, grads), **kwargs)


def _reduced(op: ReduceOp, gradients: Any) -> Any:
    context = _context.current()
    if context.replica is None or context.merging:
        return gradients
    communicator = context.replica.communicator
    leaves, structure = jax.tree.flatten(gradients)
    varying = [index for index, leaf in enumerate(leaves) if communicator.is_own(leaf)]
    if varying:
        with jax.named_scope(f"mirrored.gradients_{op.name.lower()}"):
            results = reduce_gradients([leaves[index] for index in varying], op, communicator)
        for index, result in zip(varying, results, strict=True):
            leaves[index] = result
    # Parameters and state in here belong to the replica. Where a transformation chooses with
    # lax.cond (apply_if_finite), both branches must have one type: the gradients join them.
    return structure.unflatten([communicator.own(leaf) for leaf in leaves])
