"""Who am I: how a process learns which workers there are and which one it is.

Owns the Cluster and where it is read from: an explicit description, ``mirrored
launch``, TF_CONFIG, or what JAX detects (Slurm, Open MPI, Kubernetes, Cloud TPU).
It opens no connection.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, final

from mirrored import _compat
from mirrored._errors import ClusterError

# Set by `mirrored launch` for each process it starts.
COORDINATOR = "MIRRORED_COORDINATOR"
PROCESS_COUNT = "MIRRORED_PROCESS_COUNT"
PROCESS_ID = "MIRRORED_PROCESS_ID"


@final
@dataclasses.dataclass(frozen=True)
class Cluster:
    """The workers of a run, seen from one of them.

    Args:
      coordinator: "host:port" of worker 0, where the workers meet.
      process_count: how many workers there are.
      process_id: which of them this process is, from 0.
      source: where this was read from, for messages.
      local_device_ids: which accelerators of the machine this worker uses; None for all.

    >>> import mirrored
    >>> mirrored.Cluster("10.0.0.1:1234", process_count=2, process_id=0).process_count
    2
    """

    coordinator: str
    process_count: int
    process_id: int
    source: str = "the program"
    local_device_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _check_address(self.coordinator, self.source)
        if self.process_count < 1 or not 0 <= self.process_id < self.process_count:
            raise ClusterError(
                fact=f"{self.source} names process {self.process_id} of {self.process_count}.",
                expected=f"a process id from 0 to {max(self.process_count - 1, 0)}.",
                hint="number the workers from 0; their count includes worker 0.",
            )

    @classmethod
    def of_workers(cls, workers: Sequence[str], index: int, source: str = "the program") -> Cluster:
        """Describes a cluster by the addresses of all workers, as TF_CONFIG does.

        >>> import mirrored
        >>> mirrored.Cluster.of_workers(["10.0.0.1:1234", "10.0.0.2:1234"], 1).process_id
        1
        """
        if not workers:
            raise ClusterError(
                fact=f"{source} lists no workers.",
                expected='addresses such as ["10.0.0.1:1234", "10.0.0.2:1234"].',
                hint="list every worker, this one too.",
            )
        twice = sorted({worker for worker in workers if list(workers).count(worker) > 1})
        if twice:
            raise ClusterError(
                fact=f"{source} lists {', '.join(twice)} more than once.",
                expected="one address for each worker.",
                hint="give workers on one host different ports.",
            )
        return cls(workers[0], len(workers), index, source)


def resolve_cluster(
    cluster: Cluster | Mapping[str, Any] | None,
    timeout: float,
    environment: Mapping[str, str] | None = None,
) -> Cluster | None:
    """Finds the cluster this process belongs to; None where there is no sign of one.

    Args:
      cluster: a Cluster, a dictionary in the form of TF_CONFIG, or None to look around.
      timeout: how long JAX's own detection may take, in seconds.
      environment: the environment variables; ``os.environ`` if left out.
    """
    if isinstance(cluster, Cluster):
        return cluster
    if isinstance(cluster, Mapping):
        return _from_tf_config(cluster, "cluster=")
    if cluster is not None:
        raise ClusterError(
            fact=f"cluster={cluster!r} ({type(cluster).__name__}) does not describe a cluster.",
            expected="a mirrored.Cluster, a dictionary in the form of TF_CONFIG, or None.",
            hint='write for example mirrored.Cluster("10.0.0.1:1234", process_count=2, '
            "process_id=0).",
        )
    known = os.environ if environment is None else environment
    if COORDINATOR in known:
        return Cluster(
            known[COORDINATOR],
            _number(known, PROCESS_COUNT),
            _number(known, PROCESS_ID),
            "mirrored launch",
        )
    if known.get("TF_CONFIG"):
        return _parsed_tf_config(known["TF_CONFIG"])
    try:
        detected = _compat.detect_cluster(timeout)
    except RuntimeError as error:
        raise ClusterError(
            fact=f"JAX found signs of a cluster, and could not learn who belongs to it: {error}",
            expected="a scheduler that tells, or a description.",
            hint=f"see what it says; or set {COORDINATOR}, {PROCESS_COUNT} and {PROCESS_ID}, or "
            "pass cluster=mirrored.Cluster(...).",
        ) from error
    if detected is None:
        _refuse_to_be_alone(known)
        return None
    who, address, count, number, local = detected
    return Cluster(address, count, number, who, local)


def _refuse_to_be_alone(environment: Mapping[str, str]) -> None:
    """Raises where one pod of many would train by itself, and all of them the same."""
    index = environment.get("JOB_COMPLETION_INDEX")
    if index is None or "KUBERNETES_SERVICE_HOST" not in environment:
        return
    raise ClusterError(
        fact=f"this is pod {index} of an indexed Kubernetes Job, and JAX cannot learn which "
        "others there are: the package kubernetes is not installed.",
        expected="a description of the cluster, or the package with which JAX asks for it.",
        hint=f"pip install 'jax[k8s]', or set {COORDINATOR}, {PROCESS_COUNT} and {PROCESS_ID} "
        "(examples/cluster has a JobSet); a pod that is to train alone uses MirroredStrategy.",
    )


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isdigit():
        raise ClusterError(
            fact=f"{COORDINATOR} is set, and {name} is {text!r}.",
            expected=f"{COORDINATOR}, {PROCESS_COUNT} and {PROCESS_ID} together.",
            hint="start the program with `mirrored launch`, or unset all three.",
        )
    return int(text)


def _parsed_tf_config(text: str) -> Cluster | None:
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ClusterError(
            fact=f"TF_CONFIG is not JSON ({error}): {text[:200]}",
            expected='for example {"cluster": {"worker": ["10.0.0.1:1234", "10.0.0.2:1234"]}, '
            '"task": {"type": "worker", "index": 0}}.',
            hint="quote it in the shell with single quotes.",
        ) from error
    return _from_tf_config(config, "TF_CONFIG")


def _from_tf_config(config: Any, source: str) -> Cluster | None:
    """Reads tf.distribute's description: chiefs come before workers."""
    jobs = config.get("cluster", {}) if isinstance(config, Mapping) else None
    if not isinstance(jobs, Mapping):
        raise ClusterError(
            fact=f"{source} has no cluster: {config!r}.",
            expected='{"cluster": {"worker": [...]}, "task": {"type": ..., "index": ...}}.',
            hint="see tf.distribute's TF_CONFIG; the same form is read here.",
        )
    if not jobs:
        return None
    if "ps" in jobs:
        raise ClusterError(
            fact=f"{source} lists parameter servers: {jobs['ps']}.",
            expected="chief and workers only, which train in lockstep.",
            hint="use mirrored.ParameterServerStrategy, or leave the job 'ps' out.",
        )
    task = config.get("task") or {}
    kind, index = task.get("type"), task.get("index")
    members = [
        (job, number, address)
        for job in ("chief", "master", "worker")
        for number, address in enumerate(_addresses(jobs.get(job, ()), source))
    ]
    for position, (job, number, _) in enumerate(members):
        if (job, number) == (kind, index):
            return Cluster.of_workers([address for *_, address in members], position, source)
    shown = ", ".join(f"{job} {number}" for job, number, _ in members) or "nobody"
    hint = 'set "task" to this process, for example {"type": "worker", "index": 0}.'
    if kind == "evaluator":
        hint = "an evaluator is no part of the cluster: run it with a MirroredStrategy."
    raise ClusterError(
        fact=f"{source} says this process is {kind} {index}, which its cluster does not list.",
        expected=f"one of: {shown}.",
        hint=hint,
    )


def _addresses(listed: Any, source: str) -> list[str]:
    if isinstance(listed, str) or not all(isinstance(address, str) for address in listed):
        raise ClusterError(
            fact=f"{source} lists {listed!r} where addresses belong.",
            expected='a list such as ["10.0.0.1:1234", "10.0.0.2:1234"].',
            hint="put the addresses in a list of strings.",
        )
    for address in listed:
        _check_address(address, source)
    return list(listed)


def _check_address(address: Any, source: str) -> None:
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ClusterError(
            fact=f"{source} names the address {address!r}.",
            expected='"host:port", for example "10.0.0.1:1234".',
            hint="add the port; any free one of worker 0's machine will do.",
        )
