"""ParameterServerStrategy: what users make, and what is made in its scope.

Owns the arguments, and the coordinator's home: variables made here go to the servers. How
closures get to workers is in ``_coordinator``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, final

import jax
import numpy as np

from mirrored import _compat, _context
from mirrored._errors import ArgumentError, ServerError
from mirrored._parameter_server._deployment import Deployment
from mirrored._parameter_server._engine import Engine
from mirrored._parameter_server._engines import introduce, make_engine, make_shared_engine
from mirrored._parameter_server._exchange import Exchange
from mirrored._parameter_server._participant import Participant
from mirrored._parameter_server._rules import OptaxRule, Rule
from mirrored._parameter_server._server_home import ServerHome
from mirrored._parameter_server._server_strategy import ServerStrategy, worker_placement
from mirrored._parameter_server._sharing import sharing_with
from mirrored._parameter_server._staleness import Staleness, parse_staleness
from mirrored._placement import Placement
from mirrored._strategy import Strategy

# So often servers may be lost while something is read.
_MOST_RECOVERIES = 20


@final
class ParameterServerStrategy(ServerStrategy):
    """Variables on servers; workers that ask for them, compute, and send gradients back.

    For models whose embedding tables are larger than a device, and for machines that come
    and go. Where all devices are alike and stay, ``MultiWorkerMirroredStrategy`` trains
    the same model faster, and exactly.

    Without Ray everything runs on threads of this process: for notebooks, tests and
    small models.

    Args:
      cluster: how many workers and servers there are: a dictionary such as
        ``{"worker": 2, "ps": 1}``, one in the form of TF_CONFIG (whose addresses are only
        counted: Ray places processes), or None to say it with the next two.
      variable_partitioner: cuts variables into shards: a ``FixedShardsPartitioner``,
        ``MinSizePartitioner``, ``MaxSizePartitioner``, or a function of shape and dtype.
      staleness: "async": every gradient is applied when it comes; ``mirrored.bounded(k)``:
        no worker runs more than k steps ahead of the slowest; "sync": each step is made
        of one gradient of every worker.
      backup_workers: under "sync", how many gradients of a step are not waited for.
      on_server_failure: "raise" a ServerError that names the server, or "restore" all
        servers from the latest checkpoint and run again what was done since.
      worker_count: how many workers, without ``cluster``.
      server_count: how many servers, without ``cluster``.
      engine: "threads" or "ray"; threads if left out and no address is given.
      address: of a Ray cluster to use.
      engine_options: further arguments of the engine.
      checkpoint_directory: where checkpoints for "restore" go; a folder that all servers
        see. A temporary one if left out, which only servers of this machine see.
      checkpoint_every: after how many closures to save one.
      timeout: how many seconds to wait for an answer before it counts as a failure.
      shared_with: the strategy of a dense part that is trained in lockstep, if the servers
        keep tables for it (see ``EmbeddingTable.pull``). There are no workers then; of
        several processes the first starts the servers, the others find them through Ray,
        and what all of them write is written once.

    >>> import optax
    >>> import mirrored
    >>> strategy = mirrored.ParameterServerStrategy(worker_count=2, server_count=1)
    >>> coordinator = mirrored.ClusterCoordinator(strategy)
    >>> with strategy.scope():
    ...     total = mirrored.Variable(0.0, name="total")
    >>> def closure(x):
    ...     total.assign_add(x)
    >>> for _ in range(5):
    ...     _ = coordinator.schedule(closure, args=(1.0,))
    >>> coordinator.join()
    >>> float(total)
    5.0
    """

    def __init__(
        self,
        cluster: Mapping[str, Any] | None = None,
        variable_partitioner: Any = None,
        *,
        staleness: str | Staleness = "async",
        backup_workers: int = 0,
        on_server_failure: str = "raise",
        worker_count: int | None = None,
        server_count: int | None = None,
        engine: str | None = None,
        address: str | None = None,
        engine_options: Mapping[str, Any] | None = None,
        checkpoint_directory: str | None = None,
        checkpoint_every: int = 1000,
        timeout: float = 60.0,
        shared_with: Strategy | None = None,
    ) -> None:
        super().__init__()
        workers, servers = _counts(cluster, worker_count, server_count, shared_with is not None)
        engine = engine or ("threads" if address is None else "ray")
        sharing = sharing_with(shared_with, engine, workers)
        if on_server_failure not in ("raise", "restore"):
            raise ArgumentError(
                fact=f"ParameterServerStrategy was given on_server_failure={on_server_failure!r}.",
                expected='"raise" or "restore".',
                hint="leave it out to have the failure raised.",
            )
        if sharing is not None and on_server_failure != "raise":
            raise ArgumentError(
                fact='on_server_failure="restore" was given for servers shared by processes in '
                "lockstep.",
                expected='"raise": a step that some processes have done cannot be done again by '
                "others.",
                hint="restart the program from its checkpoint, with mirrored launch say.",
            )
        parsed = parse_staleness(staleness, backup_workers)
        self._placement = worker_placement(jax.local_devices()[0], type(self).__name__)
        self.staleness = parsed
        self.on_server_failure = on_server_failure
        self.checkpoint_directory = checkpoint_directory
        self.checkpoint_every = checkpoint_every
        options = engine_options or {}
        self._deployment = Deployment(
            make_engine(engine, address, options, self)
            if sharing is None
            else make_shared_engine(sharing, address, options, servers),
            worker_count=workers,
            server_count=servers,
            staleness=parsed,
            timeout=timeout,
            partitioner=variable_partitioner,
            sharing=sharing,
        )
        if sharing is not None:
            introduce(sharing, self._deployment.engine, address)
        # Whether it has no workers, because another strategy computes.
        self.is_shared = shared_with is not None
        self._home = CoordinatorHome(self, self._deployment)
        # The one ClusterCoordinator, once there is one.
        self.coordinator: Any = None
        # Processes end with the strategy; threads only stop waiting.
        self._finalizer = weakref.finalize(self, Deployment.close, self._deployment)

    @property
    def placement(self) -> Placement:
        return self._placement

    @property
    def home(self) -> ServerHome:
        return self._home

    @property
    def deployment(self) -> Deployment:
        """The servers and workers; for the library's own modules."""
        return self._deployment

    @property
    def engine(self) -> Engine:
        """Where they live; for the library's own modules and tests of failures."""
        return self._deployment.engine

    @property
    def worker_count(self) -> int:
        """How many workers there are now."""
        return len(self._deployment.leases)

    @property
    def server_count(self) -> int:
        """How many servers there are."""
        return self._deployment.server_count

    def when_server_lost(
        self, recover: Callable[[], bool], wait_until_redone: Callable[[], None]
    ) -> None:
        """Sets who brings lost servers back; for the library's own modules."""
        self._home.recover = recover
        self._home.wait_until_redone = wait_until_redone

    def close(self) -> None:
        """Ends all workers and servers."""
        self._finalizer()

    def __enter__(self) -> ParameterServerStrategy:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@final
