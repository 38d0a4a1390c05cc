"""What a worker tells whoever started it: its last step, and how it failed.

Owns the files of a run's directory, which ``mirrored launch`` makes and reads: the
progress of each worker, and the report of one that failed. Without a launcher
nothing is written.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import pathlib
import struct
from typing import final

# Set by `mirrored launch`: where its workers leave word.
RUN_DIRECTORY = "MIRRORED_RUN_DIRECTORY"
# How many times the run was restarted so far; 0 the first time.
ATTEMPT = "MIRRORED_ATTEMPT"

# This worker ended because another one had failed.
EXIT_BYSTANDER = 86

_FORM = struct.Struct("<qq")


@final
class Progress:
    """A worker's last completed step and a count of everything it ran, in one small file.

    The file is shared memory: a write costs less than a microsecond, and the last one
    is there however the process ends.
    """

    def __init__(self, directory: str | os.PathLike[str], process_id: int) -> None:
        path = pathlib.Path(directory) / f"progress-{process_id}"
        with path.open("w+b") as file:
            file.write(_FORM.pack(-1, 0))
            file.flush()
            self._memory = mmap.mmap(file.fileno(), _FORM.size)

    def write(self, step: int, pulse: int) -> None:
        """Leaves word of the last completed step and the number of calls so far."""
        _FORM.pack_into(self._memory, 0, step, pulse)


def read_progress(directory: str | os.PathLike[str], process_id: int) -> tuple[int, int]:
    """Reads a worker's (last completed step, number of calls); (-1, 0) if it has none."""
    path = pathlib.Path(directory) / f"progress-{process_id}"
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return -1, 0
    return _FORM.unpack(content) if len(content) == _FORM.size else (-1, 0)


@final
@dataclasses.dataclass(frozen=True)
class Failure:
    """How a worker failed: an error of its own, or word of another's."""

    process_id: int
    host: str
    pid: int
    step: int
    error: str
    traceback: str
    # The worker that this one found dead or failed; None if the error is its own.
    because_of: int | None = None

    def write(self, directory: str | os.PathLike[str]) -> None:
        """Leaves the report for the launcher."""
        target = pathlib.Path(directory) / f"failure-{self.process_id}.json"
        partial = target.with_suffix(".part")
        partial.write_text(json.dumps(dataclasses.asdict(self)))
        partial.replace(target)

    def to_json(self) -> str:
        """Writes the report as text, for the coordination service."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Failure:
        """Reads what ``to_json`` wrote."""
        return cls(**json.loads(text))


def read_failure(directory: str | os.PathLike[str], process_id: int) -> Failure | None:
    """Reads the report of a worker, if it left one."""
    path = pathlib.Path(directory) / f"failure-{process_id}.json"
    return Failure.from_json(path.read_text()) if path.exists() else None


def write_ended(directory: str | os.PathLike[str], process_id: int) -> None:
    """Leaves word, for the other workers, that this one has ended with 0."""
    (pathlib.Path(directory) / f"ended-{process_id}").touch()


def read_ended(directory: str | os.PathLike[str], process_id: int) -> bool:
    """Says whether a worker is known to have ended with 0."""
    return (pathlib.Path(directory) / f"ended-{process_id}").exists()


def write_preempted(directory: str | os.PathLike[str], process_id: int, step: int) -> None:
    """Leaves word that this worker ended early, having saved after ``step``."""
    (pathlib.Path(directory) / f"preempted-{process_id}").write_text(str(step))


def read_preempted(directory: str | os.PathLike[str], process_id: int) -> int | None:
    """Reads after which step a worker was preempted; None if it was not."""
    path = pathlib.Path(directory) / f"preempted-{process_id}"
    return int(path.read_text()) if path.exists() else None
