"""Sharing: one set of servers for all processes of a program in lockstep.

Owns what such processes agree on. All run the same program, so what it makes and writes on
servers is made and written once, by the first of them; and nobody reads what was there
before, since each knows how many writes there were when it asks. The ids of all come
together before rows are asked for, so that all pull the same rows of the same moment.
"""

from __future__ import annotations

import collections
import json
import uuid
from collections.abc import Callable
from typing import Any, final

import numpy as np
from jax.experimental import multihost_utils

from mirrored import _workers
from mirrored._errors import ArgumentError, MirroredError, ServerError
from mirrored._strategy import Strategy


@final
class Sharing:
    """This process's part among those that share servers.

    Args:
      workers: all of them.
    """

    def __init__(self, workers: _workers.Workers) -> None:
        self._workers = workers
        self.is_first = workers.process_id == 0
        # By server: how many messages that write the first process has sent, or is to.
        self.writes: collections.Counter[int] = collections.Counter()

    def by_first(self, action: Callable[[], Any], what: str) -> Any:
        """Lets the first process act; returns its result, which JSON can say, to all."""
        key = self._workers.turn(f"servers/{what}")
        if self.is_first:
            try:
                value = action()
            except MirroredError as error:
                self._workers.tell(key, json.dumps({"failed": str(error)}))
                raise
            self._workers.tell(key, json.dumps({"value": value}))
            return value
        said = json.loads(self._workers.hear(key, 0))
        if "failed" in said:
            raise ServerError(
                fact=f"{self._workers.name(0)} failed at {what}: {said['failed']}",
                expected="the process that acts for all to succeed.",
                hint="its own error says more.",
            )
        return said["value"]

    def before_write(self) -> None:
        """Waits until all processes have read what they read before this write."""
        self.everyone("writing to servers")

    def everyone(self, what: str) -> None:
        """Waits for all processes."""
        self._workers.barrier(what)

    def name(self) -> str:
        """A name for these servers that no others have, the same in all processes."""
        return self.by_first(lambda: f"servers-{uuid.uuid4().hex}", "their name")


def sharing_with(strategy: Any, engine: str | None, worker_count: int | None) -> Sharing | None:
    """How this process shares servers with those of ``strategy``; None if it is alone."""
    if strategy is None:
        return None
    if not isinstance(strategy, Strategy):
        raise ArgumentError(
            fact=f"ParameterServerStrategy was given shared_with={strategy!r}.",
            expected="the strategy that trains the dense part, a MultiWorkerMirroredStrategy say.",
            hint="servers = mirrored.ParameterServerStrategy(..., shared_with=strategy).",
        )
    if worker_count:
        raise ArgumentError(
            fact=f"ParameterServerStrategy was given shared_with and {worker_count} workers.",
            expected="no workers: the processes of the other strategy compute.",
            hint='say only how many servers there are: server_count=2, or cluster={"ps": 2}.',
        )
    if not strategy.placement.spans_processes:
        return None
    workers = _workers.connected()
    assert workers is not None
    if engine != "ray":
        raise ArgumentError(
            fact=f"ParameterServerStrategy was given engine={engine!r} to be shared by "
            f"{workers.process_count} processes.",
            expected="servers in processes of their own, which all can reach.",
            hint='write engine="ray", or give the address= of a Ray cluster.',
        )
    return Sharing(workers)


def gathered(array: Any) -> np.ndarray:
    """A placed array whole, on the host of every process that has a part of it."""
    if array.is_fully_addressable:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))
