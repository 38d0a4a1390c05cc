"""GPT-2 small, ResNet-50 and a dispatch-bound loop on one GPU: mirrored, JAX and PyTorch.

    python benchmarks/gpu/run.py --out benchmarks/results --budget 370

A library is a process of its own for each workload. JAX's contenders of one workload share theirs,
so that equal programs get equal kernels from the compiler's tuning. First losses are compared
before any time is printed; rounds alternate; a ratio is the median over rounds of the ratio within
a round. Memory is read afterwards in processes that hold one contender each and find the compiled
programs in a cache, so that the trials of tuning do not count. Every result is written when it is
there: a run that is cut short keeps what it has. Nothing is downloaded; images and tokens are
drawn at random.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

sys.path.append(str(pathlib.Path(__file__).parent.parent))

import driver
import results
from driver import ContenderError, Process

HERE = pathlib.Path(__file__).parent
STYLES = ("jax", "functional", "variables")
# Rounds, steps a round, and how far losses may be apart (bfloat16 sums in another order).
ROUNDS = {"gpt2": (9, 10, 0.02), "loop": (15, 400, 1e-3), "resnet50": (9, 12, 0.05)}
# A contender that does not answer for so many seconds is left out.
PATIENCE = 150
COMPARED_LOSSES = 4
# The forms of GPT-2 in gpt2.VARIANTS, the most telling first.
VARIANTS = (
    "tuned, again",
    "plain",
    "plain, flag",
    "tuned, no flag",
    "tuned, rows apart",
    "tuned, plain norm",
    "tuned, plain head",
    "tuned, plain gelu",
    "tuned, one product",
    "tuned, one product, 2 chunks",
    "tuned, 2 chunks",
    "tuned, 8 chunks",
    "tuned, attention as JAX chooses",
)
FLAGS = ["--xla_gpu_enable_triton_gemm=false"]


class OutOfTimeError(RuntimeError):
    """The budget is used up."""


def start(workload: str, library: str, options: Any, cache: str) -> Process:
    """Starts a library on one workload."""
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, str(HERE / "contender.py"), workload, library]
    if options.small:
        command.append("--small")
    else:
        # One cache of programs, in which XLA keeps what its tuning found too.
        given = os.environ.get("XLA_FLAGS", "")
        environment["XLA_FLAGS"] = " ".join([given, *options.xla_flags]).strip()
        environment["JAX_COMPILATION_CACHE_DIR"] = f"{cache}/programs"
        environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    return Process(f"{library} on {workload}", command, patience=PATIENCE, **environment)


class Report:
    """One workload's figures, written to its file whenever they grow."""

    def __init__(self, name: str, options: Any) -> None:
        self._path = options.out / f"{name}.json" if options.out else None
        self._began = time.perf_counter()
        self.contenders: dict[str, dict[str, Any]] = {}
        self.ratios: dict[str, float] = {}
        self.failures: dict[str, str] = {}
        self._fixed = {
            "name": name,
            "date": time.strftime("%Y-%m-%d"),
            "machine": machine(),
            "versions": {"all": driver.versions()},
            "caveats": [
                "One GPU: nothing is communicated.",
                "Random data: speed, not accuracy.",
                "Compiler flags of all JAX contenders: " + " ".join(options.xla_flags),
            ],
        }

    def write(self) -> None:
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        case = {
            "name": "1 GPU",
            "contenders": self.contenders,
            "ratios": self.ratios,
            "failures": self.failures,
        }
        self._path.write_text(json.dumps(self._fixed | {"cases": [case]}, indent=1) + "\n")

    def fail(self, name: str, error: Exception) -> None:
        self.failures[name] = str(error)
        say(f"    {name} FAILED: {error}")
        self.write()


_BEGAN = time.perf_counter()


def say(text: str) -> None:
    print(f"{time.perf_counter() - _BEGAN:6.1f} s  {text}", flush=True)


def make(report: Report, process: Process, name: str, *, sent: bool = False) -> bool:
    """Has a contender made; says whether it was."""
    try:
        if not sent:
            process.send(make=name)
        found = process.answer()
    except ContenderError as error:
        report.fail(name, error)
        return False
    report.contenders[name] = {"first_step_s": found["seconds"], "losses": [found["loss"]]}
    say(f"    {name} made in {found['seconds']:.1f} s")
    return True


def check_losses(report: Report, runners: dict[str, Process], tolerance: float) -> None:
    """Drops contenders that do not train what the first one trains."""
    base: list[float] = []
    for name, process in list(runners.items()):
        losses = report.contenders[name]["losses"]
        try:
            losses += process.ask(losses=COMPARED_LOSSES, of=name)["losses"]
        except ContenderError as error:
            report.fail(name, error)
            del runners[name], report.contenders[name]
            continue
        base = base or losses
        worst = max(abs(a - b) / abs(b) for a, b in zip(losses, base))
        say(f"    {name:18} losses {[round(value, 4) for value in losses]}")
        if not worst <= tolerance:
            report.fail(name, ContenderError(f"its losses are off by {worst:.1%}: {losses}"))
            del runners[name], report.contenders[name]


