"""A door through which another process of this machine sees a cluster's status.

Owns a small HTTP answer on loopback and how it is asked for. It can be read only, and says
nothing but what ``ClusterCoordinator.status`` does.
"""

from __future__ import annotations

import http.server
import threading
import urllib.request
from collections.abc import Callable
from typing import Any, final

from mirrored._errors import ArgumentError, ServerError
from mirrored._parameter_server._status import ClusterStatus

_HOST = "127.0.0.1"
_TIMEOUT_SECONDS = 10.0


@final
class StatusDoor:
    """Answers with the status of a cluster, on a thread of its own.

    Args:
      status: what to answer.
      port: where to listen; a free one if 0.
    """

    def __init__(self, status: Callable[[], ClusterStatus], port: int) -> None:
        class Handler(http.server.BaseHTTPRequestHandler):
            """Answers any GET."""

            def do_GET(self) -> None:
                content = status().to_json().encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                """Says nothing."""

        try:
            self._server = http.server.ThreadingHTTPServer((_HOST, port), Handler)
        except OSError as error:
            raise ArgumentError(
                fact=f"serve_status cannot listen on port {port} of {_HOST}: {error}.",
                expected="a port that is free.",
                hint="leave port out to have one chosen.",
            ) from error
        self._server.daemon_threads = True
        threading.Thread(
            target=self._server.serve_forever, name="mirrored-status", daemon=True
        ).start()

    @property
    def address(self) -> str:
        """Where it is: host and port."""
        return f"{_HOST}:{self._server.server_address[1]}"

    def close(self) -> None:
        """Ends it."""
        self._server.shutdown()
        self._server.server_close()


def read_status(address: str) -> ClusterStatus:
    """Asks for the status of a cluster at an address that ``serve_status`` returned."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        raise ArgumentError(
            fact=f"the address is {address!r}.",
            expected="a host and a port, such as 127.0.0.1:8123.",
            hint="ClusterCoordinator.serve_status() returns it: print it in the program.",
        )
    try:
        # No proxy: it is this machine, or the end of a tunnel to another.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://{host or _HOST}:{port}/", timeout=_TIMEOUT_SECONDS) as answer:
            return ClusterStatus.from_json(answer.read().decode())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ServerError(
            fact=f"no status of parameter servers at {address} ({error}).",
            expected="a program that has called ClusterCoordinator.serve_status().",
            hint="see whether it still runs; it listens on its own machine only, so from another "
            "one use ssh -L.",
        ) from error
