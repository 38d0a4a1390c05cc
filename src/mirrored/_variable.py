"""Variable: one array with a placement and an aggregation.

Owns the rules of reading and writing in every context, so that no sequence of
writes leaves a mirrored variable different between replicas; the errors' words are in
``_variable_errors``. How a program carries variables through a trace is in ``_program``.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from mirrored import _compat, _context
from mirrored import _variable_errors as errors
from mirrored._collectives import fold_in_replica, from_first_replica, reduce_components
from mirrored._components import Components
from mirrored._operators import ReadsAsArray
from mirrored._placement import Placement, default_placement
from mirrored._types import (
    OTHER_STATE,
    PARAMETERS,
    ReduceOp,
    VariableAggregation,
    VariableSynchronization,
)
from mirrored._values import NestLeaf, PerReplica
from mirrored._variable_values import array_of, cast, require_reducible, shape_of, storable

_LIVE: weakref.WeakValueDictionary[int, Variable] = weakref.WeakValueDictionary()
_SERIAL = itertools.count()

# Variables whose current array was handed out; a program that would donate it
# donates a copy instead, so that what the user holds stays alive.
_LENT: set[int] = set()


@final
class Variable(NestLeaf, ReadsAsArray):
    """An array that training changes, with one copy on every replica.

    Made inside ``strategy.scope()`` it lives on all devices of the strategy and
    is equal on all of them; made outside any scope it has one replica.

    Args:
      initial_value: an array, a number or a function that returns one.
      trainable: whether it is meant to be updated from gradients; kept for those
        who ask.
      name: used in messages and checkpoints; made up if left out.
      dtype: the dtype to convert the initial value to.
      synchronization: ON_WRITE (the default, as AUTO) keeps one value; ON_READ one
        component a replica, aggregated when read outside the replicas.
      aggregation: how values written by replicas (ON_WRITE) or kept by them
        (ON_READ) become one: NONE, SUM, MEAN or ONLY_FIRST_REPLICA.

    >>> import mirrored
    >>> strategy = mirrored.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> with strategy.scope():
    ...     total = mirrored.Variable(0.0, aggregation="sum")
    >>> def replica_function():
    ...     context = mirrored.get_replica_context()
    ...     total.assign_add(context.replica_id_in_sync_group + 1.0)
    >>> strategy.run(replica_function)
    >>> float(total)
    3.0
    """

    def __init__(
        self,
        initial_value: Any,
        trainable: bool = True,
        name: str | None = None,
        dtype: Any = None,
        synchronization: VariableSynchronization | str = VariableSynchronization.AUTO,
        aggregation: VariableAggregation | str = VariableAggregation.NONE,
    ) -> None:
        context = _context.current()
        self.serial = serial = next(_SERIAL)
        self.name = name if name is not None else f"variable_{serial}"
        if context.frame is not None or context.replica is not None:
            raise errors.created_inside(self.name)
        self.trainable = trainable
        # What it is for, as strategy.explain tells it; optimizers mark their state.
        self.role = PARAMETERS if trainable else OTHER_STATE
        self.synchronization = VariableSynchronization.parse(synchronization)
        self.aggregation = VariableAggregation.parse(aggregation)
        self.placement: Placement = context.placement or default_placement()
        self.created_at = errors.caller()
        if self.placement.only_compiles:
            known = initial_value
            if isinstance(known, Variable):
                known = jax.ShapeDtypeStruct(known.shape, known.dtype)
            value = shape_of(known, dtype)
        else:
            value = initial_value() if callable(initial_value) else initial_value
            if isinstance(value, Variable):
                value = value.read(lend=False)
            if _compat.is_traced(value) or _compat.a_program_is_being_staged():
                raise errors.created_in_trace(self.name)
            value = array_of(self.name, "the creation", value, dtype)
        require_reducible(self.name, self.aggregation, self.on_read, value.dtype)
        self.shape = value.shape
        self.dtype = value.dtype
        self._components = Components(self.name, self.placement, self.aggregation)
        self.home = context.home
        if self.home is not None:
            # Not among the living, which programs take for their inputs.
            self.storage: Any = None
            self.home.adopt(self, value)
            return
        # The stored array: mirrored, or one component a replica (R, ...) if ON_READ. A
        # plain attribute, since programs read and replace it in every step.
        self.storage = (
            self._components.spread(value)
            if self.on_read
            else self.placement.mirror(value, f"variable {self.name!r}")
        )
        _LIVE[serial] = self

    @property
    def on_read(self) -> bool:
        """Whether each replica keeps a component of its own."""
        return self.synchronization in (
            VariableSynchronization.ON_READ,
            VariableSynchronization.NONE,
        )

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(np.prod(self.shape, dtype=int))

    # --- reading ---------------------------------------------------------------

    @property
    def value(self) -> Any:
        """The value as the running context sees it.

        In a replica function this replica's copy; in cross-replica context the
        mirrored value, or the aggregate of an ON_READ variable's components.
        """
        return self.read()

    def read_value(self) -> Any:
        """The same as ``value``, spelled as in TensorFlow."""
        return self.read()

    def read(self, *, lend: bool = True) -> Any:
        """Reads the variable; ``lend=False`` where the array is used up at once."""
        context = _context.current()
        if context.differentiated and self in context.differentiated:
            return context.differentiated[self]
        if self.home is not None:
            return self.home.read(self)
        slot = self._slot(context, "read")
        if slot is not None:
            slot.read = True
            stored = slot.ref[...]
            if context.replica is None:
                return self._components.total(stored) if self.on_read else stored
            if context.merging:
                if not self.on_read:
                    return stored
                return self._components.total_inside(stored, context.replica.communicator)
            communicator = context.replica.communicator
            if _compat.is_typed_key(stored):
                # As a key that enters as an argument: replicas must not share it.
                return fold_in_replica(stored, communicator)
            return communicator.own(stored)
        if self.placement.only_compiles:
            raise errors.only_compiled_for(self.name, "read", self.placement)
        if self.on_read:
            return self._components.total(self.storage)
        if lend:
            _LENT.add(self.serial)
        return self.storage

    def stored(self) -> Any:
        """The stored array as the running program has it: one component a replica if ON_READ."""
        if self.home is not None:
            return self.home.read(self)
        slot = self._slot(_context.current(), "read")
        if slot is None:
            return self.storage
        slot.read = True
        return slot.ref[...]

    def _slot(self, context: _context.Context, action: str) -> _context.Slot | None:
        """Finds this variable's storage in the running trace; None outside traces."""
        frame = context.frame
        if frame is None:
            if context.replica is not None:
                self._check_owner(context.placement)
            if _compat.a_program_is_being_staged():
                raise errors.frozen(self.name, action)
            return None
        slot = frame.slot(self)
        if slot is None:
            self._check_owner(frame.placement)
            raise errors.created_while_traced(self.name)
        return slot

    def _check_owner(self, placement: Placement | None) -> None:
        if placement is None or placement is self.placement:
            return
        raise errors.other_owner(self.name, self.placement, self.created_at, placement)

    # --- writing ---------------------------------------------------------------

    def assign(self, value: Any) -> Variable:
        """Sets the variable; see the class for how replicas' values are combined."""
        return self._write("assign", value, None)

    def assign_add(self, delta: Any) -> Variable:
        """Adds to the stored value."""
        return self._write("assign_add", delta, operator.add)

    def assign_sub(self, delta: Any) -> Variable:
        """Subtracts from the stored value."""
        return self._write("assign_sub", delta, operator.sub)

    def _write(self, action: str, value: Any, combine: Any) -> Variable:
        context = _context.current()
        if context.differentiated and self in context.differentiated:
            raise errors.written_in_loss(self.name)
        if isinstance(value, PerReplica):
            raise errors.given_per_replica(self.name, action)
        if self.home is not None:
            self.home.write(self, action, self._storable(action, value))
            return self
        slot = self._slot(context, "written")
        value = self._storable(action, value)
        if slot is None:
            if self.placement.only_compiles:
                raise errors.only_compiled_for(self.name, "written", self.placement)
            self.storage = self._placed(self._written_across(action, self.storage, value, combine))
            return self
        value = jax.lax.stop_gradient(value)
        slot.written = True
        slot.read = slot.read or combine is not None
        if context.replica is None:
            slot.ref[...] = self._written_across(action, slot.ref[...], value, combine)
        elif self.on_read:
            self._write_component(context, action, slot, value, combine)
        else:
            combined = cast(self._combined(context, action, value), self.dtype)
            combined = jnp.broadcast_to(combined, self.shape)
            stored = slot.ref[...]
            slot.ref[...] = combined if combine is None else combine(stored, combined)
        return self

    def _storable(self, action: str, value: Any) -> Any:
        if isinstance(value, Variable):
            value = value.read(lend=False)
        return storable(self.name, self.shape, self.dtype, action, value)

    def _combined(self, context: _context.Context, action: str, value: Any) -> Any:
        """Makes one value of what the replicas write, by the variable's aggregation."""
        assert context.replica is not None
        communicator = context.replica.communicator
        own = communicator.is_own(value)
        if context.merging:
            if own:
                self._refuse_varying(action)
            return value
        if self.aggregation is VariableAggregation.SUM:
            return communicator.sum([value])[0]
        if not own:
            return value
        if self.aggregation is VariableAggregation.MEAN:
            return reduce_components(ReduceOp.MEAN, [(value, None)], [None], communicator)[0]
        if self.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return from_first_replica(value, communicator)
        return self._refuse_varying(action)

    def _refuse_varying(self, action: str) -> Any:
        raise errors.would_differ(self.name, self.aggregation, action)

    def _write_component(
        self, context: _context.Context, action: str, slot: _context.Slot, value: Any, combine: Any
    ) -> None:
        assert context.replica is not None
        communicator = context.replica.communicator
        component = slot.ref[...]
        if context.merging:
            if communicator.is_own(value):
                self._refuse_varying(action)
            if combine is not None:
                self._components.require_one_total(action)
                value = combine(self.read(), value)
            share = self._components.share(value, communicator.replica_id)
            slot.ref[...] = communicator.own(jnp.broadcast_to(share, self.shape))
            return
        mine = communicator.own(jnp.broadcast_to(value, self.shape))
        slot.ref[...] = mine if combine is None else combine(component, mine)

    def _written_across(self, action: str, stored: Any, value: Any, combine: Any) -> Any:
        """Computes the new stored array of a write in cross-replica context."""
        if not self.on_read:
            return value if combine is None else combine(stored, value)
        if combine is not None:
            self._components.require_one_total(action)
            value = combine(self._components.total(stored), value)
        self._components.require_aggregation(action)
        return self._components.spread(value)

    def _placed(self, array: Any) -> Any:
        wanted = self.placement.split if self.on_read else self.placement.mirrored
        if not self.on_read:
            array = jnp.broadcast_to(array, self.shape)
            if isinstance(array, jax.Array) and array.sharding != wanted:
                return self.placement.mirror(
                    array, f"assign of variable {self.name!r}", must_agree=True
                )
            return array
        return array if array.sharding == wanted else jax.device_put(array, wanted)

    # --- storage, for programs and checkpoints -----------------------------------

    @property
    def storage_sharding(self) -> Any:
        """The sharding the stored array has."""
        return self.placement.split if self.on_read else self.placement.mirrored

    def __repr__(self) -> str:
        kind = (
            ""
            if self.synchronization is VariableSynchronization.AUTO
            else (f" {self.synchronization.name}")
        )
        aggregation = (
            ""
            if self.aggregation is VariableAggregation.NONE
            else (f" aggregation={self.aggregation.name}")
        )
        return (
            f"<Variable {self.name!r} shape={self.shape} dtype={self.dtype}{kind}{aggregation} "
            f"on {self.placement.describe()}>"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.home is None:
            return super().__reduce_ex__(protocol)
        return self.home.pickled(self)

    def __copy__(self) -> Variable:
        raise errors.not_copyable(self.name)

    def __deepcopy__(self, memo: Any) -> Variable:
        raise errors.not_copyable(self.name)


# Inside JAX's own functions a variable is its value: jnp.dot(x, variable) and
# jax.nn.relu(variable) work because they find an array in it.
jax.tree_util.register_pytree_node(
    Variable, lambda variable: ((variable.read(),), None), lambda _, children: children[0]
)


def live_variables(placement: Placement | None) -> list[Variable]:
    """Lists the variables in existence (of one placement), oldest first."""
    variables = [_LIVE[serial] for serial in sorted(_LIVE.keys()) if serial in _LIVE]
    if placement is None:
        return variables
    return [variable for variable in variables if variable.placement is placement]


def return_lent(variables: list[Variable]) -> None:
    """Gives each variable whose array was handed out an array of its own again."""
    if not _LENT:
        return
    for variable in variables:
        if variable.serial in _LENT:
            variable.storage = jnp.copy(variable.storage)
            _LENT.discard(variable.serial)
