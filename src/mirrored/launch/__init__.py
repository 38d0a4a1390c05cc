"""Starts the workers of a run on this machine, watches them, and restarts them.

``mirrored launch`` is this from the command line. Under Slurm, Kubernetes or Ray, those
do what this package does here.
"""

from mirrored.launch._launcher import launch
from mirrored.launch._settings import Settings

__all__ = ["Settings", "launch"]
