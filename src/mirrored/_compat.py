"""The one place that knows which JAX this is.

Owns every touch of JAX that differs between the supported versions (0.10 on
Python 3.11, the newest on Python 3.12) or that has no public spelling. Nothing
else in the package imports from ``jax._src``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
from jax._src import clusters as _clusters
from jax._src import core as _jax_core
from jax._src import distributed as _distributed
from jax._src import xla_bridge as _xla_bridge
from jax._src.state.types import AbstractRef as _AbstractRef
from jax.sharding import AxisType

REPLICA_AXIS = "replica"


def varies_over_replicas(value: Any) -> bool:
    """Says whether the type of ``value`` allows it to differ between replicas."""
    return type_varies_over_replicas(jax.typeof(value))


def type_varies_over_replicas(aval: Any) -> bool:
    """The same of a type; a Ref's type is that of what it holds."""
    aval = getattr(aval, "inner_aval", aval)
    manual = getattr(aval, "manual_axis_type", None)
    axes = manual.varying if manual is not None else getattr(aval, "vma", frozenset())
    return REPLICA_AXIS in axes


def is_ref_type(aval: Any) -> bool:
    """Says whether a type is that of a mutable Ref."""
    return isinstance(aval, _AbstractRef)


def is_traced(value: Any) -> bool:
    """Says whether ``value`` stands for an array of a program being traced."""
    return isinstance(value, _jax_core.Tracer)


def is_differentiated(value: Any) -> bool:
    """Says whether ``value`` is an input of a differentiation going on (``jax.grad``)."""
    return type(value).__name__ in ("JVPTracer", "LinearizeTracer")


def current_trace() -> Any:
    """Returns the trace that operations are recorded in now; only to compare by identity."""
    return _jax_core.trace_ctx.trace


def is_typed_key(value: Any) -> bool:
    """Says whether ``value`` is an array of new-style random keys."""
    return isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key)


def no_trace_is_open() -> bool:
    """Says whether Python runs outside every JAX transformation (cheap)."""
    return _jax_core.trace_state_clean()


def a_program_is_being_staged() -> bool:
    """Says whether operations on concrete arrays are being recorded, as in ``jax.jit``."""
    if no_trace_is_open():
        return False
    return is_traced(jax.numpy.zeros(()))


def keeps_64_bits() -> bool:
    """Says whether JAX keeps 64-bit types, or narrows them to 32."""
    return jax.dtypes.canonicalize_dtype("int64").itemsize == 8


def is_computed(array: Any) -> bool:
    """Says whether the value of an array is there, so that reading it does not wait."""
    return array.is_ready()


def make_mesh(devices: Any) -> jax.sharding.Mesh:
    """Builds the one-axis mesh every strategy uses.

    The axis is Auto: ``shard_map`` refuses to close over arrays on a mesh with
    Explicit axes, and a replica function may close over whatever it likes.
    """
    return jax.sharding.Mesh(devices, (REPLICA_AXIS,), axis_types=(AxisType.Auto,))


def backend_has_started() -> bool:
    """Says whether JAX has looked for devices, after which their number is fixed."""
    return _xla_bridge.backends_are_initialized()


def configured_cpu_devices() -> int:
    """How many CPU devices JAX's own option asks for; 0 if it does not."""
    return max(0, jax.config.values["jax_num_cpu_devices"])


def scan_operand_counts(params: Any) -> tuple[int, int]:
    """How many operands of a traced ``lax.scan`` are constants, and how many its carry."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carry, _ = params["ft_in"].unpack()
    return len(constants), len(carry)


def open_program(program: Any) -> Any:
    """The equations' holder of a traced (sub)program, which older JAX wraps once more."""
    return getattr(program, "jaxpr", program)


def is_program(value: Any) -> bool:
    """Says whether ``value`` is what ``open_program`` returns."""
    return isinstance(value, _jax_core.Jaxpr)


def programs_in(params: dict[str, Any]) -> Iterator[Any]:
    """Yields every program among the parameters of an equation: branches, bodies, calls."""
    for parameter in params.values():
        for candidate in parameter if isinstance(parameter, (tuple, list)) else (parameter,):
            inner = open_program(candidate)
            if is_program(inner):
                yield inner


# --- several processes ----------------------------------------------------------


def detect_cluster(timeout: float) -> tuple[str, str, int, int, tuple[int, ...] | None] | None:
    """Asks JAX whether Slurm, Open MPI, Kubernetes or Cloud TPU started this process.

    Returns:
      (who, coordinator address, process count, process id, local device ids), or None.
    """
    found = next(
        (
            environment
            for environment in _clusters.ClusterEnv._cluster_types  # noqa: SLF001
            if not environment.opt_in_only_method and environment.is_env_present()
        ),
        None,
    )
    if found is None:
        return None
    address, count, number, local = found.auto_detect_unset_distributed_params(
        None, None, None, None, found.name, max(1, int(timeout))
    )
    if address is None or count is None or number is None:
        return None
    who = found.name or found.__name__.removesuffix("Cluster").lower()
    return who, address, int(count), int(number), None if local is None else tuple(local)


def coordination_client() -> Any:
    """Returns the client of JAX's coordination service; None in a single process."""
    return _distributed.global_state.client


def distributed_runtime() -> tuple[str, int, int]:
    """Returns (coordinator address, process count, process id) of jax.distributed."""
    state = _distributed.global_state
    return str(state.coordinator_address), state.num_processes, state.process_id
