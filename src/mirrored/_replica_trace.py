"""The replica function, traced once for all replicas into one ``shard_map``.

Owns the entry cast, how variables travel through the program, and what the trace
learns; what becomes of its results is in ``_run``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any, final

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from mirrored import _compat, _context, _replica
from mirrored._arguments import Arguments
from mirrored._claims import Claim
from mirrored._collectives import ProgramCommunicator, fold_in_replica, to_varying
from mirrored._errors import TracingError, VariableError
from mirrored._placement import Placement
from mirrored._signature import is_array
from mirrored._soundness import replica_program
from mirrored._values import flattened, is_object_leaf
from mirrored._variable import Variable

SPLIT = PartitionSpec(_compat.REPLICA_AXIS)
MIRRORED = PartitionSpec()

_CONCRETIZATION_ERRORS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)

_TYPES_DIFFER = re.compile("manual axis types do not match|varying manual axes to match")


@dataclasses.dataclass
class Outline:
    """What tracing a replica function learned besides its equations."""

    treedef: Any
    # What the function returned, leaf by leaf; Python constants stay.
    leaves: list[Any]
    # Those of them that are claimed to be the same on all replicas.
    claims: dict[int, Claim]
    same: list[int]
    own: list[int]
    own_shapes: list[tuple[int, ...]]
    written: list[Variable]
    written_own: list[Variable]
    frame: _context.Frame | None
    rows: _replica.RowValidity | None
    structure: Any


@final
class ReplicaTrace:
    """One call of ``run``, to be traced into the surrounding program."""

    def __init__(
        self,
        strategy: Any,
        placement: Placement,
        function: Callable[..., Any],
        arguments: Arguments,
        variables: list[Variable],
        frame: _context.Frame | None,
    ) -> None:
        self._strategy = strategy
        self._placement = placement
        self._function = function
        self._arguments = arguments
        self._variables = variables
        self._outer = frame

    def with_arguments(self, arguments: Arguments) -> ReplicaTrace:
        """The same call with other arguments."""
        return ReplicaTrace(
            self._strategy,
            self._placement,
            self._function,
            arguments,
            self._variables,
            self._outer,
        )

    def operands(self) -> tuple[Any, ...]:
        """The arrays of the program: values per replica, row counts, mirrored, state."""
        per_replica = list(self._arguments.per_replica.values())
        counts = [value.row_counts for value in per_replica if value.row_counts is not None]
        mirrored_state, own_state = [], []
        for variable in self._variables:
            assert self._outer is not None
            array = self._outer.slots[variable].ref[...]
            (own_state if variable.on_read else mirrored_state).append(array)
        return (
            [value.stacked for value in per_replica],
            [jnp.asarray(count) for count in counts],
            list(self._arguments.mirrored.values()),
            mirrored_state,
            own_state,
        )

    def traced(self, operands: Any, hidden: frozenset[int]) -> tuple[Any, Any, Outline]:
        """Returns the replicas' program, the whole one, and what was learned.

        Args:
          operands: the arrays, or their shapes.
          hidden: results (by number) that differ although their type denies it.
        """
        outlines: list[Outline] = []
        jaxpr = jax.make_jaxpr(self._shard_map(outlines, hidden))(*operands)
        return replica_program(jaxpr), jaxpr, outlines[0]

    def _shard_map(self, outlines: list[Outline], hidden: frozenset[int]) -> Any:
        def body(
            stacked: list[Any],
            counts: list[Any],
            mirrored: list[Any],
            mirrored_state: list[Any],
            own_state: list[Any],
        ) -> Any:
            communicator = ProgramCommunicator(
                self._placement.replica_count, packs=self._placement.sends_one_by_one
            )
            frame = self._inner_frame(mirrored_state, own_state)
            arguments = self._arguments
            values = dict(zip(arguments.per_replica, [array[0] for array in stacked], strict=True))
            for index, array in zip(arguments.mirrored, mirrored, strict=True):
                values[index] = _enter(array, communicator)
            rows = arguments.rows([count[0] for count in counts])
            args, kwargs = arguments.rebuild(values)
            with _context.entered(
                strategy=self._strategy,
                placement=self._placement,
                frame=frame,
                replica=_replica.ReplicaContext(
                    self._strategy, communicator, rows, _compat.current_trace()
                ),
                merging=False,
                differentiated={},
            ):
                result = _call(self._function, args, kwargs)
            leaves, treedef = flattened(result, is_object_leaf)
            claims = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Claim)}
            leaves = [leaf.value if isinstance(leaf, Claim) else leaf for leaf in leaves]
            same, own = _by_type(leaves, hidden)
            varying = [leaves[index] for index in own]
            # Looked at while tracing only; XLA leaves them out.
            bases = [claim.basis for claim in claims.values() if claim.basis is not None]
            written, written_own = _written(frame)
            flags = [] if frame is None else [flag for flag, _ in frame.checks]
            outputs = (
                ([leaves[index] for index in same], [value for _, value in written]),
                (
                    [jnp.expand_dims(to_varying(leaf), 0) for leaf in (*varying, *bases)],
                    [jnp.expand_dims(value, 0) for _, value in written_own],
                ),
                flags,
            )
            outlines.append(
                Outline(
                    treedef,
                    leaves,
                    claims,
                    same,
                    own,
                    [jnp.shape(leaves[index]) for index in own],
                    [variable for variable, _ in written],
                    [variable for variable, _ in written_own],
                    frame,
                    rows,
                    jax.tree.structure(outputs),
                )
            )
            return outputs

        return jax.shard_map(
            body,
            mesh=self._placement.mesh,
            in_specs=(SPLIT, SPLIT, MIRRORED, MIRRORED, SPLIT),
            # A prefix for each kind of output, whatever their number: this is how
            # one trace is enough although the types are known only at its end.
            out_specs=(MIRRORED, SPLIT, MIRRORED),
            check_vma=True,
        )

    def _inner_frame(self, mirrored_state: Any, own_state: Any) -> _context.Frame | None:
        if self._outer is None:
            return None
        mirrored_left, own_left = iter(mirrored_state), iter(own_state)
        slots = {}
        for variable in self._variables:
            value = next(own_left)[0] if variable.on_read else next(mirrored_left)
            slots[variable] = _context.Slot(jax.new_ref(value))
        return _context.Frame(slots, self._placement)


def _by_type(leaves: list[Any], hidden: frozenset[int]) -> tuple[list[int], list[int]]:
    """Sorts the arrays among the results: provably the same on all replicas, or not."""
    same: list[int] = []
    own: list[int] = []
    for index, leaf in enumerate(leaves):
        if not is_array(leaf):
            continue
        varies = index in hidden or _compat.varies_over_replicas(leaf)
        (own if varies else same).append(index)
    return same, own


_Written = list[tuple[Variable, Any]]


def _written(frame: _context.Frame | None) -> tuple[_Written, _Written]:
    """The new values of written variables: mirrored ones, and components of ON_READ ones."""
    mirrored: _Written = []
    own: _Written = []
    for variable, slot in ({} if frame is None else frame.slots).items():
        if slot.written:
            (own if variable.on_read else mirrored).append((variable, slot.ref[...]))
    for variable, value in mirrored:
        if _compat.varies_over_replicas(value):
            raise VariableError(
                fact=f"variable {variable.name!r} would differ between replicas.",
                expected="a value that is provably the same on all replicas.",
                hint='reduce it first with ctx.all_reduce("mean", value).',
            )
    return mirrored, own


def _enter(array: Any, communicator: ProgramCommunicator) -> Any:
    """The entry cast: what enters belongs to the replica from here on."""
    if _compat.is_typed_key(array):
        # A key that all replicas share would give them all the same dropout mask.
        return fold_in_replica(array, communicator)
    return to_varying(array)


def _call(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except _CONCRETIZATION_ERRORS as error:
        raise TracingError(
            fact="the replica function asked in Python for a value that is known only when the "
            f"program runs ({type(error).__name__}).",
            expected="one program for all replicas: no Python `if`, `while`, int() or NumPy call "
            "on a traced value such as replica_id_in_sync_group.",
            hint="use jax.lax.cond or jnp.where; to look at concrete values, run inside "
            "`with strategy.debug():`.",
        ) from error
    except (TypeError, ValueError) as error:
        # JAX's words about scans and branches, and (ValueError) about Refs.
        if not _TYPES_DIFFER.search(str(error)):
            raise
        raise TracingError(
            fact="a carry of jax.lax.scan or while_loop (or the branches of cond, or a Ref) starts "
            "as a value that is the same on all replicas and becomes one that may differ.",
            expected="one type throughout.",
            hint="start with a value of this replica: "
            "mirrored.get_replica_context().own(jnp.zeros(...)).",
        ) from error
