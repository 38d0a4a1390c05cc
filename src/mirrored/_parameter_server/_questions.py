"""Questions: what a server may be asked, with which fields and how many arrays.

Owns the form of every message: each field's type and bounds, which must be there, and that
there are no others. Whether pieces, tables and optimizers of these numbers exist, and what
shapes and dtypes theirs are, is checked where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mirrored._parameter_server._channel import Fields
from mirrored._parameter_server._wire import MOST_ARRAYS, refused

_MOST_NAME = 4096
_Check = Callable[[Any], bool]


class _Form(NamedTuple):
    """What fields a message has."""

    required: Mapping[str, _Check]
    optional: Mapping[str, _Check]


def _number(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _number_or_none(value: Any) -> bool:
    return value is None or _number(value)


def _flag(value: Any) -> bool:
    return type(value) is bool


def _name(value: Any) -> bool:
    return type(value) is str and len(value) <= _MOST_NAME


def _numbers(value: Any) -> bool:
    return type(value) is list and len(value) <= MOST_ARRAYS and all(map(_number, value))


def _lists(value: Any) -> bool:
    # An empty list would name no array at all.
    return (
        type(value) is list
        and len(value) <= MOST_ARRAYS
        and all(_numbers(numbers) and numbers for numbers in value)
    )


def _rounds(value: Any) -> bool:
    return (
        type(value) is list
        and len(value) <= MOST_ARRAYS
        and all(
            type(closed) in (list, tuple)
            and len(closed) == 2
            and _number(closed[0])
            and _numbers(closed[1])
            for closed in value
        )
    )


def _has(form: _Form) -> _Check:
    def check(value: Any) -> bool:
        return type(value) is dict and _wrong(form, value) is None

    return check


def _list_of(check: _Check) -> _Check:
    def checked(value: Any) -> bool:
        return type(value) is list and len(value) <= MOST_ARRAYS and all(map(check, value))

    return checked


_PIECE = _has(_Form({"number": _number, "name": _name, "start": _number}, {}))
_KIND = {"kind": _name}
_UPDATES = {
    "gradients": _Form({**_KIND, "optimizer": _number, "lists": _lists, "whole": _flag}, {}),
    "rows": _Form({**_KIND, "optimizer": _number, "table": _number}, {}),
    "set_rows": _Form({**_KIND, "table": _number}, {}),
    "assign": _Form({**_KIND, "piece": _number}, {}),
    "add": _Form({**_KIND, "piece": _number}, {}),
}


def _update(value: Any) -> bool:
    if type(value) is not dict:
        return False
    kind = value.get("kind")
    form = _UPDATES.get(kind) if type(kind) is str else None
    return form is not None and _wrong(form, value) is None


_EPOCH = {"epoch": _number}
_FORMS = {
    "create": _Form({"pieces": _list_of(_PIECE)}, _EPOCH),
    "pull": _Form(
        {"read": _lists},
        {**_EPOCH, "lease": _number_or_none, "closed": _rounds, "after": _number},
    ),
    "push": _Form(
        {
            "lease": _number_or_none,
            "closure": _number_or_none,
            "step": _number,
            "updates": _list_of(_update),
            "read": _lists,
        },
        {**_EPOCH, "floor": _number, "round": _number_or_none, "counts": _flag},
    ),
    "rows": _Form({"tables": _numbers}, {**_EPOCH, "after": _number}),
    "join": _Form({"leases": lambda value: _numbers(value) and bool(value)}, _EPOCH),
    "leave": _Form({"lease": _number}, _EPOCH),
    "turn": _Form({"lease": _number, "read": _lists}, {**_EPOCH, "round": _number_or_none}),
    "status": _Form({}, _EPOCH),
}


def array_count(update: Fields) -> int:
    """How many arrays belong to an update."""
    kind = update["kind"]
    if kind == "gradients":
        return len(update["lists"])
    return 2 if kind in ("rows", "set_rows") else 1


def check(operation: str, fields: Any, arrays: Sequence[np.ndarray]) -> None:
    """Raises ServerError unless a message has the form of its operation."""
    if type(fields) is not dict:
        raise refused(found=f"{operation!r} without fields", expected="fields")
    wrong = _wrong(_FORMS[operation], fields)
    if wrong is not None:
        raise refused(found=f"{operation!r} with {wrong}", expected=f"the fields of {operation!r}")
    if operation == "push":
        expected = sum(map(array_count, fields["updates"]))
    elif operation == "rows":
        expected = len(fields["tables"])
    else:
        expected = len(fields["pieces"]) if operation == "create" else 0
    if len(arrays) != expected:
        raise refused(found=f"{operation!r} with {len(arrays)} arrays", expected=f"{expected}")


def _wrong(form: _Form, fields: Mapping[str, Any]) -> str | None:
    """What is wrong with some fields, in words."""
    for name, value in fields.items():
        checked = form.required.get(name) or form.optional.get(name)
        if checked is None:
            return f"a field {name[:40]!r}"
        if not checked(value):
            return f"{name}={str(value)[:80]}"
    missing = form.required.keys() - fields.keys()
    return f"no {min(missing)!r}" if missing else None
