"""Links: one process's channels to all servers.

Owns opening them when they are first needed and anew after servers were replaced. What
is said over them is in ``_exchange``.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Sequence
from typing import final

import numpy as np

from mirrored._parameter_server._channel import Channel, Fields, Reply, silent
from mirrored._parameter_server._engine import Connect


@final
class Links:
    """Channels to the servers, by their number."""

    def __init__(self, connect: Connect, server_count: int, timeout: float) -> None:
        self._connect = connect
        self._channels: dict[int, Channel] = {}
        self.server_count = server_count
        self.timeout = timeout
        self.epoch = 0

    def renew(self, epoch: int) -> None:
        """Forgets channels to servers that were replaced since."""
        if epoch != self.epoch:
            self.close()
            self.epoch = epoch

    def submit(
        self, server: int, operation: str, fields: Fields, arrays: Sequence[np.ndarray] = ()
    ) -> concurrent.futures.Future[Reply]:
        """Sends a message to a server."""
        return self._channel(server).submit(
            operation, {"epoch": self.epoch, **fields}, arrays, timeout=self.timeout
        )

    def wait(self, server: int, operation: str, future: concurrent.futures.Future[Reply]) -> Reply:
        """Waits for an answer."""
        try:
            return future.result(self.timeout)
        except TimeoutError:
            raise silent(self._channel(server).peer, operation, self.timeout) from None

    def request(
        self, server: int, operation: str, fields: Fields, arrays: Sequence[np.ndarray] = ()
    ) -> Reply:
        """Sends a message to a server and waits for its answer."""
        return self.wait(server, operation, self.submit(server, operation, fields, arrays))

    def close(self) -> None:
        """Lets go of all channels."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            channel.close()

    def _channel(self, server: int) -> Channel:
        channel = self._channels.get(server)
        if channel is None:
            channel = self._channels[server] = self._connect(server)
        return channel
