"""Which engines there are, by name.

Owns the choice and the late import: an engine's libraries are needed by those only who
ask for it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from mirrored._errors import ArgumentError
from mirrored._parameter_server._engine import Engine

_ENGINES = {
    "threads": ("mirrored._parameter_server._threads_engine", "ThreadsEngine"),
    "ray": ("mirrored._parameter_server._ray_engine", "RayEngine"),
}


def make_engine(
    engine: str | None, address: str | None, options: Mapping[str, Any], strategy: Any
) -> Engine:
    """Makes the engine that was asked for.

    Args:
      engine: its name; "ray" if left out and an address is given, "threads" otherwise.
      address: of a Ray cluster; None for one on this machine.
      options: keyword arguments of the engine.
      strategy: whose workers will live there; for threads, which share it.
    """
    name = engine or ("threads" if address is None else "ray")
    if name not in _ENGINES:
        raise ArgumentError(
            fact=f"ParameterServerStrategy was given engine={engine!r}.",
            expected=f"one of {', '.join(repr(known) for known in _ENGINES)}.",
            hint='leave it out for threads in this process; "ray" for processes.',
        )
    if name == "threads" and address is not None:
        raise ArgumentError(
            fact=f'ParameterServerStrategy was given engine="threads" and address={address!r}.',
            expected="an address with Ray only.",
            hint="leave one of them out.",
        )
    module, kind = _ENGINES[name]
    make = getattr(importlib.import_module(module), kind)
    if name == "threads":
        return make(strategy, **options)
    return make(address=address, **options)
