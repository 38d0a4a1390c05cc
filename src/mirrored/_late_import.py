"""Noticing that a library is imported while a block runs.

Owns the import hook only; what happens then is the caller's.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, final


@final
class _AfterLoading(importlib.abc.Loader):
    """A module's own loader, with a call after it."""

    def __init__(self, loader: Any, then: Callable[[], None]) -> None:
        self._loader = loader
        self._then = then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        # From here on the module is like any other: its spec shows its own loader.
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._then()


@final
class _Watch(importlib.abc.MetaPathFinder):
    def __init__(self, library: str, then: Callable[[], None]) -> None:
        self._library = library
        self._then = then
        self._looking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._library or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _AfterLoading(spec.loader, self._then)
        return spec


@contextlib.contextmanager
def when_imported(library: str, then: Callable[[], None]) -> Iterator[None]:
    """Calls ``then`` right after ``library`` is imported inside the block, if it is."""
    watch = _Watch(library, then)
    sys.meta_path.insert(0, watch)
    try:
        yield
    finally:
        sys.meta_path.remove(watch)
