"""From questions to a report: runs the probe, and judges what it found.

Owns the order of an examination and its deadline.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from mirrored._doctor import _hardware, _probe, _surroundings
from mirrored._doctor._child import Answer, ask
from mirrored._doctor._findings import Examination, Finding, Section
from mirrored._doctor._software import software
from mirrored._errors import ArgumentError
from mirrored._processors import cpu_environment

DEFAULT_SECONDS = 20.0
# With one CPU device there is nothing to reduce; so many virtual ones show that it would work.
_VIRTUAL_DEVICES = 4
# Kept back for what is not done by the probe.
_OWN_SECONDS = 1.0


def examine(timeout: float = DEFAULT_SECONDS, cpu_devices: int | None = None) -> Examination:
    """Looks at this machine and this process's environment.

    Args:
      timeout: after how many seconds what has not answered is reported as hanging.
      cpu_devices: how many virtual CPU devices to look at, in place of what there is.
    """
    if not timeout > _OWN_SECONDS:
        raise ArgumentError(
            fact=f"doctor was given timeout={timeout!r}.",
            expected=f"more than {_OWN_SECONDS:.0f} second.",
            hint=f"leave it out for {DEFAULT_SECONDS:.0f} s.",
        )
    if cpu_devices is not None and cpu_devices < 1:
        raise ArgumentError(
            fact=f"doctor was given cpu_devices={cpu_devices!r}.",
            expected="at least 1.",
            hint="leave it out to look at the devices there are.",
        )
    deadline = time.monotonic() + timeout - _OWN_SECONDS
    # The probe leaves the GPUs' memory to the programs that run there.
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
    if cpu_devices is not None:
        environment |= cpu_environment(cpu_devices, environment)
    answer = ask(environment, deadline - time.monotonic())
    backend = answer.facts.get(_probe.BACKEND)
    reduced, is_virtual = answer, False
    if backend is not None and _is_one_cpu(backend) and cpu_devices is None:
        virtual = environment | cpu_environment(_VIRTUAL_DEVICES, environment)
        reduced = ask(virtual, deadline - time.monotonic(), devices_only=True)
        is_virtual = True
    devices = _devices(answer, environment)
    platform = backend["platform"] if backend else ""
    count = len(backend["devices"]) if backend else 0
    # As the program would see them, not as they were changed for the probe.
    own = dict(os.environ)
    if cpu_devices is not None:
        own |= cpu_environment(cpu_devices, own)
    return Examination(
        [
            software(),
            _surroundings.machine(),
            devices,
            _all_reduce(reduced, is_virtual),
            _surroundings.variables(own, platform or "cpu", count),
            _surroundings.cluster(
                own, answer.facts.get(_probe.CLUSTER), answer.facts.get(_probe.REACH)
            ),
        ]
    )


def _is_one_cpu(backend: Mapping[str, Any]) -> bool:
    return backend["platform"] == "cpu" and len(backend["devices"]) == 1


def _devices(answer: Answer, environment: Mapping[str, str]) -> Section:
    findings = _ended(answer, environment)
    backend = answer.facts.get(_probe.BACKEND)
    if backend is None:
        return Section("Devices", [["none seen"]], findings)
    rows = [[found["name"], found["kind"], _used(found)] for found in backend["devices"]]
    for name in answer.facts.get(_probe.COMPUTE, {}).get("wrong", []):
        findings.append(
            Finding(
                fact=f"{name} computes a product of small integers wrongly.",
                hint="leave the device out, and have it tested.",
            )
        )
    platform = backend["platform"]
    findings += _surroundings.unused_accelerators(platform, environment)
    if platform == "gpu":
        findings += _surroundings.little_shared_memory(len(rows))
    return Section(f"Devices (found in {backend['seconds']:.1f} s)", rows, findings)


def _used(device: Mapping[str, Any]) -> str:
    if not device["bytes_limit"]:
        return ""
    gib = _surroundings.GIB
    return f"{device['bytes_limit'] / gib:.1f} GiB, {device['bytes_in_use'] / gib:.1f} in use"


def _ended(answer: Answer, environment: Mapping[str, str]) -> list[Finding]:
    if answer.stuck_in is not None:
        return [_surroundings.where_time_ran_out(answer.stuck_in, answer.seconds, environment)]
    if answer.failed_in is not None:
        return [
            _surroundings.where_it_failed(answer.failed_in, answer.last_words, environment),
        ]
    return []


def _all_reduce(answer: Answer, is_virtual: bool) -> Section:
    """What was measured, beside what the hardware should give."""
    title = "All-reduce"
    findings = _ended(answer, {}) if is_virtual else []
    backend, latency = answer.facts.get(_probe.BACKEND), answer.facts.get(_probe.LATENCY)
    if backend is None or latency is None:
        alone = backend is not None and len(backend["devices"]) == 1
        why = "one device: nothing to reduce" if alone else "not measured, see below"
        return Section(title, [[why]], findings)
    count, kind = len(backend["devices"]), backend["devices"][0]["kind"]
    title = f"All-reduce over {count} devices of kind {kind}"
    if is_virtual:
        title = f"All-reduce over {count} virtual CPU devices, since one has nothing to reduce"
    rows = [["4 KiB", f"{latency['seconds'] * 1e6:.0f} us", ""]]
    large = answer.facts.get(_probe.BANDWIDTH)
    if large is None:
        return Section(title, rows, findings)
    size = f"{large['bytes'] >> 20} MiB"
    gb = _hardware.GB
    if backend["platform"] == "cpu":
        bandwidth, memcpy = (large["bytes"] / large[name] for name in ("seconds", "memcpy_seconds"))
        rows.append(
            [
                size,
                f"{bandwidth / gb:.2f} GB/s",
                f"of each device's bytes; this machine copies {memcpy / gb:.1f} GB/s, and "
                f"{count} devices share that",
            ]
        )
        findings += _hardware.judge_memory_copies(bandwidth, memcpy, count)
        return Section(title, rows, findings)
    bandwidth = _hardware.carried_per_device(large["bytes"], count) / large["seconds"]
    link = _hardware.link_of(kind)
    if link is None:
        rows.append([size, f"{bandwidth / gb:.1f} GB/s", "a kind of device that is not known"])
        return Section(title, rows, findings)
    rows[0][-1] = f"{link.name}: about {link.seconds * 1e6:.0f} us"
    rows.append(
        [
            size,
            f"{bandwidth / gb:.1f} GB/s",
            f"{link.name}: at most {link.bytes_per_second / gb:.0f} GB/s each way",
        ]
    )
    findings += _hardware.judge_link(link, kind, bandwidth, latency["seconds"])
    return Section(title, rows, findings)
