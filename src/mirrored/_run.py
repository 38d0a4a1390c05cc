"""``run``: one function on every replica, as one ``shard_map`` program.

Owns the entry cast, what each kind of argument becomes inside, and the types of
what comes out. Variables travel through the program as arguments and results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from mirrored import _compat, _context, _objects
from mirrored._claims import Claim
from mirrored._collectives import ProgramCommunicator, to_varying
from mirrored._errors import (
    ContextError,
    GradientError,
    OwnershipError,
    PaddingError,
    TracingError,
    VariableError,
)
from mirrored._placement import Placement
from mirrored._program import is_array_like
from mirrored._uniformity import NOTHING, REPLICA, ROWS, output_dependence
from mirrored._values import PerReplica, flatten
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
        arguments = _Arguments(placement, args, kwargs)
        variables = [] if frame is None else live_variables(placement)
        return _Replicated(strategy, placement, function, arguments, variables, frame).result()

    return _objects.run_with_objects(replicated, function, args, kwargs)


class _Arguments:
    """The arguments of ``run`` by what becomes of them inside a replica."""

    def __init__(self, placement: Placement, args: Any, kwargs: Any) -> None:
        leaves, self._treedef = flatten((args, kwargs))
        self._leaves = leaves
        self.per_replica: dict[int, PerReplica] = {}
        self.mirrored: dict[int, Any] = {}
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, PerReplica):
                self.per_replica[index] = leaf.placed(placement)
            elif is_array_like(leaf) or _compat.is_traced(leaf):
                self.mirrored[index] = leaf

    def with_one_more_row(self) -> _Arguments:
        """The same arguments with one more padded row in each batch, for shapes only."""
        longer = object.__new__(_Arguments)
        longer._leaves, longer._treedef = self._leaves, self._treedef
        longer.mirrored = self.mirrored
        longer.per_replica = {
            index: _one_row_longer(value) if value.row_counts is not None else value
            for index, value in self.per_replica.items()
        }
        return longer

    def rebuild(self, values: dict[int, Any]) -> tuple[Any, Any]:
        """Puts this replica's values in place of the leaves."""
        leaves = list(self._leaves)
        for index, value in values.items():
            leaves[index] = value
        return self._treedef.unflatten(leaves)

    def rows(self, counts: list[Any]) -> _context.RowValidity | None:
        """Describes the rows of the batches among the arguments, seen from a replica."""
        batches = [value for value in self.per_replica.values() if value.is_batch]
        if not batches:
            return None
        lengths = {value.stacked.shape[1] for value in batches if value.stacked.ndim > 1}
        padded = [value.row_counts is not None for value in batches]
        # All parts of one batch share one array of counts; another array is another batch.
        sources = {id(value.row_counts) for value in batches if value.row_counts is not None}
        if any(padded):
            same = len(lengths) == 1 and all(padded)
            conflicting = not same or (len(sources) > 1 and not _same_counts(batches))
            return _context.RowValidity(max(lengths), counts[0], conflicting=conflicting)
        return _context.RowValidity(lengths.pop(), None) if len(lengths) == 1 else None


def _same_counts(batches: list[PerReplica]) -> bool:
    counts = [value.row_counts for value in batches]
    if any(_compat.is_traced(count) for count in counts):
        # In a trace the parts of one batch arrive as separate arguments; their equal
        # padded length is what can be known of them.
        return True
    return all(np.array_equal(counts[0], other) for other in counts[1:])


def _one_row_longer(value: PerReplica) -> PerReplica:
    shape = list(value.stacked.shape)
    shape[1] += 1
    stacked = jax.ShapeDtypeStruct(tuple(shape), value.stacked.dtype)
    return PerReplica.from_stacked(stacked, value.row_counts, is_batch=value.is_batch)