def time_rounds(report: Report, runners: dict[str, Process], rounds: int, steps: int) -> None:
    """Times the contenders in turn and writes what came out."""
    timed: dict[str, list[dict[str, float]]] = {name: [] for name in runners}
    for number in range(rounds):
        for name in list(timed) if number % 2 == 0 else list(timed)[::-1]:
            try:
                timed[name].append(runners[name].ask(time=steps, of=name))
            except ContenderError as error:
                report.fail(name, error)
                del timed[name]
    for name, rounds_of in timed.items():
        walls = [item["wall"] for item in rounds_of]
        report.contenders[name] |= {
            "median": statistics.median(walls),
            "unit": "us a step",
            "rounds": walls,
            "host": statistics.median(item["host"] for item in rounds_of),
        }


def compare(report: Report, name: str, base: str) -> None:
    """Takes the ratio of two contenders' times, round by round, and of their memory."""
    ours, theirs = report.contenders.get(name, {}), report.contenders.get(base, {})
    if "rounds" in ours and "rounds" in theirs:
        pairs = [a / b for a, b in zip(ours["rounds"], theirs["rounds"])]
        report.ratios[f"{name} / {base}, time"] = statistics.median(pairs)
        report.ratios[f"{name} / {base}, host"] = ours["host"] / theirs["host"]
    for key, what in (("needed_bytes", "memory"), ("peak_bytes", "allocator's peak")):
        if ours.get(key) and theirs.get(key):
            report.ratios[f"{name} / {base}, {what}"] = ours[key] / theirs[key]


def show(report: Report) -> None:
    for key, value in report.ratios.items():
        say(f"    {key}: {value:.4f}")
    for name, figures in report.contenders.items():
        if "rounds" not in figures:
            continue
        low, high = results.quartiles(figures["rounds"])
        text = f"    {name:18} {figures['median']:10.1f} us a step"
        text += f" (half of the rounds in {low:.1f}..{high:.1f}), host {figures['host']:.1f} us"
        if figures.get("peak_bytes"):
            text += f", peak {figures['peak_bytes'] / 2**30:.3f} GiB"
        if figures.get("needed_bytes"):
            text += f", needed {figures['needed_bytes'] / 2**30:.3f} GiB"
        say(text)


def measure(workload: str, processes: dict[str, Process], options: Any) -> Report:
    """Makes and times the contenders of one workload."""
    say(workload)
    report = Report(f"gpu-{workload}", options)
    report.write()
    rounds, steps, tolerance = ROUNDS[workload]
    if options.small:
        rounds, steps = 3, 2
    ours = processes["jax"]
    # The hand-written form tunes itself on a quiet GPU; what it finds is there for the others,
    # which only compile, so PyTorch may compile beside them.
    runners = {name: ours for name in STYLES[:1] if make(report, ours, name)}
    if "torch" in processes:
        processes["torch"].send(make="torch")
    runners |= {name: ours for name in STYLES[1:] if make(report, ours, name)}
    if "torch" in processes and make(report, processes["torch"], "torch", sent=True):
        runners["torch"] = processes["torch"]
    report.write()
    check_losses(report, runners, tolerance)
    time_rounds(report, runners, rounds, steps)
    if "torch" in runners:
        with contextlib.suppress(ContenderError):
            peak = runners["torch"].ask(memory=1)["peak_bytes"]
            report.contenders["torch"]["peak_bytes"] = peak
    for base in ("jax", "torch"):
        for name in STYLES:
            if name != base:
                compare(report, name, base)
    report.write()
    show(report)
    return report


def read_memory(reports: dict[str, Report], options: Any, cache: str, started: list[Any]) -> None:
    """Reads the memory of each JAX contender alone, all at once: time does not matter.

    What is needed is the sum of living arrays and of what the program takes beside them. The
    allocator's peak is told too, but it is no measure to a percent: a block is given whole when
    cutting it would leave less than 128 MiB, so the peak depends on what was freed before.
    """
    say("memory")
    probes = {}
    for workload, report in reports.items():
        for name in STYLES:
            if name in report.contenders:
                probes[workload, name] = start(workload, "jax", options, cache)
                started.append(probes[workload, name])
                probes[workload, name].send(make=name)
                probes[workload, name].send(losses=3, of=name)
                probes[workload, name].send(memory=1)
    for (workload, name), process in probes.items():
        figures = reports[workload].contenders[name]
        try:
            figures["peak_bytes"] = process.answer()["peak_bytes"]
            figures["needed_bytes"] = process.ask(needed=name)["needed_bytes"]
        except ContenderError as error:
            reports[workload].fail(f"memory of {name}", error)
        process.end()
    for workload, report in reports.items():
        for base in ("jax", "torch"):
            for name in STYLES:
                if name != base:
                    compare(report, name, base)
        report.write()
        say(workload)
        show(report)


