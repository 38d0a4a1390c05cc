"""Calls given to the devices: how many may be under way, and how long each should be.

Owns the bound on what is queued, and the number of steps that fill one call.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, final

from mirrored._placement import Placement
from mirrored._workers import Workers

# How long one call may take: progress bars and Ctrl-C wait for its end.
_CALL_SECONDS = 0.1
# After so many measurements over several processes the pace stays: they need not talk again.
_MOST_AGREEMENTS = 6


@final
class Pace:
    """How many steps of each program fill a call; a program's passes go on from it.

    Over several processes it is worker 0's: all must run the same programs, and come to
    the end of a call, where checkpoints are taken, after the same step.

    Args:
      workers: the processes that keep one pace; None for this one alone.
    """

    def __init__(self, workers: Workers | None = None) -> None:
        self._counts: dict[Any, int] = {}
        self._measured: collections.Counter[Any] = collections.Counter()
        self._workers = workers
        self._name = workers.turn("keras/pace") if workers is not None else ""
        self._agreements = 0

    def next_count(self, key: Any, most: int) -> int:
        """The number of steps for the next call, when ``most`` are at hand."""
        count = max(1, self._counts.get(key, 1))
        # In equal parts: 100 and 28 would be as many calls as 64 and 64.
        calls = -(-most // count)
        return -(-most // calls)

    def measured(self, key: Any, count: int, began: float) -> None:
        """Learns from a call that has just ended."""
        known = self._counts.get(key)
        if known is None:
            # The first call of a program was its compilation.
            self._counts[key] = 0
            return
        seconds = max(time.perf_counter() - began, 1e-6)
        found = max(1, min(int(count * _CALL_SECONDS / seconds), 8 * count))
        if self._workers is not None:
            self._measured[key] += 1
            if self._measured[key] > _MOST_AGREEMENTS:
                return
            found = self._agreed(self._workers, found)
        self._counts[key] = found

    def _agreed(self, workers: Workers, found: int) -> int:
        self._agreements += 1
        word = f"{self._name}/{self._agreements}"
        if workers.process_id == 0:
            workers.tell(word, str(found))
            return found
        return int(workers.hear(word, 0))


@final
class Flight:
    """The calls of one pass that are under way.

    Two programs with collectives that overlap on XLA's CPU devices can wait for each
    other's threads for ever, so there one is let finish before the next is given, whoever
    gave it: a generator may predict with one model while another trains, or a thread.
    """

    _on_cpus: ClassVar[collections.deque[tuple[Any, Callable[[], None]]]] = collections.deque()
    _cpu_turn: ClassVar[threading.RLock] = threading.RLock()

    def __init__(self, placement: Placement) -> None:
        self.one_by_one = placement.replica_count > 1 and placement.devices[0].platform == "cpu"
        self._depth = 0 if self.one_by_one else 1
        self._under_way = self._on_cpus if self.one_by_one else collections.deque()
        self._turn = self._cpu_turn if self.one_by_one else threading.RLock()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Waits until another call may be given, and lets nobody else give one in the block."""
        with self._turn:
            while len(self._under_way) > self._depth:
                self._wait()
            yield

    def started(self, token: Any, ended: Callable[[], None]) -> None:
        """Notes a call just given to the devices, and whom to tell when it ended."""
        self._under_way.append((token, ended))

    def settle(self) -> None:
        """Waits for all calls."""
        with self._turn:
            while self._under_way:
                self._wait()

    def _wait(self) -> None:
        token, ended = self._under_way.popleft()
        token.block_until_ready()
        ended()