class _Replicated:
    """One tracing of a replica function."""

    def __init__(
        self,
        strategy: Any,
        placement: Placement,
        function: Callable[..., Any],
        arguments: _Arguments,
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
        """Traces the program into the surrounding trace and rebuilds the results."""
        operands = self._operands(self._arguments)
        program = self._shard_map(self._arguments)
        jaxpr = jax.make_jaxpr(program)(*operands)
        _refuse_gradients_of_captures(jaxpr, len(jax.tree.leaves(operands)))
        structure = self._structure
        flat = jax.extend.core.jaxpr_as_fun(jaxpr)(*jax.tree.leaves(operands))
        (same, stored), (own, components), flags = structure.unflatten(flat)
        own = self._keep_claims(jaxpr, operands, own, len(same) + len(stored))
        self._store(stored, components, flags)
        per_row = self._per_row_outputs(len(own))
        counts = next(
            (v.row_counts for v in self._arguments.per_replica.values() if v.is_batch), None
        )
        outputs = list(self._constants)
        for index, value in zip(self._same, same, strict=True):
            outputs[index] = value
        for number, (index, value) in enumerate(zip(self._own, own, strict=True)):
            rows = counts if number in per_row else None
            if index in self._claims:
                outputs[index] = value
            else:
                outputs[index] = PerReplica.from_stacked(value, rows, is_batch=rows is not None)
        return self._out_treedef.unflatten(outputs)

    def _operands(self, arguments: _Arguments) -> tuple[Any, ...]:
        per_replica = list(arguments.per_replica.values())
        counts = [value.row_counts for value in per_replica if value.row_counts is not None]
        mirrored_state, own_state = [], []
        for variable in self._variables:
            assert self._outer is not None
            array = self._outer.slots[variable].ref[...]
            (own_state if variable.on_read else mirrored_state).append(array)
        return (
            [value.stacked for value in per_replica],
            [jnp.asarray(count) for count in counts],
            list(arguments.mirrored.values()),
            mirrored_state,
            own_state,
        )

    def _shard_map(self, arguments: _Arguments) -> Any:
        def body(
            stacked: list[Any],
            counts: list[Any],
            mirrored: list[Any],
            mirrored_state: list[Any],
            own_state: list[Any],
        ) -> Any:
            communicator = ProgramCommunicator(self._placement.replica_count)
            frame = None
            if self._outer is not None:
                mirrored_left, own_left = iter(mirrored_state), iter(own_state)
                frame = _context.Frame(
                    {
                        v: _context.Slot(
                            jax.new_ref(next(own_left)[0] if v.on_read else next(mirrored_left))
                        )
                        for v in self._variables
                    },
                    self._placement,
                )
            values = dict(
                zip(arguments.per_replica, [array[0] for array in stacked], strict=True)
            )
            for index, array in zip(arguments.mirrored, mirrored, strict=True):
                values[index] = _enter(array, communicator)
            rows = arguments.rows([count[0] for count in counts])
            replica = _context.ReplicaContext(self._strategy, communicator, rows)
            args, kwargs = arguments.rebuild(values)
            with _context.entered(
                strategy=self._strategy,
                placement=self._placement,
                frame=frame,
                replica=replica,
                merging=False,
                differentiated={},
            ):
                result = _call(self._function, args, kwargs)
            same, own = self._classify(result)
            stored, components = self._final_state(frame)
            self._rows = rows
            flags = [] if frame is None else [flag for flag, _ in frame.checks]
            self._frame = frame
            outputs = ((same, stored), (own, components), flags)
            self._structure = jax.tree.structure(outputs)
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

    def _classify(self, result: Any) -> tuple[list[Any], list[Any]]:
        leaves, self._out_treedef = jax.tree.flatten(result)
        self._constants: list[Any] = list(leaves)
        self._same: list[int] = []
        self._own: list[int] = []
        same, own = [], []
        self._claims: dict[int, Claim] = {}
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Claim):
                self._claims[index] = leaf
                leaf = leaf.value
            if isinstance(leaf, Variable):
                leaf = leaf.read(lend=False)
            elif not isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
                continue
            if _compat.varies_over_replicas(leaf):
                self._own.append(index)
                own.append(jnp.expand_dims(leaf, 0))
            else:
                self._same.append(index)
                same.append(leaf)
        self._own_shapes = [value.shape for value in own]
        return same, own

    def _final_state(self, frame: _context.Frame | None) -> tuple[list[Any], list[Any]]:
        self._written: list[Variable] = []
        self._written_own: list[Variable] = []
        stored, components = [], []
        for variable, slot in ({} if frame is None else frame.slots).items():
            if not slot.written:
                continue
            if variable.on_read:
                self._written_own.append(variable)
                components.append(jnp.expand_dims(slot.ref[...], 0))
                continue
            value = slot.ref[...]
            if _compat.varies_over_replicas(value):
                raise VariableError(
                    fact=f"variable {variable.name!r} would differ between replicas.",
                    expected="a value that is provably the same on all replicas.",
                    hint='reduce it first with ctx.all_reduce("mean", value).',
                )
            self._written.append(variable)
            stored.append(value)
        return stored, components

    def _store(self, stored: list[Any], components: list[Any], flags: list[Any]) -> None:
        if self._outer is None or self._frame is None:
            return
        for variable in self._frame.touched():
            self._outer.slots[variable].read = True
        for variable, value in zip(
            [*self._written, *self._written_own], [*stored, *components], strict=True
        ):
            self._outer.slots[variable].written = True
            self._outer.slots[variable].ref[...] = value
        for flag, (_, check) in zip(flags, self._frame.checks, strict=True):
            self._outer.checks.append((flag, check))

    def _keep_claims(
        self, jaxpr: Any, operands: tuple[Any, ...], own: list[Any], before: int
    ) -> list[Any]:
        """Checks what is claimed to be the same on all replicas, and makes it one array."""
        if not self._claims:
            return own
        bits = _dependence(jaxpr, operands)
        padded = self._rows is not None and self._rows.padded
        whole = dict(zip(self._own, bits[before : before + len(own)], strict=True))
        whole.update(zip(self._same, bits, strict=False))
        for index, claim in self._claims.items():
            if whole[index] & REPLICA:
                raise claim.refusal()
            if padded and claim.counts_rows and not whole[index] & ROWS:
                raise claim.padding_refusal()
        claimed = [number for number, index in enumerate(self._own) if index in self._claims]
        kept = list(own)
        for number, value in zip(
            claimed, self._one_of([own[number] for number in claimed]), strict=True
        ):
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

    def _per_row_outputs(self, own_count: int) -> set[int]:
        """Finds the outputs whose rows are the rows of a padded batch.

        They are those that grow by a row when the batch does.
        """
        rows = self._rows
        if rows is None or not rows.padded:
            return set()
        before = self._own_shapes
        asked = rows.asked
        probe = _Replicated(
            self._strategy,
            self._placement,
            self._function,
            self._arguments.with_one_more_row(),
            self._variables,
            self._outer,
        )
        after = probe.own_shapes()
        per_row = {
            number
            for number in range(own_count)
            if self._own[number] not in self._claims
            and after is not None
            and len(after) == own_count
            and len(before[number]) > 1
            and len(after[number]) == len(before[number])
            and after[number][1] == before[number][1] + 1
        }
        others = len(self._same) + own_count - len(per_row)
        writes = len(self._written) + len(self._written_own)
        if not asked and (others or writes):
            self._refuse_padding(rows)
        return per_row

    def own_shapes(self) -> list[tuple[int, ...]] | None:
        """Traces for the shapes of the varying outputs only; None if that fails."""
        operands = self._operands(self._arguments)
        try:
            jax.eval_shape(self._shard_map(self._arguments), *operands)
        except Exception:  # noqa: BLE001 (any failure: the function fixes its row count)
            return None
        return self._own_shapes

    def _refuse_padding(self, rows: _context.RowValidity) -> None:
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


