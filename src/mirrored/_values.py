"""PerReplica: one value a replica, as one array over the mesh.

Owns how values that differ between replicas are held and taken apart. A
component is either placed (a slice of one array of shape (R, ...)), or still a
host value that nobody has placed yet; only host components may differ in shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, final

import jax
import numpy as np
from jax.experimental import multihost_utils

from mirrored import _compat
from mirrored._errors import ArgumentError, ArgumentTypeError, ShapeError, TracingError
from mirrored._placement import Placement, device_name


class NestLeaf:
    """Marks classes whose objects are one leaf of a nest although JAX sees inside them."""


def is_object_leaf(value: Any) -> bool:
    """Says whether a nest walk must hand over ``value`` itself: a Variable, say."""
    return isinstance(value, NestLeaf)


class _Stacked(NamedTuple):
    """The placed form of a PerReplica."""

    array: Any
    row_counts: Any
    is_batch: bool


class _Children(tuple[Any, ...]):
    """Host components that JAX hands back: of any type, to be kept as they are."""

    __slots__ = ()


@final
@jax.tree_util.register_pytree_node_class
class PerReplica:
    """A value with one component for each replica.

    ``Strategy.run`` returns one wherever the result may differ between replicas,
    ``Strategy.distribute_dataset`` yields them, and ``Strategy.reduce``,
    ``Strategy.gather`` and ``Strategy.local_results`` take them apart.

    Where components have different numbers of rows, the rows are kept padded to
    the longest and each component remembers how many are real.

    >>> import mirrored
    >>> strategy = mirrored.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> strategy.reduce("sum", mirrored.PerReplica([1.0, 3.0])).item()
    4.0
    """

    __slots__ = ("_components", "is_batch", "row_counts", "stacked")

    def __init__(self, components: Iterable[Any]) -> None:
        self._components: tuple[Any, ...] | None = None
        # The placed array (R, ...); None while the components are host values.
        self.stacked: Any = None
        # How many rows of each component are real, or None if all are.
        self.row_counts: Any = None
        # Whether the rows of the components are the examples of a batch.
        self.is_batch = False
        if isinstance(components, _Stacked):
            self.stacked, self.row_counts, self.is_batch = components
            return
        if isinstance(components, _Children):
            self._components = tuple(components)
            return
        # Lists become arrays here: to JAX a list is a structure, not a value.
        self._components = tuple(
            np.asarray(part) if isinstance(part, (list, tuple)) else part for part in components
        )
        if not self._components:
            raise ArgumentError(
                fact="PerReplica was given no components.",
                expected="one component for each replica.",
                hint="use strategy.distribute_values_from_function to make one for each replica.",
            )

    @classmethod
    def from_stacked(
        cls, stacked: Any, row_counts: Any = None, *, is_batch: bool = False
    ) -> PerReplica:
        """Wraps an array of shape (R, ...) whose first axis is the replica.

        Args:
          stacked: the array, placed or being traced.
          row_counts: integers of shape (R,), how many rows of each component are
            real; None where all are.
          is_batch: whether the rows are the examples of a batch.
        """
        return cls(_Stacked(stacked, row_counts, is_batch))

    @property
    def replica_count(self) -> int:
        """The number of components."""
        if self._components is not None:
            return len(self._components)
        return self.stacked.shape[0]

    def placed(self, placement: Placement) -> PerReplica:
        """Returns this value as one array over the devices of ``placement``."""
        if self.replica_count != placement.replica_count:
            raise ArgumentError(
                fact=f"a PerReplica with {self.replica_count} components was given to "
                f"{placement.describe()}.",
                expected=f"{placement.replica_count} components, one for each replica.",
                hint="use values made by the same strategy, or take them apart with "
                "strategy.local_results first.",
            )
        if self._components is None:
            if not _must_move(self.stacked, placement):
                return self
            refuse_other_devices(self.stacked, placement)
            stacked = jax.device_put(self.stacked, placement.split)
            return PerReplica.from_stacked(stacked, self.row_counts, is_batch=self.is_batch)
        if any(_compat.is_traced(part) for part in self._components):
            parts, counts = _pad_rows(self._components, jax.numpy)
            return PerReplica.from_stacked(jax.numpy.stack(parts), counts)
        if placement.spans_processes:
            return _placed_over_processes(self._components, placement)
        parts, counts = _pad_rows(self._components, np)
        return PerReplica.from_stacked(placement.stack(parts), counts)

    def components(self) -> tuple[Any, ...]:
        """Returns this process's components, without padding, in replica order."""
        if self._components is not None:
            return self._components
        if _compat.is_traced(self.stacked):
            return self._traced_components()
        shards = sorted(
            self.stacked.addressable_shards, key=lambda shard: shard.index[0].start or 0
        )
        parts = tuple(shard.data[0] for shard in shards)
        if len(parts) == 1 and len(shards[0].data) > 1:
            parts = tuple(shards[0].data)
        if self.row_counts is None:
            return parts
        counts = _local_counts(self.row_counts)
        ids = [shard.index[0].start or 0 for shard in shards]
        return tuple(part[: counts[index]] for part, index in zip(parts, ids, strict=True))

    @property
    def values(self) -> tuple[Any, ...]:
        """The same as ``components()``, as tf.distribute spells it."""
        return self.components()

    def _traced_components(self) -> tuple[Any, ...]:
        if self.row_counts is not None:
            raise TracingError(
                fact="the components of a batch with padded rows were asked for while a "
                "program is traced, where their true lengths are not known.",
                expected="local_results or gather of uneven components outside "
                "mirrored.function and jax.jit.",
                hint="return the PerReplica value from the compiled function and take it "
                "apart there.",
            )
        return tuple(self.stacked[index] for index in range(self.replica_count))

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[str, bool]]:
        """Splits into arrays and structure, for JAX."""
        if self._components is not None:
            return self._components, ("components", False)
        return (self.stacked, self.row_counts), ("stacked", self.is_batch)

    @classmethod
    def tree_unflatten(cls, form: tuple[str, bool], children: Sequence[Any]) -> PerReplica:
        """Rebuilds from what tree_flatten gave; the children may be any objects."""
        kind, is_batch = form
        if kind == "stacked":
            stacked, row_counts = children
            return cls(_Stacked(stacked, row_counts, is_batch))
        return cls(_Children(children))

    def __repr__(self) -> str:
        if self._components is None and not isinstance(self.stacked, jax.Array):
            return f"PerReplica({self.stacked!r})"
        if self._components is None and _compat.is_traced(self.stacked):
            return f"PerReplica(traced {self.stacked.dtype}{list(self.stacked.shape)})"
        body = " | ".join(str(np.asarray(part)) for part in self.components())
        return f"PerReplica[{body}]"

    def __iter__(self) -> Any:
        raise _not_a_single_value(what="iterated over")

    def __bool__(self) -> bool:
        raise _not_a_single_value(what="used as a condition")

    def __float__(self) -> float:
        raise _not_a_single_value(what="turned into a Python number")

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise _not_a_single_value(what="turned into an array")