class CoordinatorHome(ServerHome):
    """Variables on servers, where they are made."""

    def __init__(self, strategy: ParameterServerStrategy, deployment: Deployment) -> None:
        super().__init__(strategy)
        self.strategy = strategy
        self._deployment = deployment
        exchange = Exchange(deployment.links, None, deployment.staleness, deployment.sharing)
        device = strategy.placement.devices[0]
        self._own = Participant(
            exchange, strategy.steps, device, sent=self._changed, sharing=deployment.sharing
        )
        self._names: set[str] = set()
        # Called when a server is lost; says whether it is there again.
        self.recover: Callable[[], bool] | None = None
        # Waits for what servers have forgotten and closures do again.
        self.wait_until_redone: Callable[[], None] = _nothing

    @property
    def participant(self) -> Participant:
        return _context.current().participant or self._own

    def adopt(self, variable: Any, value: Any) -> None:
        self._refuse_worker(f"variable {variable.name!r}")
        if _compat.is_typed_key(value):
            raise ArgumentError(
                fact=f"variable {variable.name!r} is a random key.",
                expected="numbers: they travel between processes.",
                hint="keep jax.random.key_data(key), and wrap it where it is used.",
            )
        variable.name = self._unique(variable.name)
        spec = self._deployment.catalog.add(
            variable.name, value.shape, value.dtype, trainable=variable.trainable
        )
        self._deployment.create(spec, np.asarray(value))
        self.know(variable, spec)

    def adopt_table(self, table: Any, make: Callable[[int, int], Any]) -> None:
        self._refuse_worker("a table")
        table.name = self._unique(table.name)
        spec = self._deployment.catalog.add(table.name, table.shape, table.dtype, is_table=True)
        self._deployment.create_table(spec, make)
        self.know(table, spec)

    def adopt_optimizer(self, optimizer: Any, tx: Any) -> None:
        self._refuse_worker(f"optimizer {optimizer.name!r}")
        # The optimizer of another library is given as a rule.
        rule = tx if isinstance(tx, Rule) else OptaxRule(tx, optimizer.name)
        self.know_optimizer(optimizer, self._deployment.add_optimizer(optimizer.name, rule))

    def read(self, variable: Any) -> Any:
        return self.again(lambda: super(CoordinatorHome, self).read(variable))

    def write(self, variable: Any, action: str, value: Any) -> None:
        # A write that failed half way is undone with all else, so it can be done again.
        self.again(lambda: super(CoordinatorHome, self).write(variable, action, value))

    def again(self, action: Callable[[], Any]) -> Any:
        """Acts; once more where servers were lost and came back.

        Whoever waited for closures must not see a time before them: what they did and
        servers forgot is done again first.
        """
        if _context.current().participant is not None or self.recover is None:
            return action()
        for _ in range(_MOST_RECOVERIES):
            self.wait_until_redone()
            try:
                return action()
            except ServerError:
                if not self.recover():
                    raise
        return action()

    def _changed(self) -> None:
        """The program itself changed something, which no closure would do again."""
        self._deployment.unsaved = True

    def _unique(self, name: str) -> str:
        """Names are how checkpoints find variables."""
        chosen, number = name, 1
        while chosen in self._names:
            number += 1
            chosen = f"{name}_{number}"
        self._names.add(chosen)
        return chosen

    def _refuse_worker(self, what: str) -> None:
        if _context.current().participant is not None:
            raise self._not_here(what)


