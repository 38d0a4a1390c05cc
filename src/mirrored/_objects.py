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
from typing import Any, final

import jax

from mirrored import _compat
from mirrored._claims import Claim
from mirrored._errors import ContextError
from mirrored._placement import Placement
from mirrored._replica import ReplicaContext, get_replica_context
from mirrored._values import flattened, is_leaf, is_object_leaf, mapped

_ADAPTERS: dict[str, str] = {}
_KINDS: dict[type, Adapter] = {}


class Inner(abc.ABC):
    """The objects as they exist inside one trace."""

    objects: tuple[Any, ...]

    @abc.abstractmethod
    def changed(self) -> dict[int, Any]:
        """Returns the arrays the traced code has replaced, by their number."""

    @abc.abstractmethod
    def claims(self, replica: ReplicaContext) -> dict[int, Claim]:
        """Returns the replaced arrays, made one for all replicas by the library's rules."""


class Taken(abc.ABC):
    """Objects taken apart: the arrays they hold, and how to make them again."""

    arrays: list[Any]
    """the arrays, traced or not, in a fixed order"""
    signature: Hashable
    """equal for objects that differ in the values of their arrays only"""

    @abc.abstractmethod
    def names(self) -> list[str]:
        """Names each array by its place in the objects, for messages and checkpoints."""

    @abc.abstractmethod
    def inside(self, arrays: list[Any], replica: ReplicaContext | None) -> Inner:
        """Makes new objects of ``arrays`` in the running trace, as a replica sees them."""

    @abc.abstractmethod
    def roles(self) -> list[str]:
        """Says what each array is for: PARAMETERS, OPTIMIZER_STATE or OTHER_STATE."""

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
    return is_leaf(value) or is_object(value)


def _is_object_of_any_kind(value: Any) -> bool:
    return is_object_leaf(value) or is_object(value)


def _in_use() -> bool:
    return any(library in sys.modules for library in _ADAPTERS)


def taken_from(nest: tuple[Any, Any]) -> tuple[list[Any], Any, Held]:
    """Flattens (args, kwargs) for JAX and takes the objects among them apart."""
    if not _in_use():
        return *flattened(nest, is_object_leaf), NONE
    leaves, structure = flattened(nest, _is_object_of_any_kind)
    places = [index for index, leaf in enumerate(leaves) if is_object(leaf)]
    held = Held(take([leaves[index] for index in places]) if places else None, places)
    for index in places:
        leaves[index] = None
    return leaves, structure, held


@final
class Held:
    """The stateful objects among the arguments of one call of a program."""

    def __init__(self, taken: Taken | None, places: list[int]) -> None:
        self._taken = taken
        self._places = places
        self._watched: list[Any] = []
        self.signature = taken.signature if taken else None

    def shapes(self) -> list[Any]:
        """What to trace with in place of the objects' arrays."""
        arrays = self._taken.arrays if self._taken else []
        return [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]

    def fill(self, leaves: list[Any], arrays: list[Any]) -> Inner | None:
        """Puts new objects, made of ``arrays`` in the running trace, among the leaves."""
        if self._taken is None:
            return None
        inner = self._taken.inside(arrays, None)
        for place, value in zip(self._places, inner.objects, strict=True):
            leaves[place] = value
        return inner

    def arrays(
        self, changed: list[int], unchanged: list[int], placement: Placement | None
    ) -> tuple[list[Any], list[Any]]:
        """Returns the arrays to donate and those to keep, on the devices of ``placement``."""
        taken = self._taken
        if taken is None:
            return [], []
        if placement is not None and placement.only_compiles:
            shapes = [placement.mirror(array) for array in taken.arrays]
            return [shapes[number] for number in changed], [shapes[number] for number in unchanged]
        if placement is not None:
            mirrored = placement.mirrored
            # No name may hold an array here: held by somebody, it would not be donated.
            shardings = [array.sharding for array in taken.arrays]
            for number, sharding in enumerate(shardings):
                if sharding is not mirrored and sharding != mirrored:
                    taken.write({number: placement.mirror(taken.arrays[number])})
        donated = [
            jax.numpy.copy(taken.arrays[number])
            if taken.is_shared(number)
            else taken.arrays[number]
            for number in changed
        ]
        return donated, [taken.arrays[number] for number in unchanged]

    def write(self, numbers: list[int], arrays: list[Any]) -> None:
        """Writes new arrays on the caller's objects."""
        if self._taken is not None:
            self._taken.write(dict(zip(numbers, arrays, strict=True)))

    def watch_captures(self, captures: list[Any]) -> None:
        """Notes what the function captured, for ``refuse_captures``."""
        self._watched = [value for value in captures if is_object(value)] if _in_use() else []

    def refuse_captures(self, constants: list[Any]) -> None:
        """Refuses a trace that froze an array of an object its function captured."""
        frozen = set(map(id, constants))
        for value in self._watched:
            if any(id(array) in frozen for array in take([value]).arrays):
                raise captured(type(value).__name__)


NONE = Held(None, [])


def map_arguments(function: Callable[[Any], Any], nest: Any) -> Any:
    """Maps over (args, kwargs) with PerReplica values and objects as leaves."""
    return mapped(function, nest, is_leaf=_is_leaf)


def take(objects: Sequence[Any]) -> Taken:
    """Takes objects apart by the adapter of their library."""
    adapter = _adapter_of(type(objects[0]))
    assert adapter is not None
    return adapter.take(tuple(objects))


def run_with_objects(
    run: Callable[..., Any],
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
    *,
    compiled: bool,
) -> Any:
    """Runs a replica function whose arguments may hold objects.

    Their arrays enter as arguments; what the function changes comes out by the
    library's rules, the same on all replicas, and is written on the objects.
    """
    leaves, structure = flattened((args, kwargs), _is_leaf)
    places = [index for index, leaf in enumerate(leaves) if is_object(leaf)]
    if not places:
        return run(function, args, kwargs)
    taken = take([leaves[index] for index in places])
    if compiled and not all(map(_compat.is_traced, taken.arrays)):
        raise captured(type(leaves[places[0]]).__name__)
    for index in places:
        leaves[index] = None

    @functools.wraps(function)
    def with_arrays(arrays: list[Any], leaves: list[Any]) -> Any:
        replica = get_replica_context()
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


def captured(kind: str) -> ContextError:
    """The error for an object that a program would freeze."""
    return ContextError(
        fact=f"an object of class {kind} was captured by a compiled function, which would freeze "
        "its values.",
        expected="objects passed as arguments of the compiled function and of strategy.run.",
        hint="write step(model, batch) and strategy.run(fn, args=(model, batch)).",
    )
