"""Compiling a step for devices that nobody here owns: memory, flops, collectives.

Owns strategies over such devices and what is reported. XLA compiles for a TPU slice with the
extra ``plan``, in seconds and on a CPU. Nothing runs: Variables made in the scope of such a
strategy know their shapes and have no values.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib.util
import os
import re
import time
from collections.abc import Callable
from typing import Any, NoReturn, final

import jax
import numpy as np
from jax.experimental import topologies

from mirrored import _compat, _context, _objects
from mirrored._compiled import ProgramFacts, facts_of
from mirrored._errors import ArgumentError, DeviceError, MissingDependencyError
from mirrored._explain import role_sizes, state_sizes
from mirrored._explanation import collective_lines, memory_lines, with_program_memory
from mirrored._function import Function
from mirrored._placement import Placement, resolve_devices
from mirrored._strategy import Strategy
from mirrored._types import OTHER_STATE, PARAMETERS
from mirrored._values import PerReplica

__all__ = ["Plan", "batch", "plan", "strategy"]

_TPU = re.compile(r"v\d+[a-z]*:\d+(x\d+)+")
_GPU = re.compile(r"gpu:(\d+)")
_CPU = re.compile(r"cpu:(\d+)")


def strategy(devices: str) -> Strategy:
    """Makes a strategy over devices to compile for, in the place of MirroredStrategy.

    Variables, optimizers and steps are written as ever. Nothing runs on it: values are
    never computed, only their shapes, so a model may be larger than this machine.

    Args:
      devices: a TPU slice such as "v5e:4x4" or "v4:2x2x2" (needs the extra ``plan``);
        "gpu:8" for as many GPUs in one machine, of the kind that this one has at least one
        of, asked for before JAX has used it; "cpu:4" for virtual CPU devices.

    >>> import mirrored.plan
    >>> mirrored.plan.strategy("cpu:2").num_replicas_in_sync
    2
    """
    if _TPU.fullmatch(devices):
        return _PlannedStrategy(_tpu_slice(devices))
    if gpus := _GPU.fullmatch(devices):
        return _PlannedStrategy(_mock_gpus(int(gpus[1])))
    if cpus := _CPU.fullmatch(devices):
        return _PlannedStrategy(resolve_devices([f"cpu:{n}" for n in range(int(cpus[1]))]))
    raise ArgumentError(
        fact=f"plan.strategy was given {devices!r}.",
        expected='a TPU slice such as "v5e:4x4", "gpu:8" or "cpu:4".',
        hint="for devices that are there, use mirrored.MirroredStrategy.",
    )


@final
class _PlannedStrategy(Strategy):
    """A MirroredStrategy to compile for; what would need running devices is refused."""

    def __init__(self, devices: list[Any]) -> None:
        super().__init__()
        self._placement = Placement(devices, "MirroredStrategy", only_compiles=True)

    @property
    def placement(self) -> Placement:
        return self._placement

    def run(self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None) -> Any:
        self._require_program("run")
        return super().run(fn, args, kwargs)

    def reduce(self, reduce_op: Any, value: Any, axis: Any = None) -> Any:
        self._require_program("reduce")
        return super().reduce(reduce_op, value, axis)

    def gather(self, value: Any, axis: int) -> Any:
        self._require_program("gather")
        return super().gather(value, axis)

    def debug(self) -> Any:
        self._refuse("debug")

    def explain(self, step: Any, *args: Any, **options: Any) -> Any:
        self._refuse("explain")

    def distribute_dataset(
        self, dataset: Any, batch_size: int | None = None, **options: Any
    ) -> Any:
        self._refuse("distribute_dataset")

    def distribute_datasets_from_function(self, dataset_fn: Any, **options: Any) -> Any:
        self._refuse("distribute_datasets_from_function")

    def _require_program(self, name: str) -> None:
        if _context.current().frame is None and not _compat.a_program_is_being_staged():
            self._refuse(name)

    def _refuse(self, name: str) -> NoReturn:
        raise DeviceError(
            fact=f"strategy.{name} was called on {self._placement.describe()}, which is there to "
            "compile for.",
            expected="a step given to mirrored.plan.plan, with mirrored.plan.batch for its data.",
            hint="to train, use a strategy over devices that are there: "
            "mirrored.MirroredStrategy().",
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
      step: a ``mirrored.function`` over Variables made in the strategy's scope; or a
        function of arrays under ``jax.jit``, or to be compiled so, that calls
        ``strategy.run``. Memory that one gives away is counted only if it is jitted
        with ``donate_argnums``.
      *args: its arguments. Arrays, shapes and NNX objects are mirrored; what comes from
        ``plan.batch`` is split. NumPy arrays and ``jax.eval_shape`` do.

    >>> import jax, jax.numpy as jnp, optax
    >>> import mirrored
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

    The same with Variables:

    >>> with strategy.scope():
    ...     w = mirrored.Variable(jax.ShapeDtypeStruct((8, 4), jnp.float32), name="w")
    ...     optimizer = mirrored.Optimizer(optax.adam(0.1))
    >>> def replica_step(x):
    ...     loss, gradient = mirrored.value_and_grad(lambda: mirrored.mean((x @ w).sum(1)), w)
    ...     optimizer.apply_gradients([(gradient, w)])
    ...     return loss
    >>> train_step = mirrored.function(lambda x: strategy.run(replica_step, args=(x,)))
    >>> planned = mirrored.plan.plan(strategy, train_step, x)
    >>> planned.memory["parameters"], planned.memory["optimizer state"]
    (128, 260)
    """
    placement = strategy.placement
    shapes = _shapes(placement, args)
    lowerable = step if isinstance(step, (jax.stages.Wrapped, Function)) else jax.jit(step)
    start = time.perf_counter()
    compiled = lowerable.lower(*shapes).compile(compiler_options=_compiler_options(placement))
    seconds = time.perf_counter() - start
    name = getattr(step, "__name__", type(step).__name__)
    facts = facts_of(name, compiled.as_text() or "", compiled.memory_analysis(), _cost(compiled))
    memory = with_program_memory(_sizes(step, shapes), facts)
    return Plan(name, placement.describe(), facts, memory, seconds)


def _compiler_options(placement: Placement) -> dict[str, Any] | None:
    # Each GPU that is not there counts as a process of its own, and by default XLA shares the
    # tuning of kernels out among processes and waits for what the others found: for ever here.
    if placement.devices[0].platform == "gpu" and placement.spans_processes:
        return {"xla_gpu_shard_autotuning": False}
    return None


def _sizes(step: Any, shapes: tuple[Any, ...]) -> dict[str, int]:
    variables = step.variables_used(*shapes) if isinstance(step, Function) else []
    leaves = jax.tree.leaves(shapes, is_leaf=_objects.is_object)
    objects = [leaf for leaf in leaves if _objects.is_object(leaf)]
    taken = _objects.take(objects) if objects else None
    sizes = collections.Counter(state_sizes(variables, taken))
    sizes.update(role_sizes(shapes, OTHER_STATE if variables or objects else PARAMETERS))
    return dict(sizes)


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

    return jax.tree.map(shape, nest, is_leaf=_is_leaf)


def _is_leaf(leaf: Any) -> bool:
    return isinstance(leaf, PerReplica) or _objects.is_object(leaf)
