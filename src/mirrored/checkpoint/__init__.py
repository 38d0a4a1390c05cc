"""Checkpoints of a run: saved by all workers with one call, and resumed exactly.

Orbax writes the arrays. A checkpoint holds variables, optimizers, random state, the
step and the position in the data; it is restored on any number of replicas and workers.
"""

from mirrored.checkpoint._checkpoint import Checkpoint

__all__ = ["Checkpoint"]
