"""Compiling a step for devices that nobody here owns: memory, flops, collectives.

Owns strategies over such devices and what is reported. XLA compiles for a TPU slice with the
extra ``plan``, in seconds and on a CPU; nothing runs, so steps are in functional style and
arrays may be shapes.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import time
from collections.abc import Callable
from typing import Any, final

import jax
import numpy as np
from jax.experimental import topologies

from mirrored._compiled import ProgramFacts, facts_of
from mirrored._errors import ArgumentError, DeviceError, MissingDependencyError
from mirrored._explain import role_sizes
from mirrored._explanation import collective_lines, memory_lines, with_program_memory
from mirrored._function import Function
from mirrored._placement import Placement
from mirrored._strategies import MirroredStrategy
from mirrored._strategy import Strategy
from mirrored._values import PerReplica

__all__ = ["Plan", "batch", "plan", "strategy"]

_TPU = re.compile(r"v\d+[a-z]*:\d+(x\d+)+")
_GPU = re.compile(r"gpu:(\d+)")
_CPU = re.compile(r"cpu:(\d+)")


def strategy(devices: str) -> Strategy:
    """Makes a MirroredStrategy over devices to compile for.

    Args:
      devices: a TPU slice such as "v5e:4x4" or "v4:2x2x2" (needs the extra ``plan``);
        "gpu:8" for as many GPUs in one machine, of the kind that this one has at least one
        of, asked for before JAX has used it; "cpu:4" for virtual CPU devices.

    >>> import mirrored.plan
    >>> mirrored.plan.strategy("cpu:2").num_replicas_in_sync
    2
    """
    if _TPU.fullmatch(devices):
        return MirroredStrategy(_tpu_slice(devices))
    if gpus := _GPU.fullmatch(devices):
        return MirroredStrategy(_mock_gpus(int(gpus[1])))
    if cpus := _CPU.fullmatch(devices):
        return MirroredStrategy([f"cpu:{number}" for number in range(int(cpus[1]))])
    raise ArgumentError(
        fact=f"plan.strategy was given {devices!r}.",
        expected='a TPU slice such as "v5e:4x4", "gpu:8" or "cpu:4".',
        hint="for devices that are there, use mirrored.MirroredStrategy.",
    )


def _tpu_slice(name: str) -> list[Any]:
    if importlib.util.find_spec("libtpu") is None:
        raise MissingDependencyError(
            fact=f"compiling for {name!r} needs libtpu, which is not installed.",
            expected="the extra `plan`.",
            hint="pip install 'mirrored[plan]'.",
        )
    # Without a TPU its metadata server would be asked, and waited for, for minutes.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    try:
        return list(topologies.get_topology_desc(name, "tpu").devices)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise DeviceError(
            fact=f"the compiler knows no TPU slice {name!r}: {error}",
            expected="a slice that exists, such as v5e:2x2, v5e:4x4, v4:2x2x2 or v5p:2x2x4.",
            hint="write the version of the TPU, a colon, and the sides of the slice in chips.",
        ) from error


def _mock_gpus(count: int) -> list[Any]:
    jax.config.update("jax_mock_gpu_topology", f"1x{count}x1")
    try:
        found = jax.devices("gpu")
    except RuntimeError as error:
        jax.config.update("jax_mock_gpu_topology", "")
        raise DeviceError(
            fact=f"compiling for {count} GPUs needs one to compile with: {error}",
            expected="a GPU of the kind to compile for.",
            hint='"v5e:4x4" needs no device at all.',
        ) from error
    if len(found) != count:
        raise DeviceError(
            fact=f"{count} GPUs were asked for after JAX had found {len(found)}.",
            expected="plan.strategy before anything else uses JAX.",
            hint="call it first, in a process of its own.",
        )
    return found


def batch(strategy: Strategy, global_batch: Any) -> Any:
    """Describes a global batch, split over the replicas as ``distribute_dataset`` does.

    Args:
      strategy: the strategy to split for.
      global_batch: arrays or ``jax.ShapeDtypeStruct``, or a nest of them, with the rows in
        front.

    >>> import jax, mirrored.plan
    >>> strategy = mirrored.plan.strategy("cpu:2")
    >>> images = mirrored.plan.batch(strategy, jax.ShapeDtypeStruct((64, 8), "float32"))
    >>> images.stacked.shape
    (2, 32, 8)
    """
    placement = strategy.placement
    count = placement.replica_count

    def split(leaf: Any) -> PerReplica:
        if not leaf.shape:
            raise ArgumentError(
                fact="plan.batch was given a scalar.",
                expected="arrays with the batch's rows in front.",
                hint="pass other arguments of the step beside the batch.",
            )
        rows = -(-leaf.shape[0] // count)
        shape = (count, rows, *leaf.shape[1:])
        stacked = jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=placement.split)
        counts = None
        if rows * count != leaf.shape[0]:
            counts = jax.ShapeDtypeStruct((count,), np.dtype("int32"), sharding=placement.split)
        return PerReplica.from_stacked(stacked, counts, is_batch=True)

    return jax.tree.map(split, global_batch)


@final
@dataclasses.dataclass(frozen=True)
class Plan:
    """What a step would need on other devices; print it or read its numbers.

    Attributes:
      name: the step.
      where: the devices.
      program: collectives, flops and sizes as XLA gives them, on each device.
      memory: bytes on each device, by kind.
      compile_seconds: how long compiling took.
    """

    name: str
    where: str
    program: ProgramFacts
    memory: dict[str, int]
    compile_seconds: float

    def __str__(self) -> str:
        lines = [f"A step of {self.name!r}, compiled for {self.where}."]
        lines += collective_lines(self.program.collectives)
        lines += memory_lines(self.memory)
        if self.program.flops is not None:
            lines.append(f"arithmetic: {self.program.flops:.3g} flops a device")
        return "\n".join(lines)


def plan(strategy: Strategy, step: Callable[..., Any], *args: Any) -> Plan:
    """Compiles a step for a strategy's devices and says what it would need.

    Args:
      strategy: one of ``plan.strategy``, which ``step`` uses.
      step: a function of arrays under ``jax.jit``, or one to be compiled so, that calls
        ``strategy.run``. Memory it gives away is counted only if it is jitted with
        ``donate_argnums``.
      *args: its arguments. Arrays and shapes are mirrored, or split if they come from
        ``plan.batch``; NumPy arrays and ``jax.eval_shape`` do.

    >>> import jax, jax.numpy as jnp
    >>> import mirrored.plan
    >>> strategy = mirrored.plan.strategy("cpu:2")
    >>> def step(weights, x):
    ...     gradients = strategy.run(jax.grad(lambda w, x: (x @ w).mean()), args=(weights, x))
    ...     return weights - strategy.reduce("mean", gradients)
    >>> weights = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    >>> x = mirrored.plan.batch(strategy, jax.ShapeDtypeStruct((64, 8), jnp.float32))
    >>> planned = mirrored.plan.plan(strategy, jax.jit(step, donate_argnums=0), weights, x)
    >>> planned.program.collectives
    (Collective(kind='all-reduce', count=1, bytes=128),)
    >>> planned.memory["parameters"], planned.memory["batch"]
    (128, 1024)
    """
    if isinstance(step, Function):
        raise ArgumentError(
            fact="plan was given a mirrored.function.",
            expected="a step in functional style: Variables live on devices that are there.",
            hint="pass parameters and state as arguments; see the guide on plain JAX.",
        )
    placement = strategy.placement
    shapes = _shapes(placement, args)
    lowerable = step if isinstance(step, jax.stages.Wrapped) else jax.jit(step)
    start = time.perf_counter()
    compiled = lowerable.lower(*shapes).compile(compiler_options=_compiler_options(placement))
    seconds = time.perf_counter() - start
    name = getattr(step, "__name__", type(step).__name__)
    facts = facts_of(name, compiled.as_text() or "", compiled.memory_analysis(), _cost(compiled))
    memory = with_program_memory(role_sizes(shapes), facts)
    return Plan(name, placement.describe(), facts, memory, seconds)


def _compiler_options(placement: Placement) -> dict[str, Any] | None:
    # Each GPU that is not there counts as a process of its own, and by default XLA shares the
    # tuning of kernels out among processes and waits for what the others found: for ever here.
    if placement.devices[0].platform == "gpu" and placement.spans_processes:
        return {"xla_gpu_shard_autotuning": False}
    return None


def _cost(compiled: Any) -> Any:
    try:
        return compiled.cost_analysis()
    except NotImplementedError:
        return None


def _shapes(placement: Placement, nest: Any) -> Any:
    """Puts shapes with a place in the place of arrays."""

    def shape(leaf: Any) -> Any:
        if isinstance(leaf, PerReplica):
            if isinstance(leaf.stacked, jax.ShapeDtypeStruct):
                return leaf
            raise ArgumentError(
                fact="plan was given a PerReplica value that lives on devices.",
                expected="the shape of a batch.",
                hint="write mirrored.plan.batch(strategy, global_batch).",
            )
        if isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placement.mirrored)
        return leaf

    return jax.tree.map(shape, nest, is_leaf=lambda leaf: isinstance(leaf, PerReplica))
