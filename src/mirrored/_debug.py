"""Debug mode: replicas run one after another, uncompiled, with concrete values.

Owns the threads that take turns, one a replica, and the exchange at collectives.
Only one replica runs at a time, so prints do not mix and a debugger sees one stack.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from mirrored import _compat, _context, _objects, _replica
from mirrored._claims import Claim
from mirrored._collectives import Communicator, fold_in_replica
from mirrored._errors import ContextError, VariableError
from mirrored._placement import Placement
from mirrored._signature import is_array, is_array_like
from mirrored._types import ReduceOp
from mirrored._values import PerReplica, flatten, flattened, is_object_leaf
from mirrored._variable import Variable


@contextlib.contextmanager
def debugging(strategy: Any) -> Iterator[None]:
    """Makes ``run`` of ``strategy``, and every ``mirrored.function``, uncompiled in the block."""
    with _context.entered(debugged=strategy):
        yield


def is_debugging(strategy: Any) -> bool:
    """Says whether ``run`` of ``strategy`` should run replicas one after another."""
    return _context.current().debugged is strategy


class _Abandoned(BaseException):
    """Ends a replica's thread when another replica has failed."""


@final
class _Turns:
    """Lets one replica at a time run, from one meeting point to the next."""

    def __init__(self, replica_count: int) -> None:
        self._resume = [threading.Semaphore(0) for _ in range(replica_count)]
        self._paused = threading.Semaphore(0)
        self._deposits: list[Any] = [None] * replica_count
        self._meeting: list[str | None] = [None] * replica_count
        self._results: list[Any] = []
        self._abandoned = False

    def meet(self, replica_id: int, what: str, value: Any) -> list[Any]:
        """Hands in ``value`` and waits for those of all replicas."""
        self._deposits[replica_id] = value
        self._meeting[replica_id] = what
        self._paused.release()
        self._resume[replica_id].acquire()
        if self._abandoned:
            raise _Abandoned
        return self._results

    def wait_for_turn(self, replica_id: int) -> None:
        """Called first in a replica's thread."""
        self._resume[replica_id].acquire()
        if self._abandoned:
            raise _Abandoned

    def drive(self, threads: list[threading.Thread], done: list[bool], failed: list[Any]) -> None:
        """Runs the replicas to their end, round by round."""
        for thread in threads:
            thread.start()
        try:
            while not all(done):
                self._meeting = [None] * len(threads)
                for replica_id in [index for index, ended in enumerate(done) if not ended]:
                    self._resume[replica_id].release()
                    self._paused.acquire()
                    if failed:
                        raise failed[0]
                self._check_round(done)
                self._results = list(self._deposits)
        finally:
            self._abandoned = True
            for replica_id, ended in enumerate(done):
                if not ended:
                    self._resume[replica_id].release()
            for thread in threads:
                thread.join()

    def finish(self) -> None:
        """Called last in a replica's thread."""
        self._paused.release()

    def _check_round(self, done: list[bool]) -> None:
        if all(done):
            return
        if any(done) or len(set(self._meeting)) > 1:
            places = [
                f"replica {index}: {'returned' if ended else self._meeting[index]}"
                for index, ended in enumerate(done)
            ]
            raise ContextError(
                fact=f"the replicas did not meet in the same collective ({'; '.join(places)}).",
                expected="every replica to call the same collectives in the same order.",
                hint="do not put collectives or variable writes under a condition that differs "
                "between replicas.",
            )


