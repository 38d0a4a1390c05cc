"""A run on this machine: attempt after attempt, watched, and the first failure told.

Owns the workers' names and addresses, which of them failed first, when to start all of
them again, and that none is left behind. What a worker does is its own affair; one
process is in ``_process``.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import os
import pathlib
import signal
import socket
import sys
import tempfile
import time
from typing import Any, final

from mirrored._cluster import COORDINATOR, PROCESS_COUNT, PROCESS_ID
from mirrored._processors import cpu_environment
from mirrored._report import (
    ATTEMPT,
    EXIT_BYSTANDER,
    RUN_DIRECTORY,
    read_failure,
    read_preempted,
    read_progress,
    write_ended,
)
from mirrored.launch._process import Worker
from mirrored.launch._settings import Settings

_POLL_SECONDS = 0.02
# How long the others may take to say what they saw once one worker has failed.
_LAST_WORDS_SECONDS = 0.4
# A worker that ended only because another one did is given this long to be told apart.
_CULPRIT_SECONDS = 1.0
# One that has reported a failure of its own ends when it has told the others, which may end first.
_TELLING_SECONDS = 5.0
_STOPPED_SECONDS = 5.0
_BYSTANDERS = (EXIT_BYSTANDER, -signal.SIGABRT)
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def launch(settings: Settings) -> int:
    """Runs the workers to their end and returns the exit code of the run.

    0 if all workers ended with 0; else the code of the first that failed (128 + the
    signal's number, if it was killed).
    """
    if settings.run_directory is not None:
        pathlib.Path(settings.run_directory).mkdir(parents=True, exist_ok=True)
        return _Launcher(settings, settings.run_directory).run()
    with tempfile.TemporaryDirectory(prefix="mirrored-") as directory:
        return _Launcher(settings, directory).run()


def local_gpu_count() -> int:
    """Counts the GPUs of this machine without starting anything that would hold them."""
    return len(glob.glob("/dev/nvidia[0-9]*"))


@final
@dataclasses.dataclass(frozen=True)
class _Outcome:
    """How an attempt ended."""

    code: int
    reason: str = ""
    preempted: bool = False


@final
class _Launcher:
    """A run: one attempt after another."""

    def __init__(self, settings: Settings, directory: str) -> None:
        self._settings = settings
        self._directory = directory
        self._workers: list[Worker] = []
        self._signals: list[int] = []
        self._told_to_end_at: float | None = None

    def run(self) -> int:
        before = {number: signal.signal(number, self._on_signal) for number in _PASSED_ON}
        try:
            attempt = 0
            while True:
                outcome = self._attempt(attempt)
                if outcome.code == 0 and not outcome.preempted:
                    return 0
                if self._told_to_end_at is not None or attempt >= self._settings.max_restarts:
                    return outcome.code
                attempt += 1
                _say(
                    f"{outcome.reason}; starting all workers again "
                    f"({attempt} of at most {self._settings.max_restarts} restarts)."
                )
        finally:
            for worker in self._workers:
                worker.end()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: Any) -> None:
        # Only noted here: the loop may be between starting a worker and knowing it.
        self._signals.append(number)

    # --- one attempt -------------------------------------------------------------

    def _attempt(self, attempt: int) -> _Outcome:
        for path in glob.glob(f"{glob.escape(self._directory)}/*-[0-9]*"):
            pathlib.Path(path).unlink()
        settings = self._settings
        coordinator = self._coordinator(attempt)
        first = settings.node_rank * settings.processes
        self._workers = []
        command = [*([sys.executable, "-u"] if settings.python else []), *settings.command]
        for local in range(settings.processes):
            environment = self._environment(attempt, coordinator, first + local, local)
            number = first + local
            self._workers.append(
                Worker(
                    number,
                    command,
                    environment,
                    shown=settings.show is None or number in settings.show,
                    log=self._log(attempt, number),
                )
            )
        pids = {worker.number: worker.process.pid for worker in self._workers}
        listing = pathlib.Path(self._directory) / "workers.part"
        listing.write_text(json.dumps({"attempt": attempt, "pids": pids}))
        listing.replace(listing.with_suffix(".json"))
        outcome = self._wait()
        for worker in self._workers:
            worker.end()
        for worker in self._workers:
            worker.drain()
        return outcome

    def _log(self, attempt: int, number: int) -> pathlib.Path | None:
        if self._settings.log_directory is None:
            return None
        directory = pathlib.Path(self._settings.log_directory) / f"attempt-{attempt}"
        directory.mkdir(parents=True, exist_ok=True)
        return directory / f"worker-{number}"

    def _coordinator(self, attempt: int) -> str:
        given = self._settings.coordinator
        if given is None:
            with socket.create_server(("127.0.0.1", 0)) as probe:
                return f"127.0.0.1:{probe.getsockname()[1]}"
        host, _, port = given.rpartition(":")
        # Another port each time: connections of the attempt before may linger.
        return f"{host}:{int(port) + attempt}"

    def _environment(
        self, attempt: int, coordinator: str, number: int, local: int
    ) -> dict[str, str]:
        settings = self._settings
        environment = dict(os.environ)
        environment |= {
            COORDINATOR: coordinator,
            PROCESS_COUNT: str(settings.nodes * settings.processes),
            PROCESS_ID: str(number),
            RUN_DIRECTORY: self._directory,
            ATTEMPT: str(attempt),
        }
        # A restarted worker finds its programs compiled.
        cache = os.path.join(self._directory, "compiled")
        if "JAX_COMPILATION_CACHE_DIR" not in environment:
            environment["JAX_COMPILATION_CACHE_DIR"] = cache
            environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
            environment["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
        if settings.cpu_devices is not None:
            environment |= cpu_environment(settings.cpu_devices, environment)
        elif "JAX_LOCAL_DEVICE_IDS" not in environment:
            gpus = local_gpu_count()
            share = gpus // settings.processes
            if settings.processes > 1 and share > 0:
                ids = range(local * share, (local + 1) * share)
                environment["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, ids))
        return environment

    def _wait(self) -> _Outcome:
        last_progress: Any = None
        changed_at = time.monotonic()
        stopped_since: dict[int, float] = {}
        ended: set[int] = set()
        while True:
            self._deliver()
            codes = [worker.code for worker in self._workers]
            if any(codes):
                return self._failed()
            if all(code == 0 for code in codes):
                return self._ended()
            for worker in self._workers:
                if worker.code == 0 and worker.number not in ended:
                    ended.add(worker.number)
                    write_ended(self._directory, worker.number)
            now = time.monotonic()
            if self._told_to_end_at is not None:
                if now - self._told_to_end_at > self._settings.grace:
                    late = [worker.number for worker in self._workers if worker.code is None]
                    return _Outcome(
                        128 + signal.SIGKILL,
                        f"workers {late} had not ended {self._settings.grace:g} s after the signal",
                    )
            else:
                progress = [
                    read_progress(self._directory, worker.number) for worker in self._workers
                ]
                if progress != last_progress or not any(pulse for _, pulse in progress):
                    last_progress, changed_at = progress, now
                outcome = self._stuck(now - changed_at) or self._stopped(now, stopped_since)
                if outcome is not None:
                    _say(f"{outcome.reason}.")
                    return outcome
            time.sleep(_POLL_SECONDS)

    def _deliver(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            again = number == signal.SIGINT and self._told_to_end_at is not None
            if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                self._told_to_end_at = self._told_to_end_at or time.monotonic()
            for worker in self._workers:
                worker.pass_on(signal.SIGKILL if again else number)

    def _stuck(self, quiet: float) -> _Outcome | None:
        limit = self._settings.watchdog
        if not limit or quiet < limit:
            return None
        return _Outcome(
            1, f"no worker has run anything for {quiet:.0f} s (last steps: {self._steps()})"
        )

    def _stopped(self, now: float, since: dict[int, float]) -> _Outcome | None:
        for worker in self._workers:
            if worker.code is not None or not worker.is_stopped():
                since.pop(worker.number, None)
                continue
            if now - since.setdefault(worker.number, now) > _STOPPED_SECONDS:
                step = read_progress(self._directory, worker.number)[0]
                return _Outcome(
                    128 + signal.SIGSTOP,
                    f"{self._name(worker)} was stopped (SIGSTOP) {_after(step)}, and the others "
                    "wait for it",
                )
        return None

    def _steps(self) -> str:
        return ", ".join(
            f"worker {worker.number}: {read_progress(self._directory, worker.number)[0]}"
            for worker in self._workers
        )

    def _ended(self) -> _Outcome:
        steps = [read_preempted(self._directory, worker.number) for worker in self._workers]
        if any(step is not None for step in steps):
            step = next(step for step in steps if step is not None)
            return _Outcome(0, f"the run was preempted and saved after step {step}", preempted=True)
        return _Outcome(0)

    # --- failures ----------------------------------------------------------------

    def _failed(self) -> _Outcome:
        """Finds out who failed first, and says so with its own words."""
        first = next(worker for worker in self._workers if worker.code)
        began = time.monotonic()
        while first.code in _BYSTANDERS:
            patience = _TELLING_SECONDS if self._has_reported_itself() else _CULPRIT_SECONDS
            if time.monotonic() - began > patience:
                break
            culprits = [w for w in self._workers if w.code and w.code not in _BYSTANDERS]
            if culprits:
                first = culprits[0]
                break
            time.sleep(_POLL_SECONDS)
        # Of one that was killed they have nothing to tell; all can be started again at once.
        deadline = time.monotonic() + (_LAST_WORDS_SECONDS if (first.code or 0) > 0 else 0.0)
        while time.monotonic() < deadline and any(w.code is None for w in self._workers):
            time.sleep(_POLL_SECONDS)
        running = [worker for worker in self._workers if worker.code is None]
        for worker in self._workers:
            worker.end()
        for worker in self._workers:
            worker.drain()
        code = first.code or 0
        step = read_progress(self._directory, first.number)[0]
        reason = f"{self._name(first)} {_manner(code)} {_after(step)}"
        _say(f"{reason}; {self._words_of(first)}")
        if running:
            shown = ", ".join(str(worker.number) for worker in running)
            _say(f"ended the others that still ran: {shown}.")
        return _Outcome(code if code > 0 else 128 - code, reason)

    def _has_reported_itself(self) -> bool:
        """Whether a worker that still runs has written down that it failed, and not another."""
        reports = [
            read_failure(self._directory, worker.number)
            for worker in self._workers
            if worker.code is None
        ]
        return any(report is not None and report.because_of is None for report in reports)

    def _words_of(self, worker: Worker) -> str:
        failure = read_failure(self._directory, worker.number)
        words = failure.traceback if failure is not None else "\n".join(worker.tail)
        if not words.strip():
            return "it said nothing."
        shown = "\n".join(f"  | {line}" for line in words.strip().splitlines())
        return f"its last words:\n{shown}"

    def _name(self, worker: Worker) -> str:
        return f"worker {worker.number} (host {socket.gethostname()}, pid {worker.process.pid})"


def _manner(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    if code == EXIT_BYSTANDER:
        return f"ended because of another worker (exit code {code})"
    return f"failed first, with exit code {code},"


def _after(step: int) -> str:
    return f"after step {step}" if step >= 0 else "before its first completed step"


def _say(text: str) -> None:
    sys.stderr.write(f"mirrored launch: {text}\n")
    sys.stderr.flush()
