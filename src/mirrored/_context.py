"""Where the running code stands: default, cross-replica or replica context.

Owns the one ContextVar of the library, the ReplicaContext, and the Frame in
which a program being traced keeps the variables it touches. It holds the
strategy only to hand it back to those who ask for it.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, final

import jax
import jax.numpy as jnp

from mirrored import _compat
from mirrored._collectives import Communicator, SingleCommunicator, all_gather, all_reduce
from mirrored._errors import ArgumentError, ContextError, PaddingError
from mirrored._placement import Placement
from mirrored._types import ReduceOp
from mirrored._values import PerReplica, map_nest

if TYPE_CHECKING:
    from mirrored._variable import Variable


@final
class Slot:
    """A variable's storage inside one trace."""

    __slots__ = ("read", "ref", "written")

    def __init__(self, ref: Any) -> None:
        self.ref = ref
        self.read = False
        self.written = False


@final
class Frame:
    """The variables of a program while it is traced, each held in a JAX Ref.

    Refs make writes inside ``lax.scan``, ``cond`` and ``while_loop`` work; they
    exist only inside the trace, the program's arguments are plain arrays.
    """

    def __init__(
        self,
        slots: dict[Variable, Slot],
        placement: Placement | None,
        adopt: Callable[[Variable], Slot | None] | None = None,
    ) -> None:
        self.slots = slots
        self.placement = placement
        self._adopt = adopt
        self.checks: list[tuple[Any, Callable[[Any], None]]] = []

    @property
    def is_concrete(self) -> bool:
        """Whether it holds concrete values (debug mode) rather than a trace's."""
        return self._adopt is not None

    def slot(self, variable: Variable) -> Slot | None:
        """Finds a variable's storage; debug mode makes it when it is first asked for."""
        found = self.slots.get(variable)
        if found is None and self._adopt is not None:
            found = self._adopt(variable)
            if found is not None:
                self.slots[variable] = found
        return found

    def touched(self) -> list[Variable]:
        """The variables the traced code has read or written, in creation order."""
        return [variable for variable, slot in self.slots.items() if slot.read or slot.written]


class RetraceWith(BaseException):
    """Leaves a trace to do something that must happen outside it, then trace again.

    Derives from BaseException so that no ``except Exception`` of user code stops it.
    """

    def __init__(self, prepare: Callable[[], None]) -> None:
        super().__init__()
        self.prepare = prepare


@dataclasses.dataclass(frozen=True)
class Context:
    """What code running now may ask for."""

    strategy: Any = None
    placement: Placement | None = None
    frame: Frame | None = None
    replica: ReplicaContext | None = None
    merging: bool = False
    differentiated: Mapping[Any, Any] = dataclasses.field(default_factory=dict)
    denominators: list[Any] | None = None
    reduces_gradients: bool = False


_CURRENT: contextvars.ContextVar[Context] = contextvars.ContextVar(
    "mirrored_context", default=Context()
)


def current() -> Context:
    """Returns the context of the running code."""
    return _CURRENT.get()


@contextlib.contextmanager
def entered(**changes: Any) -> Iterator[Context]:
    """Runs a block in the current context with ``changes`` applied."""
    context = dataclasses.replace(_CURRENT.get(), **changes)
    token = _CURRENT.set(context)
    try:
        yield context
    finally:
        _CURRENT.reset(token)


@contextlib.contextmanager
def scope(strategy: Any, placement: Placement) -> Iterator[None]:
    """Makes ``strategy`` the current one; the same strategy nests, another does not."""
    context = current()
    if context.replica is not None and not context.merging:
        raise ContextError(
            fact="scope() was entered inside a replica function.",
            expected="scope() in cross-replica context.",
            hint="create variables before strategy.run, inside `with strategy.scope():`.",
        )
    if context.strategy is not None and context.strategy is not strategy:
        raise ContextError(
            fact="Mixing different strategies: the scope of "
            f"{placement.describe()} was entered inside the scope of "
            f"{context.placement.describe() if context.placement else context.strategy!r}.",
            expected="one strategy at a time.",
            hint="leave the outer scope first, or use the same strategy object in both places.",
        )
    with entered(strategy=strategy, placement=placement):
        yield