def _nothing() -> None:
    """Without a coordinator there is nothing to wait for."""


def _counts(
    cluster: Mapping[str, Any] | None,
    worker_count: int | None,
    server_count: int | None,
    shared: bool,
) -> tuple[int, int]:
    """How many workers and servers were asked for."""
    if cluster is not None and (worker_count is not None or server_count is not None):
        raise ArgumentError(
            fact="ParameterServerStrategy was given cluster and worker_count or server_count.",
            expected="one of the two.",
            hint='write cluster={"worker": 2, "ps": 1}, or worker_count=2, server_count=1.',
        )
    workers, servers = worker_count, server_count
    if cluster is not None:
        jobs = cluster.get("cluster", cluster)
        try:
            servers = _count(jobs["ps"])
            workers = _count(jobs.get("worker", 0) if shared else jobs["worker"])
        except (KeyError, TypeError) as error:
            raise ArgumentError(
                fact=f"ParameterServerStrategy was given cluster={cluster!r}.",
                expected='numbers of, or lists of addresses for, "worker" and "ps".',
                hint='write cluster={"worker": 2, "ps": 1}.',
            ) from error
    if workers is None:
        workers = 0 if shared else 2
    servers = 1 if servers is None else servers
    if workers < (0 if shared else 1) or servers < 1:
        raise ArgumentError(
            fact=f"ParameterServerStrategy was given {workers} workers and {servers} servers.",
            expected="at least one of each.",
            hint="one server is enough for most models.",
        )
    return workers, servers


def _count(job: Any) -> int:
    return job if isinstance(job, int) else len(job)
