"""The workers of a run, once they have met: waiting for and hearing from each other.

Owns the connection of this process to the others (JAX's coordination service),
barriers that name the absent, and worker 0's word on initial values. How a failure
is noticed and told is in ``_failure``.
"""

from __future__ import annotations

import collections
import itertools
import json
import os
import re
from collections.abc import Sequence
from typing import Any, final

import jax
import numpy as np
from jax.experimental import multihost_utils

from mirrored import _compat
from mirrored._cluster import PROCESS_ID, Cluster
from mirrored._errors import ArgumentError, ContextError, WorkerError
from mirrored._processors import bound_collectives, share_processors
from mirrored._report import RUN_DIRECTORY, Progress
from mirrored._rollcall import Member, gather

# JAX's own word that a worker is gone; below the 15 s in which its peers must end.
_HEARTBEAT_SECONDS = 10
# Values up to this size travel through the coordination service, without a compiled
# collective for each shape.
_INLINE_BYTES = 1 << 20
_LARGEST_PIECE_WORDS = 1 << 23
# Keys of values that everyone has read are dropped after this many broadcasts.
_BROADCASTS_KEPT = 256


@final
class Workers:
    """The place of this process among the workers of its run."""

    def __init__(self, cluster: Cluster, members: tuple[Member, ...], timeout: float) -> None:
        self.cluster = cluster
        self.members = members
        self.timeout = timeout
        self.client = _compat.coordination_client()
        self.process_id = cluster.process_id
        self.process_count = cluster.process_count
        self._broadcasts = itertools.count()
        self._turns = collections.Counter[str]()
        self._kept: list[str] = []

    def name(self, process_id: int) -> str:
        """Names a worker with its host and process."""
        return str(self.members[process_id])

    def barrier(self, name: str, timeout: float | None = None) -> None:
        """Waits until all workers call this with the same name.

        Raises:
          WorkerError: after ``timeout`` seconds, naming those who did not come.
        """
        limit = self.timeout if timeout is None else timeout
        try:
            self.client.wait_at_barrier(f"mirrored/{self.turn(name)}", int(limit * 1000))
        except jax.errors.JaxRuntimeError as error:
            raise self._waited_in_vain(name, str(error), limit) from error

    def _waited_in_vain(self, name: str, said: str, limit: float) -> WorkerError:
        """Names the absent; or says that the connection itself broke, and how."""
        _, found, rest = said.partition("timed out task names:")
        absent = [int(line) for line in re.findall(r"^\s*(\d+)\s*$", rest, re.MULTILINE)]
        if found and absent:
            who = " and ".join(self.name(number) for number in absent)
            fact = f"{who} did not come to {name!r} within {limit:g} s."
        else:
            # JAX names the one whose death broke it by number.
            dead = sorted(set(map(int, re.findall(r"\bTask:? (\d+)", said))))
            who = " and ".join(self.name(number) for number in dead) or "the other workers"
            fact = f"waiting for {who} at {name!r} failed: {said.splitlines()[0]}"
        return WorkerError(
            fact=fact,
            expected=f"all {self.process_count} workers.",
            hint="see what the absent worker printed; every worker must run the same program, "
            "and call this on every worker or on none.",
        )

    def turn(self, name: str) -> str:
        """Numbers what all workers do under one name: the first time, the second, ..."""
        self._turns[name] += 1
        return f"{name}/{self._turns[name]}"

    def tell(self, key: str, value: str) -> None:
        """Leaves a word for the others."""
        self.client.key_value_set(f"mirrored/{key}", value, allow_overwrite=True)

    def hear(self, key: str, from_worker: int, timeout: float | None = None) -> str:
        """Waits for the word that ``from_worker`` leaves under ``key``."""
        return self._get(key, from_worker, timeout).decode()

    def _get(self, key: str, from_worker: int, timeout: float | None) -> bytes:
        limit = self.timeout if timeout is None else timeout
        try:
            return self.client.blocking_key_value_get_bytes(
                f"mirrored/{key}", max(1, int(limit * 1000))
            )
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise self._waited_in_vain(key, str(error), limit) from error
            raise WorkerError(
                fact=f"{self.name(from_worker)} did not send {key!r} within {limit:g} s.",
                expected="every worker at the same place of the same program.",
                hint="see what that worker printed; variables must be created, and restored, on "
                "every worker in the same order.",
            ) from error

    def claim(self, key: str) -> bool:
        """Says whether this worker is the first to claim ``key``."""
        return self.client.key_value_increment(f"mirrored/claim/{key}", 1) == 1

    def heard(self, key: str) -> str | None:
        """Returns the word left under ``key``; None if there is none yet."""
        try:
            return self.client.key_value_try_get(f"mirrored/{key}")
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                return None
            raise

    def all_under(self, key: str) -> list[tuple[str, str]]:
        """Returns what was left under ``key`` and a name of its own, as (key, word)."""
        return self.client.key_value_dir_get(f"mirrored/{key}/")

    def broadcast(self, value: Any, what: str) -> np.ndarray:
        """Returns worker 0's ``value``, bit for bit, on every worker.

        All workers must call it, with equal shapes and dtypes; ``what`` is for messages.
        """
        array = np.asarray(value)
        number = next(self._broadcasts)
        key = f"value/{number}"
        header = json.dumps([list(array.shape), str(array.dtype), what]).encode()
        small = array.nbytes <= _INLINE_BYTES
        if self.process_id == 0:
            body = array.tobytes() if small else b""
            self.client.key_value_set_bytes(f"mirrored/{key}", header + b"\n" + body)
        else:
            theirs, _, body = self._get(key, 0, None).partition(b"\n")
            if theirs != header:
                raise self._unlike(json.loads(theirs), array, what)
        self._kept.append(key)
        if len(self._kept) >= _BROADCASTS_KEPT:
            self._forget()
        if self.process_id == 0 and small:
            return array
        if not small:
            return _broadcast_pieces(array)
        return np.frombuffer(body, array.dtype).reshape(array.shape)

    def _unlike(self, theirs: list[Any], array: np.ndarray, what: str) -> ArgumentError:
        shape, dtype, whose = theirs
        return ArgumentError(
            fact=f"worker {self.process_id} made {what} of {array.dtype}{list(array.shape)} where "
            f"worker 0 made {whose} of {dtype}{shape}.",
            expected="the same values made in the same order on every worker.",
            hint="build the model the same way everywhere, whatever the worker.",
        )

    def _forget(self) -> None:
        self.barrier("values read")
        if self.process_id == 0:
            for key in self._kept:
                self.client.key_value_delete(f"mirrored/{key}")
        self._kept.clear()