@final
class ReplicaContext:
    """What a replica function may ask about its replica, and how it reaches the others.

    Returned by ``mirrored.get_replica_context()`` inside a function given to
    ``strategy.run``.

    >>> import mirrored
    >>> strategy = mirrored.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> def replica_function():
    ...     context = mirrored.get_replica_context()
    ...     return context.all_reduce("sum", context.replica_id_in_sync_group + 1)
    >>> int(strategy.run(replica_function))
    3
    """

    def __init__(
        self,
        strategy: Any,
        communicator: Communicator,
        rows: RowValidity | None = None,
    ) -> None:
        self._strategy = strategy
        self._communicator = communicator
        self._rows = rows

    def adopt(self, strategy: Any) -> None:
        """Sets the strategy of the default context; for the library's own modules."""
        self._strategy = strategy

    @property
    def strategy(self) -> Any:
        """The strategy this replica belongs to."""
        return self._strategy

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas run in lockstep."""
        return self._communicator.replica_count

    @property
    def replica_id_in_sync_group(self) -> Any:
        """This replica's number, from 0.

        One program runs on all replicas, so the number is traced: use
        ``jnp.where`` or ``jax.lax.cond`` instead of Python's ``if``.
        """
        return self._communicator.replica_id

    @property
    def replica_id(self) -> Any:
        """The same as ``replica_id_in_sync_group``."""
        return self._communicator.replica_id

    @property
    def communicator(self) -> Communicator:
        """The replica's way to the others; for the library's own modules."""
        return self._communicator

    @property
    def rows(self) -> RowValidity | None:
        """Which rows of the batch are real; for the library's own modules."""
        return self._rows

    @property
    def example_weights(self) -> Any:
        """The weight of each row of this replica's batch: 1 for real rows, 0 for padding.

        None where no batch of ``distribute_dataset`` was given to ``run``.
        """
        return None if self._rows is None else self._rows.weights()

    def all_reduce(self, op: ReduceOp | str, value: Any) -> Any:
        """Reduces ``value`` (a nest) elementwise over the replicas.

        The result is the same on every replica, and its type says so.
        """
        op = ReduceOp.parse(op)
        with jax.named_scope(f"mirrored.all_reduce_{op.name.lower()}"):
            return all_reduce(op, value, self._communicator)

    def all_gather(self, value: Any, axis: int = 0) -> Any:
        """Concatenates ``value`` (a nest) of all replicas along ``axis``; scalars are stacked."""
        with jax.named_scope("mirrored.all_gather"):
            return all_gather(value, axis, self._communicator)

    def merge_call(self, merge_fn: Callable[..., Any], args: Any = (), kwargs: Any = None) -> Any:
        """Calls ``merge_fn(strategy, *args)`` in cross-replica context, in the same program.

        Values that may differ between replicas arrive as PerReplica values;
        variables read inside are the stored, mirrored ones.
        """
        context = current()
        if context.merging:
            raise ContextError(
                fact="merge_call was called inside merge_call.",
                expected="merge_call in replica context.",
                hint="call the inner function directly: it already runs in cross-replica context.",
            )
        args, kwargs = map_nest(self._to_merge, (tuple(args), dict(kwargs or {})))
        with entered(merging=True):
            result = merge_fn(self._strategy, *args, **kwargs)
        return map_nest(self._from_merge, result)

    def _to_merge(self, value: Any) -> Any:
        if hasattr(value, "dtype") and self._communicator.is_own(value):
            return PerReplica.from_stacked(jnp.expand_dims(value, 0))
        return value

    def _from_merge(self, value: Any) -> Any:
        return value.stacked[0] if isinstance(value, PerReplica) else value

    def random_key(self, key_or_seed: Any, step: Any = None) -> Any:
        """Returns a random key that is a pure function of seed, step and replica.

        Args:
          key_or_seed: an integer seed or a JAX key, the same on every replica.
          step: the step's number, if keys should differ between steps.
        """
        key = key_or_seed
        if not (_compat.is_typed_key(key) or getattr(key, "ndim", 0) == 1):
            key = jax.random.key(key)
        if step is not None:
            key = jax.random.fold_in(key, step)
        return fold_in_replica(key, self._communicator)


def fold_in_replica(key: Any, communicator: Communicator) -> Any:
    """Makes this replica's key of one that all replicas share."""
    # The tag keeps a replica's stream apart from a user's own fold_in(key, small number).
    tagged = jax.random.fold_in(communicator.own(key), 0x6D697272)
    return jax.random.fold_in(tagged, communicator.replica_id)


