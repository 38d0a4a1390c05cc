"""What the tests of survival and ``make chaos`` share: one program, and what it must give."""

from __future__ import annotations

import itertools
import json
import pathlib

import numpy as np

from mirrored.testing import Run, run_with_faults

PROGRAM = pathlib.Path(__file__).parent / "programs" / "train.py"
STEPS_IN_EPOCH = 13
EPOCHS = 4


def uninterrupted(directory, workers):
    """Runs the program to its end and returns what it leaves."""
    directory.mkdir(parents=True)
    with Run([PROGRAM, directory, EPOCHS, 0], workers) as run:
        run.finish(180).require_success()
    return outcome(directory, workers)


def interrupted(directory, workers, faults, pause=0.02):
    """Runs the program with faults and returns (what it leaves, the run)."""
    directory.mkdir(parents=True)
    finished = run_with_faults([PROGRAM, directory, EPOCHS, pause], workers, faults, timeout=300)
    finished.require_success()
    return outcome(directory, workers), finished


def outcome(directory, workers):
    """Reads the final state, and which rows each worker saw in which step."""
    with np.load(directory / "final.npz") as saved:
        arrays = {name: (saved[name].dtype.str, saved[name].tobytes()) for name in saved.files}
    seen = []
    for number in range(workers):
        rows = {}
        for line in (directory / f"seen-{number}").read_text().splitlines():
            entry = json.loads(line)
            # A step that was taken back and done again must see the same rows.
            assert rows.setdefault(entry["step"], entry["rows"]) == entry["rows"]
        seen.append(rows)
    return arrays, seen


def seconds_lost(directory):
    """Returns the longest time between two completed steps."""
    times = [json.loads(line)["time"] for line in (directory / "seen-0").read_text().splitlines()]
    return max(after - before for before, after in itertools.pairwise(times))
