"""ClusterCoordinator: gives closures to workers and sees that all are run.

Owns one thread for each worker, what happens when a worker or a server is lost, and when
a checkpoint is taken. The rules of errors are in ``_closure_queue``; who lives is in
``_deployment``.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, final

import jax

from mirrored._errors import ArgumentError, CheckpointError, ContextError, ServerError, WorkerError
from mirrored._parameter_server._closure_queue import Closure, ClosureQueue
from mirrored._parameter_server._engine import ClosureCall, ClosureOutcome
from mirrored._parameter_server._per_worker import (
    PerWorkerDataset,
    PerWorkerValues,
    per_worker_dataset,
)
from mirrored._parameter_server._recovery import Checkpoints, read_manifest
from mirrored._parameter_server._remote_value import RemoteValue
from mirrored._parameter_server._status import ClusterStatus, WorkerStatus
from mirrored._parameter_server._status_door import StatusDoor
from mirrored._parameter_server._strategy import ParameterServerStrategy
from mirrored._values import NestLeaf, is_object_leaf

_LOG = logging.getLogger("mirrored")
_POLL_SECONDS = 0.05
# How long a worker with nothing to do is still waited for by the others.
_GRACE_SECONDS = 0.1
# A closure that takes its worker with it this often is at fault itself.
_MOST_LOSSES = 20
_RESTART_PAUSES = (0.0, 0.5, 2.0, 5.0)


@final
class ClusterCoordinator:
    """Schedules functions on the workers of a ParameterServerStrategy.

    A worker that is lost is replaced, and what it ran is run elsewhere; its updates are
    applied once, whatever happens. The first error of a closure is raised by the next
    ``schedule``, ``join`` or ``done``, and what was still waiting is cancelled.

    A strategy has one coordinator: asked for again, the same one is returned.

    Args:
      strategy: the strategy whose workers run what is scheduled.

    >>> import mirrored
    >>> strategy = mirrored.ParameterServerStrategy(worker_count=2)
    >>> coordinator = mirrored.ClusterCoordinator(strategy)
    >>> results = [coordinator.schedule(lambda x: x * x, args=(n,)) for n in range(3)]
    >>> coordinator.join()
    >>> coordinator.fetch(results)
    [0, 1, 4]
    """

    def __new__(cls, strategy: ParameterServerStrategy) -> ClusterCoordinator:
        if not isinstance(strategy, ParameterServerStrategy):
            raise ArgumentError(
                fact=f"ClusterCoordinator was given {strategy!r}.",
                expected="a ParameterServerStrategy.",
                hint="other strategies need no coordinator: call strategy.run.",
            )
        # Closures are numbered by it, and servers know updates by these numbers.
        return super().__new__(cls) if strategy.coordinator is None else strategy.coordinator

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        if strategy.coordinator is self:
            return
        strategy.coordinator = self
        self._strategy = strategy
        self._deployment = strategy.deployment
        self._restores = strategy.on_server_failure == "restore"
        self._queue = ClosureQueue(keeps_log=self._restores)
        self._checkpoints = Checkpoints(strategy.checkpoint_directory)
        self._every = strategy.checkpoint_every
        # Held while servers are saved or restored.
        self._standstill = threading.RLock()
        self._members: set[int] = set()
        self._members_lock = threading.Lock()
        self._stopping: set[int] = set()
        self._deployment.when_closed(self._queue.close)
        if self._restores:
            strategy.when_server_lost(self._recovered, self._queue.wait_until_redone)
        for index in list(self._deployment.leases):
            self._start_thread(index)

    @property
    def strategy(self) -> ParameterServerStrategy:
        """The strategy."""
        return self._strategy

    # --- scheduling --------------------------------------------------------------

    def schedule(
        self, fn: Callable[..., Any], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> RemoteValue:
        """Runs ``fn`` on some worker, some time; returns at once.

        ``fn`` is Python that may take several steps: each ``strategy.run`` (or call of a
        ``mirrored.function``) in it is compiled, asks the servers for values and sends
        updates. It may run again on another worker if its own is lost.

        Args:
          fn: what to run.
          args: positional arguments; per-worker values become the worker's own.
          kwargs: keyword arguments, likewise.
        """
        if not callable(fn):
            raise ArgumentError(
                fact=f"schedule was given {fn!r}, which cannot be called.",
                expected="a function.",
                hint="write schedule(fn, args=(x,)), not schedule(fn(x)).",
            )
        if not isinstance(args, (tuple, list)):
            raise ArgumentError(
                fact=f"schedule was given args={args!r} ({type(args).__name__}).",
                expected="a tuple or a list of positional arguments.",
                hint="for a single argument write args=(x,).",
            )
        own_args, own_kwargs = jax.tree.map(
            _for_workers, (tuple(args), dict(kwargs or {})), is_leaf=is_object_leaf
        )
        if not self._deployment.leases and self._strategy.is_shared:
            raise ContextError(
                fact="schedule was called on servers that are shared with another strategy.",
                expected="workers to run closures; here the other strategy computes.",
                hint="call strategy.run of that strategy, with rows of table.pull(ids).",
            )
        if self._restores and self._deployment.unsaved:
            self._save_between_closures()
        self._join_turns()
        return self._queue.put(fn, own_args, own_kwargs)

    def join(self, timeout: float | None = None) -> None:
        """Waits until all closures are over; raises the first error there was, once.

        With ``timeout``, a WorkerError after so many seconds says who still runs what.
        """
        self._queue.wait(timeout)

    def done(self) -> bool:
        """Says whether all closures are over; raises the first error there was, once."""
        return self._queue.done()

    def fetch(self, val: Any) -> Any:
        """Replaces every RemoteValue in a nest by its value, waiting for it."""
        return jax.tree.map(
            lambda leaf: leaf.fetch() if isinstance(leaf, RemoteValue) else leaf,
            val,
            is_leaf=is_object_leaf,
        )

    # --- what each worker has ----------------------------------------------------

    def create_per_worker_dataset(self, dataset_fn: Any) -> PerWorkerDataset:
        """Makes a dataset on each worker.

        Args:
          dataset_fn: a function that makes a worker's own dataset, or something to iterate
            over, which every worker reads whole. The function may take an InputContext, whose
            ``input_pipeline_id`` is the worker's number.

        Returns:
          What ``iter`` makes an iterator for each worker of, to be passed to ``schedule``.
        """
        return per_worker_dataset(dataset_fn, self._strategy.worker_count)

    def create_per_worker_value(self, fn: Callable[[], Any]) -> PerWorkerValues:
        """Calls ``fn`` once on each worker that needs it, and keeps the result there."""
        return PerWorkerValues(_WithoutIndex(fn))

    # --- workers come and go -----------------------------------------------------

    def add_worker(self) -> int:
        """Starts one more worker, which takes part at once; returns its number."""
        index = self._deployment.add_worker()
        self._start_thread(index)
        return index

    def remove_worker(self, index: int) -> None:
        """Ends a worker; what it runs is run elsewhere."""
        if index not in self._deployment.leases:
            raise ArgumentError(
                fact=f"remove_worker was given {index!r}.",
                expected=f"one of {sorted(self._deployment.leases)}.",
                hint="add_worker returns the number of a new one.",
            )
        self._stopping.add(index)
        self._deployment.remove_worker(index)

    def status(self) -> ClusterStatus:
        """Says who serves what, who runs what, and how it goes; ``print`` it."""
        running = self._queue.running_on()
        workers = []
        for index in sorted(self._deployment.leases):
            name = f"worker {index}"
            closure, seconds = running.get(name, (None, 0.0))
            alive = self._deployment.engine.worker_is_alive(index)
            done = self._queue.done_on(name)
            workers.append(WorkerStatus(index, alive, closure, seconds, done))
        return ClusterStatus(
            staleness=str(self._strategy.staleness),
            waiting=self._queue.waiting_count(),
            running=len(running),
            done=self._queue.done_count(),
            workers=workers,
            servers=self._deployment.status(),
        )

    def serve_status(self, port: int = 0) -> str:
        """Lets ``mirrored status ADDRESS`` on this machine see the status; returns the address.

        Args:
          port: where to listen, on loopback; a free one is chosen if it is 0.
        """
        door = StatusDoor(self.status, port)
        self._deployment.when_closed(door.close)
        return door.address

    # --- checkpoints -------------------------------------------------------------

    def save(self, directory: str | os.PathLike[str] | None = None) -> str:
        """Saves what is on the servers, between two closures; returns the folder.

        Args:
          directory: where the folder is made; the strategy's if left out.
        """
        with self._standstill:
            checkpoints = self._checkpoints if directory is None else Checkpoints(directory)
            return self._deployment.once(lambda: self._save(checkpoints), "a checkpoint")

    def restore(self, directory: str | os.PathLike[str] | None = None) -> bool:
        """Brings the servers to the state of the latest checkpoint in a directory.

        The number of servers and the partitioner may be others than when it was saved;
        variables are found by their names, optimizers by the order they were made in.

        Returns:
          False if there is no checkpoint.
        """
        checkpoints = self._checkpoints if directory is None else Checkpoints(directory)

        def act() -> bool:
            latest = checkpoints.latest()
            if latest is not None:
                self._restore(*latest)
            return latest is not None

        return self._brought_back(act)

    def _brought_back(self, action: Callable[[], bool]) -> bool:
        """Acts, once for all processes that share the servers; says whether they changed."""
        sharing = self._deployment.sharing
        with self._standstill:
            if sharing is not None:
                sharing.before_write()
            found = self._deployment.once(action, "bringing a checkpoint back")
            if found and sharing is not None and not sharing.is_first:
                self._deployment.follow_epoch()
            return found

    def get_state(self) -> dict[str, str]:
        """Saves what is on the servers; returns where, for ``mirrored.checkpoint``.

        So ``Checkpoint(directory, {"servers": coordinator, "epoch": 0})`` saves and restores
        variables, tables and optimizers on servers together with all else of a program. The
        strategy's ``checkpoint_directory`` has the newest four.
        """
        if self._strategy.checkpoint_directory is None:
            raise CheckpointError(
                fact="the servers are to be saved, and the strategy has no checkpoint_directory.",
                expected="a folder that all servers see, now and when the program starts again.",
                hint="write ParameterServerStrategy(..., checkpoint_directory=...).",
            )
        with self._standstill:
            checkpoints = Checkpoints(self._state_directory(), keep=4)
            path = self._deployment.once(lambda: self._save(checkpoints), "a checkpoint")
        return {"checkpoint": os.path.basename(path)}

    def set_state(self, state: Mapping[str, str]) -> None:
        """Brings the servers to what ``get_state`` saved."""
        path = os.path.join(self._state_directory(), state["checkpoint"])

        def act() -> bool:
            self._restore(path, read_manifest(path))
            return True

        self._brought_back(act)

    def _state_directory(self) -> str:
        return os.path.join(self._strategy.checkpoint_directory or "", "of_programs")

    def _restore(self, path: str, manifest: Any) -> None:
        if self._queue.is_busy:
            raise CheckpointError(
                fact="restore was called while closures wait or run.",
                expected="a coordinator that has nothing to do.",
                hint="join first.",
            )
        self._queue.next_number = max(self._queue.next_number, manifest["next_closure"])
        self._deployment.new_epoch()
        self._deployment.restore(path, manifest)
        if self._restores:
            self._deployment.unsaved = True

    def _save_between_closures(self) -> None:
        with self._standstill:
            if self._deployment.unsaved:
                self._save(self._checkpoints)

    def _save(self, checkpoints: Checkpoints) -> str:
        self._queue.pause()
        try:
            timeout = self._deployment.links.timeout
            if not self._queue.wait_until_none_runs(timeout):
                raise CheckpointError(
                    fact=f"closures still run {timeout} s after no more were handed out.",
                    expected="closures short enough to save between them.",
                    hint="take fewer steps in each, or give the strategy a longer timeout=.",
                )
            path = checkpoints.save(self._deployment, {"next_closure": self._queue.next_number})
            if checkpoints is self._checkpoints:
                self._queue.forget_log()
            return path
        finally:
            self._queue.resume()
            if self._queue.is_busy:
                self._join_turns()

    # --- one thread a worker -----------------------------------------------------

    def _start_thread(self, index: int) -> None:
        threading.Thread(
            target=self._serve, args=(index,), name=f"mirrored-dispatch-{index}", daemon=True
        ).start()

    def _serve(self, index: int) -> None:
        idle_since = time.monotonic()
        while index not in self._stopping and not self._queue.is_closed:
            closure = self._queue.take(f"worker {index}", _POLL_SECONDS)
            if closure is None:
                idle = time.monotonic() - idle_since
                if idle > _GRACE_SECONDS or self._queue.is_paused:
                    self._leave_turns(index)
                continue
            try:
                self._run(index, closure)
            except Exception as error:  # noqa: BLE001 (told to who waits for the closure)
                if not self._queue.is_closed:
                    self._queue.fail(closure, error)
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
            self._queue.floor,
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
            self._queue.give_back(closure)
        elif isinstance(error, ServerError) and self._deployment.dead_servers():
            self._server_lost(closure)
        elif error is not None:
            self._queue.fail(closure, error)
        else:
            self._queue.finish(closure, outcome.value)
            if self._restores and self._queue.over_count >= self._every:
                # Others, whose closures have to end first, must not wait for this worker.
                self._leave_turns(index)
                self._save_in_thread()

    def _save_in_thread(self) -> None:
        with self._standstill:
            if self._queue.over_count < self._every or self._queue.is_closed:
                return
            try:
                self._save(self._checkpoints)
            except ServerError:
                # One died while it was asked to save.
                self._recover()
            except (CheckpointError, OSError) as error:
                self._queue.stop_with(error, "a checkpoint")

    # --- losses ------------------------------------------------------------------

    def _worker_lost(self, index: int, closure: Closure, error: WorkerError) -> None:
        _LOG.warning("%s %s runs again elsewhere.", error.fact, closure.name)
        # First refuse what it may still send; then let another run the closure.
        self._deployment.give_up_worker(index)
        with self._members_lock:
            self._members.discard(index)
        closure.losses += 1
        if closure.losses >= _MOST_LOSSES:
            self._queue.fail(
                closure,
                WorkerError(
                    fact=f"{closure.name} lost its worker {closure.losses} times; the last said: "
                    f"{error.fact}",
                    expected="a closure that workers survive.",
                    hint="look at the worker's log: it may run out of memory.",
                ),
            )
        else:
            self._queue.give_back(closure)
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
        if not self._restores:
            self._queue.fail(closure, self._loss())
            return
        self._queue.give_back(closure)
        self._recovered()

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

    def _recovered(self) -> bool:
        """Brings lost servers back; says whether all are there."""
        with self._standstill:
            if self._deployment.dead_servers():
                self._recover()
            return not self._deployment.dead_servers()

    def _recover(self) -> None:
        """Brings all servers to the latest checkpoint, and runs again what was done since."""
        self._queue.pause()
        try:
            for _ in range(_MOST_LOSSES):
                if self._queue.is_closed:
                    return
                loss = self._loss()
                latest = self._checkpoints.latest()
                if latest is None or self._deployment.unsaved:
                    self._queue.stop_with(loss, loss.fact)
                    return
                path, manifest = latest
                self._deployment.new_epoch()
                try:
                    self._deployment.restore(path, read_manifest(path) and manifest)
                except ServerError:
                    continue
                self._queue.run_again()
                return
        finally:
            self._queue.resume()

    # --- turns -------------------------------------------------------------------

    def _join_turns(self) -> None:
        """Before work begins: all workers take turns, from the same step on."""
        if self._strategy.staleness.kind == "async":
            return
        with self._members_lock:
            if self._members:
                return
            indexes = list(self._deployment.leases)
            self._deployment.join(indexes)
            self._members.update(indexes)

    def _leave_turns(self, index: int) -> None:
        if self._strategy.staleness.kind == "async" or self._queue.is_closed:
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


@final
class _WithoutIndex:
    """Calls a function that does not ask which worker it is on; travels with closures."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function

    def __call__(self, index: int) -> Any:
        return self._function()


def _for_workers(argument: Any) -> Any:
    if isinstance(argument, RemoteValue):
        raise ArgumentError(
            fact=f"schedule was given {argument!r} as an argument.",
            expected="values that are there.",
            hint="fetch it first, or do both in one closure.",
        )
    if isinstance(argument, NestLeaf):
        return getattr(argument, "resource", argument)
    return argument
