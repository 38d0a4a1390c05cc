"""Contenders in processes of their own, driven in turn: the frame of all benchmarks.

Owns how processes are started and asked (a line of JSON, answered by a line of JSON) and how
rounds alternate. A script of a contender calls ``serve``; a benchmark starts it as a ``Process``
and calls ``check_losses`` and ``time_rounds``, or ``measure`` for both. What is answered is in
``serving``, the form of a result in ``results``. None of them needs more than Python, so that they
run in every peer's environment.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from results import machine, ratio, show, spread, versions, write_result
from serving import serve

__all__ = [
    "ContenderError",
    "Group",
    "Process",
    "check_losses",
    "compare_curves",
    "machine",
    "measure",
    "options",
    "ratio",
    "serve",
    "show",
    "single_rounds",
    "spread",
    "start",
    "time_rounds",
    "versions",
    "write_result",
]

# A contender that does not answer for so many seconds has failed.
PATIENCE = 300


class ContenderError(RuntimeError):
    """A contender said that a request failed, or ended, or does not answer."""


class Process:
    """A contender's process: started, and asked when it is needed."""

    def __init__(
        self, name: str, command: list[str], *, patience: float = PATIENCE, **environment: str
    ) -> None:
        self.name = name
        self._patience = patience
        # Libraries warn of many things; what they say is shown if something goes wrong.
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 -- it lives as long as the process
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            bufsize=0,
            env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"} | environment,
            # A process that starts others ends together with them.
            start_new_session=True,
        )
        self._received = b""
        self._unread = 1
        self._versions: dict[str, str] = {}

    @property
    def versions(self) -> dict[str, str]:
        """What it runs on; waits until it is up."""
        if not self._versions:
            self.answer()
        return self._versions

    def send(self, **request: Any) -> None:
        """Asks without waiting for the answer."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer will say that it ended
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._unread += 1

    def answer(self) -> dict[str, Any]:
        """Reads up to the answer to the last request."""
        found: dict[str, Any] = {}
        while self._unread:
            found = json.loads(self._line())
            self._unread -= 1
            self._versions = found.get("versions", self._versions)
            if "error" in found:
                raise self._failure(found["error"])
        return found

    def ask(self, **request: Any) -> dict[str, Any]:
        """Asks and waits for the answer."""
        self.send(**request)
        return self.answer()

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._received:
            if not select.select([pipe], [], [], self._patience)[0]:
                failure = self._failure(f"did not answer for {self._patience:g} s")
                self.end()
                raise failure
            more = os.read(pipe, 65536)
            if not more:
                raise self._failure(f"ended with {self._process.wait()}")
            self._received += more
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _failure(self, what: str) -> ContenderError:
        # Where the process writes is where this file handle stands, so its place is kept.
        size = os.fstat(self._said.fileno()).st_size
        last = os.pread(self._said.fileno(), 4000, max(size - 4000, 0))
        return ContenderError(f"{self.name}: {what}\n{last.decode(errors='replace')}")

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._said):
            assert file is not None
            file.close()


class Group(Process):
    """Processes that train together, asked as one: the slowest one's time, the mean of losses."""

    def __init__(self, name: str, command: list[str], count: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = str(probe.getsockname()[1])
        self._others = []
        for rank in range(count)[::-1]:
            environment = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "WORLD_SIZE": str(count),
                "RANK": str(rank),
                "MIRRORED_COORDINATOR": f"127.0.0.1:{port}",
                "MIRRORED_PROCESS_COUNT": str(count),
                "MIRRORED_PROCESS_ID": str(rank),
            }
            if rank:
                self._others.append(Process(f"{name} {rank}", command, **environment))
            else:
                super().__init__(f"{name} 0", command, **environment)

    def send(self, **request: Any) -> None:
        for process in self._others:
            process.send(**request)
        super().send(**request)

    def answer(self) -> dict[str, Any]:
        found = [super().answer(), *(process.answer() for process in self._others)]
        together = dict(found[0])
        for key in together.keys() & {"wall", "host", "thread", "seconds", "peak_bytes"}:
            together[key] = max(item[key] for item in found)
        if "loss" in together:
            together["loss"] = statistics.mean(item["loss"] for item in found)
        if "losses" in together:
            curves = zip(*(item["losses"] for item in found))
            together["losses"] = [statistics.mean(at_a_step) for at_a_step in curves]
        return together

    def end(self) -> None:
        for process in self._others:
            process.end()
        super().end()


@contextlib.contextmanager
def start(
    script: str,
    pythons: Mapping[str, str | None],
    *arguments: object,
    counts: Mapping[str, int] | None = None,
) -> Iterator[dict[str, Process]]:
    """Starts ``script --serve PEER arguments...`` for each peer that has a Python, side by side.

    A peer named in ``counts`` is a group of so many processes.
    """
    started: dict[str, Process] = {}
    try:
        for peer, python in pythons.items():
            if python:
                command = [python, script, "--serve", peer, *map(str, arguments)]
                if counts and peer in counts:
                    started[peer] = Group(peer, command, counts[peer])
                else:
                    started[peer] = Process(peer, command)
        for process in started.values():
            _ = process.versions  # none starts up beside a measurement
        yield started
    finally:
        for process in started.values():
            process.end()