@final
class _TakingTurns(Communicator):
    """The communicator of a replica in debug mode."""

    is_typed = False

    def __init__(self, turns: _Turns, replica_id: int, placement: Placement) -> None:
        self._turns = turns
        self._id = replica_id
        self._device = placement.devices[replica_id]
        self.replica_count = placement.replica_count
        # Results of collectives are the same on all replicas; they come out of run as
        # plain arrays, as they would compiled.
        self.agreed_values: list[Any] = []

    @property
    def replica_id(self) -> int:
        return self._id

    def _meet(self, what: str, value: Any) -> list[Any]:
        if any(_compat.is_traced(leaf) for leaf in jax.tree.leaves(value)):
            raise ContextError(
                fact=f"{what} was called inside jax.vmap or another transformation in debug mode.",
                expected="collectives outside transformations other than jax.grad.",
                hint="run compiled, without strategy.debug(), or move the collective out.",
            )
        return [
            jax.device_put(part, self._device) for part in self._turns.meet(self._id, what, value)
        ]

    def sum(self, values: list[Any]) -> list[Any]:
        @jax.custom_vjp
        def total(values: list[Any]) -> list[Any]:
            parts = self._meet("a sum", values)
            return [sum(column[1:], start=column[0]) for column in zip(*parts, strict=True)]

        # The gradient of a sum over replicas is the sum of the replicas' cotangents.
        total.defvjp(
            lambda values: (total(values), None), lambda _, cotangents: (total(cotangents),)
        )
        return self._agreed(total([jnp.asarray(value) for value in values])) if values else []

    def extreme(self, op: ReduceOp, values: list[Any]) -> list[Any]:
        parts = self._meet(f"a {op.name.lower()}", [jnp.asarray(value) for value in values])
        function = jnp.minimum if op is ReduceOp.MIN else jnp.maximum
        results = []
        for column in zip(*parts, strict=True):
            result = column[0]
            for other in column[1:]:
                result = function(result, other)
            results.append(result)
        return self._agreed(results)

    def gather(self, value: Any, axis: int, *, tiled: bool) -> Any:
        combine = jnp.concatenate if tiled else jnp.stack

        @jax.custom_vjp
        def gathered(value: Any) -> Any:
            return combine(self._meet("a gather", value), axis=axis)

        def own_part(shape: Any, cotangent: Any) -> tuple[Any]:
            whole = self._meet("a gather's gradient", cotangent)
            total = sum(whole[1:], start=whole[0])
            if not tiled:
                return (jnp.take(total, self._id, axis=axis),)
            return (jnp.split(total, self.replica_count, axis=axis)[self._id].reshape(shape),)

        gathered.defvjp(lambda value: (gathered(value), value.shape), own_part)
        return self._agreed([gathered(jnp.asarray(value))])[0]

    def own(self, value: Any) -> Any:
        return value

    def is_own(self, value: Any) -> bool:
        # There are no types to ask, so the replicas compare their values.
        value = jax.lax.stop_gradient(value)
        if _compat.is_traced(value):
            return True
        parts = [np.asarray(part) for part in self._meet("a comparison", value)]
        return not all(np.array_equal(parts[0], part, equal_nan=_has_nan(part)) for part in parts)

    def came_from_one(self, value: Any) -> bool:
        # There are no types to ask here either; what collectives gave is known, though, and
        # other arrays of JAX are the replica's own, as those are that come out of run.
        if _compat.is_traced(value) or not isinstance(value, jax.Array):
            return self.is_own(value)
        return not any(value is agreed for agreed in self.agreed_values)

    def loss_is_own(self, loss: Any) -> bool:
        # The gradient of sum above makes the mean over replicas right for every loss.
        return True

    def agree(self, value: Any) -> Any:
        return self._agreed([value])[0]

    def _agreed(self, values: list[Any]) -> list[Any]:
        self.agreed_values.extend(values)
        return values


def _has_nan(array: Any) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.inexact))


class _Cell:
    """A replica's own storage of a variable, with the face of a JAX Ref."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __getitem__(self, index: Any) -> Any:
        return self._value

    def __setitem__(self, index: Any, value: Any) -> None:
        self._value = value


def run_one_after_another(
    strategy: Any, placement: Placement, function: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Runs ``function`` on every replica in turn, meeting at collectives."""
    if _context.current().frame is not None or _compat.a_program_is_being_staged():
        raise ContextError(
            fact="strategy.run was called in debug mode inside a compiled function.",
            expected="run called directly, so that there are concrete values to look at.",
            hint="call the function itself, or enter `with jax.disable_jit():` too.",
        )
    return _objects.run_with_objects(
        lambda *call: _in_turns(strategy, placement, *call), function, args, kwargs, compiled=False
    )


