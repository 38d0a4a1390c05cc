"""The Ray session: one on this machine, started when it is first needed, or a cluster's.

Owns starting it quietly, on the loopback interface only, and ending it with the last
strategy that used it. A session that the program started itself is used and left alone.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
import warnings
from typing import Any, final

from mirrored._errors import ClusterError, MissingDependencyError

if "ray" not in sys.modules:
    # Ray reads these when it is imported: it need not call anybody, nor print a notice of
    # what it will do in versions to come, which is as well here.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
try:
    import ray

    # What the transports need comes with the same extra.
    importlib.import_module("zmq")
except ImportError as error:
    raise MissingDependencyError(
        fact=f"ParameterServerStrategy(engine='ray') needs Ray and ZeroMQ: {error}.",
        expected="the extra mirrored[ray].",
        hint="pip install 'mirrored[ray]', or use engine='threads'.",
    ) from error

# That it authenticates those who connect, as it should, need not be said at every start.
logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
# Ray's smallest; tensors do not go through it.
_OBJECT_STORE_BYTES = 80 << 20
NAMESPACE = "mirrored"


@final
class _Sessions:
    """Who uses the session that was started here."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0


_STARTED_HERE = _Sessions()


@final
class RaySession:
    """A hold on Ray.

    Args:
      address: of a cluster; None for this machine.
      options: further arguments of ``ray.init``.
    """

    def __init__(self, address: str | None, options: dict[str, Any]) -> None:
        self._is_ours = False
        with _STARTED_HERE.lock:
            if ray.is_initialized():
                if address is not None and _STARTED_HERE.users:
                    raise ClusterError(
                        fact=f"a strategy was given the Ray cluster {address!r} while another one "
                        "of this program uses Ray on this machine.",
                        expected="one Ray session in a program.",
                        hint="close the other strategy first.",
                    )
                self._is_ours = _STARTED_HERE.users > 0
            else:
                _start(address, options)
                self._is_ours = True
            _STARTED_HERE.users += self._is_ours

    def close(self) -> None:
        """Ends Ray, if it was started here and nobody else uses it."""
        with _STARTED_HERE.lock:
            if self._is_ours:
                self._is_ours = False
                _STARTED_HERE.users -= 1
                if not _STARTED_HERE.users and ray.is_initialized():
                    ray.shutdown()


def _start(address: str | None, options: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {
        "namespace": NAMESPACE,
        "logging_level": logging.ERROR,
        "configure_logging": False,
        "log_to_driver": True,
    }
    if address is None:
        # "local" starts one even where RAY_ADDRESS names a cluster.
        arguments |= {
            "address": "local",
            "include_dashboard": False,
            "object_store_memory": _OBJECT_STORE_BYTES,
            "_node_ip_address": "127.0.0.1",
            # Ray lets its workers give way to everything else; here they are the program.
            "_system_config": {"worker_niceness": 0},
        }
    else:
        arguments["address"] = address
    try:
        with warnings.catch_warnings():
            # Ray starts its processes with fork and exec, as JAX need not fear.
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            ray.init(**{**arguments, **options})
    except Exception as error:
        where = "on this machine" if address is None else f"at {address!r}"
        raise ClusterError(
            fact=f"Ray {where} did not start: {error}",
            expected="a Ray session.",
            hint="for a cluster see `ray status` there; arguments of ray.init go into "
            'engine_options={"ray_options": {...}}.',
        ) from error