def _must_move(stacked: Any, placement: Placement) -> bool:
    if _compat.is_traced(stacked) or not isinstance(stacked, jax.Array):
        return False
    sharding = stacked.sharding
    return sharding is not placement.split and sharding.device_set != placement.device_set


def refuse_other_devices(stacked: Any, placement: Placement) -> None:
    """Refuses components that another strategy has placed: moving them would cost each step."""
    found = stacked.sharding.device_set
    if not stacked.committed or found <= placement.device_set:
        return
    raise ArgumentError(
        fact=f"a PerReplica value on {', '.join(sorted(map(device_name, found)))} was given to "
        f"{placement.describe()}.",
        expected="values of the strategy that runs.",
        hint="use values made by the same strategy, or take them apart with "
        "strategy.local_results first.",
    )


def _not_a_single_value(*, what: str) -> ArgumentTypeError:
    return ArgumentTypeError(
        fact=f"a PerReplica value was {what}, but it has one component for each replica.",
        expected="one value: the replicas' values reduced or taken apart first.",
        hint='use strategy.reduce("mean", value), strategy.gather(value, axis=0) or '
        "strategy.local_results(value).",
    )


def _pad_rows(parts: Sequence[Any], namespace: Any) -> tuple[list[Any], Any]:
    """Pads components along axis 0 to the longest; returns them and the row counts."""
    arrays = [part if _compat.is_typed_key(part) else namespace.asarray(part) for part in parts]
    for part, array in zip(parts, arrays, strict=True):
        if isinstance(array, np.ndarray) and array.dtype.kind in "OSUMm":
            raise ArgumentTypeError(
                fact=f"a PerReplica holds {part!r} ({type(part).__name__}), which is no array.",
                expected="arrays or numbers where replicas compute or values are reduced.",
                hint='put PerReplica values inside the nest: {"a": PerReplica([1, 2])}; other '
                "objects are for strategy.local_results.",
            )
    shapes = [array.shape for array in arrays]
    if len(set(shapes)) == 1:
        return arrays, None
    if any(len(shape) == 0 for shape in shapes) or len({shape[1:] for shape in shapes}) > 1:
        raise ShapeError(
            fact="the components of a PerReplica value have the shapes "
            f"{' | '.join(str(shape) for shape in shapes)}.",
            expected="components that differ in their first axis at most, since all "
            "replicas run one program.",
            hint="pad the other axes to one size first.",
        )
    longest = max(shape[0] for shape in shapes)
    counts = np.array([shape[0] for shape in shapes], np.int32)
    dtype = namespace.result_type(*arrays)
    # Padding repeats a real row. It is never counted, but it is computed with: of
    # rows of zeros a logarithm or a division would make NaN, also in gradients.
    filler = next(array for array in reversed(arrays) if array.shape[0])[-1:]
    padded = [
        namespace.concatenate(
            [array.astype(dtype)] + [filler.astype(dtype)] * (longest - array.shape[0])
        )
        for array in arrays
    ]
    return padded, counts


