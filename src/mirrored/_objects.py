"""Stateful objects of other libraries among the arguments of a program.

Owns how such objects (Flax NNX modules, say) are taken apart into arrays at the door
of a program, put together again inside it, and written back on the caller's own
objects at its end. What an object is, and what becomes of its parts in a replica, each
library's module knows; the core imports none of them.
"""

from __future__ import annotations

import abc
import functools
import importlib
import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax

from mirrored import _context
from mirrored._claims import Claim
from mirrored._values import PerReplica

_ADAPTERS: dict[str, str] = {}
_KINDS: dict[type, Adapter] = {}
# Structures of arguments known to hold no object, most calls' fate.
_PLAIN: set[Any] = set()
_MOST_PLAIN = 256


class Inner(abc.ABC):
    """The objects as they exist inside one trace."""

    objects: tuple[Any, ...]

    @abc.abstractmethod
    def changed(self) -> dict[int, Any]:
        """Returns the arrays the traced code has replaced, by their number."""

    @abc.abstractmethod
    def claims(self, replica: _context.ReplicaContext) -> dict[int, Claim]:
        """Returns the replaced arrays, made one for all replicas by the library's rules."""


class Taken(abc.ABC):
    """Objects taken apart: the arrays they hold, and how to make them again."""

    arrays: list[Any]
    """the arrays, traced or not, in a fixed order"""
    signature: Hashable
    """equal for objects that differ in the values of their arrays only"""

    @abc.abstractmethod
    def inside(self, arrays: list[Any], replica: _context.ReplicaContext | None) -> Inner:
        """Makes new objects of ``arrays`` in the running trace, as a replica sees them."""

    @abc.abstractmethod
    def write(self, arrays: dict[int, Any]) -> None:
        """Puts new arrays, by number, into the caller's objects."""

    @abc.abstractmethod
    def is_shared(self, number: int) -> bool:
        """Says whether somebody else holds the array, so that it must not be donated."""


class Adapter(abc.ABC):
    """What a library's module knows about its objects."""

    @abc.abstractmethod
    def owns(self, kind: type) -> bool:
        """Says whether instances of ``kind`` are such objects."""

    @abc.abstractmethod
    def take(self, objects: tuple[Any, ...]) -> Taken:
        """Takes all objects of one call apart together: they may share parts."""


def add_adapter(library: str, module: str) -> None:
    """Lets ``module`` handle the objects of ``library`` once that is imported.

    The module has a function ``argument_adapter()`` that returns an Adapter.
    """
    _ADAPTERS[library] = module


@functools.cache
def _adapter(module: str) -> Adapter:
    return importlib.import_module(module).argument_adapter()


def _adapter_of(kind: type) -> Adapter | None:
    known = _KINDS.get(kind)
    if known is None:
        for library, module in _ADAPTERS.items():
            if library in sys.modules and _adapter(module).owns(kind):
                known = _KINDS[kind] = _adapter(module)
    return known


def is_object(value: Any) -> bool:
    """Says whether ``value`` is a stateful object of one of the libraries in use."""
    kind = type(value)
    return kind in _KINDS or _adapter_of(kind) is not None


def _is_leaf(value: Any) -> bool:
    return isinstance(value, PerReplica) or is_object(value)


def _in_use() -> bool:
    return any(library in sys.modules for library in _ADAPTERS)


def flatten_arguments(nest: tuple[Any, Any]) -> tuple[list[Any], Any, list[int]]:
    """Flattens (args, kwargs) for JAX; objects are leaves, whose places come third."""
    if not _in_use():
        return *jax.tree.flatten(nest), []
    args, kwargs = nest
    if not any(map(is_object, args)) and not any(map(is_object, kwargs.values())):
        leaves, structure = jax.tree.flatten(nest)
        if structure in _PLAIN:
            return leaves, structure, []
    leaves, structure = jax.tree.flatten(nest, is_leaf=is_object)
    places = [index for index, leaf in enumerate(leaves) if is_object(leaf)]
    if not places and len(_PLAIN) < _MOST_PLAIN:
        _PLAIN.add(structure)
    return leaves, structure, places


def map_arguments(function: Callable[[Any], Any], nest: Any) -> Any:
    """Maps over (args, kwargs) with PerReplica values and objects as leaves."""
    return jax.tree.map(function, nest, is_leaf=_is_leaf)


def take(objects: Sequence[Any]) -> Taken:
    """Takes objects apart by the adapter of their library."""
    adapter = _adapter_of(type(objects[0]))
    assert adapter is not None
    return adapter.take(tuple(objects))


def run_with_objects(
    run: Callable[..., Any], function: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Runs a replica function whose arguments may hold objects.

    Their arrays enter as arguments; what the function changes comes out by the
    library's rules, the same on all replicas, and is written on the objects.
    """
    leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=_is_leaf)
    places = [index for index, leaf in enumerate(leaves) if is_object(leaf)]
    if not places:
        return run(function, args, kwargs)
    taken = take([leaves[index] for index in places])
    for index in places:
        leaves[index] = None

    @functools.wraps(function)
    def with_arrays(arrays: list[Any], leaves: list[Any]) -> Any:
        replica = _context.current().replica
        assert replica is not None
        inner = taken.inside(arrays, replica)
        filled = list(leaves)
        for index, value in zip(places, inner.objects, strict=True):
            filled[index] = value
        inner_args, inner_kwargs = structure.unflatten(filled)
        return function(*inner_args, **inner_kwargs), inner.claims(replica)

    result, written = run(with_arrays, (taken.arrays, leaves), {})
    taken.write(written)
    return result
