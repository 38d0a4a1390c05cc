"""When a worker fails: the others hear of it, say who it was, and end.

Owns the two threads that watch the other workers, and the hooks by which this
process ends at once, instead of waiting for workers that will never come.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from typing import Any, NoReturn, final

import jax

from mirrored import _preemption, _workers
from mirrored._cluster import Cluster, resolve_cluster
from mirrored._errors import WorkerError
from mirrored._report import EXIT_BYSTANDER, RUN_DIRECTORY, Failure
from mirrored._rollcall import Member
from mirrored._workers import Workers, last_pulse, last_step

_BEAT_SECONDS = 0.5
# With more workers than this each beats more rarely, so that worker 0's load grows
# with their number and not with its square.
_FULL_RATE_WORKERS = 32
# A worker without a sign for so long is reported; JAX ends the run soon after.
_QUIET_SECONDS = 7.0
# When something has already failed, this much silence is telling.
_SUSPICIOUS_SECONDS = 2.5
_LONGEST_SEARCH_SECONDS = 12.0

# In place of a beat: the worker's program has ended.
_LEFT = "left"

_COMMUNICATION = re.compile(
    r"gloo|nccl|collective|coordination ?service|heartbeat|connection (closed|reset|refused)"
    r"|DEADLINE_EXCEEDED|UNAVAILABLE",
    re.IGNORECASE,
)


_watching: list[Watch] = []


def join(cluster: Cluster | Mapping[str, Any] | None, timeout: float) -> None:
    """Joins the cluster this process belongs to, if any, and watches the other workers."""
    found: Cluster | None
    if _workers.is_connected_by_user():
        found = _workers.cluster_of_user()
    else:
        found = resolve_cluster(cluster, timeout)
    if found is None or found.process_count == 1:
        return
    workers = _workers.connect(found, timeout)
    if not _watching:
        _watching.append(Watch(workers))
        _watching[0].start()


@final
class Watch:
    """Watches the other workers from this one."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._preemption = _preemption.start(workers)
        self._me = workers.process_id
        self._over = threading.Event()
        self._telling = threading.Lock()
        self._ending = threading.Lock()
        self._failed_itself = False
        # What sys.exit was given here last, and how much had run until then.
        self._exit: tuple[object, int] | None = None
        now = time.monotonic()
        # For each worker: its last beat, when it was seen to change, its last step.
        self._seen = {member.process_id: ("", now, -1) for member in workers.members}
        self._asked_at: float | None = None
        self._unreachable = False
        self._peer_failure: Failure | None = None
        self._warned: set[int] = set()
        self._interval = _BEAT_SECONDS * max(1.0, workers.process_count / _FULL_RATE_WORKERS)

    def start(self) -> None:
        """Starts watching, and makes this process end at once when it fails."""
        threading.Thread(target=self._beat, name="mirrored-beat", daemon=True).start()
        threading.Thread(target=self._look, name="mirrored-look", daemon=True).start()
        # Before JAX's own leave-taking, which is registered earlier.
        atexit.register(self._leave)
        sys.excepthook = self._on_exception
        # Python tells nobody with which code it ends.
        sys.exit = self._on_exit
        threading.excepthook = self._on_thread_exception
        _before_abort(self._on_abort)

    def _leave(self) -> None:
        """Tells the others that this program has come to its end."""
        if self._exit is not None and self._exit[1] == last_pulse():
            code = self._exit[0]
            own = f"SystemExit: {code}"
            self._fail(own, own, _exit_code(code), is_ending=True)
        try:
            with self._telling:
                self._over.set()
                self._workers.tell(f"beat/{self._me}", f"{_LEFT} {last_step()}")
            self._preemption.leave()
        except jax.errors.JaxRuntimeError:
            # Worker 0 has left first; there is nobody to tell.
            return

    # --- beating and listening ---------------------------------------------------

    def _beat(self) -> None:
        count = 0
        while True:
            self._preemption.wait(self._interval)
            count += 1
            try:
                with self._telling:
                    if self._over.is_set():
                        # The last word is that this worker has left.
                        return
                    self._asked_at = time.monotonic()
                    self._workers.tell(f"beat/{self._me}", f"{count} {last_step()}")
                beats = self._workers.all_under("beat")
                failures = self._workers.all_under("failure")
                self._preemption.exchange()
            except jax.errors.JaxRuntimeError:
                # Worker 0 is gone, or the run is ending: the rest is for the one who
                # finds out why.
                self._unreachable = not self._over.is_set()
                continue
            self._asked_at = None
            self._note(beats)
            others = [Failure.from_json(text) for _, text in failures]
            others = [failure for failure in others if failure.process_id != self._me]
            if others and self._peer_failure is None:
                self._peer_failure = others[0]
                self._end_because_of_peer(None)

    def _note(self, beats: list[tuple[str, str]]) -> None:
        now = time.monotonic()
        for key, text in beats:
            number = int(key.rsplit("/", 1)[1])
            beat, _, step = text.partition(" ")
            if self._seen[number][0] != beat:
                self._seen[number] = (beat, now, int(step))

    def _look(self) -> None:
        while not self._over.wait(1.0):
            if self._ending.locked():
                return
            self._look_for_the_left()
            found = self._silent(_QUIET_SECONDS + 2 * self._interval)
            if found is None or found.process_id in self._warned:
                continue
            self._warned.add(found.process_id)
            _say(
                f"mirrored: {found} has given no sign for {_QUIET_SECONDS:g} s; "
                f"{self._last_step_of(found)}. If it does not come back, this worker ends too."
            )

    def _look_for_the_left(self) -> None:
        for number, (beat, since, step) in self._seen.items():
            if beat != _LEFT or number in self._warned:
                continue
            if time.monotonic() - since > _QUIET_SECONDS:
                self._warned.add(number)
                _say(
                    f"mirrored: {self._workers.name(number)} has come to the end of its program, "
                    f"its last step was {step}; here it is {last_step()}. What needs all workers "
                    "(run, reduce, reading an ON_READ variable) waits for it in vain."
                )

    def _silent(self, limit: float) -> Member | None:
        """Finds a worker that has given no sign for ``limit`` seconds."""
        now = time.monotonic()
        asked = self._asked_at
        if self._me != 0 and asked is not None and now - asked > limit:
            return self._workers.members[0]
        if asked is not None and now - asked > self._interval:
            # No news at all: what is known of the others is as old.
            return None
        others = [
            member
            for member in self._workers.members
            if member.process_id != self._me and self._seen[member.process_id][0] != _LEFT
        ]
        if not others:
            return None
        oldest = min(others, key=lambda member: self._seen[member.process_id][1])
        return oldest if now - self._seen[oldest.process_id][1] > limit else None

    def _last_step_of(self, member: Member) -> str:
        step = self._seen[member.process_id][2]
        own = last_step()
        if step < 0 and own < 0:
            return "it had completed no step yet"
        return f"its last step was {step}, as far as it told; here it is {own}"

    # --- ending ------------------------------------------------------------------

    def _culprit(self) -> WorkerError | None:
        """Says who has failed, as soon as that is known."""
        failure = self._peer_failure
        if failure is not None:
            member = self._workers.members[failure.process_id]
            at = f"after step {failure.step}" if failure.step >= 0 else "before its first step"
            return WorkerError(
                fact=f"{member} failed {at}: {failure.error}",
                expected="all workers to run to the end.",
                hint="its traceback stands above; this worker only ended with it.",
            )
        found = self._silent(_SUSPICIOUS_SECONDS + 2 * self._interval)
        if found is None and self._unreachable and self._me != 0 and self._coordinator_is_gone():
            found = self._workers.members[0]
        if found is None:
            return None
        return WorkerError(
            fact=f"{found} died or stopped; {self._last_step_of(found)}.",
            expected="all workers to run to the end.",
            hint="look at its output, its machine's memory and its scheduler; under `mirrored "
            "launch --max-restarts` a run goes on from its last checkpoint.",
        )

    def _coordinator_is_gone(self) -> bool:
        host, _, port = self._workers.cluster.coordinator.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), 1.0).close()
        except OSError:
            return True
        return False

    def _search(self, limit: float) -> WorkerError | None:
        """Waits until it is known who has failed."""
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            found = self._culprit()
            if found is not None:
                return found
            time.sleep(0.05)
        return self._left_early()

    def _left_early(self) -> WorkerError | None:
        """Blames one that ended without a fault, where nobody else is to blame."""
        for number, (beat, _, step) in self._seen.items():
            if beat == _LEFT:
                return WorkerError(
                    fact=f"{self._workers.name(number)} had come to the end of its program, its "
                    f"last step was {step}; here it is {last_step()}, and this worker still "
                    "needed it.",
                    expected="as many steps on every worker.",
                    hint="see why its loop was shorter: the same data, or as many batches, on "
                    "every worker.",
                )
        return None

    def _end_because_of_peer(self, own: str | None) -> None:
        """Ends this process, which is well itself, with the name of the one that is not."""
        if not self._ending.acquire(blocking=False):
            # Another thread is already at it.
            threading.Event().wait()
        # The beat goes on: it hears what the one who failed has left as its last word.
        error = self._culprit() if self._peer_failure is not None else None
        error = error or self._search(_LONGEST_SEARCH_SECONDS)
        text = "" if own is None else own
        failure = self._peer_failure
        if failure is not None:
            text += f"\nfrom {self._workers.name(failure.process_id)}:\n{failure.traceback}"
        if error is None:
            text += "\nmirrored: another worker seems to have failed; which one is not known.\n"
        else:
            text += f"\n{type(error).__module__}.{type(error).__qualname__}: {error}\n"
        _say(text)
        because = failure.process_id if failure is not None else None
        self._report(str(error or "another worker failed"), text, because_of=because or -1)
        _end(EXIT_BYSTANDER)

    def _on_exception(self, kind: Any, error: Any, trace: Any) -> None:
        own = "".join(traceback.format_exception(kind, error, trace))
        if isinstance(error, WorkerError) and not _COMMUNICATION.search(str(error)):
            _say(own)
            self._report(str(error), own, because_of=-1)
            _end(EXIT_BYSTANDER)
        if isinstance(error, Exception) and _COMMUNICATION.search(str(error)):
            self._end_because_of_peer(own)
        summary = "".join(traceback.format_exception_only(kind, error)).strip()
        self._fail(own, summary, 130 if kind is KeyboardInterrupt else 1)

    def _on_exit(self, code: Any = None, /) -> NoReturn:
        """In place of sys.exit: with anything but 0 the program says that it has failed.

        The others would wait for it, and it for them, in JAX's leave-taking.
        """
        if threading.current_thread() is threading.main_thread():
            self._exit = None if code in (None, 0) else (code, last_pulse())
        raise SystemExit(code)

    def _fail(self, own: str, summary: str, code: int, *, is_ending: bool = False) -> None:
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()
        self._failed_itself = True
        _say(own)
        failure = self._report(summary, own, because_of=None)
        if is_ending:
            # Python starts no thread any more.
            self._tell_others(failure)
        else:
            telling = threading.Thread(target=self._tell_others, args=(failure,), daemon=True)
            telling.start()
            telling.join(3.0)
        _end(code)

    def _tell_others(self, failure: Failure) -> None:
        try:
            self._workers.tell(f"failure/{self._me}", failure.to_json())
            if self._me == 0:
                # The service that carries the message ends with this process.
                time.sleep(2 * self._interval)
        except jax.errors.JaxRuntimeError:
            # The others are gone already.
            return

    def _on_thread_exception(self, arguments: Any) -> None:
        if arguments.exc_type is SystemExit:
            return
        name = arguments.thread.name if arguments.thread is not None else "?"
        _say(f"in thread {name}:")
        self._on_exception(arguments.exc_type, arguments.exc_value, arguments.exc_traceback)

    def _on_abort(self) -> None:
        """JAX ends the process because a worker is gone; say which, before it does."""
        if self._failed_itself:
            _end(1)
        self._unreachable = True
        error = self._search(2.0)
        if error is None:
            return
        text = f"\n{type(error).__module__}.{type(error).__qualname__}: {error}\n"
        _say(text)
        self._report(str(error), text, because_of=-1)
        _end(EXIT_BYSTANDER)

    def _report(self, error: str, text: str, because_of: int | None) -> Failure:
        me = self._workers.members[self._me]
        failure = Failure(self._me, me.host, me.pid, last_step(), error, text, because_of)
        directory = os.environ.get(RUN_DIRECTORY)
        if directory:
            failure.write(directory)
        return failure


def _say(text: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(text if text.endswith("\n") else f"{text}\n")
    sys.stderr.flush()


def _exit_code(given: object) -> int:
    """The exit code that Python makes of what sys.exit was given."""
    return given if isinstance(given, int) else 1


def _end(code: int) -> None:
    """Ends the process now: its other threads may wait for workers that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


_HANDLER_TYPE = ctypes.CFUNCTYPE(None, ctypes.c_int)
_handlers: list[Any] = []


def _before_abort(function: Any) -> None:
    """Calls ``function`` when C++ code of JAX aborts the process.

    A handler of Python's signal module would run too late: it waits for the main
    thread, and the process ends when the C handler returns.
    """

    def handle(number: int) -> None:
        libc.signal(number, 0)
        function()

    libc = ctypes.CDLL(None)
    handler = _HANDLER_TYPE(handle)
    _handlers.append(handler)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal.restype = ctypes.c_void_p
    libc.signal(int(signal.SIGABRT), ctypes.cast(handler, ctypes.c_void_p))
