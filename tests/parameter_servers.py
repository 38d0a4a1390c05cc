"""Strategies on parameter servers for tests, one for each engine there is."""

from __future__ import annotations

import contextlib

import mirrored

# An engine's name, and the arguments it is asked for with.
ENGINES = {"threads": {}}


@contextlib.contextmanager
def cluster(engine="threads", workers=2, servers=1, **arguments):
    """A strategy and its coordinator, ended with the block."""
    with mirrored.ParameterServerStrategy(
        worker_count=workers,
        server_count=servers,
        engine=engine,
        **{**ENGINES[engine], **arguments},
    ) as strategy:
        yield strategy, mirrored.ClusterCoordinator(strategy)
