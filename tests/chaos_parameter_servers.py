"""Seeded runs whose parameter servers and workers are killed at random: `make chaos-ps`.

    python tests/chaos_parameter_servers.py [--engine ray] [--seeds 20] [--first 0]

Ends with 1 if a closure was lost, an update doubled, or a run did not come to its end.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback

from test_parameter_server_faults import kills_at_random


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", default="ray", choices=("ray", "threads"))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--closures", type=int, default=120)
    parser.add_argument("--kills", type=int, default=4)
    options = parser.parse_args()
    failed = []
    for seed in range(options.first, options.first + options.seeds):
        start = time.monotonic()
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
            try:
                said = kills_at_random(
                    options.engine,
                    seed,
                    directory,
                    closures=options.closures,
                    kills=options.kills,
                )
                word = f"every update once; {said}"
            except Exception as error:  # noqa: BLE001 (the other seeds are run, too)
                traceback.print_exc()
                failed.append(seed)
                word = f"FAILED: {type(error).__name__}"
        print(f"seed {seed}: {word} ({time.monotonic() - start:.1f} s)", flush=True)
    print(f"{options.seeds - len(failed)} of {options.seeds} runs lost and doubled nothing")
    if failed:
        print(f"failed: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
