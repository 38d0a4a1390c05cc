"""XLA's CPU devices before they start: how many there are, and with how many threads.

Owns the environment variables that say so (``XLA_FLAGS``, ``NPROC``). They are read once,
when JAX's backend starts.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping, MutableMapping

from mirrored import _compat

_COUNT_FLAG = "--xla_force_host_platform_device_count"
_TIMEOUT_FLAG = "--xla_cpu_collective_timeout_seconds"
# The first that is set counts.
_THREADS = ("PJRT_NPROC", "NPROC")
# Dead and stopped workers are noticed otherwise; this is for those that go on but never
# come, and must outlast a worker's longest work alone.
_COLLECTIVE_SECONDS = 600


def cpu_environment(count: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that make a process show ``count`` virtual CPU devices.

    They also give XLA's CPU thread pool enough threads for several devices: with fewer
    than two each, programs with collectives hang.
    """
    flags = re.sub(rf"{_COUNT_FLAG}=\d+", "", environment.get("XLA_FLAGS", "")).split()
    variables = {
        "XLA_FLAGS": " ".join([*flags, f"{_COUNT_FLAG}={count}"]),
        "JAX_PLATFORMS": "cpu",
    }
    if count > 1:
        threads = max(os.cpu_count() or 1, 2 * count, asked_threads(environment) or 0)
        variables["NPROC"] = str(threads)
    return variables


def asked_cpu_devices(environment: Mapping[str, str]) -> int:
    """How many virtual CPU devices the environment asks for; 1 if it does not."""
    found = re.findall(rf"{_COUNT_FLAG}=(\d+)", environment.get("XLA_FLAGS", ""))
    count = found[-1] if found else environment.get("JAX_NUM_CPU_DEVICES", "1")
    return int(count) if count.isdigit() else 1


def asked_threads(environment: Mapping[str, str]) -> int | None:
    """How many threads the environment gives XLA's pool; None if it leaves that to XLA."""
    given = next((environment[name] for name in _THREADS if environment.get(name)), "")
    return int(given) if given.isdigit() else None


def share_processors(
    pids: Iterable[int], environment: MutableMapping[str, str] = os.environ
) -> None:
    """Gives this process its share of the processors that the processes ``pids`` use too.

    Otherwise each of them starts a thread for every processor. These wait for each other by
    spinning, and take the processors from the threads they wait for: on two processors, steps
    of two workers took 4 to 20 times as long.

    Args:
      pids: the processes of this machine that compute together, this one among them.
      environment: where to set the number of threads, if nobody has.
    """
    if sys.platform != "linux" or asked_threads(environment) is not None:
        return
    own = os.sched_getaffinity(0)
    sharing = 0
    for pid in pids:
        try:
            sharing += not own.isdisjoint(os.sched_getaffinity(pid))
        except OSError:
            # In a container of its own, or gone.
            continue
    if sharing < 2:
        return
    devices = max(asked_cpu_devices(environment), _compat.configured_cpu_devices())
    # Several devices of one process wait for each other, so each needs its threads.
    least = 2 * devices if devices > 1 else 1
    environment["NPROC"] = str(max(len(own) // sharing, least))


def bound_collectives(environment: MutableMapping[str, str] = os.environ) -> None:
    """Bounds how long a collective between CPU devices waits, if the user has not."""
    flags = environment.get("XLA_FLAGS", "")
    if _TIMEOUT_FLAG not in flags:
        environment["XLA_FLAGS"] = f"{flags} {_TIMEOUT_FLAG}={_COLLECTIVE_SECONDS}".strip()
