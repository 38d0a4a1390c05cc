"""Server: what one parameter server does with the messages it gets.

Owns the order of things in a message: is the asker still a worker, was this update
applied before, whose turn it is, then the update, then the values asked for. What a server
has is in ``_holdings``, the form of messages in ``_questions``.

Operations of ``handle`` (fields -> arrays): ``create`` pieces with their values; ``pull``
values; ``push`` updates, and pull; ``rows`` of tables; ``join``, ``leave`` and ``turn``
at server 0; ``status``. Operations of ``control``, which may carry any Python:
``optimizer`` (number, rule), ``rule``, which takes the place of another (number, rule),
``number`` (optimizer, path, value), ``table`` (piece, a function of a range of rows),
``pieces``, ``end_lease``, ``closed``, ``close``, ``epoch``, ``save``, ``restore``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np

from mirrored._errors import ServerError
from mirrored._parameter_server import _shard_files
from mirrored._parameter_server._applied import Applied
from mirrored._parameter_server._channel import Fields, Reply
from mirrored._parameter_server._engine import ServerSpec
from mirrored._parameter_server._holdings import Holdings
from mirrored._parameter_server._questions import check
from mirrored._parameter_server._rounds import Rounds
from mirrored._parameter_server._tally import Tally
from mirrored._parameter_server._turns import Turns

# How long the others wait for a worker that neither comes nor is known to be lost.
PATIENCE_SECONDS = 30.0


@final
class Server:
    """Holds its share of the variables and applies what workers push.

    Attributes:
      lock: to be held around ``handle`` and ``control``.
    """

    def __init__(self, spec: ServerSpec, patience: float = PATIENCE_SECONDS) -> None:
        self.spec = spec
        self.lock = threading.Lock()
        self.holdings = Holdings(spec.name)
        self.applied = Applied()
        self._turns = Turns(spec.staleness, patience)
        self._rounds = Rounds()
        self._ended: set[int] = set()
        self._epoch = 0
        # Messages with writes of the program itself, which some who read wait for.
        self._writes = 0
        self._tally = Tally()
        self._operations: dict[str, Callable[[Fields, list[np.ndarray]], Reply]] = {
            "create": self._create,
            "pull": self._pull,
            "push": self._push,
            "rows": self._rows,
            "join": self._join,
            "leave": self._leave,
            "turn": self._turn,
            "status": self._status,
        }
        self._controls: dict[str, Callable[..., Any]] = {
            "optimizer": self.holdings.set_rule,
            "rule": self.holdings.replace_rule,
            "number": self.holdings.set_number,
            "table": self.holdings.create_table,
            "pieces": self.holdings.expect_pieces,
            "end_lease": self._end_lease,
            "closed": self._closed,
            "close": self._close,
            "epoch": self._set_epoch,
            "save": self._save,
            "restore": self._restore,
        }

    def handle(self, operation: str, fields: Fields, arrays: list[np.ndarray]) -> Reply:
        """Answers one message."""
        self._tally.messages += 1
        action = self._operations.get(operation)
        if action is None:
            raise self._unknown(operation)
        check(operation, fields, arrays)
        return action(fields, arrays)

    def control(self, operation: str, *objects: Any) -> Any:
        """Does what only the coordinator may ask for."""
        action = self._controls.get(operation)
        if action is None:
            raise self._unknown(operation)
        return action(*objects)

    def _unknown(self, operation: str) -> ServerError:
        return ServerError(
            fact=f"{self.spec.name} was asked for {operation!r}.",
            expected=f"one of {', '.join([*self._operations, *self._controls])}.",
            hint="all processes must run the same version of mirrored.",
        )

    # --- values ------------------------------------------------------------------

    def _create(self, fields: Fields, arrays: list[np.ndarray]) -> Reply:
        self.holdings.create(fields["pieces"], arrays)
        return {}, []

    def _values(self, fields: Fields) -> list[np.ndarray]:
        """What a message asks to read."""
        if fields["read"]:
            self._tally.told(fields.get("lease"))
        return self.holdings.read(fields["read"])

    def _pull(self, fields: Fields, arrays: list[np.ndarray]) -> Reply:
        self._check_epoch(fields)
        self.holdings.require(fields["read"])
        self._close(fields.get("closed", ()))
        if self._is_behind(fields):
            return {"behind": True}, []
        return {}, self._values(fields)

    def _is_behind(self, fields: Fields) -> bool:
        """Whether writes that are to be seen are still on their way, from another process."""
        return fields.get("after", 0) > self._writes

    def _rows(self, fields: Fields, arrays: list[np.ndarray]) -> Reply:
        self._check_epoch(fields)
        if self._is_behind(fields):
            return {"behind": True}, []
        return {}, self.holdings.rows(fields["tables"], arrays)

    # --- updates -----------------------------------------------------------------

    def _push(self, fields: Fields, arrays: list[np.ndarray]) -> Reply:
        self._check_epoch(fields)
        self._check_lease(fields["lease"])
        self.holdings.require(fields["read"])
        self.applied.forget_below(fields.get("floor", 0))
        closure, step = fields["closure"], fields["step"]
        kind = self.spec.staleness.kind
        # The coordinator's own writes belong to no closure.
        if closure is not None and self.applied.has(closure, step):
            self._tally.duplicates += 1
            known: Fields = {"duplicate": True}
            if kind == "sync" and self.spec.index == 0 and fields["lease"] is not None:
                # Whoever closed the round may have died before the other servers knew.
                known |= self._standing(fields["lease"])[0]
            return self._answer(fields, known)
        # Whatever is wrong with it is found before anything is done.
        self.holdings.examine(fields["updates"], arrays)
        self._tally.came(fields["lease"])
        if kind == "sync" and fields.get("round") is not None:
            return self._gather(fields, arrays)
        if kind == "bounded" and self.spec.index == 0 and fields.get("counts"):
            if not self._turns.is_member(fields["lease"]):
                # The others went on without it: what it computed may be too old.
                self._turns.be_more_patient()
                self._turns.join(fields["lease"])
                self._tally.late += 1
                return self._answer(fields, {"late": True})
            self._turns.done(fields["lease"])
        self.holdings.apply(fields["updates"], arrays)
        self._tally.updated()
        if closure is not None:
            self.applied.note(closure, step)
        if fields["lease"] is None:
            self._writes += 1
        return self._answer(fields, {})

    def _answer(self, fields: Fields, answer: Fields) -> Reply:
        worker = fields["lease"] is not None
        if worker and self.spec.index == 0 and self.spec.staleness.kind == "bounded":
            answer["go"] = self._turns.may_go(fields["lease"])
        return answer, self._values(fields)

    # --- turns -------------------------------------------------------------------

    def _join(self, fields: Fields, arrays: list[np.ndarray]) -> Reply:
        self._check_epoch(fields)
        for lease in fields["leases"]:
            self._check_lease(lease)
            self._turns.join(lease)
        return self._standing(fields["leases"][0])

    def _standing(self, lease: int) -> Reply:
        go = self.spec.staleness.kind != "bounded" or self._turns.may_go(lease)
        return {"go": go, "round": self._turns.round, "closed": self._turns.closed}, []

    def _leave(self, fields: Fields, arrays: list[np.ndarray]) -> Reply:
        self._turns.leave(fields["lease"])
        self._close_round()
        return {}, []

    def _turn(self, fields: Fields, arrays: list[np.ndarray]) -> Reply:
        """Answers a worker that waits: may it go on, and with which values?"""
        self._check_epoch(fields)
        self._check_lease(fields["lease"])
        self._turns.heard(fields["lease"])
        self._close_round()
        answer, _ = self._standing(fields["lease"])
        if fields.get("round") is not None:
            answer["go"] = self._turns.round > fields["round"]
        return answer, self._values(fields) if answer["go"] else []

    def _gather(self, fields: Fields, arrays: list[np.ndarray]) -> Reply:
        """Takes a gradient for the round that is gathered for now."""
        lease, round_number = fields["lease"], fields["round"]
        keeper = self.spec.index == 0
        if keeper and round_number < self._turns.round:
            self._tally.late += 1
            self._turns.join(lease)
            answer, _ = self._standing(lease)
            answer["late"] = True
            if self.spec.staleness.backup_workers:
                # The step was made without it, as was asked for.
                self.applied.note(fields["closure"], fields["step"])
                answer["dropped"] = True
            else:
                self._turns.be_more_patient()
            return answer, self._values(fields)
        identity = (fields["closure"], fields["step"])
        self._rounds.add(round_number, lease, identity, fields["updates"], arrays)
        if not keeper:
            return {}, []
        self._turns.offer(lease)
        self._close_round()
        answer, _ = self._standing(lease)
        answer["go"] = self._turns.round > round_number
        return answer, self._values(fields) if answer["go"] else []

    def _close_round(self) -> None:
        if self.spec.index != 0 or self.spec.staleness.kind != "sync":
            return
        round_number = self._turns.round
        leases = self._turns.close()
        if leases is not None:
            self._commit(round_number, leases)

    def _commit(self, round_number: int, leases: Sequence[int]) -> None:
        """Makes the step of a round of the gradients of these workers; once."""
        taken = self._rounds.take(round_number, leases, self.applied.has)
        if taken is None:
            return
        identities, updates, arrays = taken
        if updates:
            self.holdings.apply(updates, arrays)
            self._tally.updated()
        for closure, step in identities:
            self.applied.note(closure, step)

    def _closed(self) -> list[tuple[int, list[int]]]:
        """Under "sync", at server 0: the last rounds, and whose gradients made them."""
        return self._turns.closed

    def _close(self, closed: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Makes the steps of rounds that were closed, those that were not made yet."""
        for round_number, leases in closed:
            self._commit(round_number, leases)

    # --- membership and faults ---------------------------------------------------

    def _end_lease(self, lease: int) -> None:
        self._ended.add(lease)
        self._tally.forget(lease)
        self._turns.leave(lease)
        self._close_round()

    def _set_epoch(self, epoch: int) -> None:
        if epoch > self._epoch:
            # Whoever still works for the old epoch is refused; his steps are done again.
            self._turns = Turns(self.spec.staleness, self._turns.patience)
            self._rounds = Rounds()
        self._epoch = epoch

    def _check_lease(self, lease: int | None) -> None:
        if lease is not None and lease in self._ended:
            raise ServerError(
                fact=f"{self.spec.name} was sent a message by a worker given up as lost "
                f"(lease {lease}).",
                expected="messages of workers that are part of the cluster.",
                hint="its closure runs elsewhere; nothing has to be done.",
            )

    def _check_epoch(self, fields: Fields) -> None:
        if fields.get("epoch", self._epoch) != self._epoch:
            raise ServerError(
                fact=f"{self.spec.name} was sent a message of epoch {fields['epoch']}; servers "
                f"were restored since, and the epoch is {self._epoch}.",
                expected="messages of this epoch.",
                hint="the closure runs again; nothing has to be done.",
            )

    def _save(self, directory: str) -> Fields:
        return _shard_files.save(self, directory)

    def _restore(self, directory: str, manifest: Fields) -> None:
        _shard_files.restore(self, directory, manifest)

    def _status(self, fields: Fields, arrays: list[np.ndarray]) -> Reply:
        tables = list(self.holdings.tables.values())
        return {
            "index": self.spec.index,
            "bytes": self.holdings.store.byte_count()
            + sum(table.values.nbytes for table in tables),
            "variables": sorted({piece.name for piece in self.holdings.store.pieces()}),
            "tables": [
                {
                    "name": table.piece.name,
                    "rows": len(table.values),
                    "rows_read": table.rows_read,
                    "rows_written": table.rows_written,
                }
                for table in tables
            ],
            "steps_of_workers": {str(lease): n for lease, n in self._turns.steps.items()},
            "round": self._turns.round,
            "farthest_ahead": self._turns.farthest_ahead,
            **self._tally.as_fields(),
        }, []
