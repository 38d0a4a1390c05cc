"""Starts the workers of a program as Ray tasks, and all of them again when one fails.

python examples/cluster/on_ray.py 2 examples/several_workers.py /shared/checkpoints
"""

import os
import socket
import subprocess
import sys

import ray


@ray.remote
class Place:
    """Where one worker runs: a process of its own, so that Ray's stays clean."""

    def address(self):
        """Returns an address of this machine that is free now."""
        with socket.create_server(("", 0)) as probe:
            return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def run(self, coordinator, count, number, command):
        """Runs the worker to its end and returns its exit code."""
        environment = os.environ | {
            "MIRRORED_COORDINATOR": coordinator,
            "MIRRORED_PROCESS_COUNT": str(count),
            "MIRRORED_PROCESS_ID": str(number),
        }
        return subprocess.run([sys.executable, *command], env=environment, check=False).returncode


def main():
    count, command = int(sys.argv[1]), sys.argv[2:]
    ray.init()
    for _ in range(5):
        # One GPU each: .options(num_gpus=1).
        places = [Place.options(scheduling_strategy="SPREAD").remote() for _ in range(count)]
        coordinator = ray.get(places[0].address.remote())
        runs = [
            place.run.remote(coordinator, count, number, command)
            for number, place in enumerate(places)
        ]
        try:
            if not any(ray.get(runs)):
                return 0
        except ray.exceptions.RayActorError as error:
            print(f"a worker's machine is gone: {error}")
        for place in places:
            ray.kill(place)
    return 1


if __name__ == "__main__":
    sys.exit(main())
