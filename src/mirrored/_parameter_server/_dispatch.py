"""Dispatch: one thread a worker, which hands closures to it and sees what becomes of them.

Owns what happens when a worker or a server is lost, who takes turns, and saving between two
closures. The rules of errors are in ``_closure_queue``; who lives is in ``_deployment``.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import final

from mirrored._errors import CheckpointError, ServerError, WorkerError
from mirrored._parameter_server._closure_queue import Closure, ClosureQueue
from mirrored._parameter_server._deployment import Deployment
from mirrored._parameter_server._engine import ClosureCall, ClosureOutcome
from mirrored._parameter_server._recovery import Checkpoints, read_manifest

_LOG = logging.getLogger("mirrored")
_POLL_SECONDS = 0.05
# How long a worker with nothing to do is still waited for by the others.
_GRACE_SECONDS = 0.1
# A closure that takes its worker with it this often is at fault itself.
_MOST_LOSSES = 20
_RESTART_PAUSES = (0.0, 0.5, 2.0, 5.0)


@final
class Dispatch:
    """Gives the closures of a queue to workers.

    Args:
      deployment: the workers and servers.
      checkpoints: where they are saved, and from where servers come back.
      every: after how many closures to save; None if servers that are lost stay lost.

    Attributes:
      queue: the closures.
      standstill: held while servers are saved or restored.
    """

    def __init__(self, deployment: Deployment, checkpoints: Checkpoints, every: int | None) -> None:
        self._deployment = deployment
        self._checkpoints = checkpoints
        self._every = every
        self.queue = ClosureQueue(keeps_log=every is not None)
        self.standstill = threading.RLock()
        self._members: set[int] = set()
        self._members_lock = threading.Lock()
        self._stopping: set[int] = set()
        for index in list(deployment.leases):
            self.start(index)

    def before_closure(self) -> None:
        """To be called before a closure is put into the queue."""
        if self._every is not None and self._deployment.unsaved:
            with self.standstill:
                if self._deployment.unsaved:
                    self.save(self._checkpoints)
        self._join_turns()

    def stop(self, index: int) -> None:
        """Gives a worker no more closures."""
        self._stopping.add(index)

    def save(self, checkpoints: Checkpoints) -> str:
        """Saves what is on the servers between two closures; returns the folder."""
        self.queue.pause()
        try:
            timeout = self._deployment.links.timeout
            if not self.queue.wait_until_none_runs(timeout):
                raise CheckpointError(
                    fact=f"closures still run {timeout} s after no more were handed out.",
                    expected="closures short enough to save between them.",
                    hint="take fewer steps in each, or give the strategy a longer timeout=.",
                )
            path = checkpoints.save(self._deployment, {"next_closure": self.queue.next_number})
            if checkpoints is self._checkpoints:
                self.queue.forget_log()
            return path
        finally:
            self.queue.resume()
            if self.queue.is_busy:
                self._join_turns()

    # --- one thread a worker -----------------------------------------------------

    def start(self, index: int) -> None:
        """Starts to give closures to a worker."""
        threading.Thread(
            target=self._serve, args=(index,), name=f"mirrored-dispatch-{index}", daemon=True
        ).start()

    def _serve(self, index: int) -> None:
        idle_since = time.monotonic()
        while index not in self._stopping and not self.queue.is_closed:
            closure = self.queue.take(f"worker {index}", _POLL_SECONDS)
            if closure is None:
                idle = time.monotonic() - idle_since
                if idle > _GRACE_SECONDS or self.queue.is_paused:
                    self._leave_turns(index)
                continue
            try:
                self._run(index, closure)
            except Exception as error:  # noqa: BLE001 (told to who waits for the closure)
                if not self.queue.is_closed:
                    self.queue.fail(closure, error)
            idle_since = time.monotonic()
        self._leave_turns(index)

    def _run(self, index: int, closure: Closure) -> None:
        with self._members_lock:
            # Whoever runs a closure takes turns, one that came later or again too, and must
            # leave when it has nothing more to do, or the others wait for it.
            self._members.add(index)
        call = ClosureCall(
            closure.number,
            closure.function,
            closure.args,
            closure.kwargs,
            self._deployment.epoch,
            self.queue.floor,
        )
        try:
            outcome = self._deployment.engine.execute(index, call)
        except WorkerError as error:
            self._worker_lost(index, closure, error)
            return
        self._ended(index, closure, call, outcome)

    def _ended(
        self, index: int, closure: Closure, call: ClosureCall, outcome: ClosureOutcome
    ) -> None:
        error = outcome.error
        if call.epoch != self._deployment.epoch:
            # Servers were brought back to before this closure.
            self.queue.give_back(closure)
        elif isinstance(error, ServerError) and self._deployment.dead_servers():
            self._server_lost(closure)
        elif error is not None:
            self.queue.fail(closure, error)
        else:
            self.queue.finish(closure, outcome.value)
            if self._every is not None and self.queue.over_count >= self._every:
                # Others, whose closures have to end first, must not wait for this worker.
                self._leave_turns(index)
                self._save_in_thread()

    def _save_in_thread(self) -> None:
        with self.standstill:
            if self._every is None or self.queue.over_count < self._every:
                return
            if self.queue.is_closed:
                return
            try:
                self.save(self._checkpoints)
            except ServerError:
                # One died while it was asked to save.
                self._recover()
            except (CheckpointError, OSError) as error:
                self.queue.stop_with(error, "a checkpoint")

    # --- losses ------------------------------------------------------------------

    def _worker_lost(self, index: int, closure: Closure, error: WorkerError) -> None:
        _LOG.warning("%s %s runs again elsewhere.", error.fact, closure.name)
        # First refuse what it may still send; then let another run the closure.
        self._deployment.give_up_worker(index)
        with self._members_lock:
            self._members.discard(index)
        closure.losses += 1
        if closure.losses >= _MOST_LOSSES:
            self.queue.fail(
                closure,
                WorkerError(
                    fact=f"{closure.name} lost its worker {closure.losses} times; the last said: "
                    f"{error.fact}",
                    expected="a closure that workers survive.",
                    hint="look at the worker's log: it may run out of memory.",
                ),
            )
        else:
            self.queue.give_back(closure)
        self._replace(index)

    def _replace(self, index: int) -> None:
        for pause in (*_RESTART_PAUSES, *[_RESTART_PAUSES[-1]] * 1000):
            if index in self._stopping:
                return
            time.sleep(pause)
            try:
                self._deployment.start_worker(index)
            except WorkerError:
                continue
            return

    def _server_lost(self, closure: Closure) -> None:
        if self._every is None:
            self.queue.fail(closure, self._loss())
            return
        self.queue.give_back(closure)
        self.recovered()

    def _loss(self) -> ServerError:
        dead = self._deployment.dead_servers()
        names = ", ".join(f"server {index}" for index in dead)
        held = sorted(
            {
                spec.name
                for spec in self._deployment.catalog.variables.values()
                if any(part.server in dead for part in spec.parts)
            }
        )
        return ServerError(
            fact=f"{names} of {self._deployment.server_count} is gone, and with it "
            f"{', '.join(held[:5])}{', ...' if len(held) > 5 else ''}.",
            expected="servers that live until the strategy is closed.",
            hint='on_server_failure="restore" brings servers back from their checkpoint.',
        )

    def recovered(self) -> bool:
        """Brings lost servers back; says whether all are there."""
        with self.standstill:
            if self._deployment.dead_servers():
                self._recover()
            return not self._deployment.dead_servers()

    def _recover(self) -> None:
        """Brings all servers to the latest checkpoint, and runs again what was done since."""
        self.queue.pause()
        try:
            for _ in range(_MOST_LOSSES):
                if self.queue.is_closed:
                    return
                loss = self._loss()
                latest = self._checkpoints.latest()
                if latest is None or self._deployment.unsaved:
                    self.queue.stop_with(loss, loss.fact)
                    return
                path, manifest = latest
                self._deployment.new_epoch()
                try:
                    self._deployment.restore(path, read_manifest(path) and manifest)
                except ServerError:
                    continue
                self.queue.run_again()
                return
        finally:
            self.queue.resume()

    # --- turns -------------------------------------------------------------------

    def _join_turns(self) -> None:
        """Before work begins: all workers take turns, from the same step on."""
        if self._deployment.staleness.kind == "async":
            return
        with self._members_lock:
            if self._members:
                return
            indexes = list(self._deployment.leases)
            self._deployment.join(indexes)
            self._members.update(indexes)

    def _leave_turns(self, index: int) -> None:
        if self._deployment.staleness.kind == "async" or self.queue.is_closed:
            return
        with self._members_lock:
            if index not in self._members:
                return
            self._members.discard(index)
        try:
            self._deployment.leave(index)
        except ServerError:
            # The server that keeps the turns is lost, and its turns with it.
            return
