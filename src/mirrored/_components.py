"""The components of an ON_READ variable: one a replica, and the one value they stand for.

Owns how components become their total and a total becomes components; when a variable
may be read or written so is the rules of ``_variable``.
"""

from __future__ import annotations

from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from mirrored import _compat
from mirrored import _variable_errors as errors
from mirrored._collectives import Communicator, from_first_replica, reduce_components
from mirrored._placement import Placement
from mirrored._reduction import reduce_nest
from mirrored._types import ReduceOp, VariableAggregation
from mirrored._values import PerReplica

_READ_BY = {
    VariableAggregation.SUM: ReduceOp.SUM,
    VariableAggregation.MEAN: ReduceOp.MEAN,
}


@final
class Components:
    """How the components of one variable, kept as one array (R, ...), are to be taken."""

    def __init__(self, name: str, placement: Placement, aggregation: VariableAggregation) -> None:
        self._name = name
        self._placement = placement
        self._aggregation = aggregation

    def total(self, stacked: Any) -> Any:
        """Makes one value of all components, outside the replicas."""
        if self._aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return jax.device_put(stacked[0], self._placement.mirrored)
        return reduce_nest(self._placement, self._op(), PerReplica.from_stacked(stacked), None)

    def total_inside(self, component: Any, communicator: Communicator) -> Any:
        """Makes the same value where each replica has its own component."""
        if self._aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return from_first_replica(component, communicator)
        return reduce_components(self._op(), [(component, None)], [None], communicator)[0]

    def _op(self) -> ReduceOp:
        op = _READ_BY.get(self._aggregation)
        if op is None:
            raise errors.not_one_value(self._name)
        return op

    def spread(self, value: Any) -> Any:
        """Makes the stacked components whose total is ``value``."""
        placement = self._placement
        count = placement.replica_count
        if placement.only_compiles and not _compat.is_traced(value):
            return placement.stack([value] * count)
        if placement.spans_processes and not _compat.is_traced(value):
            # Worker 0's value, as for every variable.
            value = np.asarray(placement.mirror(value, f"variable {self._name!r}"))
        shares = [self.share(jnp.asarray(value), index) for index in range(count)]
        if any(_compat.is_traced(share) for share in shares):
            return jnp.stack(shares)
        return placement.stack([np.asarray(share) for share in shares])

    def share(self, value: Any, replica_id: Any) -> Any:
        """One replica's component of a total."""
        if self._aggregation is not VariableAggregation.SUM:
            return value
        count = self._placement.replica_count
        if jnp.issubdtype(value.dtype, jnp.inexact):
            return value / count
        # Integers: the remainder goes to the first replicas, so the total is kept.
        return value // count + (replica_id < value % count).astype(value.dtype)

    def require_aggregation(self, action: str) -> None:
        """Refuses to make components of one value where nothing says how."""
        if self._aggregation is VariableAggregation.NONE:
            raise errors.no_cross_write(self._name, self._aggregation, action)

    def require_one_total(self, action: str) -> None:
        """Refuses to add to a total that is none, or that would be counted anew."""
        if self._aggregation in (VariableAggregation.NONE, VariableAggregation.SUM):
            raise errors.no_cross_write(self._name, self._aggregation, action)
