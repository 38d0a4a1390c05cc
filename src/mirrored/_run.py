"""``run``: one function on every replica, as one ``shard_map`` program.

Owns what comes out: its types, refusing what differs though it must not, and writing
variables back. How the function is traced is in ``_replica_trace``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import jax
from jax.extend.core import jaxpr_as_fun

from mirrored import _context, _objects, _replica
from mirrored._arguments import Arguments
from mirrored._errors import ContextError, OwnershipError, PaddingError, VariableError
from mirrored._placement import Placement
from mirrored._replica_trace import MIRRORED, SPLIT, Outline, ReplicaTrace
from mirrored._row_mixing import mixing_outputs
from mirrored._soundness import (
    captured_constants,
    refuse_gradients_summed_by_jax,
    varying_outputs,
)
from mirrored._uniformity import NOTHING, REPLICA, ROWS, output_dependence
from mirrored._values import PerReplica
from mirrored._variable import live_variables


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
        trace = ReplicaTrace(strategy, placement, function, arguments, variables, frame)
        return _Replicated(placement, function, arguments, trace, frame).result()

    return _objects.run_with_objects(replicated, function, args, kwargs, compiled=True)


@final
class _Replicated:
    """One call of ``run``, put into the surrounding program."""

    def __init__(
        self,
        placement: Placement,
        function: Callable[..., Any],
        arguments: Arguments,
        trace: ReplicaTrace,
        frame: _context.Frame | None,
    ) -> None:
        self._placement = placement
        self._function = function
        self._arguments = arguments
        self._trace = trace
        self._outer = frame

    def result(self) -> Any:
        """Traces the replicas and rebuilds their results by type."""
        operands = self._trace.operands()
        operand_count = len(jax.tree.leaves(operands))
        inner, jaxpr, outline = self._trace.traced(operands, frozenset())
        hidden = self._hidden_differences(inner, outline)
        if hidden:
            # Typed as the same on all replicas, but decided by control flow that
            # differs: trace again with these results marked as varying.
            inner, jaxpr, outline = self._trace.traced(operands, hidden)
        refuse_gradients_summed_by_jax(inner, operand_count)
        flat = jaxpr_as_fun(jaxpr)(*jax.tree.leaves(operands))
        (same, stored), (own, components), flags = outline.structure.unflatten(flat)
        own = self._with_claims_kept(inner, operands, outline, own[: len(outline.own)])
        self._store(outline, stored, components, flags)
        per_row = self._per_row_outputs((inner, jaxpr, outline), operands)
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

    def _hidden_differences(self, inner: Any, outline: Outline) -> frozenset[int]:
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
        self, inner: Any, operands: tuple[Any, ...], outline: Outline, own: list[Any]
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
            in_specs=(SPLIT,),
            out_specs=MIRRORED,
            check_vma=False,
        )(stacked)

    def _store(self, outline: Outline, stored: Any, components: Any, flags: Any) -> None:
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

    def _per_row_outputs(
        self, traced: tuple[Any, Any, Outline], operands: tuple[Any, ...]
    ) -> set[int]:
        """Finds the outputs whose rows are the rows of a padded batch.

        They are those that grow by a row when the batch does.
        """
        outline = traced[2]
        rows = outline.rows
        if rows is None or not rows.padded:
            return set()
        asked = rows.asked
        longer = self._with_one_more_row()
        after = None if longer is None else longer[2].own_shapes
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
            self._refuse_padding(rows, "nothing in it asks which")
        if not asked and longer is not None:
            # Of a single row one cannot see what becomes of several.
            program, whole, _ = longer if rows.row_count == 1 else traced
            captured = len(program.invars) - len(jax.tree.leaves(operands))
            is_batch = [False] * captured + self._arguments.are_batches()
            is_batch += [False] * (len(program.invars) - len(is_batch))
            first_own = len(outline.same) + len(outline.written)
            mixing = mixing_outputs(program, is_batch, captured_constants(whole))[first_own:]
            if any(mixing[number] for number in per_row):
                self._refuse_padding(rows, "it combines rows with each other")
        return per_row

    def _with_one_more_row(self) -> tuple[Any, Any, Outline] | None:
        """What ``ReplicaTrace.traced`` returns, for a batch of one row more."""
        longer = self._trace.with_arguments(self._arguments.with_one_more_row())
        try:
            return longer.traced(longer.operands(), frozenset())
        except Exception:  # noqa: BLE001 (any failure means: the function fixes its row count)
            return None

    def _refuse_padding(self, rows: _replica.RowValidity, why: str) -> None:
        name = getattr(self._function, "__qualname__", repr(self._function))
        raise PaddingError(
            fact=f"{name} was given a batch that does not split evenly over "
            f"{self._placement.replica_count} replicas, so some of its {rows.row_count} rows a "
            f"replica are padding, and {why}.",
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


def _require_agreement(agree: Any) -> None:
    if not agree:
        raise PaddingError(
            fact="two batches with different numbers of real rows were given to one run.",
            expected="one batch, or batches whose rows belong together.",
            hint="run them one after the other, or pass remainder='drop' to distribute_dataset.",
        )


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