def check_losses(
    runners: Mapping[str, Process], count: int, tolerance: float, apart: Collection[str] = ()
) -> dict[str, list[float]]:
    """Makes every contender and refuses to go on with one that trains something else.

    Those named in ``apart`` are known to train something else, and are not compared.
    """
    curves: dict[str, list[float]] = {}
    for name, process in runners.items():
        first = process.ask(make=name)["loss"]
        curves[name] = [first]
        if count:
            curves[name] += process.ask(losses=count, of=name)["losses"]
    compare_curves({name: curves[name] for name in curves if name not in apart}, tolerance)
    return curves


def compare_curves(curves: Mapping[str, list[float]], tolerance: float) -> None:
    """Refuses curves of losses that are not the first one's."""
    base = next(iter(curves))
    for name in curves:
        worst = max(abs(a - b) / abs(b) for a, b in zip(curves[name], curves[base]))
        if not worst <= tolerance:
            text = (
                f"the losses of {name} are {worst:.2e} off those of {base}, more than {tolerance}"
            )
            raise ContenderError(f"{text}: {curves[name]} and {curves[base]}")


def time_rounds(
    runners: Mapping[str, Process],
    rounds: int,
    steps: int | Mapping[str, int],
    *,
    warm: int = 1,
    steps_a_call: int = 1,
) -> dict[str, dict[str, Any]]:
    """Times the contenders in turn: by name the medians, and the rounds they come from."""

    def ask(name: str) -> dict[str, float]:
        count = steps if isinstance(steps, int) else steps[name]
        found = runners[name].ask(time=count, of=name, warm=warm)
        return {key: value / steps_a_call for key, value in found.items()}

    return {
        name: {
            "median": statistics.median(item["wall"] for item in rounds_of),
            "unit": "us a step",
            "rounds": [round(item["wall"], 2) for item in rounds_of],
            "host": statistics.median(item["host"] for item in rounds_of),
            "thread": statistics.median(item["thread"] for item in rounds_of),
        }
        for name, rounds_of in _in_turn(runners, rounds, ask).items()
    }


def single_rounds(
    runners: Mapping[str, Process], rounds: int, steps: int
) -> dict[str, dict[str, Any]]:
    """Times calls one by one, with idle devices, in turn: the host time of a step by name."""
    timed = _in_turn(runners, rounds, lambda name: runners[name].ask(single=steps, of=name))
    return {
        name: {
            "median": statistics.median(item["host"] for item in rounds_of),
            "unit": "us of host time a step",
            "rounds": [round(item["host"], 2) for item in rounds_of],
            "thread": statistics.median(item["thread"] for item in rounds_of),
        }
        for name, rounds_of in timed.items()
    }


def _in_turn(
    runners: Mapping[str, Process], rounds: int, ask: Callable[[str], dict[str, float]]
) -> dict[str, list[dict[str, float]]]:
    timed: dict[str, list[dict[str, float]]] = {name: [] for name in runners}
    for number in range(rounds):
        for name in list(runners) if number % 2 == 0 else list(runners)[::-1]:
            timed[name].append(ask(name))
    return timed


def measure(
    case: str,
    runners: Mapping[str, Process],
    *,
    losses: int,
    tolerance: float,
    rounds: int,
    steps: int,
    apart: Collection[str] = (),
    **timing: int,
) -> dict[str, Any]:
    """Compares losses, then times in turn: a case, with the first contender over each other."""
    curves = check_losses(runners, losses, tolerance, apart)
    contenders = time_rounds(runners, rounds, steps, **timing)
    for name, figures in contenders.items():
        figures["losses"] = curves[name][:5]
    ours, *others = contenders
    ratios = {f"{ours} / {base}": ratio(contenders, ours, base) for base in others}
    return {"name": case, "contenders": contenders, "ratios": ratios}


def options(
    description: str | None,
    *,
    rounds: int,
    steps: int | None = None,
    peers: Collection[str] = (),
    more: Callable[[argparse.ArgumentParser], Any] = lambda parser: None,
) -> argparse.Namespace:
    """Parses what all benchmarks understand; ``pythons`` of the result has each peer's Python."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for peer in peers:
        parser.add_argument(f"--{peer}-python", help=f"a Python that has {peer}")
    parser.add_argument("--rounds", type=int, help=f"{rounds} unless told otherwise")
    if steps is not None:
        parser.add_argument("--steps", type=int, help=f"{steps} unless told otherwise")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try the script")
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--serve", nargs="+", help=argparse.SUPPRESS)
    more(parser)
    given = parser.parse_args()
    given.rounds = given.rounds or (2 if given.small else rounds)
    if steps is not None:
        given.steps = given.steps or (2 if given.small else steps)
    given.pythons = {"jax": sys.executable}
    given.pythons |= {peer: getattr(given, f"{peer}_python") for peer in peers}
    return given
