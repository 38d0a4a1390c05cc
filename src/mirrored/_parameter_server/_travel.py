"""What travels through Ray: code, and values that only a pickle can say.

Owns pickling with Ray's cloudpickle and what is raised for what cannot be pickled. It is
never used on what came over a transport: Ray is the way that is trusted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray import cloudpickle

from mirrored._errors import ArgumentError

dumps = cloudpickle.dumps  # pyright: ignore[reportPrivateImportUsage] (it is documented)
loads = cloudpickle.loads


def pickled(value: Any, what: str) -> bytes:
    """Pickles what the user gave; ``what`` is its name for the error."""
    try:
        return dumps(value)
    except Exception as error:
        raise ArgumentError(
            fact=f"{what} cannot travel to another process: {type(error).__name__}: {error}",
            expected="functions and arguments that can be pickled.",
            hint="files, locks and coordinators belong to this process: open or make them in the "
            "closure, or with create_per_worker_value.",
        ) from error


def in_pickle(action: Callable[[], Any]) -> bytes:
    """What an action returned or raised, to be ``opened`` in another process."""
    try:
        return dumps((True, action()))
    except Exception as error:  # noqa: BLE001 (raised again where it was asked for)
        return dumps((False, error))


def opened(content: bytes) -> Any:
    """Returns, or raises, what ``in_pickle`` took."""
    succeeded, value = loads(content)
    if succeeded:
        return value
    raise value
