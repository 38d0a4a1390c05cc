"""Flax NNX with strategies: modules, optimizers, metrics and random streams in ``run``."""

from mirrored.nnx._objects import argument_adapter
from mirrored.nnx._optimizer import Optimizer
from mirrored.nnx._policy import Policy, set_policy

__all__ = ["Optimizer", "Policy", "argument_adapter", "set_policy"]
