"""The enumerations of the public API and how they are parsed.

Owns ReduceOp, VariableSynchronization and VariableAggregation, and the words for what an
array is for; knows nothing of arrays or devices.
"""

from __future__ import annotations

import enum
from typing import TypeVar

from mirrored._errors import ArgumentError

# What an array of a step is for.
PARAMETERS = "parameters"
OPTIMIZER_STATE = "optimizer state"
OTHER_STATE = "other state"
BATCH = "batch"

_Member = TypeVar("_Member", bound="_NamedEnum")


class _NamedEnum(enum.Enum):
    """An enumeration whose members may also be written as strings in any case."""

    @classmethod
    def parse(cls: type[_Member], value: object) -> _Member:
        """Returns the member that ``value`` (a member or its name) means."""
        if isinstance(value, cls):
            return value
        name = value.upper() if isinstance(value, str) else getattr(value, "name", None)
        for member in cls:
            if member.name == name:
                return member
        names = ", ".join(repr(member.name.lower()) for member in cls)
        raise ArgumentError(
            fact=f"{value!r} is not a {cls.__name__}.",
            expected=f"one of {names}, or a member of mirrored.{cls.__name__}.",
            hint=f"write for example mirrored.{cls.__name__}.{next(iter(cls)).name}.",
        )


class ReduceOp(_NamedEnum):
    """How values of several replicas become one.

    >>> import mirrored
    >>> mirrored.ReduceOp.parse("mean")
    <ReduceOp.MEAN: 'MEAN'>
    """

    SUM = "SUM"
    MEAN = "MEAN"
    MIN = "MIN"
    MAX = "MAX"


class VariableSynchronization(_NamedEnum):
    """When the copies of a variable are made one.

    AUTO and ON_WRITE keep one value, equal on all replicas, at every moment.
    ON_READ keeps one component a replica and aggregates them when the variable is
    read in cross-replica context. NONE is accepted for tf.distribute's sake and
    means ON_READ without aggregation.
    """

    AUTO = "AUTO"
    NONE = "NONE"
    ON_WRITE = "ON_WRITE"
    ON_READ = "ON_READ"


class VariableAggregation(_NamedEnum):
    """How values written (ON_WRITE) or kept (ON_READ) by replicas become one.

    The members are tf.distribute's: NONE, SUM, MEAN and ONLY_FIRST_REPLICA.
    """

    NONE = "NONE"
    SUM = "SUM"
    MEAN = "MEAN"
    ONLY_FIRST_REPLICA = "ONLY_FIRST_REPLICA"
