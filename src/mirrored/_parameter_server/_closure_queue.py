"""ClosureQueue: closures that wait, run and are over, and the one error among them.

Owns tf.distribute's rules of what an error does: the first is kept and cancels what
waits; it is raised once, by whoever asks next. It starts nothing and knows no workers.
"""

from __future__ import annotations

import collections
import heapq
import threading
import time
from collections.abc import Callable
from typing import Any, final

from mirrored._errors import CancelledError, WorkerError
from mirrored._parameter_server._remote_value import RemoteValue

_MOST_WAITING = 256 * 1024


@final
class Closure:
    """One call that was scheduled."""

    def __init__(self, number: int, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.number = number
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.result = RemoteValue(self.name)
        self.losses = 0

    @property
    def name(self) -> str:
        """What it is called in messages."""
        return f"closure {self.number} ({getattr(self.function, '__name__', 'a callable')})"


@final
class ClosureQueue:
    """The closures of one coordinator.

    Args:
      keeps_log: whether to remember what is over, to run it again if servers are brought
        back to an earlier state.
    """

    def __init__(self, *, keeps_log: bool) -> None:
        self._keeps_log = keeps_log
        self._changed = threading.Condition()
        self._waiting: collections.deque[Closure] = collections.deque()
        self._running: dict[int, tuple[Closure, str, float]] = {}
        self._done: collections.Counter[str] = collections.Counter()
        self._over: list[Closure] = []
        self._error: Exception | None = None
        self._paused = False
        self._closed = False
        self.next_number = 0
        # Numbers of closures that are not over, and of those that are and still stand in it.
        self._open: list[int] = []
        self._ended: set[int] = set()
        # Numbers of those that were over, and are to be once more.
        self._redone: set[int] = set()

    # --- what the program does ---------------------------------------------------

    def put(self, function: Callable[..., Any], args: Any, kwargs: Any) -> RemoteValue:
        """Adds a closure at the end; waits while there are too many."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._waiting) < _MOST_WAITING or self._error)
            self._raise_error()
            closure = Closure(self.next_number, function, args, kwargs)
            self.next_number += 1
            heapq.heappush(self._open, closure.number)
            self._waiting.append(closure)
            self._changed.notify_all()
            return closure.result

    def wait(self, timeout: float | None) -> None:
        """Waits until all closures are over; raises the error, if there was one."""
        with self._changed:
            if not self._changed.wait_for(self._is_done, timeout):
                running = "; ".join(
                    f"{closure.name} on {where} for {time.monotonic() - since:.1f} s"
                    for closure, where, since in self._running.values()
                )
                raise WorkerError(
                    fact=f"join did not finish within {timeout} s: {len(self._waiting)} closures "
                    f"wait, and {running or 'no worker runs one'}.",
                    expected="all closures over by then.",
                    hint="join again, or see what the workers named do.",
                )
            self._raise_error()

    def done(self) -> bool:
        """Says whether all closures are over; raises the error, if there was one."""
        with self._changed:
            self._raise_error()
            return self._is_done()

    def _is_done(self) -> bool:
        return not self._running and (not self._waiting or self._error is not None)

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    # --- what workers' threads do ------------------------------------------------

    def take(self, where: str, timeout: float) -> Closure | None:
        """Hands out the next closure, or None if there is none for a while."""
        with self._changed:
            self._changed.wait_for(
                lambda: (self._waiting and not self._paused) or self._closed, timeout
            )
            if not self._waiting or self._paused or self._closed:
                return None
            closure = self._waiting.popleft()
            self._running[closure.number] = (closure, where, time.monotonic())
            self._changed.notify_all()
            return closure

    def finish(self, closure: Closure, value: Any) -> None:
        """Notes that a closure is over."""
        with self._changed:
            if self._keeps_log:
                self._over.append(closure)
            closure.result.set(value)
            if closure.number in self._running:
                self._done[self._running[closure.number][1]] += 1
            self._gone(closure)

    def fail(self, closure: Closure, error: Exception) -> None:
        """Notes that a closure raised; cancels what waits."""
        with self._changed:
            closure.result.fail(error)
            self._gone(closure)
            self.stop_with(error, closure.name)

    def stop_with(self, error: Exception, why: str) -> None:
        """Keeps an error to be raised, and cancels what waits."""
        with self._changed:
            if self._error is None:
                self._error = error
            while self._waiting:
                cancelled = self._waiting.popleft()
                self._ended.add(cancelled.number)
                self._redone.discard(cancelled.number)
                cancelled.result.fail(
                    CancelledError(
                        fact=f"{cancelled.name} was cancelled: {why} failed before it ran.",
                        expected="no error in any closure.",
                        hint="join raises the error itself; schedule this closure again.",
                    )
                )
            self._changed.notify_all()

    def give_back(self, closure: Closure) -> None:
        """Puts a closure back in front: its worker was lost."""
        with self._changed:
            self._running.pop(closure.number, None)
            if self._error is None:
                self._waiting.appendleft(closure)
                self._changed.notify_all()
                return
            closure.result.fail(self._error)
            self._gone(closure)

    def _gone(self, closure: Closure) -> None:
        self._running.pop(closure.number, None)
        self._redone.discard(closure.number)
        self._ended.add(closure.number)
        self._changed.notify_all()

    # --- checkpoints -------------------------------------------------------------

    @property
    def floor(self) -> int:
        """All closures with a lower number are over."""
        with self._changed:
            while self._open and self._open[0] in self._ended:
                self._ended.discard(heapq.heappop(self._open))
            return self._open[0] if self._open else self.next_number

    @property
    def over_count(self) -> int:
        """How many closures were over since the last checkpoint."""
        with self._changed:
            return len(self._over)

    @property
    def is_busy(self) -> bool:
        """Whether closures wait or run."""
        with self._changed:
            return bool(self._waiting or self._running)

    @property
    def is_closed(self) -> bool:
        """Whether nothing is handed out any more."""
        return self._closed

    def waiting_count(self) -> int:
        """How many closures wait."""
        return len(self._waiting)

    def running_on(self) -> dict[str, tuple[str, float]]:
        """Who runs what, and for how many seconds."""
        with self._changed:
            now = time.monotonic()
            return {
                where: (closure.name, now - since)
                for closure, where, since in self._running.values()
            }

    def done_on(self, where: str) -> int:
        """How many closures somebody has finished."""
        return self._done[where]

    def done_count(self) -> int:
        """How many closures were finished."""
        return sum(self._done.values())

    @property
    def is_paused(self) -> bool:
        """Whether none are handed out for now."""
        return self._paused

    def pause(self) -> None:
        """Hands out no closures for a while."""
        with self._changed:
            self._paused = True
            self._changed.notify_all()

    def resume(self) -> None:
        """Hands out closures again."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def wait_until_none_runs(self, timeout: float) -> bool:
        """Waits for the running closures; says whether they are over."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, timeout)

    def forget_log(self) -> None:
        """What is over is in a checkpoint now."""
        with self._changed:
            self._over.clear()

    def run_again(self) -> None:
        """Puts back what was over since the last checkpoint: servers are back there."""
        with self._changed:
            again, self._over = self._over, []
            for closure in again:
                # Its number may stand in the heap still, or not.
                self._ended.discard(closure.number)
                self._redone.add(closure.number)
                heapq.heappush(self._open, closure.number)
            self._waiting.extendleft(reversed(again))
            self._changed.notify_all()

    def wait_until_redone(self) -> None:
        """Waits until all that was over once is over again, or cannot be."""
        with self._changed:
            self._changed.wait_for(lambda: not self._redone or self._error or self._closed)

    def close(self) -> None:
        """Lets everybody who waits go."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