def measure_variants(processes: dict[str, Process], options: Any) -> None:
    """Times other forms of GPT-2 beside the tuned one, one after the other."""
    say("variants of GPT-2")
    report = Report("gpu-gpt2-variants", options)
    ours = processes["jax"]
    rounds, steps, tolerance = (3, 2, 0.02) if options.small else (5, 8, 0.02)
    # Known already, and compiled: its losses are of later steps, so it is not compared again.
    report.contenders["jax"] = {"losses": [0.0]}
    wanted = None
    for variant in VARIANTS:
        name = f"jax-{variant}"
        if not make(report, ours, name):
            continue
        try:
            losses = [report.contenders[name]["losses"][0]]
            losses += ours.ask(losses=COMPARED_LOSSES, of=name)["losses"]
            wanted = wanted or losses
            worst = max(abs(a - b) / abs(b) for a, b in zip(losses, wanted))
            if not worst <= tolerance:
                raise ContenderError(f"its losses are off by {worst:.1%}")
            report.contenders[name]["losses"] = losses
            time_rounds(report, {"jax": ours, name: ours}, rounds, steps)
            ours.ask(drop=name)
        except ContenderError as error:
            report.fail(name, error)
            continue
        compare(report, name, "jax")
        ratio = report.ratios[f"{name} / jax, time"]
        say(f"    {name}: {ratio:.4f} of the tuned form's time")
        report.write()


def machine() -> dict[str, Any]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        gpu = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.strip()
    except OSError:
        gpu = "none"
    return {"gpu": gpu} | driver.machine()


def start_mock(options: Any) -> Any:
    """Compiles GPT-2 for 8 GPUs that are not there, beside the reading of memory."""
    command = [sys.executable, str(HERE / "mock_gpus.py"), "--gpus", "8"]
    if options.out:
        command += ["--json", str(options.out / "gpu-mock-8.json")]
    if options.small:
        command.append("--cpu")
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return subprocess.Popen(command, env=environment)


def run(options: Any, cache: str, started: list[Any]) -> None:
    if options.variants:
        processes = {"jax": start("gpt2", "jax", options, cache)}
        started.append(processes["jax"])
        processes["jax"].answer()
        if make(Report("gpu-gpt2-variants", options), processes["jax"], "jax"):
            measure_variants(processes, options)
        return
    workloads = options.workloads
    peers: dict[str, dict[str, Process]] = {}
    for workload in workloads:
        peers[workload] = {
            library: start(workload, library, options, cache) for library in options.libraries
        }
        started += peers[workload].values()
    for workload in workloads:
        for process in peers[workload].values():
            process.answer()
    say("all processes are up")
    reports = {}
    for workload in workloads:
        try:
            reports[workload] = measure(workload, peers[workload], options)
        except ContenderError as error:
            say(f"{workload} FAILED: {error}")
        # What is not needed any more gives its memory back: the probes come beside the rest.
        for library, process in peers[workload].items():
            if (workload, library) != ("gpt2", "jax"):
                process.end()
    mock = start_mock(options)
    started.append(mock)
    read_memory(reports, options, cache, started)
    try:
        mock.wait(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        say(f"the compile for GPUs that are not there did not end within {PATIENCE} s")
    if "gpt2" in reports:
        measure_variants(peers["gpt2"], options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", nargs="+", default=list(ROUNDS), choices=ROUNDS)
    parser.add_argument(
        "--without-torch",
        dest="libraries",
        action="store_const",
        const=["jax"],
        default=["jax", "torch"],
    )
    parser.add_argument("--xla-flags", nargs="*", default=FLAGS)
    parser.add_argument("--variants", action="store_true", help="only the forms of GPT-2")
    parser.add_argument("--small", action="store_true", help="toy sizes, to try the script")
    parser.add_argument("--budget", type=int, default=480, help="seconds it may take")
    parser.add_argument("--out", type=pathlib.Path, help="folder for the results")
    options = parser.parse_args()

    def out_of_time(*_: Any) -> None:
        raise OutOfTimeError

    signal.signal(signal.SIGALRM, out_of_time)
    signal.alarm(options.budget)
    started: list[Any] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        try:
            run(options, cache, started)
        except OutOfTimeError:
            say("the time is used up; what is written so far stays")
        finally:
            signal.alarm(0)
            for process in started:
                process.end() if isinstance(process, Process) else process.kill()
    say("end")


if __name__ == "__main__":
    main()
