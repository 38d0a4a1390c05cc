"""The contender's side: answers requests about its steps, whatever library they are written in.

Needs no more than Python, so that it runs in every peer's environment.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from results import versions


def serve(
    make: Callable[[str], Callable[[], Any]],
    wait: Callable[[Any], Any],
    more: Mapping[str, Callable[[Any], dict[str, Any]]] | None = None,
) -> None:
    """Answers requests from standard input until it is closed.

    - ``{"make": name}``: ``make(name)`` gives a step, a function of no arguments that returns the
      loss; it is called once. Answers with ``seconds`` and ``loss``.
    - ``{"losses": n, "of": name}``: the losses of n further steps.
    - ``{"time": n, "of": name}``: microseconds a step of n further steps: ``wall`` until the last
      loss is there, ``host`` until the last call has returned, ``thread`` the processor time of
      the calling thread. One step goes before, unless ``"warm": 0`` says otherwise; with
      ``"value": 1`` also the last ``loss``.
    - ``{"single": n, "of": name}``: medians over n steps, each waited for: ``host`` of the call
      alone and ``thread`` of the call alone.
    - ``{"drop": name}``: forgets a step.
    - ``{"memory": 1}``: the most memory the process ever had, in bytes.
    - ``{key: value}`` of a key in ``more``: what ``more[key](value)`` returns.
    """
    # Libraries print to standard output; the answers keep the real one to themselves.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    made: dict[str, Callable[[], Any]] = {}
    say({"versions": versions()})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "make" in request:
                start = time.perf_counter()
                step = made[request["make"]] = make(request["make"])
                loss = float(step())
                say({"seconds": time.perf_counter() - start, "loss": loss})
            elif more and (known := more.keys() & request.keys()):
                (key,) = known
                say(more[key](request[key]))
            elif "memory" in request:
                say({"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024})
            elif "drop" in request:
                del made[request["drop"]]
                say({})
            else:
                say(_trained(request, made[request["of"]], wait))
        except Exception as error:  # noqa: BLE001 -- told to whoever asked; others go on
            traceback.print_exc()
            say({"error": f"{type(error).__name__}: {str(error)[:500]}"})


def _trained(request: dict[str, Any], step: Any, wait: Any) -> dict[str, Any]:
    if "losses" in request:
        return {"losses": [float(step()) for _ in range(request["losses"])]}
    if "single" in request:
        hosts, threads = [], []
        for _ in range(request["single"]):
            worked, start = time.thread_time(), time.perf_counter()
            result = step()
            hosts.append((time.perf_counter() - start) * 1e6)
            threads.append((time.thread_time() - worked) * 1e6)
            wait(result)
        return {"host": statistics.median(hosts), "thread": statistics.median(threads)}
    count = request["time"]
    for _ in range(request.get("warm", 1)):
        wait(step())
    worked, start = time.thread_time(), time.perf_counter()
    for _ in range(count):
        result = step()
    returned, work = time.perf_counter(), time.thread_time() - worked
    wait(result)
    scale = 1e6 / count
    wall = (time.perf_counter() - start) * scale
    found = {"wall": wall, "host": (returned - start) * scale, "thread": work * scale}
    return found | {"loss": float(result)} if "value" in request else found