def is_leaf(value: Any) -> bool:
    """The ``is_leaf`` of nest walks: PerReplica values and Variables stay whole."""
    return isinstance(value, (PerReplica, NestLeaf))


def flatten(nest: Any) -> tuple[list[Any], Any]:
    """Flattens a nest with PerReplica values and Variables as leaves."""
    return flattened(nest, is_leaf)


def map_nest(function: Callable[..., Any], nest: Any, *rest: Any) -> Any:
    """Maps over a nest with PerReplica values as leaves."""
    return mapped(function, nest, *rest, is_leaf=is_leaf)


def joined_values(placement: Placement, local: Mapping[int, Any]) -> Any:
    """Makes a nest of PerReplica values of this process's components, nests of one structure."""
    structures = {index: flattened(value)[1] for index, value in local.items()}
    first = min(local)
    for index, structure in structures.items():
        if structure != structures[first]:
            raise ArgumentError(
                fact=f"the value of replica {first} has the structure {structures[first]}, that of "
                f"replica {index} {structure}.",
                expected="one structure on every replica.",
                hint="return the same keys and as many entries everywhere; shapes may differ.",
            )
    if len(local) == placement.replica_count:
        return jax.tree.map(lambda *parts: PerReplica(parts), *local.values())
    # Other processes fill in their own components; here they only keep the place.
    everything = [local.get(index, local[first]) for index in range(placement.replica_count)]
    return jax.tree.map(lambda *parts: PerReplica(parts).placed(placement), *everything)


def flattened(nest: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Any]:
    """``jax.tree.flatten`` of a nest that users gave, whose dictionaries may not be sortable."""
    try:
        return jax.tree.flatten(nest, is_leaf=is_leaf)
    except (TypeError, ValueError) as error:
        keys = _unsortable_keys(nest, is_leaf)
        if keys is None:
            raise
        raise ArgumentError(
            fact=f"a nest holds a dictionary with the keys {', '.join(map(repr, keys))}, which "
            "have no order.",
            expected="keys that can be sorted: strings only, or numbers only.",
            hint="write the keys as strings, or pass a tuple or a dataclass.",
        ) from error


def mapped(
    function: Callable[..., Any],
    nest: Any,
    *rest: Any,
    is_leaf: Callable[[Any], bool] | None = None,
) -> Any:
    """``jax.tree.map`` of nests that users gave."""
    flattened(nest, is_leaf)
    return jax.tree.map(function, nest, *rest, is_leaf=is_leaf)


def _unsortable_keys(nest: Any, is_leaf: Callable[[Any], bool] | None) -> list[Any] | None:
    if is_leaf is not None and is_leaf(nest):
        return None
    if isinstance(nest, dict):
        try:
            sorted(nest)
        except TypeError:
            return list(nest)
    parts = nest.values() if isinstance(nest, dict) else nest
    if not isinstance(nest, (dict, list, tuple)):
        return None
    found = (_unsortable_keys(part, is_leaf) for part in parts)
    return next((keys for keys in found if keys is not None), None)


def _placed_over_processes(components: tuple[Any, ...], placement: Placement) -> PerReplica:
    """Places this process's components, padded to the longest of all processes."""
    parts = {index: np.asarray(components[index]) for index in placement.local_replica_ids}
    own = np.zeros(placement.replica_count, np.int32)
    for index, part in parts.items():
        own[index] = len(part) if part.ndim else 0
    counts = np.asarray(multihost_utils.process_allgather(own)).sum(axis=0, dtype=np.int32)
    if len(set(counts.tolist())) == 1:
        return PerReplica.from_stacked(placement.stack(components))
    longest = int(counts.max())
    padded = list(components)
    for index, part in parts.items():
        rest = np.zeros((longest - len(part), *part.shape[1:]), part.dtype)
        padded[index] = np.concatenate([part, rest])
    return PerReplica.from_stacked(placement.stack(padded), counts)


def _local_counts(row_counts: Any) -> dict[int, int]:
    """Returns the row counts that this process knows, by replica."""
    if isinstance(row_counts, jax.Array) and not row_counts.is_fully_addressable:
        return {
            (shard.index[0].start or 0) + offset: int(count)
            for shard in row_counts.addressable_shards
            for offset, count in enumerate(np.asarray(shard.data))
        }
    return dict(enumerate(np.asarray(row_counts).tolist()))
