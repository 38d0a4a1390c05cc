"""Flax NNX with strategies: modules, optimizers, metrics and random streams in ``run``."""

from mirrored.nnx._batch_norm import BatchNorm

# Not for users: what the core asks this door for.
from mirrored.nnx._objects import argument_adapter as argument_adapter
from mirrored.nnx._optimizer import Optimizer
from mirrored.nnx._policy import Policy, set_policy

__all__ = ["BatchNorm", "Optimizer", "Policy", "set_policy"]
