"""Status: what a cluster of parameter servers says of itself, and how that reads.

Owns the words and the table. Where the numbers come from is in ``_tally``, ``_turns`` and
``_closure_queue``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, final


@final
@dataclasses.dataclass(frozen=True)
class ServerStatus:
    """One server.

    Args:
      index: its number.
      bytes: of the variables and tables it holds, without optimizers' state.
      variables: the names of variables it holds all or some rows of.
      tables: for each table: name, rows, rows_read and rows_written.
      updates: how many it has applied.
      updates_a_second: in the last seconds.
      messages: how many it was sent.
      duplicates: updates it was sent twice and applied once.
      late: gradients that came after their step was made.
      staleness_mean: how many updates of others were applied, on average, between a
        worker's reading of values and the arrival of its gradients.
      staleness_most: the most there were.
      farthest_ahead: under "bounded", how many steps ahead of the slowest a worker was at
        most while it computed.
      round: under "sync", how many steps were made.
      steps_of_workers: by lease, the steps of the workers that take turns now.
      seconds: since it started.
    """

    index: int
    bytes: int
    variables: list[str]
    tables: list[dict[str, Any]]
    updates: int
    updates_a_second: float
    messages: int
    duplicates: int
    late: int
    staleness_mean: float
    staleness_most: int
    farthest_ahead: int
    round: int
    steps_of_workers: dict[str, int]
    seconds: float


@final
@dataclasses.dataclass(frozen=True)
class WorkerStatus:
    """One worker.

    Args:
      index: its number.
      is_alive: whether it runs.
      closure: what it runs at the moment, or None.
      seconds: for how long.
      done: how many closures it has finished.
    """

    index: int
    is_alive: bool
    closure: str | None
    seconds: float
    done: int


@final
@dataclasses.dataclass(frozen=True)
class ClusterStatus:
    """Who serves what, who runs what, and how it goes; ``print`` it.

    Returned by ``ClusterCoordinator.status``.

    Args:
      staleness: how updates of different workers are combined, in words.
      waiting: how many closures wait for a worker.
      running: how many run.
      done: how many are over.
      workers: one entry each.
      servers: one entry each; None for one that does not answer.

    >>> import mirrored
    >>> strategy = mirrored.ParameterServerStrategy(worker_count=2, server_count=1)
    >>> coordinator = mirrored.ClusterCoordinator(strategy)
    >>> with strategy.scope():
    ...     weights = mirrored.Variable([0.0] * 256, name="weights")
    >>> status = coordinator.status()
    >>> status.servers[0].bytes, status.waiting
    (1024, 0)
    >>> print(status)
    parameter servers, async: 2 workers, 1 server; 0 closures wait, 0 run, 0 done
    ...
    """

    staleness: str
    waiting: int
    running: int
    done: int
    workers: list[WorkerStatus]
    servers: list[ServerStatus | None]

    def __str__(self) -> str:
        lines = [
            f"parameter servers, {self.staleness}: {_count(len(self.workers), 'worker')}, "
            f"{_count(len(self.servers), 'server')}; {_count(self.waiting, 'closure')} wait, "
            f"{self.running} run, {self.done} done"
        ]
        rows = [["server", "bytes", "updates", "updates/s", "stale mean", "most", "holds"]]
        for index, server in enumerate(self.servers):
            rows.append(_server_row(index, server))
        lines += _table(rows)
        rows = [["worker", "state", "done", "runs"]]
        for worker in self.workers:
            runs = f"{worker.closure}, {worker.seconds:.1f} s" if worker.closure else "nothing"
            state = "alive" if worker.is_alive else "gone"
            rows.append([str(worker.index), state, str(worker.done), runs])
        lines += _table(rows)
        return "\n".join(lines)

    def to_json(self) -> str:
        """The same as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ClusterStatus:
        """Reads what ``to_json`` wrote."""
        fields = json.loads(text)
        fields["workers"] = [WorkerStatus(**worker) for worker in fields["workers"]]
        fields["servers"] = [
            None if server is None else ServerStatus(**server) for server in fields["servers"]
        ]
        return cls(**fields)


def _server_row(index: int, server: ServerStatus | None) -> list[str]:
    if server is None:
        return [str(index), "-", "-", "-", "-", "-", "does not answer"]
    held = [f"{table['name']} ({table['rows']:,} rows)" for table in server.tables]
    held += server.variables
    shown = ", ".join(held[:4]) + (f" and {len(held) - 4} more" if len(held) > 4 else "")
    return [
        str(index),
        _bytes(server.bytes),
        f"{server.updates:,}",
        f"{server.updates_a_second:.1f}",
        f"{server.staleness_mean:.1f}",
        str(server.staleness_most),
        shown or "nothing",
    ]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(
            # Numbers to the right, the last column as it is.
            cell if column == len(row) - 1 else cell.rjust(widths[column])
            for column, cell in enumerate(row)
        )
        for row in rows
    ]


def _bytes(count: int) -> str:
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
