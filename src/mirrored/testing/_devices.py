"""Virtual CPU devices for programs that use several.

Owns asking XLA for them, before JAX's backend starts.
"""

from __future__ import annotations

import os

import jax

from mirrored import _compat
from mirrored._errors import ArgumentError, ContextError
from mirrored._processors import cpu_environment


def use_cpu_devices(count: int) -> None:
    """Makes JAX show ``count`` virtual CPU devices, and nothing else.

    Call it before anything uses JAX's devices. It also gives XLA's CPU thread pool
    enough threads: with fewer than two a device, programs with collectives hang.

    Args:
      count: the number of devices.

    Raises:
      ContextError: if JAX has already started with other devices.
    """
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ArgumentError(
            fact=f"use_cpu_devices was given {count!r}.",
            expected="a positive integer.",
            hint="write for example mirrored.testing.use_cpu_devices(8).",
        )
    if _compat.backend_has_started():
        devices = jax.devices()
        if devices[0].platform == "cpu" and len(devices) == count:
            return
        raise ContextError(
            fact=f"use_cpu_devices({count}) was called after JAX had started with "
            f"{len(devices)} {devices[0].platform} device(s).",
            expected="the call before anything asks JAX for devices or makes an array.",
            hint="move it to the top of the program, right after the imports.",
        )
    os.environ.update(cpu_environment(count, os.environ))
    jax.config.update("jax_platforms", "cpu")
