"""``mirrored.nnx.BatchNorm``: batch norm over the global batch.

Owns the statistics over all replicas' real rows. Everything else, the layer's variables
and options included, is ``nnx.BatchNorm``'s.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mirrored import _context
from mirrored._collectives import Communicator
from mirrored._errors import ArgumentError, PaddingError
from mirrored._replica import ReplicaContext


class BatchNorm(nnx.BatchNorm):
    """An ``nnx.BatchNorm`` whose statistics are those of the global batch.

    Used exactly like ``nnx.BatchNorm``. Inside ``strategy.run`` mean and variance are
    taken over the batches of all replicas, in one more all-reduce a layer (two with
    ``use_fast_variance=False``), and each real row counts once, so that training equals
    one device on batches that do not divide evenly too. Elsewhere it is ``nnx.BatchNorm``.

    >>> from flax import nnx
    >>> import mirrored
    >>> import mirrored.nnx
    >>> strategy = mirrored.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> with strategy.scope():
    ...     norm = mirrored.nnx.BatchNorm(1, momentum=0.5, rngs=nnx.Rngs(0))
    >>> for batch in strategy.distribute_dataset([[1.0], [2.0], [6.0]], batch_size=3):
    ...     result = strategy.run(lambda norm, x: norm(x), args=(norm, batch))
    >>> float(norm.mean[0])
    1.5
    """

    def __call__(
        self, x: Any, use_running_average: bool | None = None, *, mask: Any = None
    ) -> jax.Array:
        """Normalizes ``x``; arguments as in ``nnx.BatchNorm``."""
        context = _context.current()
        replica = context.replica
        if use_running_average is None:
            use_running_average = self.use_running_average
        if replica is None or context.merging or use_running_average:
            return super().__call__(x, use_running_average, mask=mask)
        if self.axis_index_groups is not None:
            raise ArgumentError(
                fact="mirrored.nnx.BatchNorm was given axis_index_groups.",
                expected="statistics over all replicas.",
                hint="leave axis_index_groups out, or use nnx.BatchNorm.",
            )
        mean, var = (running[...] for running in (self.mean, self.var))
        scale, bias = (part if part is None else part[...] for part in (self.scale, self.bias))
        x, _, _, scale, bias = self.promote_dtype((x, mean, var, scale, bias), dtype=self.dtype)
        mean, var = self._statistics(x, _real(x, mask, replica), replica.communicator)
        for running, new in ((self.mean, mean), (self.var, var)):
            # The statistics of a batch, not what led to them, are remembered.
            kept = self.momentum * running[...] + (1 - self.momentum) * new
            running[...] = jax.lax.stop_gradient(kept)
        factor = jax.lax.rsqrt(self._along(x, var) + self.epsilon)
        if scale is not None:
            factor = factor * self._along(x, scale)
        result = (x - self._along(x, mean)) * factor
        if bias is not None:
            result = result + self._along(x, bias)
        return result.astype(x.dtype)

    def _statistics(self, x: Any, real: Any, communicator: Communicator) -> tuple[Any, Any]:
        """The mean and variance over the real elements of all replicas."""
        # As Flax does: half floats are averaged in float32.
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        axes = tuple(index for index in range(x.ndim) if index not in self._feature_axes(x))
        real = jnp.broadcast_to(jnp.ones((), bool) if real is None else real, x.shape)

        def total(value: Any) -> Any:
            return jnp.sum(value, axes, where=real)

        count = total(jnp.ones_like(x))
        if self.use_fast_variance:
            sums = communicator.sum([total(x), total(x * x), count])
            mean, of_squares = sums[0] / sums[2], sums[1] / sums[2]
            return mean, jnp.maximum(0.0, of_squares - mean * mean)
        first, counts = communicator.sum([total(x), count])
        mean = first / counts
        (second,) = communicator.sum([total((x - self._along(x, mean)) ** 2)])
        return mean, second / counts

    def _feature_axes(self, x: Any) -> tuple[int, ...]:
        axes = self.axis if isinstance(self.axis, (tuple, list)) else (self.axis,)
        return tuple(axis % x.ndim for axis in axes)

    def _along(self, x: Any, features: Any) -> Any:
        """Gives an array of features the shape in which it meets ``x``."""
        axes = self._feature_axes(x)
        return features.reshape([x.shape[i] if i in axes else 1 for i in range(x.ndim)])


def _real(x: Any, mask: Any, replica: ReplicaContext) -> Any:
    """Which elements of ``x`` count: those of real rows, and of the caller's mask."""
    rows = replica.rows
    if rows is None or not rows.padded:
        return mask
    if x.shape[0] == rows.row_count:
        real = rows.mask().reshape((-1,) + (1,) * (x.ndim - 1))
        return real if mask is None else jnp.logical_and(real, mask)
    if mask is not None:
        return mask
    raise PaddingError(
        fact=f"batch norm was given {x.shape[0]} rows of a batch with {rows.row_count} rows, some "
        "of them padding.",
        expected="the rows of the batch, or a mask.",
        hint="pass mask=, made of mirrored.get_replica_context().example_weights and reshaped "
        "like the input; or drop the remainder with remainder='drop'.",
    )