def _broadcast_pieces(array: np.ndarray) -> np.ndarray:
    """Broadcasts by collectives, as integers so that every bit arrives, -0.0's sign too."""
    content = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
    words = np.zeros(-(-content.size // 4), np.uint32)
    words.view(np.uint8)[: content.size] = content
    pieces = []
    start = 0
    while start < words.size:
        # Powers of two: few programs, whatever the sizes.
        size = min(1 << (words.size - start - 1).bit_length(), _LARGEST_PIECE_WORDS)
        piece = np.zeros(size, np.uint32)
        part = words[start : start + size]
        piece[: part.size] = part
        pieces.append(np.asarray(multihost_utils.broadcast_one_to_all(piece))[: part.size])
        start += size
    received = np.concatenate(pieces).view(np.uint8)[: content.size]
    return received.view(array.dtype).reshape(array.shape)


# --- this process's place, of which there is one, as there is one jax.distributed ------------

_connected: Workers | None = None


def connected() -> Workers | None:
    """Returns the workers this process has met; None in a single process."""
    return _connected


def connect(cluster: Cluster, timeout: float) -> Workers:
    """Meets the other workers and starts JAX's distributed runtime among them."""
    global _connected
    if _connected is not None:
        _require_same(_connected.cluster, cluster)
        return _connected
    if _compat.coordination_client() is not None:
        members = _introduce(cluster)
        _share_processors(cluster, members)
        _connected = Workers(cluster, members, timeout)
        return _connected
    if _compat.backend_has_started():
        raise ContextError(
            fact=f"JAX had already started with {jax.local_device_count()} device(s) when this "
            f"process was to join {cluster.process_count} workers (the cluster is from "
            f"{cluster.source}).",
            expected="the strategy to be made before anything asks JAX for devices or makes an "
            "array.",
            hint="move strategy = mirrored.MultiWorkerMirroredStrategy() to the top of the "
            "program.",
        )
    members = gather(cluster, timeout)
    bound_collectives()
    _share_processors(cluster, members)
    # JAX's own would swallow SIGTERM, see _preemption.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        cluster.coordinator,
        cluster.process_count,
        cluster.process_id,
        local_device_ids=cluster.local_device_ids,
        cluster_detection_method="deactivate",
        initialization_timeout=max(10, int(timeout)),
        heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
    )
    _connected = Workers(cluster, members, timeout)
    return _connected


def is_connected_by_user() -> bool:
    """Says whether the program called jax.distributed.initialize itself."""
    return _connected is None and _compat.coordination_client() is not None


def cluster_of_user() -> Cluster:
    """Describes the cluster that the program's own jax.distributed.initialize made."""
    address, count, number = _compat.distributed_runtime()
    return Cluster(address, count, number, "jax.distributed.initialize")


def _require_same(before: Cluster, now: Cluster) -> None:
    if (before.process_count, before.process_id) != (now.process_count, now.process_id):
        raise ContextError(
            fact=f"this process is worker {before.process_id} of {before.process_count}, and was "
            f"now told to be worker {now.process_id} of {now.process_count}.",
            expected="one cluster for a process's whole life.",
            hint="make one MultiWorkerMirroredStrategy and pass it around.",
        )


def _introduce(cluster: Cluster) -> tuple[Member, ...]:
    """Learns the hosts where the user called jax.distributed.initialize."""
    me = Member(cluster.process_id, os.uname().nodename, os.getpid())
    client = _compat.coordination_client()
    client.key_value_set(f"mirrored/member/{me.process_id}", json.dumps([me.host, me.pid]), True)
    members = []
    for number in range(cluster.process_count):
        host, pid = json.loads(client.blocking_key_value_get(f"mirrored/member/{number}", 60_000))
        members.append(Member(number, host, pid))
    return tuple(members)


def _share_processors(cluster: Cluster, members: Sequence[Member]) -> None:
    host = members[cluster.process_id].host
    share_processors(member.pid for member in members if member.host == host)


# --- what this process has done, for those who watch -------------------------------------------


@final
class _Doings:
    """How far this process is. Attributes are written by the training thread alone."""

    def __init__(self) -> None:
        self.step = -1
        self.pulse = 0
        directory = os.environ.get(RUN_DIRECTORY)
        number = os.environ.get(PROCESS_ID, "0")
        self.progress = Progress(directory, int(number)) if directory else None

    def write(self) -> None:
        if self.progress is not None:
            self.progress.write(self.step, self.pulse)


_doings = _Doings()


def pulse() -> None:
    """Notes that this process has called a compiled program."""
    _doings.pulse += 1
    if _doings.progress is not None:
        _doings.write()


def completed(step: int) -> None:
    """Notes that this process has completed a step."""
    _doings.step = step
    _doings.pulse += 1
    _doings.write()


def last_pulse() -> int:
    """Returns how many compiled programs and steps this process has run."""
    return _doings.pulse


def last_step() -> int:
    """Returns the last step completed here; -1 before the first."""
    return _doings.step
