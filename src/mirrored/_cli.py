"""The command line: arguments are read here, and nothing else is done."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from mirrored._doctor import DEFAULT_SECONDS, examine
from mirrored._errors import MirroredError
from mirrored._parameter_server import read_status
from mirrored.launch import Settings, launch
from mirrored.launch._launcher import local_gpu_count


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that ``arguments`` (``sys.argv`` if left out) ask for."""
    given = _parser().parse_args(arguments)
    try:
        return given.command(given)
    except MirroredError as error:
        print(f"mirrored: {error}", file=sys.stderr)
        return 2


def _doctor(given: argparse.Namespace) -> int:
    examination = examine(given.timeout, given.cpu_devices)
    print(examination)
    return 1 if examination.wrong else 0


def _status(given: argparse.Namespace) -> int:
    while True:
        print(read_status(given.address), flush=True)
        if given.every is None:
            return 0
        time.sleep(given.every)


def _launch(given: argparse.Namespace) -> int:
    command = [*(["-m"] if given.module else []), given.program, *given.arguments]
    coordinator = given.coordinator
    if coordinator is None and (given.master_addr, given.master_port) != (None, None):
        coordinator = f"{given.master_addr or '127.0.0.1'}:{given.master_port or 29500}"
    settings = Settings(
        command=command,
        processes=given.processes,
        cpu_devices=given.cpu_devices,
        max_restarts=given.max_restarts,
        grace=given.grace,
        watchdog=given.watchdog,
        coordinator=coordinator,
        nodes=given.nodes,
        node_rank=given.node_rank,
        run_directory=given.run_directory,
        python=not given.no_python,
        log_directory=given.log_dir,
        show=given.show_workers,
    )
    return launch(settings)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mirrored", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="command")
    _add_launch(commands)
    _add_doctor(commands)
    _add_status(commands)
    return parser


def _add_status(commands: Any) -> None:
    status = commands.add_parser(
        "status",
        allow_abbrev=False,
        help="show who serves and who runs what in a program on parameter servers",
        description="Shows the servers, workers, queues, staleness and updates a second of a "
        "program that called ClusterCoordinator.serve_status(), at the address it returned.",
    )
    status.set_defaults(command=_status)
    status.add_argument("address", metavar="HOST:PORT", help="what serve_status() returned")
    status.add_argument(
        "--every", type=float, metavar="SECONDS", help="show it again and again, until Ctrl-C"
    )


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor",
        allow_abbrev=False,
        help="look at this machine and say what is wrong",
        description="Looks at versions, devices, memory, all-reduces, the environment and the "
        "cluster, and says in plain words what is wrong. Exits with 0 if nothing is, else with 1.",
    )
    doctor.set_defaults(command=_doctor)
    doctor.add_argument(
        "--timeout",
        type=float,
        default=DEFAULT_SECONDS,
        metavar="SECONDS",
        help=f"when what does not answer counts as hanging (default {DEFAULT_SECONDS:.0f})",
    )
    doctor.add_argument(
        "--cpu-devices",
        type=int,
        metavar="K",
        help="look at K virtual CPU devices, as launch --cpu-devices makes them",
    )


def _add_launch(commands: Any) -> None:
    run = commands.add_parser(
        "launch",
        allow_abbrev=False,
        help="start and look after the workers of a run on this machine",
        description="Starts N workers of a program, prefixes their output, reports the first "
        "failure, restarts them all from the last checkpoint, and leaves no process behind.",
    )
    run.set_defaults(command=_launch)
    run.add_argument(
        "-n",
        "--processes",
        "--nproc-per-node",
        "--nproc_per_node",
        type=_processes,
        default=1,
        metavar="N",
        help="workers on this machine (default 1); 'gpu' for one a GPU, 'auto' for that or, "
        "without GPUs, 1",
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
        "--rdzv-endpoint",
        "--rdzv_endpoint",
        metavar="HOST:PORT",
        help="where worker 0 listens (default: a free port of this machine)",
    )
    run.add_argument(
        "--master-addr", "--master_addr", metavar="HOST", help="the coordinator's host alone"
    )
    run.add_argument(
        "--master-port",
        "--master_port",
        type=int,
        metavar="PORT",
        help="the coordinator's port alone (29500 if only the host is given)",
    )
    run.add_argument(
        "--standalone", action="store_true", help="one machine, which is so anyway: ignored"
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
    run.add_argument(
        "--log-dir",
        "--log_dir",
        metavar="PATH",
        help="also write each worker's output to PATH/attempt-0/worker-0.out and .err",
    )
    run.add_argument(
        "--show-workers",
        "--local-ranks-filter",
        "--local_ranks_filter",
        type=_numbers,
        metavar="0,1",
        help="show the output of these workers only",
    )
    run.add_argument(
        "--no-python", "--no_python", action="store_true", help="run the program without Python"
    )
    run.add_argument("-m", "--module", action="store_true", help="run a module, as python -m does")
    run.add_argument("program", help="the program, or the module with -m")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the program")


def _processes(text: str) -> int:
    if text in ("gpu", "auto"):
        found = local_gpu_count()
        if text == "gpu" and not found:
            msg = "there is no GPU on this machine"
            raise argparse.ArgumentTypeError(msg)
        return max(found, 1)
    return int(text)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]
