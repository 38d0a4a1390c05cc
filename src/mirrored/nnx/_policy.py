"""What becomes of each kind of ``nnx.Variable`` that a replica function changes.

Owns the policies and the filters they hang on.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, final

from flax import nnx

from mirrored._errors import ArgumentError


@final
class Policy(enum.Enum):
    """What becomes of variables that a replica function changes.

    AGREE: their new value must be provably the same on all replicas.
    MEAN: it is averaged over replicas (weighted by the real rows of the batch).
    SUM: each replica adds to it, and the contributions are added up.
    FIRST: replica 0's value is kept.
    """

    AGREE = "agree"
    MEAN = "mean"
    SUM = "sum"
    FIRST = "first"


_POLICIES: list[tuple[Any, Policy]] = [
    (nnx.BatchStat, Policy.MEAN),
    (nnx.metrics.MetricState, Policy.SUM),
]

# Called after a change: what was traced under the old policies must not be used again.
_WHEN_CHANGED: list[Callable[[], None]] = []


def when_changed(forget: Callable[[], None]) -> None:
    """Lets ``forget`` be called whenever a policy changes."""
    _WHEN_CHANGED.append(forget)


def set_policy(filter: Any, policy: Policy | str) -> None:
    """Changes what becomes of variables in ``strategy.run``; the last call that fits wins.

    By default ``nnx.BatchStat`` is averaged ("mean"), the state of ``nnx.metrics`` is
    added up ("sum"), and everything else must come out the same on all replicas
    ("agree").

    Args:
      filter: an NNX filter: a Variable type, ``nnx.PathContains("ema")``, a predicate...
      policy: "agree", "mean", "sum" or "first".

    >>> from flax import nnx
    >>> import mirrored.nnx
    >>> class Ema(nnx.Variable):
    ...     pass
    >>> mirrored.nnx.set_policy(Ema, "mean")
    """
    try:
        chosen = Policy(policy)
    except ValueError:
        raise ArgumentError(
            fact=f"set_policy was given {policy!r}.",
            expected=f"one of {', '.join(repr(member.value) for member in Policy)}.",
            hint='write for example mirrored.nnx.set_policy(nnx.BatchStat, "mean").',
        ) from None
    _POLICIES.append((filter, chosen))
    for forget in _WHEN_CHANGED:
        forget()


def policy_of(path: Any, variable: Any) -> Policy:
    for chosen, policy in reversed(_POLICIES):
        if nnx.filterlib.to_predicate(chosen)(path, variable):
            return policy
    return Policy.AGREE
