"""Exchange: what a worker (or the coordinator) says to the servers in a step.

Owns the order of messages under each kind of staleness, and the numbers that make an
update known: closure and step. It moves flat arrays; what is in them is in ``_layout``.

Under "async" an update and the question for the next values are one message to each
server, and nobody waits for the answer until the values are needed. Under "bounded"
server 0 is asked first, since it may refuse what was computed from values too old.
Under "sync" server 0 is told last: a gradient it counts has then reached the others.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np

from mirrored._parameter_server._channel import Fields, Reply, silent
from mirrored._parameter_server._links import Links
from mirrored._parameter_server._sharing import Sharing
from mirrored._parameter_server._staleness import Staleness

# For each server, lists of pieces to read: one flat array a list.
Reads: TypeAlias = Mapping[int, Sequence[Sequence[int]]]
# For each server, updates and the arrays that go with them.
Updates: TypeAlias = Mapping[int, tuple[Sequence[Fields], Sequence[np.ndarray]]]
Values: TypeAlias = dict[int, list[np.ndarray]]
# For each server, tables and the numbers of rows of each.
RowsWanted: TypeAlias = Mapping[int, tuple[Sequence[int], Sequence[np.ndarray]]]
Futures: TypeAlias = dict[int, concurrent.futures.Future[Reply]]


class RowsQuestion(NamedTuple):
    """Rows that are asked for: which ones, and the answers on their way, if asked already."""

    wanted: RowsWanted
    futures: Futures | None


_KEEPER = 0
_FIRST_NAP = 0.0002
_LONGEST_NAP = 0.005


@final
class Exchange:
    """One participant's talk with the servers.

    Args:
      links: the channels.
      lease: the worker's; None for the coordinator, which takes no turns.
      staleness: how updates of different workers are combined.
      sharing: with which other processes in lockstep it shares the servers, or None.
    """

    def __init__(
        self,
        links: Links,
        lease: int | None,
        staleness: Staleness,
        sharing: Sharing | None = None,
    ) -> None:
        self.links = links
        self._lease = lease
        # Of a process whose writes another one sends: how many there are to be.
        self._writes = None if sharing is None or sharing.is_first else sharing.writes
        self._kind = "async" if lease is None else staleness.kind
        self._closure: int | None = None
        self._step = -1
        self._floor = 0
        self._go = True
        self._round = 0
        self._closed: list[Any] | None = None
        self._ahead: tuple[Reads, Futures] | None = None
        self._joined = False

    @property
    def steps(self) -> int:
        """How many updates the running closure has sent."""
        return self._step + 1

    def begin(self, closure: int, floor: int) -> None:
        """Begins a closure."""
        self._closure, self._floor, self._step = closure, floor, -1
        self._ahead = None
        self._joined = False

    def end(self) -> None:
        """Waits until everything the closure sent has arrived."""
        self._collect()
        self._closure = None

    # --- reading -----------------------------------------------------------------

    def values(self, reads: Reads) -> Values:
        """Reads values: those that came with the last answer, if they were asked for."""
        self._join()
        ahead = self._ahead
        arrived = self._collect()
        if not self._go:
            self._wait_for_go()
        elif ahead is not None and ahead[0] is reads:
            return {server: arrays for server, (_, arrays) in arrived.items() if server in reads}
        return self._pull(reads)

    def ask_for_rows(self, wanted: RowsWanted) -> RowsQuestion:
        """Asks for rows of tables: from each server, of tables those with these numbers.

        They are read after everything that was sent before: messages to a server arrive in
        order. Where workers take turns nothing is asked before the turn has come.
        """
        return RowsQuestion(wanted, self._submit_rows(wanted) if self._kind == "async" else None)

    def rows(self, question: RowsQuestion) -> Values:
        """The rows that were asked for."""
        wanted, futures = question
        if futures is None:
            self._collect()
            futures = self._submit_rows(wanted)
        return {
            server: self._answer(server, "rows", *self._rows_of(server, wanted), future)
            for server, future in futures.items()
        }

    def _submit_rows(self, wanted: RowsWanted) -> Futures:
        return {
            server: self.links.submit(server, "rows", *self._rows_of(server, wanted))
            for server in wanted
        }

    def _rows_of(self, server: int, wanted: RowsWanted) -> tuple[Fields, Sequence[np.ndarray]]:
        tables, numbers = wanted[server]
        return {"tables": list(tables), **self._after(server)}, numbers

    def _after(self, server: int) -> Fields:
        """Which writes must have come before something is read."""
        return {} if self._writes is None else {"after": self._writes[server]}

    def _answer(
        self,
        server: int,
        operation: str,
        fields: Fields,
        arrays: Sequence[np.ndarray],
        future: concurrent.futures.Future[Reply],
    ) -> list[np.ndarray]:
        """Waits for what was asked for; asks again while writes of the group are missing."""
        reply, found = self.links.wait(server, operation, future)
        deadline, nap = self._deadline(), _FIRST_NAP
        while reply.get("behind"):
            nap = self._rest(nap, deadline)
            reply, found = self.links.request(server, operation, fields, arrays)
        return found

    def _pull(self, reads: Reads) -> Values:
        said: Fields = {"lease": self._lease}
        if self._closed is not None:
            said["closed"] = self._closed
        asked = {
            server: {**said, "read": lists, **self._after(server)}
            for server, lists in reads.items()
        }
        futures = {
            server: self.links.submit(server, "pull", fields) for server, fields in asked.items()
        }
        return {
            server: self._answer(server, "pull", asked[server], (), future)
            for server, future in futures.items()
        }

    def _collect(self) -> dict[int, Reply]:
        """Waits for the answers to what was sent last."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return {}
        return {
            server: self.links.wait(server, "push", future) for server, future in ahead[1].items()
        }

    # --- writing -----------------------------------------------------------------

    def push(self, updates: Updates, reads: Reads, *, is_step: bool) -> bool:
        """Sends updates, and asks for the values of the next step.

        Args:
          updates: what to send to each server.
          reads: what to ask for; empty if nobody knows yet what is needed next.
          is_step: whether they are gradients, for which workers take turns.

        Returns:
          False if the gradients were refused because the values they were computed from
          are too old: compute them again.
        """
        self._join()
        self._collect()
        self._step += 1
        if is_step and self._kind == "bounded":
            return self._push_bounded(updates, reads)
        if is_step and self._kind == "sync":
            return self._push_round(updates, reads)
        self._ahead = (reads, self._submit(updates, reads, set()))
        return True

    def _submit(self, updates: Updates, reads: Reads, but: set[int]) -> Futures:
        futures = {}
        for server in sorted({*updates, *reads} - but):
            if server in updates:
                fields, arrays = self._message(server, updates, reads)
                futures[server] = self.links.submit(server, "push", fields, arrays)
            else:
                asked = {"lease": self._lease, "read": reads[server]}
                futures[server] = self.links.submit(server, "pull", asked)
        return futures

    def _message(
        self, server: int, updates: Updates, reads: Reads
    ) -> tuple[Fields, Sequence[np.ndarray]]:
        sent, arrays = updates.get(server, ([], []))
        return {
            "lease": self._lease,
            "closure": self._closure,
            "step": self._step,
            "floor": self._floor,
            "updates": sent,
            "read": reads.get(server, []),
        }, arrays

    # --- turns -------------------------------------------------------------------

    def _join(self) -> None:
        """Learns where the others are, once a closure."""
        if self._joined or self._kind == "async" or self._closure is None:
            return
        self._joined = True
        reply, _ = self.links.request(_KEEPER, "join", {"leases": [self._lease]})
        self._go, self._round, self._closed = reply["go"], reply["round"], reply["closed"]

    def _push_bounded(self, updates: Updates, reads: Reads) -> bool:
        fields, arrays = self._message(_KEEPER, updates, reads)
        future = self.links.submit(_KEEPER, "push", {**fields, "counts": True}, arrays)
        reply, _ = self.links.wait(_KEEPER, "push", future)
        self._go = reply.get("go", True)
        if reply.get("late"):
            self._step -= 1
            return False
        futures = self._submit(updates, reads, {_KEEPER})
        self._ahead = (reads, {_KEEPER: future, **futures})
        return True

    def _wait_for_go(self) -> None:
        deadline, nap = self._deadline(), _FIRST_NAP
        while not self._go:
            nap = self._rest(nap, deadline)
            reply, _ = self.links.request(_KEEPER, "turn", {"lease": self._lease, "read": []})
            self._go = reply["go"]

    def _push_round(self, updates: Updates, reads: Reads) -> bool:
        said = {"round": self._round}
        others = {}
        for server in updates:
            if server != _KEEPER:
                fields, arrays = self._message(server, updates, {})
                others[server] = self.links.submit(server, "push", {**fields, **said}, arrays)
        for server, future in others.items():
            self.links.wait(server, "push", future)
        fields, arrays = self._message(_KEEPER, updates, reads)
        future = self.links.submit(_KEEPER, "push", {**fields, **said}, arrays)
        reply, _ = self.links.wait(_KEEPER, "push", future)
        if reply.get("duplicate"):
            self._round, self._closed = reply["round"], reply["closed"]
            self._ahead = (reads, {_KEEPER: future, **self._tell_round(reads)})
            return True
        deadline, nap = self._deadline(), _FIRST_NAP
        asked = {"lease": self._lease, **said, "read": reads.get(_KEEPER, [])}
        while not reply["go"] and not reply.get("late"):
            nap = self._rest(nap, deadline)
            future = self.links.submit(_KEEPER, "turn", asked)
            reply, _ = self.links.wait(_KEEPER, "turn", future)
        self._round, self._closed = reply["round"], reply["closed"]
        if reply.get("late") and not reply.get("dropped"):
            self._step -= 1
            return False
        self._ahead = (reads, {_KEEPER: future, **self._tell_round(reads)})
        return True

    def _tell_round(self, reads: Reads) -> Futures:
        """Says to the other servers whose gradients were taken, and asks for values."""
        return {
            server: self.links.submit(
                server,
                "pull",
                {"lease": self._lease, "closed": self._closed, "read": reads.get(server, [])},
            )
            for server in range(self.links.server_count)
            if server != _KEEPER
        }

    def _deadline(self) -> float:
        return time.monotonic() + self.links.timeout

    def _rest(self, nap: float, deadline: float) -> float:
        if time.monotonic() > deadline:
            who = "the group of workers"
            raise silent(who, "turn", self.links.timeout)
        time.sleep(nap)
        return min(nap * 2, _LONGEST_NAP)
