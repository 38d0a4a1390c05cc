"""What to launch and how to look after it, checked before anything is started."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Sequence
from typing import final

from mirrored._errors import ArgumentError


@final
@dataclasses.dataclass(frozen=True)
class Settings:
    """What to start and how to look after it.

    Args:
      command: the program and its arguments, as for ``python``: ``["train.py", "--lr", "1"]``
        or ``["-m", "package.train"]``.
      processes: how many workers on this machine.
      cpu_devices: virtual CPU devices for each worker; None to use what there is.
      max_restarts: how often all workers are started again after a failure.
      grace: seconds between passing SIGTERM on and SIGKILL.
      watchdog: seconds without progress of any worker after which the run is ended;
        0 for never. It starts with the first step.
      coordinator: "host:port" of worker 0; chosen on this machine if None.
      nodes: how many machines run this command, each with ``processes`` workers.
      node_rank: which of them this one is, from 0.
      run_directory: where the workers leave word; a temporary directory if None.
      python: whether ``command`` is for Python; else it is a program of its own.
      log_directory: where each worker's output is also written, a file for each attempt.
      show: the workers whose output is shown; None for all. Failures are, of all.

    >>> from mirrored.launch import Settings
    >>> Settings(["-m", "package.train"], processes=2).processes
    2
    """

    command: Sequence[str]
    processes: int = 1
    cpu_devices: int | None = None
    max_restarts: int = 0
    grace: float = 30.0
    watchdog: float = 300.0
    coordinator: str | None = None
    nodes: int = 1
    node_rank: int = 0
    run_directory: str | None = None
    python: bool = True
    log_directory: str | None = None
    show: Sequence[int] | None = None

    def __post_init__(self) -> None:
        self._require(bool(self.command), "command", "a program to start")
        self._require(self.processes >= 1, "processes", "at least 1")
        devices = self.cpu_devices
        self._require(devices is None or devices >= 1, "cpu_devices", "at least 1")
        self._require(self.max_restarts >= 0, "max_restarts", "0 or more")
        self._require(self.grace >= 0, "grace", "0 or more seconds")
        self._require(self.watchdog >= 0, "watchdog", "0 or more seconds")
        self._require(self.nodes >= 1, "nodes", "at least 1")
        self._require(0 <= self.node_rank < self.nodes, "node_rank", "from 0 to nodes - 1")
        self._require(
            self.nodes == 1 or self.coordinator is not None,
            "coordinator",
            "host:port of the first machine, the same on all of them",
        )
        if self.coordinator is not None:
            host, _, port = self.coordinator.rpartition(":")
            fits = bool(host) and port.isdigit() and 0 < int(port) < 65536 - self.max_restarts
            self._require(
                fits, "coordinator", "host:port, with room for a port more for each restart"
            )
        if self.show is not None:
            total = self.nodes * self.processes
            known = all(0 <= number < total for number in self.show)
            self._require(known, "show", f"numbers of workers from 0 to {total - 1}")
        program = self.command[0]
        if not self.python:
            found = shutil.which(program) is not None
            self._require(found, "command", f"a program that can be run, which {program} is not")
        elif not program.startswith("-"):
            found = os.path.exists(program)
            self._require(found, "command", f"a file; there is no {os.path.abspath(program)}")

    def _require(self, holds: bool, name: str, expected: str) -> None:
        if not holds:
            raise ArgumentError(
                fact=f"launch was given {name}={getattr(self, name)!r}.",
                expected=f"{expected}.",
                hint="see `mirrored launch --help`.",
            )
