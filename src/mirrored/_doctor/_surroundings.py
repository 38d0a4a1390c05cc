"""What a program meets on this machine besides packages: memory, GPUs, variables, a cluster.

Owns reading them and saying which of them do harm. It starts no backend.
"""

from __future__ import annotations

import os
import pathlib
import platform
import shutil
from collections.abc import Mapping
from typing import Any

from mirrored._doctor import _probe
from mirrored._doctor._findings import Finding, Section
from mirrored._processors import asked_cpu_devices, asked_threads

GIB = 1 << 30
# Shown if set: what decides which devices there are and how XLA runs on them.
_SHOWN = (
    "JAX_PLATFORMS",
    "XLA_FLAGS",
    "NPROC",
    "PJRT_NPROC",
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "KERAS_BACKEND",
    "JAX_COMPILATION_CACHE_DIR",
)
_SHOWN_BEGINNINGS = ("XLA_PYTHON_CLIENT_", "NCCL_", "TPU_", "LIBTPU_", "MIRRORED_", "JAX_ENABLE_")
# What makes every step slow, and is easily forgotten.
_SLOW = {
    "JAX_DISABLE_JIT": "nothing is compiled",
    "JAX_DEBUG_NANS": "each step is checked, and run again without compilation where a NaN is",
    "JAX_LOG_COMPILES": "each compilation is written out",
    "NCCL_P2P_DISABLE": "GPUs reach each other through the host's memory only",
}
_OFF = ("", "0", "false", "False")
_CLUSTER_SIGNS = {
    "MIRRORED_COORDINATOR": "mirrored launch",
    "TF_CONFIG": "TF_CONFIG",
    "SLURM_JOB_ID": "Slurm",
    "OMPI_COMM_WORLD_SIZE": "Open MPI",
    "KUBERNETES_SERVICE_HOST": "Kubernetes",
    "TPU_WORKER_HOSTNAMES": "Cloud TPU",
    "RAY_ADDRESS": "Ray",
}
_LITTLE_SHARED_MEMORY = 1 * GIB


def machine() -> Section:
    """The machine itself: cores, memory, and GPUs that its driver shows."""
    cores = len(os.sched_getaffinity(0))
    total, free = _memory()
    rows = [
        ["system", f"{platform.system()} {platform.machine()}"],
        ["cores", str(cores)],
        ["memory", f"{total / GIB:.1f} GiB, {free / GIB:.1f} free"],
    ]
    shared = pathlib.Path("/dev/shm")
    if shared.is_dir():
        rows.append(["/dev/shm", f"{shutil.disk_usage(shared).total / GIB:.1f} GiB"])
    return Section("Machine", rows)


def little_shared_memory(gpu_count: int) -> list[Finding]:
    """NCCL and data workers share memory; containers often have 64 MiB of it."""
    shared = pathlib.Path("/dev/shm")
    if gpu_count < 2 or not shared.is_dir():
        return []
    size = shutil.disk_usage(shared).total
    if size >= _LITTLE_SHARED_MEMORY:
        return []
    return [
        Finding(
            fact=f"/dev/shm has {size / (1 << 20):.0f} MiB, and {gpu_count} GPUs share it.",
            hint="start the container with --shm-size=8g, or --ipc=host.",
        )
    ]


def _memory() -> tuple[float, float]:
    """(all, available) bytes of this machine, or of the container it is seen from."""
    lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    total, free = kib["MemTotal"] * 1024.0, kib["MemAvailable"] * 1024.0
    group = pathlib.Path("/sys/fs/cgroup")
    limit, used = group / "memory.max", group / "memory.current"
    if limit.is_file() and used.is_file() and limit.read_text().strip().isdigit():
        total = min(total, float(limit.read_text()))
        free = min(free, total - float(used.read_text()))
    return total, max(free, 0.0)


def unused_accelerators(platform_name: str, environment: Mapping[str, str]) -> list[Finding]:
    """Accelerators this machine has although JAX computes on its CPU."""
    if platform_name != "cpu" or environment.get("JAX_PLATFORMS") == "cpu":
        return []
    devices = pathlib.Path("/dev")
    if list(devices.glob("nvidia[0-9]*")):
        return [
            Finding(
                fact="this machine has NVIDIA GPUs (/dev/nvidia0), and JAX computes on the CPU.",
                hint='pip install "jax[cuda13]" (or cuda12, if nvidia-smi shows a driver before '
                "580); if it is installed, see what `python -c 'import jax; "
                'jax.devices("cuda")\'` says.',
            )
        ]
    if list(devices.glob("accel[0-9]*")):
        return [
            Finding(
                fact="this machine has TPUs (/dev/accel0), and JAX computes on the CPU.",
                hint='pip install "jax[tpu]", and see that no other process holds them.',
            )
        ]
    return []


