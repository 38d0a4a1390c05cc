"""Which engines there are, by name.

Owns the choice and the late import: an engine's libraries are needed by those only who
ask for it.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

from mirrored._errors import ArgumentError
from mirrored._parameter_server._engine import Engine
from mirrored._parameter_server._sharing import Sharing

_ENGINES = {
    "threads": ("mirrored._parameter_server._threads_engine", "ThreadsEngine"),
    "ray": ("mirrored._parameter_server._ray_engine", "RayEngine"),
}
_GUESTS = "mirrored._parameter_server._guest_engine"
_STARTING = "starting the servers"


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


def make_shared_engine(
    sharing: Sharing, address: str | None, options: Mapping[str, Any], server_count: int
) -> Engine:
    """Makes the engine of one of several processes that share servers on Ray.

    The first process starts them; the others wait until it has, see ``introduce``.
    """
    name = sharing.name() if address is not None else None
    if sharing.is_first:
        module = importlib.import_module(_ENGINES["ray"][0])
        return module.RayEngine(address=address, name=name, **options)
    guests = importlib.import_module(_GUESTS)
    path = sharing.by_first(str, _STARTING)
    if address is None:
        return guests.GuestEngine(guests.found_in_file(path))
    ray_options = options.get("ray_options") or {}
    return guests.GuestEngine(guests.found_in_ray(address, name, server_count, ray_options))


def introduce(sharing: Sharing, engine: Any, address: str | None) -> None:
    """Tells the others that the servers run, and waits until they have found them."""
    path = ""
    if sharing.is_first:
        guests = importlib.import_module(_GUESTS)

        def leave() -> str:
            return "" if address is not None else guests.left_in_file(engine.introductions())

        path = sharing.by_first(leave, _STARTING)
    sharing.everyone("finding the servers")
    if path:
        os.unlink(path)