def _dependence(jaxpr: Any, operands: tuple[Any, ...]) -> list[int]:
    """Finds what the outputs of the replicas' program depend on."""
    equation = next(
        equation for equation in jaxpr.jaxpr.eqns if equation.primitive.name == "shard_map"
    )
    inner = equation.params["jaxpr"]
    stacked, counts, mirrored, mirrored_state, own_state = map(len, operands)
    inputs = (
        [REPLICA] * stacked
        + [REPLICA | ROWS] * counts
        + [NOTHING] * (mirrored + mirrored_state)
        + [REPLICA] * own_state
    )
    invars = getattr(inner, "jaxpr", inner).invars
    # Arrays the function closed over come first.
    return output_dependence(inner, [NOTHING] * (len(invars) - len(inputs)) + inputs)


def _enter(array: Any, communicator: ProgramCommunicator) -> Any:
    """The entry cast: what enters belongs to the replica from here on."""
    if _compat.is_typed_key(array):
        # A key that all replicas share would give them all the same dropout mask.
        return _context.fold_in_replica(array, communicator)
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


def _refuse_gradients_of_captures(jaxpr: Any, operand_count: int) -> None:
    """Refuses a gradient with respect to an array the function closed over.

    Such an array is the same on all replicas by type, so JAX sums its gradient over
    the replicas by itself; averaged or summed again it is quietly wrong.
    """
    for equation in jaxpr.jaxpr.eqns:
        if equation.primitive.name != "shard_map":
            continue
        inner = equation.params["jaxpr"]
        inner = getattr(inner, "jaxpr", inner)
        captured = {
            _shape_of(variable)
            for variable in inner.invars[: len(inner.invars) - operand_count]
            if jnp.issubdtype(variable.aval.dtype, jnp.inexact)
        }
        if not captured:
            continue
        summed: dict[Any, int] = {}
        shared: dict[Any, int] = {}
        _count_sums(inner, summed, shared, transposed=False)
        for shape in captured:
            if summed.get(shape, 0) > shared.get(shape, 0):
                raise GradientError(
                    fact="the gradient with respect to an array that the replica function closed "
                    f"over ({shape[1]}{list(shape[0])}) was taken inside strategy.run, where JAX "
                    "sums it over the replicas by itself.",
                    expected="parameters passed to the replica function as arguments, so that "
                    "their gradient is this replica's own.",
                    hint="pass it through args: strategy.run(fn, args=(params, batch)); or use "
                    "mirrored.value_and_grad, which reduces exactly once.",
                )


def _shape_of(variable: Any) -> tuple[Any, Any]:
    return (variable.aval.shape, variable.aval.dtype)


def _count_sums(
    jaxpr: Any, summed: dict[Any, int], shared: dict[Any, int], *, transposed: bool
) -> None:
    """Counts the psums that differentiation inserted, and the collectives that explain them."""
    for equation in jaxpr.eqns:
        backward = transposed or "transpose(" in str(equation.source_info.name_stack)
        name = equation.primitive.name
        if name.startswith(("psum", "all_reduce", "pmax", "pmin", "all_gather")):
            # What a collective made is shared by all replicas as well: its gradient is
            # summed for a good reason.
            tally = summed if backward else shared
            for output in equation.outvars:
                tally[_shape_of(output)] = tally.get(_shape_of(output), 0) + 1
        for inner in _inner_jaxprs(equation):
            _count_sums(inner, summed, shared, transposed=backward)


def _inner_jaxprs(equation: Any) -> Iterator[Any]:
    for parameter in equation.params.values():
        for candidate in parameter if isinstance(parameter, (tuple, list)) else (parameter,):
            inner = getattr(candidate, "jaxpr", candidate)
            if hasattr(inner, "eqns"):
                yield inner


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
