"""The roll call before training: all workers come, or it is said who did not.

Owns one short exchange on worker 0's address before JAX's coordination service
starts there. That service waits for everybody too, but ends the process without
naming those who are missing.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import os
import socket
import time
from typing import Any, final

from mirrored._cluster import Cluster
from mirrored._errors import ClusterError
from mirrored._report import RUN_DIRECTORY, read_ended

_VERSION = 1
_PAUSE = 0.05
_MOST_PAUSE = 0.5
# How often worker 0 looks for those who have ended in place of coming.
_LOOK_SECONDS = 0.5
# How long after the deadline worker 0 may take to tell the others who is absent.
_GRACE = 5.0


@final
@dataclasses.dataclass(frozen=True)
class Member:
    """A worker that has come."""

    process_id: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"worker {self.process_id} (host {self.host}, pid {self.pid})"


def gather(cluster: Cluster, timeout: float) -> tuple[Member, ...]:
    """Waits until every worker has come and returns them in order.

    Raises:
      ClusterError: after ``timeout`` seconds, naming the absent; at once, if two
        workers have the same number or disagree on how many there are.
    """
    deadline = time.monotonic() + timeout
    me = Member(cluster.process_id, socket.gethostname(), os.getpid())
    if cluster.process_count == 1:
        return (me,)
    if cluster.process_id == 0:
        return _call(cluster, me, deadline, timeout)
    return _answer(cluster, me, deadline, timeout)


# --- worker 0 -------------------------------------------------------------------


def _call(cluster: Cluster, me: Member, deadline: float, timeout: float) -> tuple[Member, ...]:
    present: dict[int, Member] = {0: me}
    lines: list[socket.socket] = []
    try:
        with _listen(cluster) as server:
            while len(present) < cluster.process_count:
                server.settimeout(min(max(deadline - time.monotonic(), 0.001), _LOOK_SECONDS))
                try:
                    line, _ = server.accept()
                except TimeoutError:
                    absent = _absent(cluster, present)
                    over = _ended(absent)
                    if over is not None:
                        _reply(lines, {"ended": over})
                        raise _ended_error(cluster, over) from None
                    if time.monotonic() < deadline:
                        continue
                    _reply(lines, {"absent": absent})
                    raise _absent_error(cluster, absent, timeout) from None
                lines.append(line)
                said = _read(line, min(deadline, time.monotonic() + _GRACE))
                refusal = _refusal(cluster, present, said)
                if refusal is not None:
                    _reply(lines, {"refused": refusal})
                    raise _refused(cluster, refusal)
                if said is not None:
                    member = Member(said["id"], said["host"], said["pid"])
                    present[member.process_id] = member
        members = tuple(present[number] for number in range(cluster.process_count))
        _reply(lines, {"members": [dataclasses.astuple(member) for member in members]})
        return members
    finally:
        for line in lines:
            line.close()


def _listen(cluster: Cluster) -> socket.socket:
    host, port = _parts(cluster.coordinator)
    try:
        if _is_loopback(host):
            return socket.create_server(("127.0.0.1", port))
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        raise ClusterError(
            fact=f"worker 0 could not listen on {cluster.coordinator} ({error}).",
            expected=f"a free port of this machine, as {cluster.source} names it.",
            hint="choose another port; a run that is still ending may hold this one.",
        ) from error


def _refusal(cluster: Cluster, present: dict[int, Member], said: dict[str, Any] | None) -> Any:
    """Says why somebody who came cannot take part; None if all is well."""
    if said is None:
        # Not one of ours (a port scan, say), or gone again: keep waiting for the real one.
        return None
    newcomer = Member(said["id"], said["host"], said["pid"])
    if said["version"] != _VERSION:
        return f"{newcomer} runs another version of mirrored"
    if said["count"] != cluster.process_count:
        return (
            f"{newcomer} was told of {said['count']} workers, and worker 0 of "
            f"{cluster.process_count}"
        )
    if newcomer.process_id in present:
        return f"{present[newcomer.process_id]} and {newcomer} have the same number"
    return None


def _absent(cluster: Cluster, present: dict[int, Member]) -> list[int]:
    return [number for number in range(cluster.process_count) if number not in present]


def _reply(lines: list[socket.socket], answer: dict[str, Any]) -> None:
    for line in lines:
        try:
            line.settimeout(_GRACE)
            line.sendall(json.dumps(answer).encode() + b"\n")
            line.shutdown(socket.SHUT_WR)
            # The other side closes first, so that the port is free at once.
            line.recv(1)
        except OSError:
            continue


# --- everybody else -------------------------------------------------------------


def _answer(cluster: Cluster, me: Member, deadline: float, timeout: float) -> tuple[Member, ...]:
    hello = {
        "version": _VERSION,
        "id": me.process_id,
        "count": cluster.process_count,
        "host": me.host,
        "pid": me.pid,
    }
    pause = _PAUSE
    while True:
        heard = _ask(cluster, hello, deadline)
        if heard is not None:
            break
        if _ended([0]) is not None:
            raise _ended_error(cluster, 0)
        if time.monotonic() > deadline:
            raise _absent_error(cluster, [0], timeout)
        time.sleep(pause)
        pause = min(2 * pause, _MOST_PAUSE)
    if "absent" in heard:
        raise _absent_error(cluster, heard["absent"], timeout)
    if "ended" in heard:
        raise _ended_error(cluster, heard["ended"])
    if "refused" in heard:
        raise _refused(cluster, heard["refused"])
    return tuple(Member(*member) for member in heard["members"])


def _ask(cluster: Cluster, hello: dict[str, Any], deadline: float) -> dict[str, Any] | None:
    """Comes to worker 0 and waits for its answer; None to try again."""
    left = max(deadline - time.monotonic(), 0.1)
    try:
        with socket.create_connection(_parts(cluster.coordinator), min(left, _GRACE)) as line:
            line.sendall(json.dumps(hello).encode() + b"\n")
            return _read(line, deadline + _GRACE)
    except OSError:
        # Not there yet, not resolvable yet, or gone again.
        return None


def _read(line: socket.socket, deadline: float) -> dict[str, Any] | None:
    """Reads one line of JSON; None if it does not come or is something else."""
    received = b""
    try:
        while not received.endswith(b"\n"):
            line.settimeout(max(deadline - time.monotonic(), 0.001))
            part = line.recv(65536)
            if not part:
                return None
            received += part
        said = json.loads(received)
    except (OSError, ValueError):
        return None
    return said if isinstance(said, dict) else None


def _parts(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host) == ipaddress.ip_address("127.0.0.1")
    except ValueError:
        return False


def _absent_error(cluster: Cluster, absent: list[int], timeout: float) -> ClusterError:
    shown = ", ".join(str(number) for number in absent)
    noun = "worker" if len(absent) == 1 else "workers"
    verb = "has" if len(absent) == 1 else "have"
    hint = "look at what they printed; they may have failed before they came, or not been started."
    if 0 in absent:
        hint = f"start worker 0, and see that {cluster.coordinator} can be reached from here."
    return ClusterError(
        fact=f"{noun} {shown} of {cluster.process_count} {verb} not come to "
        f"{cluster.coordinator} within {timeout:g} s (the cluster is from {cluster.source}).",
        expected=f"all {cluster.process_count} workers.",
        hint=hint,
    )


def _ended(absent: list[int]) -> int | None:
    """Finds one of the absent that the launcher knows to have ended."""
    directory = os.environ.get(RUN_DIRECTORY)
    if directory is None:
        return None
    return next((number for number in absent if read_ended(directory, number)), None)


def _ended_error(cluster: Cluster, number: int) -> ClusterError:
    return ClusterError(
        fact=f"worker {number} of {cluster.process_count} came to the end of its program before "
        "it met the others.",
        expected=f"all {cluster.process_count} workers.",
        hint="every worker must run the same program, and make the strategy.",
    )


def _refused(cluster: Cluster, refusal: str) -> ClusterError:
    return ClusterError(
        fact=f"at {cluster.coordinator}, {refusal}.",
        expected="each worker once, all told of the same cluster.",
        hint=f"check what {cluster.source} says on each worker, and that no other run uses "
        "this address.",
    )
