"""Helps to test programs that use several devices on a machine that has one CPU.

Owns asking XLA for virtual CPU devices, before JAX's backend starts.
"""

from __future__ import annotations

import os
import re

import jax

from mirrored import _compat
from mirrored._errors import ArgumentError, ContextError

_COUNT_FLAG = "--xla_force_host_platform_device_count"


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
    flags = re.sub(rf"{_COUNT_FLAG}=\d+", "", os.environ.get("XLA_FLAGS", "")).split()
    os.environ["XLA_FLAGS"] = " ".join([*flags, f"{_COUNT_FLAG}={count}"])
    threads = max(os.cpu_count() or 1, 2 * count)
    set_before = os.environ.get("NPROC", "")
    if set_before.isdigit():
        threads = max(threads, int(set_before))
    os.environ["NPROC"] = str(threads)
    jax.config.update("jax_platforms", "cpu")
