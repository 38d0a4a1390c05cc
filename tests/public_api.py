"""Writes down the public API, one line a name, for the snapshot beside this file.

``python tests/public_api.py`` (or ``make api``) writes the snapshot anew.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import pathlib
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

import mirrored

SNAPSHOT = pathlib.Path(__file__).parent / "public_api.txt"
MODULES = [
    "mirrored",
    *sorted(
        f"mirrored.{module.name}"
        for module in pkgutil.iter_modules(mirrored.__path__)
        if not module.name.startswith("_")
    ),
]

# What the reference leaves out: private names, and those for the library's own modules.
HIDDEN = re.compile(
    "|".join(
        re.findall(
            r'^ *filters: \["!(.*)", "!(.*)"\]$',
            (pathlib.Path(__file__).parent.parent / "mkdocs.yml").read_text(),
            re.MULTILINE,
        )[0]
    )
)


def public_names() -> list[str]:
    """Full names of everything public, in the order of the modules."""
    return [
        f"{module}.{name}"
        for module in MODULES
        for name in importlib.import_module(module).__all__
        if not name.startswith("__")
    ]


def written() -> str:
    """Names, arguments, defaults, members and bases of everything public."""
    lines = []
    for full_name in public_names():
        module, _, name = full_name.rpartition(".")
        lines += _described(full_name, getattr(importlib.import_module(module), name))
    return "".join(f"{line}\n" for line in lines)


def _described(name: str, thing: Any) -> Iterator[str]:
    if not inspect.isclass(thing):
        yield f"{name}{_signature(thing)}" if callable(thing) else f"{name} = {thing!r}"
        return
    if issubclass(thing, Exception):
        yield f"{name}({', '.join(base.__name__ for base in thing.__bases__)})"
        return
    if issubclass(thing, enum.Enum):
        yield f"{name}: {', '.join(member.name for member in thing)}"
        return
    yield f"{name}{_signature(thing.__init__)}"
    # Members of a public base have their lines there; those of other libraries are theirs to keep.
    public = {getattr(mirrored, base) for base in mirrored.__all__}
    bases = [thing, *(base for base in thing.__mro__[1:] if base not in public)]
    own = [base for base in bases if base.__module__.split(".")[0] == "mirrored"]
    members = {member for base in own for member in vars(base) if not HIDDEN.search(member)}
    if dataclasses.is_dataclass(thing):
        members -= {field.name for field in dataclasses.fields(thing)}
    for member in sorted(members):
        value = inspect.getattr_static(thing, member)
        if isinstance(value, (staticmethod, classmethod)):
            yield f"{name}.{member}{_signature(value.__func__)}"
        elif inspect.isfunction(value):
            yield f"{name}.{member}{_signature(value)}"
        else:
            yield f"{name}.{member}"


def _signature(thing: Any) -> str:
    signature = inspect.signature(thing)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    text = str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    # A function as a default shows where it lies, which is another place in every process.
    return re.sub(r" at 0x[0-9a-f]+", "", text)


if __name__ == "__main__":
    SNAPSHOT.write_text(written())