@final
class RowValidity:
    """Which rows of a replica's batch are real, and whether anybody asked.

    A batch of 7 rows on 2 replicas is 4 rows and 3 rows; all replicas run one
    program, so the second gets a fourth row of zeros. Code that never asks which
    rows are real would count it: ``asked`` lets ``run`` refuse such a program.
    """

    def __init__(self, row_count: int, real: Any, *, conflicting: bool = False) -> None:
        self.row_count = row_count
        # How many rows from the first are real, or a boolean for each row.
        self._real = real
        self._conflicting = conflicting
        self.asked = False

    @property
    def padded(self) -> bool:
        """Whether some rows of some replica are padding."""
        return self._real is not None

    def mask(self) -> Any:
        """A boolean for each row, or None if all rows are real."""
        self.asked = True
        if self._conflicting:
            raise PaddingError(
                fact="two batches with different numbers of real rows were given to one run.",
                expected="one batch, or batches whose rows belong together.",
                hint="run them one after the other, or pass remainder='drop' to "
                "distribute_dataset.",
            )
        if self._real is None:
            return None
        if jnp.ndim(self._real) == 1:
            return self._real
        return jnp.arange(self.row_count) < self._real

    def real_count(self) -> Any:
        """How many rows are real."""
        mask = self.mask()
        return self.row_count if mask is None else jnp.sum(mask)

    def weights(self) -> Any:
        """One float32 for each row: 1 for a real row, 0 for padding."""
        mask = self.mask()
        if mask is None:
            return jnp.ones(self.row_count, jnp.float32)
        return mask.astype(jnp.float32)


_DEFAULT_REPLICA = ReplicaContext(None, SingleCommunicator())

# Modules above that take part in every scope, by the name of the library they are
# for: they join only if that library has been imported.
_COMPANIONS: dict[str, str] = {}


def set_default_strategy(strategy: Any) -> None:
    """Tells the default replica context its strategy, which a higher layer owns."""
    _DEFAULT_REPLICA.adopt(strategy)


def add_companion(library: str, module: str) -> None:
    """Lets ``module`` take part in scopes once ``library`` is imported.

    The module has a function ``companion_scope(strategy)`` that returns a context
    manager. This is how Keras models made in a scope learn of it, without the core
    importing Keras.
    """
    _COMPANIONS[library] = module


@contextlib.contextmanager
def companions(strategy: Any) -> Iterator[None]:
    """Enters the scopes of all companions whose library is in use."""
    with contextlib.ExitStack() as stack:
        for library, module in _COMPANIONS.items():
            if library in sys.modules:
                companion = importlib.import_module(module)
                stack.enter_context(companion.companion_scope(strategy))
        yield


def get_replica_context() -> ReplicaContext | None:
    """Returns the ReplicaContext of the running replica function.

    None in cross-replica context (inside ``scope()`` or ``merge_call``). Outside
    any scope, the default context with one replica.

    >>> import mirrored
    >>> mirrored.get_replica_context().num_replicas_in_sync
    1
    """
    context = current()
    if context.merging:
        return None
    if context.replica is not None:
        return context.replica
    return None if context.strategy is not None else _DEFAULT_REPLICA


def in_cross_replica_context() -> bool:
    """Says whether the code stands in cross-replica context.

    >>> import mirrored
    >>> mirrored.in_cross_replica_context()
    False
    """
    return get_replica_context() is None


def has_strategy() -> bool:
    """Says whether a strategy other than the default one is current.

    >>> import mirrored
    >>> mirrored.has_strategy()
    False
    """
    return current().strategy is not None


def require_cross_replica(what: str) -> None:
    """Raises unless ``what`` is called in cross-replica (or default) context."""
    context = current()
    if context.replica is not None and not context.merging:
        raise ContextError(
            fact=f"{what} was called inside a replica function.",
            expected=f"{what} in cross-replica context: outside the function given to run.",
            hint="inside a replica function use "
            "mirrored.get_replica_context().all_reduce or .merge_call.",
        )


def require_argument_nest(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Checks the ``args`` and ``kwargs`` of ``run``."""
    if not isinstance(args, (tuple, list)):
        raise ArgumentError(
            fact=f"run was given args={args!r} ({type(args).__name__}).",
            expected="a tuple or a list of positional arguments.",
            hint="for a single argument write args=(x,).",
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise ArgumentError(
            fact=f"run was given kwargs={kwargs!r} ({type(kwargs).__name__}).",
            expected="a dictionary of keyword arguments.",
            hint='write kwargs={"name": value}.',
        )
    return tuple(args), dict(kwargs or {})
