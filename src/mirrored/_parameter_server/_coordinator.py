"""ClusterCoordinator: gives closures to workers and sees that all are run.

Owns what users call: scheduling, what each worker has, checkpoints, the status. How closures
get to workers, and what happens when somebody is lost, is in ``_dispatch``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, final

import jax

from mirrored._errors import ArgumentError, CheckpointError, ContextError
from mirrored._parameter_server._dispatch import Dispatch
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
        self._checkpoints = Checkpoints(strategy.checkpoint_directory)
        every = strategy.checkpoint_every if self._restores else None
        self._dispatch = Dispatch(strategy.deployment, self._checkpoints, every)
        self._queue = self._dispatch.queue
        self._deployment.when_closed(self._queue.close)
        if self._restores:
            strategy.when_server_lost(self._dispatch.recovered, self._queue.wait_until_redone)

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
        self._dispatch.before_closure()
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
        self._dispatch.start(index)
        return index

    def remove_worker(self, index: int) -> None:
        """Ends a worker; what it runs is run elsewhere."""
        if index not in self._deployment.leases:
            raise ArgumentError(
                fact=f"remove_worker was given {index!r}.",
                expected=f"one of {sorted(self._deployment.leases)}.",
                hint="add_worker returns the number of a new one.",
            )
        self._dispatch.stop(index)
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
        with self._dispatch.standstill:
            checkpoints = self._checkpoints if directory is None else Checkpoints(directory)
            return self._deployment.once(lambda: self._dispatch.save(checkpoints), "a checkpoint")

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
        with self._dispatch.standstill:
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
        with self._dispatch.standstill:
            checkpoints = Checkpoints(self._state_directory(), keep=4)
            path = self._deployment.once(lambda: self._dispatch.save(checkpoints), "a checkpoint")
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
