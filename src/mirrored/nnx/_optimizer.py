"""An ``nnx.Optimizer`` that reduces gradients before it uses them."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from mirrored import _context
from mirrored._errors import ArgumentError
from mirrored._gradient_reduction import GradientReduction
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
      communication_dtype: what gradients are reduced in, for example ``jnp.bfloat16``.
      reduction: "fast", or "reproducible": gradients are summed in one fixed order
        whatever the number of replicas.

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
        self,
        model: Any,
        tx: Any,
        *,
        wrt: Any = nnx.Param,
        reduce: ReduceOp | str = "mean",
        communication_dtype: Any = None,
        reduction: str = "fast",
    ) -> None:
        super().__init__(model, tx, wrt=wrt)
        if reduce is None:
            raise ArgumentError(
                fact="mirrored.nnx.Optimizer was given reduce=None.",
                expected='"mean" or "sum".',
                hint="use nnx.Optimizer where gradients are reduced before.",
            )
        self.reduction = GradientReduction(reduce, communication_dtype, reduction)

    def update(self, model: Any, grads: Any, /, **kwargs: Any) -> Any:
        """Reduces the gradients where they vary and updates the model."""
        reduced = self._reduced(grads)
        with jax.named_scope("mirrored.update"):
            return super().update(model, reduced, **kwargs)

    def _reduced(self, gradients: Any) -> Any:
        context = _context.current()
        if context.replica is None or context.merging:
            return gradients
        communicator = context.replica.communicator
        found, structure = jax.tree_util.tree_flatten_with_path(gradients)
        names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in found]
        leaves = [leaf for _, leaf in found]
        reduced = self.reduction(leaves, names, type(self).__name__, communicator)
        # Parameters and state in here belong to the replica. Where a transformation chooses
        # with lax.cond (apply_if_finite), both branches must have one type: they join them.
        return structure.unflatten([communicator.own(leaf) for leaf in reduced])
