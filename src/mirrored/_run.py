"""``run``: one function on every replica, as one ``shard_map`` program.

Owns the entry cast, what each kind of argument becomes inside, and the types of
what comes out. Variables travel through the program as arguments and results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec

from mirrored import _compat, _context, _objects, _replica
from mirrored._arguments import Arguments
from mirrored._claims import Claim
from mirrored._collectives import ProgramCommunicator, to_varying
from mirrored._errors import (
    ContextError,
    OwnershipError,
    PaddingError,
    TracingError,
    VariableError,
)
from mirrored._placement import Placement
from mirrored._soundness import (
    refuse_gradients_of_captures,
    replica_program,
    varying_outputs,
)
from mirrored._uniformity import NOTHING, REPLICA, ROWS, output_dependence
from mirrored._values import PerReplica, is_object_leaf
from mirrored._variable import Variable, live_variables

_AXIS = _compat.REPLICA_AXIS
_SPLIT = PartitionSpec(_AXIS)
_MIRRORED = PartitionSpec()

_CONCRETIZATION_ERRORS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def run_replicas(
    strategy: Any,
    placement: Placement,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Traces ``function`` once for all replicas and returns its results by type."""
    frame = _context.current().frame
    if frame is not None:
        if frame.placement not in (None, placement):
            raise OwnershipError(
                fact=f"one compiled function runs on {frame.placement.describe()} and on "
                f"{placement.describe()}.",
                expected="one strategy in one compiled function.",
                hint="compile a mirrored.function for each strategy.",
            )
        frame.placement = placement

    def replicated(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        arguments = Arguments(placement, args, kwargs)
        variables = [] if frame is None else live_variables(placement)
        return _Replicated(strategy, placement, function, arguments, variables, frame).result()

    return _objects.run_with_objects(replicated, function, args, kwargs, compiled=True)


@dataclasses.dataclass
class _Outline:
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
class _Replicated:
    """One call of ``run``, being traced into the surrounding program."""

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

    def result(self) -> Any:
        """Traces the replicas and rebuilds their results by type."""
        operands = self._operands()
        operand_count = len(jax.tree.leaves(operands))
        inner, jaxpr, outline = self._traced(operands, frozenset())
        hidden = self._hidden_differences(inner, outline)
        if hidden:
            # Typed as the same on all replicas, but decided by control flow that
            # differs: trace again with these results marked as varying.
            inner, jaxpr, outline = self._traced(operands, hidden)
        refuse_gradients_of_captures(inner, operand_count)
        flat = jaxpr_as_fun(jaxpr)(*jax.tree.leaves(operands))
        (same, stored), (own, components), flags = outline.structure.unflatten(flat)
        own = self._with_claims_kept(inner, operands, outline, own[: len(outline.own)])
        self._store(outline, stored, components, flags)
        per_row = self._per_row_outputs(outline)
        counts = self._arguments.row_counts
        outputs = list(outline.leaves)
        for index, value in zip(outline.same, same, strict=True):
            outputs[index] = value
        for number, (index, value) in enumerate(zip(outline.own, own, strict=True)):
            rows = counts if number in per_row else None
            if index in outline.claims:
                outputs[index] = value
            else:
                outputs[index] = PerReplica.from_stacked(value, rows, is_batch=rows is not None)
        return outline.treedef.unflatten(outputs)

    def _operands(self) -> tuple[Any, ...]:
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

    def _traced(self, operands: Any, hidden: frozenset[int]) -> tuple[Any, Any, _Outline]:
        outlines: list[_Outline] = []
        jaxpr = jax.make_jaxpr(self._shard_map(outlines, hidden))(*operands)
        return replica_program(jaxpr), jaxpr, outlines[0]

    def _shard_map(self, outlines: list[_Outline], hidden: frozenset[int]) -> Any:
        def body(
            stacked: list[Any],
            counts: list[Any],
            mirrored: list[Any],
            mirrored_state: list[Any],
            own_state: list[Any],
        ) -> Any:
            communicator = ProgramCommunicator(self._placement.replica_count)
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
            leaves, treedef = jax.tree.flatten(result, is_leaf=is_object_leaf)
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
                _Outline(
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
            in_specs=(_SPLIT, _SPLIT, _MIRRORED, _MIRRORED, _SPLIT),
            # A prefix for each kind of output, whatever their number: this is how
            # one trace is enough although the types are known only at its end.
            out_specs=(_MIRRORED, _SPLIT, _MIRRORED),
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

    def _hidden_differences(self, inner: Any, outline: _Outline) -> frozenset[int]:
        """Finds results typed as mirrored that are not; refuses such variables."""
        varying = varying_outputs(inner)
        for variable, varies in zip(outline.written, varying[len(outline.same) :], strict=False):
            if varies:
                raise VariableError(
                    fact=f"variable {variable.name!r} would differ between replicas: it was "
                    "written under control flow (lax.cond, switch or while_loop) that differs "
                    "between replicas, or with a value that came out of it.",
                    expected="a value that is the same on all replicas.",
                    hint='reduce the value first with ctx.all_reduce("mean", value), or select '
                    "with jnp.where.",
                )
        return frozenset(
            index for index, varies in zip(outline.same, varying, strict=False) if varies
        )

    def _with_claims_kept(
        self, inner: Any, operands: tuple[Any, ...], outline: _Outline, own: list[Any]
    ) -> list[Any]:
        """Checks what is claimed to be the same on all replicas, and makes it one array."""
        if not outline.claims:
            return own
        bits = _dependence(inner, operands)
        first_own = len(outline.same) + len(outline.written)
        of = dict(zip(outline.same, bits, strict=False))
        of.update(zip(outline.own, bits[first_own:], strict=False))
        for index, claim in outline.claims.items():
            if of[index] & REPLICA:
                raise claim.refusal()
        bases = [claim for claim in outline.claims.values() if claim.basis is not None]
        if outline.rows is not None and outline.rows.padded:
            for claim, bit in zip(bases, bits[first_own + len(outline.own) :], strict=False):
                if not bit & ROWS:
                    raise claim.padding_refusal()
        claimed = [number for number, index in enumerate(outline.own) if index in outline.claims]
        kept = list(own)
        whole = self._one_of([own[number] for number in claimed])
        for number, value in zip(claimed, whole, strict=True):
            kept[number] = value
        return kept

    def _one_of(self, stacked: list[Any]) -> list[Any]:
        """Takes each device's component as the whole: free, and right for equal ones."""
        if not stacked:
            return []
        return jax.shard_map(
            lambda values: [value[0] for value in values],
            mesh=self._placement.mesh,
            in_specs=(_SPLIT,),
            out_specs=_MIRRORED,
            check_vma=False,
        )(stacked)

    def _store(self, outline: _Outline, stored: Any, components: Any, flags: Any) -> None:
        if self._outer is None or outline.frame is None:
            return
        for variable in outline.frame.touched():
            self._outer.slots[variable].read = True
        written = [*outline.written, *outline.written_own]
        for variable, value in zip(written, [*stored, *components], strict=True):
            self._outer.slots[variable].written = True
            self._outer.slots[variable].ref[...] = value
        for flag, (_, check) in zip(flags, outline.frame.checks, strict=True):
            self._outer.checks.append((flag, check))
        agree = self._arguments.row_counts_agree()
        if agree is not None and outline.rows is not None and outline.rows.asked:
            self._outer.checks.append((agree, _require_agreement))

    def _per_row_outputs(self, outline: _Outline) -> set[int]:
        """Finds the outputs whose rows are the rows of a padded batch.

        They are those that grow by a row when the batch does.
        """
        rows = outline.rows
        if rows is None or not rows.padded:
            return set()
        asked = rows.asked
        after = self._shapes_with_one_more_row()
        per_row = {
            number
            for number, before in enumerate(outline.own_shapes)
            if after is not None
            and outline.own[number] not in outline.claims
            and len(after) == len(outline.own_shapes)
            and before
            and after[number][:1] == (before[0] + 1,)
        }
        others = len(outline.same) + len(outline.own) - len(per_row)
        if not asked and (others or outline.written or outline.written_own):
            self._refuse_padding(rows)
        return per_row

    def _shapes_with_one_more_row(self) -> list[tuple[int, ...]] | None:
        longer = _Replicated(
            self._strategy,
            self._placement,
            self._function,
            self._arguments.with_one_more_row(),
            self._variables,
            self._outer,
        )
        outlines: list[_Outline] = []
        try:
            jax.eval_shape(longer._shard_map(outlines, frozenset()), *longer._operands())
        except Exception:  # noqa: BLE001 (any failure means: the function fixes its row count)
            return None
        return outlines[0].own_shapes

    def _refuse_padding(self, rows: _replica.RowValidity) -> None:
        name = getattr(self._function, "__qualname__", repr(self._function))
        raise PaddingError(
            fact=f"{name} was given a batch that does not split evenly over "
            f"{self._placement.replica_count} replicas, so some of its {rows.row_count} rows a "
            "replica are padding, and nothing in it asks which.",
            expected="a loss that leaves the padded rows out.",
            hint="use mirrored.mean(per_example_loss) for the loss (exact on every batch), weight "
            "rows by mirrored.get_replica_context().example_weights, or pass remainder='drop' to "
            "distribute_dataset.",
        )


def _dependence(inner: Any, operands: tuple[Any, ...]) -> list[int]:
    """Finds what the outputs of the replicas' program depend on."""
    stacked, counts, mirrored, mirrored_state, own_state = map(len, operands)
    inputs = (
        [REPLICA] * stacked
        + [REPLICA | ROWS] * counts
        + [NOTHING] * (mirrored + mirrored_state)
        + [REPLICA] * own_state
    )
    # Arrays the function closed over come first.
    captured = [NOTHING] * (len(inner.invars) - len(inputs))
    return output_dependence(inner, captured + inputs)


def _by_type(leaves: list[Any], hidden: frozenset[int]) -> tuple[list[int], list[int]]:
    """Sorts the arrays among the results: provably the same on all replicas, or not."""
    same: list[int] = []
    own: list[int] = []
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
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


def _require_agreement(agree: Any) -> None:
    if not agree:
        raise PaddingError(
            fact="two batches with different numbers of real rows were given to one run.",
            expected="one batch, or batches whose rows belong together.",
            hint="run them one after the other, or pass remainder='drop' to distribute_dataset.",
        )


def _enter(array: Any, communicator: ProgramCommunicator) -> Any:
    """The entry cast: what enters belongs to the replica from here on."""
    if _compat.is_typed_key(array):
        # A key that all replicas share would give them all the same dropout mask.
        return _replica.fold_in_replica(array, communicator)
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
    except TypeError as error:
        if "manual axis types do not match" not in str(error):
            raise
        raise TracingError(
            fact="a carry of jax.lax.scan or while_loop (or the branches of cond) starts as a "
            "value that is the same on all replicas and becomes one that may differ.",
            expected="one type throughout.",
            hint="start with a value of this replica: "
            "mirrored.get_replica_context().own(jnp.zeros(...)).",
        ) from error


def refuse_nested(what: str) -> None:
    """Raises if ``run`` is called inside a replica function or a merge_call."""
    context = _context.current()
    if context.replica is not None:
        raise ContextError(
            fact=f"{what} was called inside a replica function.",
            expected=f"{what} in cross-replica context.",
            hint="call the inner function directly; replicas reach each other through "
            "mirrored.get_replica_context().all_reduce.",
        )
