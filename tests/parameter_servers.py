"""Strategies on parameter servers for tests, one for each engine there is.

Processes cost seconds to start, so one Ray session serves all tests, and strategies on Ray
are used again by tests that ask for the same one.
"""

from __future__ import annotations

import contextlib
import functools
import importlib

import mirrored

# An engine's name, and the arguments it is asked for with.
ENGINES = {"threads": {}, "ray": {}}
# How many strategies on Ray may live at once.
_MOST_KEPT = 4
_KEPT = {}
# Imported when it is needed: tests without Ray should not wait for it.
_SESSION = "mirrored._parameter_server._ray_session"


@functools.cache
def ray_session():
    """A hold on Ray until the tests are over."""
    return importlib.import_module(_SESSION).RaySession(None, {})


def make_strategy(engine="threads", workers=2, servers=1, **arguments):
    """A strategy of the caller's own."""
    if engine == "ray":
        ray_session()
    return mirrored.ParameterServerStrategy(
        worker_count=workers,
        server_count=servers,
        engine=engine,
        **{**ENGINES[engine], **arguments},
    )


@contextlib.contextmanager
def cluster(engine="threads", workers=2, servers=1, **arguments):
    """A strategy and its coordinator; tests on Ray that ask for the same one share it."""
    if engine == "ray" and not {"checkpoint_directory", "engine_options"} & arguments.keys():
        yield _kept(workers, servers, **arguments)
        return
    with make_strategy(engine, workers, servers, **arguments) as strategy:
        yield strategy, mirrored.ClusterCoordinator(strategy)


def _kept(workers, servers, **arguments):
    key = (workers, servers, *sorted(arguments.items()))
    found = _KEPT.pop(key, None)
    if found is None:
        while len(_KEPT) >= _MOST_KEPT:
            _KEPT.pop(next(iter(_KEPT)))[0].close()
        strategy = make_strategy("ray", workers, servers, **arguments)
        found = strategy, mirrored.ClusterCoordinator(strategy)
    _KEPT[key] = found
    return found