def variables(environment: Mapping[str, str], platform_name: str, device_count: int) -> Section:
    """The variables that JAX and XLA heed, and those that do harm."""
    shown = sorted(
        name for name in environment if name in _SHOWN or name.startswith(_SHOWN_BEGINNINGS)
    )
    rows = [[name, environment[name]] for name in shown] or [["none that JAX or XLA heed"]]
    findings = [
        Finding(
            fact=f"{name}={environment[name]}: {meaning}.",
            hint=f"unset {name} where speed counts.",
            is_wrong=False,
        )
        for name, meaning in _SLOW.items()
        if environment.get(name, "") not in _OFF
    ]
    if platform_name == "cpu":
        findings += _few_threads(environment, device_count)
    keras_backend = environment.get("KERAS_BACKEND")
    if keras_backend not in (None, "jax"):
        findings.append(
            Finding(
                fact=f"KERAS_BACKEND={keras_backend}: mirrored.keras needs Keras on JAX.",
                hint="set KERAS_BACKEND=jax before Keras is imported.",
            )
        )
    return Section("Environment", rows, findings)


def _few_threads(environment: Mapping[str, str], device_count: int) -> list[Finding]:
    count = max(device_count, asked_cpu_devices(environment))
    threads = asked_threads(environment) or os.cpu_count() or 1
    if count < 2 or threads >= 2 * count:
        return []
    return [
        Finding(
            fact=f"{count} virtual CPU devices share a pool of {threads} threads; "
            "their programs may hang in the first all-reduce.",
            hint=f"call mirrored.testing.use_cpu_devices({count}) in place of the flag, or set "
            f"NPROC={2 * count} as well.",
        )
    ]


def cluster(
    environment: Mapping[str, str],
    seen: Mapping[str, Any] | None,
    reached: Mapping[str, Any] | None,
) -> Section:
    """Which cluster a MultiWorkerMirroredStrategy would join from here."""
    signs = [name for variable, name in _CLUSTER_SIGNS.items() if variable in environment]
    rows = [["signs of", ", ".join(signs) or "none"]]
    if seen is None:
        return Section("Cluster", [*rows, ["described by", "not looked into"]])
    if "error" in seen:
        fact, expected, hint = seen["error"]
        finding = Finding(f"{fact} Expected: {expected}", hint)
        return Section("Cluster", [*rows, ["described by", "see below"]], [finding])
    if not seen:
        return Section("Cluster", [*rows, ["described by", "nothing: this process is alone"]])
    rows += [
        ["described by", str(seen["source"])],
        ["this process", f"{seen['process_id']} of {seen['process_count']}"],
        ["worker 0", f"{seen['coordinator']} ({(reached or {}).get('state', 'not reached')})"],
    ]
    return Section("Cluster", rows, _addresses(seen["coordinator"], reached or {}))


def _addresses(coordinator: str, reached: Mapping[str, Any]) -> list[Finding]:
    if "unknown_host" in reached:
        fact = f"the host of worker 0 is not known here: {reached['unknown_host']}."
        return [Finding(fact, "use its IP address, or a name that all machines resolve.")]
    if "cannot_listen" in reached:
        fact = f"this process is worker 0 and cannot listen at {reached['cannot_listen']}."
        return [
            Finding(fact, "name an address of this machine and a port that no program uses now.")
        ]
    if "unreachable" in reached:
        fact = f"worker 0 cannot be reached at {reached['unreachable']}."
        hint = f"let the firewall pass {coordinator.rpartition(':')[2]} and other TCP ports."
        return [Finding(fact, f"see that both machines share a network; {hint}")]
    return []


def where_time_ran_out(stage: str, seconds: float, environment: Mapping[str, str]) -> Finding:
    """Puts a stage that did not end into words, with what to look at."""
    hints = {
        _probe.CLUSTER: "a scheduler's address does not answer; describe the cluster by TF_CONFIG "
        "or mirrored.Cluster(...).",
        _probe.BACKEND: "on a TPU slice it waits for the other hosts: run it on all of them; on "
        "a GPU see whether nvidia-smi answers; JAX_PLATFORMS=cpu looks without accelerators.",
        _probe.COMPUTE: "the device does not answer: see nvidia-smi for errors, and dmesg.",
        _probe.LATENCY: "on a CPU give XLA's pool threads, NPROC of twice the devices; between "
        "GPUs try NCCL_DEBUG=INFO, and NCCL_P2P_DISABLE=1 to see whether the direct path hangs.",
        _probe.BANDWIDTH: "see whether other programs keep the devices busy; "
        "`--timeout 60` waits longer.",
        _probe.REACH: "name the address of worker 0 by number; looking its name up takes too long.",
    }
    what = _probe.WHAT_HAPPENS.get(stage, "starting Python and importing JAX")
    return Finding(
        fact=f"{what} did not end within {seconds:.0f} s.",
        hint=hints.get(stage, "the disk or the machine is very busy; `--timeout 60` waits longer."),
    )


def where_it_failed(stage: str, last_words: str, environment: Mapping[str, str]) -> Finding:
    """Puts a stage that failed into words."""
    what = _probe.WHAT_HAPPENS.get(stage, "importing JAX")
    hint = "the last words above are JAX's own."
    if "Unknown flag" in last_words:
        hint = "take the flag out of XLA_FLAGS: this version of XLA does not know it."
    elif stage == _probe.BACKEND:
        what += f" with JAX_PLATFORMS={environment.get('JAX_PLATFORMS', '')!r}"
        hint = "unset it to take what there is, or set it to cpu to do without accelerators."
    return Finding(fact=f"{what} failed: {last_words}", hint=hint)
