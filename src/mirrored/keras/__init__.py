"""Keras on every device: ``compile``, ``fit``, ``evaluate`` and ``predict``, unchanged.

Models, optimizers and metrics made in ``strategy.scope()`` are mirrored on its devices, and
the model remembers: call ``fit`` wherever you like. Importing this module is not needed
for that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from mirrored._errors import MissingDependencyError

try:
    import keras as _keras
except ImportError as error:
    raise MissingDependencyError(
        fact=f"mirrored.keras needs Keras, which could not be imported ({error}).",
        expected="Keras 3 on its JAX backend.",
        hint='pip install "mirrored[keras]", and set KERAS_BACKEND=jax.',
    ) from error

from mirrored.keras import _entry, _scope, _served_tables
from mirrored.keras._backup import Backup
from mirrored.keras._entry import Mirrored
from mirrored.keras._ownership import strategy_of
from mirrored.keras._per_replica import per_replica

__all__ = ["Backup", "Mirrored", "per_replica", "strategy_of"]


@contextlib.contextmanager
def companion_scope(strategy: Any) -> Iterator[None]:
    """What Keras does in ``strategy.scope()``; entered by it."""
    _entry.install()
    _served_tables.install()
    if _keras.backend.backend() != "jax":
        # Keras may have been imported by something else; only a model would be wrong.
        with _scope.refusing_models():
            yield
        return
    with _scope.draws_of_worker_0(strategy.placement), _scope.variables_of(strategy):
        yield
