"""GPT-2 small, ResNet-50 and a dispatch-bound loop on one GPU: mirrored, JAX and PyTorch.

    python benchmarks/gpu/run.py --out benchmarks/results

Every contender is a process of its own, started one after the other so that compilers tune
themselves on a quiet GPU, and then driven in turn. The first losses are compared before any time
is printed. JAX's contenders are started twice: the first one compiles and tunes, the second one
finds the result. Nothing is downloaded; images and tokens are drawn at random.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from typing import Any

HERE = pathlib.Path(__file__).parent
CONTENDERS = {
    "gpt2": ("jax", "functional", "variables", "jax-plain", "torch"),
    "resnet50": ("jax", "functional", "variables", "torch"),
    "loop": ("jax", "functional", "variables", "torch"),
}
# Rounds, steps a round, and how far losses may be apart (bfloat16 sums in another order).
ROUNDS = {"gpt2": (5, 20, 0.02), "resnet50": (5, 20, 0.05), "loop": (31, 1000, 1e-3)}
COMPARED_LOSSES = 5


class Process:
    """A contender that has started and waits for requests."""

    def __init__(self, workload: str, name: str, options: Any, cache: str) -> None:
        self.name = name
        environment = dict(os.environ)
        environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        environment["TF_CPP_MIN_LOG_LEVEL"] = "2"
        if not options.small:
            # One cache of tuned kernels, so that equal programs get equal kernels; and one of
            # programs, so that the trials of tuning do not count as memory of the contender.
            tuned = f"--xla_gpu_per_fusion_autotune_cache_dir={cache}/kernels"
            flags = [tuned] if name.endswith("-plain") else [tuned, *options.xla_flags]
            environment["XLA_FLAGS"] = " ".join([environment.get("XLA_FLAGS", ""), *flags]).strip()
            environment["JAX_COMPILATION_CACHE_DIR"] = f"{cache}/programs"
            environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        command = [sys.executable, str(HERE / "contender.py"), workload, name]
        if options.small:
            command.append("--small")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.ready_after = self._answer()["ready"]

    def ask(self, **request: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"contender {self.name} ended with {self._process.wait()}")
        return json.loads(line)

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def compare_losses(found: dict[str, list[float]], tolerance: float) -> None:
    """Refuses to go on with contenders that do not train the same thing."""
    (base, wanted), *others = found.items()
    for name, losses in others:
        worst = max(abs(a - b) / abs(b) for a, b in zip(losses, wanted))
        if not worst <= tolerance:
            raise SystemExit(f"losses of {name} differ from {base}: {losses} and {wanted}")


def measure(workload: str, options: Any, cache: str) -> dict[str, Any]:
    """Runs one workload; returns the figures of its contenders."""
    rounds, steps, tolerance = ROUNDS[workload]
    names = [name for name in CONTENDERS[workload] if not options.only or name in options.only]
    processes, compiled = [], {}
    for name in names:
        process = Process(workload, name, options, cache)
        compiled[name] = process.ready_after
        print(f"{workload}: {name} ready after {process.ready_after:.0f} s", flush=True)
        if not name.startswith("torch"):
            process.end()
            process = Process(workload, name, options, cache)
        processes.append(process)
    losses = {p.name: p.ask(losses=COMPARED_LOSSES)["losses"] for p in processes}
    for name, values in losses.items():
        print(f"    {name:12} losses", [round(value, 4) for value in values], flush=True)
    compare_losses(losses, tolerance)
    timed: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(rounds):
        for process in processes if number % 2 == 0 else processes[::-1]:
            timed[process.name].append(process.ask(time=steps))
    contenders = {}
    for process in processes:
        walls = [item["wall"] for item in timed[process.name]]
        contenders[process.name] = {
            "median": statistics.median(walls),
            "unit": "us/step",
            "rounds": walls,
            "host": statistics.median(item["host"] for item in timed[process.name]),
            "peak_bytes": process.ask(memory=1)["memory"],
            "compile_s": compiled[process.name],
            "losses": losses[process.name],
        }
        process.end()
    return contenders


def ratios(contenders: dict[str, Any]) -> dict[str, float]:
    """Compares the mirrored styles with hand-written JAX and with PyTorch."""
    found = {}
    for name in ("functional", "variables"):
        for base in ("jax", "torch"):
            if name in contenders and base in contenders:
                ours, theirs = contenders[name], contenders[base]
                found[f"{name} / {base}, time"] = ours["median"] / theirs["median"]
                if theirs["peak_bytes"]:  # the CPU backend does not count
                    found[f"{name} / {base}, memory"] = ours["peak_bytes"] / theirs["peak_bytes"]
    return found


def machine() -> dict[str, Any]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        gpu = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.strip()
    except OSError:
        gpu = "none"
    return {"gpu": gpu, "cores": os.cpu_count(), "system": platform.platform()}


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("jax", "jaxlib", "optax", "numpy", "torch", "torchvision"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--only", nargs="+", help="contenders to run (default: all)")
    parser.add_argument("--xla-flags", nargs="*", default=["--xla_gpu_enable_triton_gemm=false"])
    parser.add_argument("--small", action="store_true", help="toy sizes, to try the script")
    parser.add_argument("--out", type=pathlib.Path, help="folder for gpu-WORKLOAD.json")
    options = parser.parse_args()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as cache:
        for workload in options.workloads:
            contenders = measure(workload, options, cache)
            compared = ratios(contenders)
            print(workload, {name: round(value, 4) for name, value in compared.items()})
            for name, figures in contenders.items():
                spread = (max(figures["rounds"]) - min(figures["rounds"])) / figures["median"]
                print(
                    f"    {name:12} {figures['median']:10.1f} us a step (spread {spread:.1%}), "
                    f"host {figures['host']:.1f} us, peak {figures['peak_bytes'] / 2**30:.2f} GiB, "
                    f"first step after {figures['compile_s']:.0f} s",
                    flush=True,
                )
            if options.out:
                options.out.mkdir(parents=True, exist_ok=True)
                result = {
                    "workload": workload,
                    "machine": machine(),
                    "versions": versions(),
                    "contenders": contenders,
                    "ratios": compared,
                    "caveats": ["one GPU", "random data", *options.xla_flags],
                }
                path = options.out / f"gpu-{workload}.json"
                path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"all of it took {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
