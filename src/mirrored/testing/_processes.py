"""Programs of several processes under test: started, disturbed at chosen steps, awaited.

Owns the Run, which is a ``mirrored launch`` of its own, and faults done to its workers.
The steps are those that ``Checkpoint.completed`` counts.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

from mirrored._errors import ArgumentError, WorkerError
from mirrored._report import read_progress

_POLL_SECONDS = 0.001


@final
@dataclasses.dataclass(frozen=True)
class Fault:
    """A signal sent to a worker once it has completed a step.

    Args:
      step: the number of completed steps, as the worker counts them.
      worker: which worker.
      signal: SIGKILL, SIGSTOP, SIGTERM or another.
    """

    step: int
    worker: int
    signal: signal.Signals


def random_faults(seed: int, workers: int, last_step: int, count: int = 1) -> list[Fault]:
    """Draws faults at random steps of random workers: kill -9, SIGSTOP or SIGTERM.

    >>> from mirrored.testing import random_faults
    >>> random_faults(0, workers=2, last_step=50) == random_faults(0, workers=2, last_step=50)
    True
    """
    draw = random.Random(seed)
    kinds = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)
    faults = [
        Fault(draw.randint(1, last_step), draw.randrange(workers), draw.choice(kinds))
        for _ in range(count)
    ]
    return sorted(faults, key=lambda fault: fault.step)


@final
@dataclasses.dataclass(frozen=True)
class FinishedRun:
    """A run that has ended: its exit code and what it printed."""

    code: int
    stdout: str
    stderr: str

    def require_success(self) -> FinishedRun:
        """Returns itself; raises with the output if the run failed."""
        if self.code != 0:
            raise WorkerError(
                fact=f"the run ended with {self.code}:\n{self.stdout}\n{self.stderr}",
                expected="exit code 0.",
                hint="the first failure is reported in the last lines.",
            )
        return self


@final
class Run:
    """Several processes of one program, started by ``mirrored launch``.

    Use it as a context manager: whatever still runs at its end is killed.

    Args:
      program: the program and its arguments, as for ``python``.
      workers: how many processes.
      cpu_devices: virtual CPU devices for each; one, if left out.
      max_restarts: how often the launcher starts all workers again.
      environment: variables to set beside those of this process.

    >>> from mirrored.testing import Run
    >>> with Run(["-m", "platform"], workers=2) as run:
    ...     finished = run.finish().require_success()
    >>> sorted(line[:10] for line in finished.stdout.splitlines())
    ['[worker 0]', '[worker 1]']
    """

    def __init__(
        self,
        program: Sequence[str | os.PathLike[str]],
        workers: int,
        *,
        cpu_devices: int = 1,
        max_restarts: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.workers = workers
        self._temporary = tempfile.TemporaryDirectory(prefix="mirrored-test-")
        self._directory = pathlib.Path(self._temporary.name)
        # What this process told XLA of its own devices is not for others.
        own = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC")}
        command = [
            *(sys.executable, "-m", "mirrored", "launch", "-n", str(workers)),
            *("--cpu-devices", str(cpu_devices), "--max-restarts", str(max_restarts)),
            *("--run-directory", self._temporary.name),
            *map(str, program),
        ]
        self._outputs = [(self._directory / name).open("w+b") for name in ("out.txt", "err.txt")]
        self._launcher = subprocess.Popen(
            command,
            env=own | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=self._outputs[0],
            stderr=self._outputs[1],
        )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._launcher.poll() is None:
            pids = self.pids()
            self._launcher.kill()
            self._launcher.wait()
            for pid in pids:
                # Groups of their own; the kernel ends the workers, not what they started.
                try:
                    os.killpg(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        for output in self._outputs:
            output.close()
        self._temporary.cleanup()

    def _listing(self) -> dict[str, Any] | None:
        try:
            return json.loads((self._directory / "workers.json").read_text())
        except FileNotFoundError:
            return None

    @property
    def attempt(self) -> int:
        """How often the workers were started again; -1 before they are started at all."""
        listing = self._listing()
        return -1 if listing is None else listing["attempt"]

    def pids(self) -> list[int]:
        """The process ids of the workers, in order."""
        listing = self._listing()
        return [] if listing is None else list(listing["pids"].values())

    def step(self, worker: int = 0) -> int:
        """The last step a worker has completed; -1 before the first."""
        return read_progress(self._directory, worker)[0]

    def wait_for_step(self, step: int, worker: int = 0, timeout: float = 60.0) -> bool:
        """Waits until a worker has completed ``step``; False if the run has ended before."""
        deadline = time.monotonic() + timeout
        while self.step(worker) < step:
            if self._launcher.poll() is not None:
                return False
            if time.monotonic() > deadline:
                raise WorkerError(
                    fact=f"worker {worker} is at step {self.step(worker)} after {timeout:g} s; "
                    f"its run printed:\n{self._printed(0)}\n{self._printed(1)}",
                    expected=f"step {step}.",
                    hint="call Checkpoint.completed after each step, and look at the output.",
                )
            time.sleep(_POLL_SECONDS)
        return True

    def send(self, worker: int, number: int) -> None:
        """Sends a signal to a worker."""
        if not 0 <= worker < self.workers:
            raise ArgumentError(
                fact=f"a signal was to go to worker {worker}.",
                expected=f"a worker from 0 to {self.workers - 1}.",
                hint="workers are numbered from 0.",
            )
        os.kill(self.pids()[worker], number)

    def send_launcher(self, number: int) -> None:
        """Sends a signal to the launcher."""
        self._launcher.send_signal(number)

    def kill(self, worker: int) -> None:
        """Kills a worker, as a machine that fails does."""
        self.send(worker, signal.SIGKILL)

    def stop(self, worker: int) -> None:
        """Stops a worker: it is there, and does nothing."""
        self.send(worker, signal.SIGSTOP)

    def preempt(self, worker: int) -> None:
        """Sends SIGTERM to a worker, as a scheduler does that wants its machine back."""
        self.send(worker, signal.SIGTERM)

    def finish(self, timeout: float = 60.0) -> FinishedRun:
        """Waits for the end of the run."""
        try:
            code = self._launcher.wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise WorkerError(
                fact=f"the run has not ended within {timeout:g} s; it printed:\n"
                f"{self._printed(0)}\n{self._printed(1)}",
                expected="an end.",
                hint="its workers may wait for each other; see their last lines.",
            ) from error
        return FinishedRun(code, self._printed(0), self._printed(1))

    def _printed(self, which: int) -> str:
        return pathlib.Path(self._outputs[which].name).read_text(errors="replace")


def run_with_faults(
    program: Sequence[str | os.PathLike[str]],
    workers: int,
    faults: Iterable[Fault],
    *,
    cpu_devices: int = 1,
    environment: Mapping[str, str] | None = None,
    timeout: float = 120.0,
) -> FinishedRun:
    """Runs a program to its end, with faults, each in an attempt of its own.

    The launcher starts all workers again after each; a fault whose step is behind when
    the run resumes is done at once.
    """
    waiting = list(faults)
    with Run(
        program,
        workers,
        cpu_devices=cpu_devices,
        max_restarts=len(waiting),
        environment=environment,
    ) as run:
        over = threading.Event()

        def disturb() -> None:
            for attempt, fault in enumerate(waiting):
                while run.attempt < attempt or run.step(fault.worker) < fault.step:
                    if over.wait(_POLL_SECONDS):
                        return
                try:
                    run.send(fault.worker, fault.signal)
                except ProcessLookupError:
                    # The run has come to its end in the meantime.
                    return

        disturber = threading.Thread(target=disturb, daemon=True)
        disturber.start()
        try:
            return run.finish(timeout)
        finally:
            over.set()
            disturber.join()
