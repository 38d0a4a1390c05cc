"""One worker of a launch: a process in a group of its own, and its output.

Owns starting it, reading what it prints, passing signals on, and ending it with
everything it has started.
"""

from __future__ import annotations

import collections
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import IO, Any, final

_TAIL_LINES = 40
# Asks Linux to kill the worker should its launcher be killed, then becomes the worker. In a
# program of its own: Python between fork and exec (preexec_fn) is unsafe beside threads.
_TIED = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9);"
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execvp(sys.argv[2], sys.argv[2:])"
)


@final
class Worker:
    """One process, its output, and what is known of its end.

    Args:
      number: its number among all workers.
      command: the program and its arguments.
      environment: all of its environment variables.
      shown: whether its output is passed on, with its number before each line.
      log: a path to which ``.out`` and ``.err`` are added; None to write no files.
    """

    def __init__(
        self,
        number: int,
        command: list[str],
        environment: Mapping[str, str],
        *,
        shown: bool = True,
        log: pathlib.Path | None = None,
    ) -> None:
        self.number = number
        self.tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        self._shown = shown
        self.process = subprocess.Popen(
            [*_tie(), *command],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # A group of its own, so that its children end with it and Ctrl-C is passed
            # on once.
            start_new_session=True,
        )
        self._readers = [
            threading.Thread(target=self._copy, args=(source, target, file), daemon=True)
            for source, target, file in (
                (self.process.stdout, sys.stdout, log and log.with_suffix(".out")),
                (self.process.stderr, sys.stderr, log and log.with_suffix(".err")),
            )
        ]
        for reader in self._readers:
            reader.start()

    def _copy(self, source: Any, target: IO[str], path: pathlib.Path | None) -> None:
        log = path.open("wb") if path is not None else contextlib.nullcontext()
        with source, log as file:
            for raw in source:
                line = raw.decode(errors="replace")
                if line.startswith("[Gloo] Rank "):
                    continue
                if file is not None:
                    file.write(raw)
                    file.flush()
                if target is sys.stderr:
                    self.tail.append(line.rstrip("\n"))
                if self._shown:
                    ended = line if line.endswith("\n") else f"{line}\n"
                    target.write(f"[worker {self.number}] {ended}")
                    target.flush()

    @property
    def code(self) -> int | None:
        """The exit code, as subprocess gives it; None while it runs."""
        return self.process.poll()

    def pass_on(self, number: int) -> None:
        """Sends a signal to the worker alone: what its children get is its own choice."""
        if self.code is None:
            self.process.send_signal(number)

    def end(self) -> None:
        """Ends the worker and everything it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def drain(self) -> None:
        """Waits for the rest of its output."""
        for reader in self._readers:
            reader.join(2.0)

    def is_stopped(self) -> bool:
        """Says whether somebody stopped it (SIGSTOP), where the system tells."""
        try:
            status = pathlib.Path(f"/proc/{self.process.pid}/stat").read_text()
        except OSError:
            return False
        return status.rpartition(")")[2].split()[0] == "T"


def _tie() -> list[str]:
    if sys.platform != "linux":
        return []
    return [sys.executable, "-S", "-E", "-c", _TIED, str(os.getpid())]
