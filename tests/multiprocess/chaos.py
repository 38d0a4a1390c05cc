"""Many seeded runs whose workers are killed, stopped and preempted at random steps.

Every run must end with the same bits as the uninterrupted one: parameters, optimizer
state, random state and the rows of every step. ``make chaos`` runs it.
"""

import argparse
import collections
import pathlib
import statistics
import sys
import tempfile
import time

import survival

from mirrored.testing import random_faults


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--first-seed", type=int, default=0)
    given = parser.parse_args()
    lost = collections.defaultdict(list)
    failed = 0
    with tempfile.TemporaryDirectory(prefix="mirrored-chaos-") as name:
        root = pathlib.Path(name)
        expected = {}
        for seed in range(given.first_seed, given.first_seed + given.runs):
            workers = 2 + seed % 3
            if workers not in expected:
                expected[workers] = survival.uninterrupted(root / f"whole-{workers}", workers)
            faults = random_faults(seed, workers, survival.STEPS_IN_EPOCH * survival.EPOCHS - 5)
            directory = root / f"seed-{seed}"
            began = time.monotonic()
            found, _ = survival.interrupted(directory, workers, faults)
            same = found == expected[workers]
            failed += not same
            seconds = survival.seconds_lost(directory)
            kinds = "+".join(fault.signal.name for fault in faults)
            lost[kinds, workers].append(seconds)
            where = ", ".join(f"worker {fault.worker} at step {fault.step}" for fault in faults)
            print(
                f"seed {seed}: {workers} workers, {kinds} {where}: "
                f"{'identical' if same else 'DIFFERENT'}, {seconds:.1f} s without a step, "
                f"{time.monotonic() - began:.0f} s in all",
                flush=True,
            )
    print(f"{given.runs - failed} of {given.runs} runs identical to the uninterrupted one")
    for (kinds, workers), seconds in sorted(lost.items()):
        print(
            f"  {kinds}, {workers} workers: {len(seconds)} runs, median "
            f"{statistics.median(seconds):.1f} s without a step, at most {max(seconds):.1f} s"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
