"""The command line: arguments are read here, and nothing else is done."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mirrored._errors import MirroredError
from mirrored.launch import Settings, launch


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that ``arguments`` (``sys.argv`` if left out) ask for."""
    parser = _parser()
    given = parser.parse_args(arguments)
    command = [*(["-m"] if given.module else []), given.program, *given.arguments]
    try:
        settings = Settings(
            command=command,
            processes=given.processes,
            cpu_devices=given.cpu_devices,
            max_restarts=given.max_restarts,
            grace=given.grace,
            watchdog=given.watchdog,
            coordinator=given.coordinator,
            nodes=given.nodes,
            node_rank=given.node_rank,
            run_directory=given.run_directory,
        )
        return launch(settings)
    except MirroredError as error:
        print(f"mirrored: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mirrored", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="command")
    run = commands.add_parser(
        "launch",
        allow_abbrev=False,
        help="start and look after the workers of a run on this machine",
        description="Starts N workers of a program, prefixes their output, reports the first "
        "failure, restarts them all from the last checkpoint, and leaves no process behind.",
    )
    run.add_argument(
        "-n",
        "--processes",
        "--nproc-per-node",
        "--nproc_per_node",
        type=int,
        default=1,
        metavar="N",
        help="workers on this machine (default 1)",
    )
    run.add_argument(
        "--cpu-devices", type=int, metavar="K", help="virtual CPU devices for each worker"
    )
    run.add_argument(
        "--max-restarts",
        "--max_restarts",
        type=int,
        default=0,
        metavar="M",
        help="how often to start all workers again after a failure (default 0)",
    )
    run.add_argument(
        "--grace",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="from a signal passed on until workers are killed (default 30)",
    )
    run.add_argument(
        "--watchdog",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="end a run in which no worker runs anything for so long; 0 for never (default 300)",
    )
    run.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="where worker 0 listens (default: a free port of this machine)",
    )
    run.add_argument(
        "--nodes", "--nnodes", type=int, default=1, metavar="N", help="machines (default 1)"
    )
    run.add_argument(
        "--node-rank",
        "--node_rank",
        type=int,
        default=0,
        metavar="I",
        help="which of the machines this is, from 0",
    )
    run.add_argument("--run-directory", metavar="PATH", help="where workers leave word")
    run.add_argument("-m", "--module", action="store_true", help="run a module, as python -m does")
    run.add_argument("program", help="the program, or the module with -m")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the program")
    return parser