def _in_turns(
    strategy: Any, placement: Placement, function: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    count = placement.replica_count
    turns = _Turns(count)
    leaves, structure = flatten((args, kwargs))
    placed = [leaf.placed(placement) if isinstance(leaf, PerReplica) else leaf for leaf in leaves]
    results: list[Any] = [None] * count
    frames: list[Any] = [None] * count
    communicators = [_TakingTurns(turns, index, placement) for index in range(count)]
    done = [False] * count
    failed: list[BaseException] = []

    def replica(replica_id: int) -> None:
        try:
            turns.wait_for_turn(replica_id)
            device = placement.devices[replica_id]
            own = [_leaf_of_replica(leaf, replica_id, device, communicators) for leaf in placed]
            own_args, own_kwargs = structure.unflatten(own)
            frames[replica_id] = _debug_frame(placement, replica_id, device)
            rows = _rows(placed, replica_id)
            context = _replica.ReplicaContext(strategy, communicators[replica_id], rows)
            with (
                _context.entered(
                    strategy=strategy,
                    placement=placement,
                    frame=frames[replica_id],
                    replica=context,
                    merging=False,
                    differentiated={},
                ),
                jax.disable_jit(),
                jax.default_device(device),
            ):
                results[replica_id] = function(*own_args, **own_kwargs)
            done[replica_id] = True
        except _Abandoned:
            return
        except BaseException as error:  # noqa: BLE001 (handed to the calling thread)
            failed.append(error)
        turns.finish()

    threads = [
        threading.Thread(
            target=contextvars.copy_context().run, args=(replica, index), name=f"replica {index}"
        )
        for index in range(count)
    ]
    turns.drive(threads, done, failed)
    _store(placement, frames)
    return _combined(placement, results, communicators)


def _rows(placed: list[Any], replica_id: int) -> _replica.RowValidity | None:
    batches = [leaf for leaf in placed if isinstance(leaf, PerReplica) and leaf.is_batch]
    if not batches:
        return None
    counts = batches[0].row_counts
    real = None if counts is None else np.asarray(counts)[replica_id]
    return _replica.RowValidity(batches[0].stacked.shape[1], real)


def _leaf_of_replica(leaf: Any, replica_id: int, device: Any, communicators: list[Any]) -> Any:
    if isinstance(leaf, PerReplica):
        return jax.device_put(leaf.stacked[replica_id], device)
    if not is_array_like(leaf):
        return leaf
    if _compat.is_typed_key(leaf):
        return fold_in_replica(jax.device_put(leaf, device), communicators[replica_id])
    return jax.device_put(jnp.asarray(leaf), device)


def _debug_frame(placement: Placement, replica_id: int, device: Any) -> _context.Frame:
    def adopt(variable: Variable) -> _context.Slot | None:
        if variable.placement is not placement:
            return None
        stored = variable.storage[replica_id] if variable.on_read else variable.storage
        return _context.Slot(_Cell(jax.device_put(stored, device)))

    return _context.Frame({}, placement, adopt=adopt)


def _store(placement: Placement, frames: list[_context.Frame]) -> None:
    for variable, slot in frames[0].slots.items():
        if not slot.written:
            continue
        parts = [np.asarray(frame.slots[variable].ref[...]) for frame in frames]
        if variable.on_read:
            variable.storage = placement.stack(parts)
            continue
        if not all(np.array_equal(parts[0], part, equal_nan=_has_nan(part)) for part in parts):
            raise VariableError(
                fact=f"variable {variable.name!r} would differ between replicas.",
                expected="the same value on all replicas.",
                hint='reduce it first with ctx.all_reduce("mean", value).',
            )
        variable.storage = placement.mirror(parts[0])


def _combined(placement: Placement, results: list[Any], communicators: list[Any]) -> Any:
    flat = [flattened(result, is_object_leaf) for result in results]
    structures = {str(structure) for _, structure in flat}
    if len(structures) > 1:
        raise ContextError(
            fact=f"the replicas returned different structures: {' | '.join(sorted(structures))}.",
            expected="one structure.",
            hint="return the same from every branch.",
        )
    agreed = {id(value) for value in communicators[0].agreed_values}
    outputs = []
    for column in zip(*(leaves for leaves, _ in flat), strict=True):
        first = column[0]
        if isinstance(first, Claim):
            parts = [np.asarray(claim.value) for claim in column]
            if not all(np.array_equal(parts[0], part, equal_nan=_has_nan(part)) for part in parts):
                raise first.refusal()
            outputs.append(placement.mirror(parts[0]))
        elif not is_array(first):
            outputs.append(first)
        elif id(first) in agreed:
            outputs.append(placement.mirror(np.asarray(first)))
        else:
            parts = [np.asarray(part) for part in column]
            outputs.append(PerReplica(parts))
    return flat[0][1].unflatten(outputs)
