"""Preemption: SIGTERM on one worker, and the one check after which all of them stop.

Owns hearing the signal, telling the others, and agreeing where to stop. What is done
there is ``mirrored.checkpoint``'s. JAX has such an agreement too, but a program that
ends just as the signal comes then waits for minutes.
"""

from __future__ import annotations

import signal
import threading
import time
from typing import Any, final

import jax

from mirrored._workers import Workers

_POLL_SECONDS = 0.02
_NOTICE = "preemption/notice"
_COUNTS = "preemption/count"


@final
class Preemption:
    """Whether this run is to stop, asked by each worker equally often.

    Args:
      workers: who must stop at the same check; None for this process alone.
    """

    def __init__(self, workers: Workers | None = None) -> None:
        self._workers = workers
        self._signalled = threading.Event()
        # Held while workers agree, so that nobody goes past the check they agree on.
        self._counting = threading.Lock()
        self._count = 0
        self._stop_at: int | None = None
        self._agreeing = False
        self._told = False

    def listen(self) -> None:
        """Answers SIGTERM, unless the program does so itself or this is no main thread."""
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _on_signal)

    def signalled(self) -> None:
        """Notes that this process is to end."""
        self._signalled.set()

    def reached(self) -> bool:
        """Says whether to stop now; called once after each step, on every worker."""
        if self._workers is None:
            return self._signalled.is_set()
        with self._counting:
            self._count += 1
            return self._stop_at is not None and self._count >= self._stop_at

    # --- among workers, from the thread that watches the others ------------------------

    def wait(self, seconds: float) -> None:
        """Waits that long, or until there is something to tell the others."""
        if not self._told:
            self._signalled.wait(seconds)
        else:
            time.sleep(seconds)

    def exchange(self) -> None:
        """Tells the others of a signal, and hears of one of theirs."""
        workers = self._workers
        if workers is None or self._agreeing:
            return
        if self._signalled.is_set() and not self._told:
            self._told = True
            workers.tell(_NOTICE, str(workers.process_id))
        if self._told or workers.heard(_NOTICE) is not None:
            self._agreeing = True
            threading.Thread(
                target=self._agree, args=(workers,), name="mirrored-preemption", daemon=True
            ).start()

    def _agree(self, workers: Workers) -> None:
        """Finds the first check that no worker has come to yet."""
        deadline = time.monotonic() + workers.timeout
        with self._counting:
            try:
                workers.tell(f"{_COUNTS}/{workers.process_id}", str(self._count))
                counts: list[int] = []
                while len(counts) < workers.process_count and time.monotonic() < deadline:
                    time.sleep(_POLL_SECONDS)
                    counts = [int(text) for _, text in workers.all_under(_COUNTS)]
            except jax.errors.JaxRuntimeError:
                # A worker is gone; who that is will be found out and told elsewhere.
                return
            if len(counts) == workers.process_count:
                self._stop_at = max(counts) + 1

    def leave(self) -> None:
        """Lets the others agree without this worker, whose program is over."""
        if self._workers is not None and not self._agreeing:
            self._agreeing = True
            self._workers.tell(f"{_COUNTS}/{self._workers.process_id}", str(self._count))


_current = [Preemption()]


def start(workers: Workers) -> Preemption:
    """Makes preemption an affair of all workers."""
    _current[:] = [Preemption(workers)]
    return _current[0]


def current() -> Preemption:
    """Returns the preemption of this run."""
    return _current[0]


def _on_signal(number: int, frame: Any) -> None:
    current().signalled()
