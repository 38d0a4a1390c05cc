"""Engine of a process that uses servers another process has started, and started none.

Owns finding them: their addresses and keys are secrets, and come either from the servers
themselves through the Ray cluster that all processes belong to, or on one host in a file
that only its user can read. Nothing here starts or ends anybody.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, final

from mirrored._errors import ClusterError, ContextError
from mirrored._parameter_server._channel import Channel, Fields, gone
from mirrored._parameter_server._engine import (
    ClosureCall,
    ClosureOutcome,
    Engine,
    ServerSpec,
    WorkerSpec,
)
from mirrored._parameter_server._ray_session import NAMESPACE, RaySession, ray

# isort: split
# What follows needs what the session has found to be there.
from ray.exceptions import RayError

from mirrored._parameter_server._endpoint import Address, is_reachable, open_channel
from mirrored._parameter_server._transport import Keys

_FIND_SECONDS = 180.0


@final
class Introduction(NamedTuple):
    """What is needed to reach a server; the keys are secret."""

    address: Address
    keys: Keys

    def as_fields(self) -> Fields:
        """The same as JSON says it."""
        keys = {
            name: None if key is None else key.hex()
            for name, key in dataclasses.asdict(self.keys).items()
        }
        return {"address": dataclasses.asdict(self.address), "keys": keys}

    @staticmethod
    def of_fields(fields: Fields) -> Introduction:
        """Made again of what ``as_fields`` said."""
        token, *curve = [
            None if (key := fields["keys"][field.name]) is None else bytes.fromhex(key)
            for field in dataclasses.fields(Keys)
        ]
        return Introduction(Address(**fields["address"]), Keys(token or b"", *curve))


@final
class GuestEngine(Engine):
    """Servers of another process.

    Args:
      introductions: of each server, what is needed to reach it.
    """

    def __init__(self, introductions: Sequence[Introduction]) -> None:
        self._introductions = list(introductions)

    def connect(self, server: int) -> Channel:
        address, keys = self._introductions[server]
        return open_channel(address, f"server {server}", keys)

    def server_is_alive(self, index: int) -> bool:
        return is_reachable(self._introductions[index].address)

    def worker_is_alive(self, index: int) -> bool:
        return False

    def start_server(self, spec: ServerSpec) -> None:
        if not self.server_is_alive(spec.index):
            raise gone(spec.name, "start")

    def stop(self) -> None:
        """They are not this process's to end."""

    def start_worker(self, spec: WorkerSpec) -> None:
        self._refuse(f"{spec.name} was to be started")

    def stop_worker(self, index: int) -> None:
        self._refuse(f"worker {index} was to be stopped")

    def control(self, server: int, operation: str, *objects: Any) -> Any:
        self._refuse(f"{operation!r} was asked of server {server}")

    def execute(self, worker: int, call: ClosureCall) -> ClosureOutcome:
        self._refuse(f"worker {worker} was to run a closure")

    def kill_server(self, index: int) -> None:
        self._refuse(f"server {index} was to be killed")

    def kill_worker(self, index: int) -> None:
        self._refuse(f"worker {index} was to be killed")

    def _refuse(self, what: str) -> NoReturn:
        raise ContextError(
            fact=f"{what} by a process that uses the servers of worker 0.",
            expected="worker 0, which started them, to do it.",
            hint="do it where jax.process_index() is 0.",
        )


def found_in_ray(
    address: str, name: str, server_count: int, options: Mapping[str, Any]
) -> list[Introduction]:
    """Asks the servers themselves, in the Ray cluster they are in, which is left again."""
    session = RaySession(address, dict(options))
    try:
        return [
            Introduction(
                *ray.get(
                    ray.get_actor(server_name(name, index), NAMESPACE).introduction.remote(),
                    timeout=_FIND_SECONDS,
                )
            )
            for index in range(server_count)
        ]
    except (ValueError, RayError) as error:
        raise ClusterError(
            fact=f"the servers of worker 0 were not found in Ray at {address}: {error}",
            expected=f"{server_count} servers, which worker 0 had started.",
            hint="see what worker 0 printed; all must be given the same address=.",
        ) from error
    finally:
        session.close()


def left_in_file(introductions: Sequence[Introduction]) -> str:
    """Leaves them for other processes of this user on this host; returns where."""
    descriptor, path = tempfile.mkstemp(prefix="mirrored-servers-")
    with os.fdopen(descriptor, "w") as file:
        json.dump([introduction.as_fields() for introduction in introductions], file)
    return path


def found_in_file(path: str) -> list[Introduction]:
    """Reads what ``left_in_file`` left."""
    try:
        with open(path) as file:
            owner = os.fstat(file.fileno()).st_uid
            content = json.load(file) if owner == os.getuid() else None
    except OSError as error:
        content, owner = None, error
    if content is None:
        raise ClusterError(
            fact=f"the servers of worker 0 run on its own host, and {path} is not there, or not "
            f"this user's ({owner}).",
            expected="all processes on that host, run by one user.",
            hint="for several hosts start a Ray cluster, and give its address= to the strategy.",
        )
    return [Introduction.of_fields(fields) for fields in content]


def server_name(name: str, index: int) -> str:
    """What a server is called in its Ray cluster."""
    return f"{name}-{index}"
