"""Closures as a worker's process is asked for them: the service behind its endpoint.

Owns the functions, arguments and makers of resources that came through Ray, and how a
result is told: in fields and arrays where they can say it, otherwise kept as a pickle that
the coordinator asks for through Ray. What runs a closure is in ``_worker``.
"""

from __future__ import annotations

import collections
import traceback
from collections.abc import Callable
from typing import Any, final

import numpy as np

from mirrored._errors import ServerError, WorkerError
from mirrored._parameter_server._channel import Fields, Reply
from mirrored._parameter_server._engine import ClosureCall, ClosureOutcome, Resource
from mirrored._parameter_server._nests import NotPlainError, Said, understood
from mirrored._parameter_server._travel import dumps, loads
from mirrored._parameter_server._worker import Worker

# Functions kept by a worker; the coordinator sends one again that was forgotten.
_MOST_FUNCTIONS = 1024
# What a worker answers to a closure whose function it does not have.
UNKNOWN = "unknown"


@final
class Closures:
    """Answers the operation ``execute`` of the coordinator.

    Attributes:
      makers: what makes each per-worker value, by its number.
      staged: arguments that the wire could not carry, by closure.
      outcomes: results that the wire cannot carry, pickled, by closure.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._name = worker.spec.name
        self._functions: collections.OrderedDict[str, Any] = collections.OrderedDict()
        self.makers: dict[int, Callable[[int], Any]] = {}
        self.staged: dict[int, Any] = {}
        self.outcomes: dict[int, bytes] = {}

    def keep_function(self, digest: str, function: Any) -> None:
        """Takes in a function."""
        self._functions[digest] = function
        if len(self._functions) > _MOST_FUNCTIONS:
            self._functions.popitem(last=False)

    def handle(self, operation: str, fields: Fields, arrays: list[np.ndarray]) -> Reply:
        """Runs a closure."""
        if operation != "execute":
            raise ServerError(
                fact=f"{self._name} was asked for {operation!r}.",
                expected="'execute'.",
                hint="all processes must run the same version of mirrored.",
            )
        digest = fields["function"]
        function = self._functions.get(digest)
        if function is None:
            return {UNKNOWN: True}, []
        self._functions.move_to_end(digest)
        closure = fields["closure"]
        if fields["staged"]:
            args, kwargs = self.staged.pop(closure)
        else:
            args, kwargs = understood(fields["arguments"], arrays, self._resource)
        call = ClosureCall(closure, function, args, kwargs, fields["epoch"], fields["floor"])
        return self._told(closure, self._worker.execute(call))

    def _resource(self, number: int) -> Resource:
        return Resource(number, self.makers[number])

    def _told(self, closure: int, outcome: ClosureOutcome) -> Reply:
        if outcome.error is None:
            said = Said()
            try:
                value = said.say(outcome.value)
            except NotPlainError:
                return self._kept(closure, outcome)
            return {"steps": outcome.steps, "value": value}, said.arrays
        return self._kept(closure, outcome)

    def _kept(self, closure: int, outcome: ClosureOutcome) -> Reply:
        error = outcome.error
        if error is not None:
            text = "".join(traceback.format_exception(error))
            error.add_note(f"on {self._name}:\n{text}")
            # Frames cannot travel, and hold what the closure held.
            error = error.with_traceback(None)
        try:
            self.outcomes[closure] = dumps((outcome.value, error))
            loads(self.outcomes[closure])
        except Exception as problem:  # noqa: BLE001 (whatever the user's objects raise)
            what = "raised" if error is not None else "returned"
            found = error if error is not None else outcome.value
            lost = WorkerError(
                fact=f"closure {closure} {what} {type(found).__name__}: {str(found)[:500]!r}, "
                f"which cannot travel to the coordinator ({type(problem).__name__}: {problem}).",
                expected="values and errors that can be pickled.",
                hint="return arrays and numbers; give errors arguments they can be made of again.",
            )
            for note in getattr(error, "__notes__", []):
                lost.add_note(note)
            self.outcomes[closure] = dumps((None, lost))
        return {"steps": outcome.steps, "kept": True}, []
