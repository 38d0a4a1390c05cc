"""What the devices did while something ran: operations with their times, from a trace.

Owns recording a trace with JAX's profiler for this and reading it. It does not know
what was run, nor what the times mean for it.
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any, final

import jax

from mirrored._compiled import is_collective
from mirrored._errors import ContextError

_Interval = tuple[float, float]


@final
@dataclasses.dataclass(frozen=True)
class Timeline:
    """What the devices did while something ran; seconds, the mean over the devices.

    Attributes:
      wall: from the beginning to the end.
      compute: how long a device computed.
      collectives: how long it exchanged values, waiting for the others included, while
        it computed nothing.
      operations: by program, the names of the operations that ran.
    """

    wall: float
    compute: float
    collectives: float
    operations: dict[str, frozenset[str]]


def record(run: Callable[[], Any]) -> Timeline | None:
    """Runs something under the profiler; None if the backend tells nothing of operations."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory(prefix="mirrored-trace-") as directory:
        try:
            jax.profiler.start_trace(directory, profiler_options=options)
        except RuntimeError as error:
            raise ContextError(
                fact=f"the profiler could not be started: {error}",
                expected="no other trace at the same time.",
                hint="end it first: explain records a trace of its own.",
            ) from error
        try:
            start = time.perf_counter()
            run()
            wall = time.perf_counter() - start
        finally:
            jax.profiler.stop_trace()
        (path,) = pathlib.Path(directory).rglob("*.xplane.pb")
        with warnings.catch_warnings():
            # Python 3.12 warns of jaxlib's types when they are first used. Where warnings are
            # errors, that one would end the process: it is raised inside C++.
            warnings.filterwarnings("ignore", "builtin type .* has no __module__ attribute")
            return _read(jax.profiler.ProfileData.from_file(str(path)), wall)


def _read(profile: Any, wall: float) -> Timeline | None:
    computing: dict[Any, list[_Interval]] = collections.defaultdict(list)
    exchanging: dict[Any, list[_Interval]] = collections.defaultdict(list)
    operations: dict[str, set[str]] = collections.defaultdict(set)
    for plane in profile.planes:
        for line in plane.lines:
            for event in line.events:
                told = dict(event.stats)
                operation = told.get("hlo_op")
                # Kernels of a CUDA graph do not say which operation they are.
                if operation is None and not _is_kernel(plane.name, line.name):
                    continue
                # CPU devices share a plane; each GPU has its own.
                device = (plane.name, told.get("device_ordinal"))
                interval = (event.start_ns, event.start_ns + event.duration_ns)
                found = is_collective(event.name) or is_collective(operation or "")
                (exchanging if found else computing)[device].append(interval)
                if operation is not None:
                    operations[str(told.get("hlo_module", ""))].add(operation)
    devices = {*computing, *exchanging}
    if not devices:
        return None
    compute = sum(_length(computing[device]) for device in devices)
    either = sum(_length([*computing[device], *exchanging[device]]) for device in devices)
    scale = 1e-9 / len(devices)
    named = {name: frozenset(found) for name, found in operations.items()}
    return Timeline(wall, compute * scale, (either - compute) * scale, named)


def _is_kernel(plane: str, line: str) -> bool:
    return plane.startswith("/device:GPU") and line.startswith("Stream")


def _length(intervals: list[_Interval]) -> float:
    """How long at least one of the intervals lasts."""
    total, end = 0.0, float("-inf")
    for first, last in sorted(intervals):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total
