"""Runs what this machine can of the benchmarks, prints ratios first, and says what got worse.

    make bench                              # all of it; see the estimate it prints
    make bench ARGS="--only keras-fit nnx"
    make bench ARGS="--list"

Results go to benchmarks/results/, each when its benchmark has ended: an interruption keeps those
that are there. Each is compared with the one last committed. Environments of the peers are made
in .bench/ unless options or $BENCH_TENSORFLOW_PYTHON and $BENCH_TORCH_PYTHON name others.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

import environments
import goals
import results

HERE = pathlib.Path(__file__).resolve().parent
RESULTS = HERE / "results"


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A script, the result it writes, what it needs, and what it took on two cores."""

    name: str
    script: str
    seconds: int
    peers: tuple[str, ...] = ()
    needs_images: bool = False


SUITE = (
    Benchmark("custom-loop", "custom_loop.py", 60, ("tensorflow", "torch")),
    Benchmark("keras-fit", "keras_fit.py", 180, ("tensorflow",)),
    Benchmark("growth-replicas", "growth_replicas.py", 200, ("tensorflow",)),
    Benchmark("growth-variables", "growth_variables.py", 60, ("tensorflow",)),
    Benchmark("nnx", "nnx_overhead.py", 30),
    Benchmark("reductions", "reduction_cost.py", 60),
    Benchmark("several-workers", "several_workers.py", 60, ("torch",)),
    Benchmark("parameter-servers", "parameter_servers.py", 150, ("tensorflow",)),
    Benchmark("fashion", "fashion.py", 300, ("tensorflow", "torch"), needs_images=True),
)


def committed(name: str) -> dict[str, Any] | None:
    """The result that was last committed."""
    command = ["git", "show", f"HEAD:benchmarks/results/{name}.json"]
    try:
        done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return json.loads(done.stdout) if done.returncode == 0 else None


def run(benchmark: Benchmark, pythons: dict[str, str], given: argparse.Namespace) -> bool:
    """Runs one benchmark; says whether it came to its end."""
    path = given.out / f"{benchmark.name}.json"
    command = [sys.executable, str(HERE / benchmark.script), "--json", str(path)]
    for peer in benchmark.peers:
        if peer in pythons:
            command += [f"--{peer}-python", pythons[peer]]
    if given.rounds:
        command += ["--rounds", str(given.rounds)]
    if given.small:
        command.append("--small")
    elif benchmark.needs_images:
        try:
            command += ["--data", environments.fashion_folder(given.fashion)]
        except environments.UnavailableError as error:
            print(f"{benchmark.name} is left out: {error}", flush=True)
            return False
    began = time.perf_counter()
    print(f"--- {benchmark.name} (about {benchmark.seconds} s)", flush=True)
    # A session of its own: what it started ends with it, whatever happens here.
    process = subprocess.Popen(
        command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, start_new_session=True
    )
    try:
        code = process.wait(timeout=max(20 * benchmark.seconds, 600))
    except subprocess.TimeoutExpired:
        print(f"{benchmark.name} did not end within {20 * benchmark.seconds} s", flush=True)
        code = 1
    finally:
        if process.poll() is None:
            # It ends its contenders when it is interrupted, which a kill would not let it do.
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
    if code:
        print(f"{benchmark.name} FAILED with {code}; its last result stays", flush=True)
        return False
    print(f"    took {time.perf_counter() - began:.0f} s", flush=True)
    return True


def judge(names: list[str], given: argparse.Namespace) -> None:
    """Prints each goal's standing, and what got worse than in the last committed results."""
    found = {name: json.loads((given.out / f"{name}.json").read_text()) for name in names}
    print("\ngoals")
    for goal, value in goals.standing(found):
        print(f"    {goal.verdict(value)}: {goal.result}, {goal.case}: {goal.text(value)}")
    worse = []
    for name, new in found.items():
        old = committed(name)
        if old is None:
            print(f"nothing to compare {name} with: no result is committed")
        else:
            worse += list(results.what_got_worse(old, new))
    print("worse by more than 5 % than in the last committed results, and by more than noise:")
    for line in worse or ["nothing"]:
        print(f"    {line}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [benchmark.name for benchmark in SUITE]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--list", action="store_true", help="list the benchmarks and end")
    parser.add_argument("--without", nargs="+", choices=environments.PEERS, default=[])
    for peer in environments.PEERS:
        parser.add_argument(f"--{peer}-python", help=f"a Python that has {peer}")
    parser.add_argument("--fashion", help="the folder of Fashion-MNIST")
    parser.add_argument("--small", action="store_true", help="tiny sizes; needs --out")
    parser.add_argument("--rounds", type=int, help="fewer for a first look, more against noise")
    parser.add_argument("--out", type=pathlib.Path, help="folder of the results")
    given = parser.parse_args()
    if given.small and not given.out:
        parser.error("--small is no measurement: name a folder for its results with --out")
    given.out = given.out or RESULTS
    chosen = [benchmark for benchmark in SUITE if benchmark.name in given.only]
    if given.list:
        for benchmark in SUITE:
            print(f"{benchmark.name:20} about {benchmark.seconds:4} s, {benchmark.script}")
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    total = sum(benchmark.seconds for benchmark in chosen)
    print(
        f"{len(chosen)} benchmarks, about {total / 60:.0f} minutes on two quiet cores", flush=True
    )
    pythons = {}
    for peer in environments.PEERS:
        if peer in given.without or not any(peer in benchmark.peers for benchmark in chosen):
            continue
        try:
            pythons[peer] = environments.python_of(peer, getattr(given, f"{peer}_python"))
        except environments.UnavailableError as error:
            print(f"{peer} is left out: {error}", flush=True)
    ended: list[str] = []
    try:
        for benchmark in chosen:
            if run(benchmark, pythons, given):
                ended.append(benchmark.name)
    except KeyboardInterrupt:
        print("interrupted; the results that are there stay", flush=True)
    if not given.small:
        judge(ended, given)
    return 0 if len(ended) == len(chosen) else 1


if __name__ == "__main__":
    # Asked to end by whoever started it, it ends as on Ctrl-C, and its children with it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    raise SystemExit(main())
