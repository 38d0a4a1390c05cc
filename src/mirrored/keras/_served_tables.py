"""``keras.layers.Embedding`` on parameter servers: its rows stay there.

Owns the weight that stands for a table, and what an embedding layer made in the scope of a
ParameterServerStrategy does differently: it looks rows up, and never holds them all.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import jax
import keras
import numpy as np

from mirrored._errors import ArgumentError
from mirrored._parameter_server import EmbeddingTable, ParameterServerStrategy
from mirrored.keras import _private, _scope

# Up to here a table's first values are drawn at once, the same as without servers; beyond,
# servers draw their own, in blocks.
_DRAWN_AT_ONCE_BYTES = 256 << 20

# In a worker's own process: the tables there are, by the name of the layer.
_TABLES: contextvars.ContextVar[Mapping[str, EmbeddingTable] | None] = contextvars.ContextVar(
    "mirrored_keras_tables", default=None
)


@contextlib.contextmanager
def tables_by_layer(tables: Mapping[str, EmbeddingTable]) -> Iterator[None]:
    """Embedding layers built inside take these tables for theirs."""
    token = _TABLES.set(tables)
    try:
        yield
    finally:
        _TABLES.reset(token)


@final
class TableVariable(_private.Variable):
    """The weight of an embedding layer whose rows are on parameter servers.

    Reading its value brings all rows here: for saving, and for looking at small ones.
    """

    def __init__(self, strategy: Any, **arguments: Any) -> None:
        self._strategy = strategy
        self.table: Any = None
        super().__init__(**arguments)

    def _initialize_with_initializer(self, initializer: Any) -> None:
        _private.give_layout(self)
        rows, features = self._shape
        dtype = np.dtype(self._dtype)
        tables = _TABLES.get()
        if tables is not None:
            self.table = tables[layer_of(self)]
            return
        with self._strategy.scope():
            if rows * features * dtype.itemsize <= _DRAWN_AT_ONCE_BYTES:
                with _scope.outside():
                    values = np.asarray(initializer(self._shape, dtype=self._dtype))
                self.table = EmbeddingTable(
                    rows, features, _zeros, dtype=dtype, name=self.path.replace("/", ".")
                )
                self.table.assign(values)
            else:
                self.table = EmbeddingTable(
                    rows,
                    features,
                    functools.partial(_drawn, keras.initializers.serialize(initializer), rows),
                    dtype=dtype,
                    name=self.path.replace("/", "."),
                )

    @property
    def value(self) -> Any:
        """All rows."""
        if self.table is None or _private.in_shape_inference():
            return jax.numpy.zeros(self._shape, self._dtype)
        return jax.numpy.asarray(self.table.numpy())

    def _direct_assign(self, value: Any) -> None:
        self.table.assign(np.asarray(value))


def layer_of(weight: Any) -> str:
    """The name of the layer a weight belongs to."""
    return weight.path.split("/")[-2]


def _zeros(key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.numpy.zeros(shape, dtype)


def _drawn(config: Any, rows: int, key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Draws a block of a table of ``rows`` rows."""
    initializer: Any = keras.initializers.deserialize(config)
    if isinstance(initializer, keras.initializers.VarianceScaling):
        # Its scale is that of the whole table, not of the block.
        initializer.scale *= _fan(initializer.mode, shape) / _fan(
            initializer.mode, (rows, shape[1])
        )
    if isinstance(initializer, _private.RandomInitializer):
        initializer.seed = _KeyAsSeed(key)
    return initializer(shape, dtype=np.dtype(dtype).name)


def _fan(mode: str, shape: tuple[int, ...]) -> float:
    rows, features = shape
    return {"fan_in": rows, "fan_out": features, "fan_avg": (rows + features) / 2}[mode]


@final
class _KeyAsSeed(keras.random.SeedGenerator):
    """A JAX key where Keras expects a seed generator: each block has a key of its own."""

    def __init__(self, key: Any) -> None:
        # Not the generator's own: it would make a variable.
        self._key = key

    def next(self, ordered: bool = True) -> Any:
        """The key."""
        return jax.random.key_data(self._key)


def install() -> None:
    """Wraps ``keras.layers.Embedding``; once."""
    layer = keras.layers.Embedding
    if _private.wraps_twice(layer.build):
        return
    layer.build = _private.mark_wrapper(_building(layer.build))
    layer.call = _private.mark_wrapper(_calling(layer.call))


def table_of(layer: Any) -> TableVariable | None:
    """The weight of an embedding layer that stands for a table, or None."""
    weight = _private.embeddings_of(layer)
    return weight if isinstance(weight, TableVariable) else None


def _building(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def build(self: Any, input_shape: Any = None) -> None:
        strategy = _scope.current_strategy()
        is_served = isinstance(strategy, ParameterServerStrategy) or _TABLES.get() is not None
        if self.built or not is_served:
            original(self, input_shape)
            return
        _require_plain(self)
        weight = TableVariable(
            strategy,
            initializer=self.embeddings_initializer,
            shape=(self.input_dim, self.output_dim),
            dtype=self.variable_dtype,
            trainable=self.trainable,
            name="embeddings",
        )
        _private.give_embeddings(self, weight)

    return build


def _calling(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, inputs: Any) -> Any:
        weight = table_of(self)
        if weight is None:
            return original(self, inputs)
        ids = jax.numpy.asarray(inputs)
        if not jax.numpy.issubdtype(ids.dtype, jax.numpy.integer):
            ids = ids.astype(jax.numpy.int32)
        if _private.in_shape_inference():
            rows = jax.numpy.zeros((*ids.shape, self.output_dim), weight.dtype)
        else:
            rows = weight.table.lookup(ids)
        return keras.ops.cast(rows, dtype=self.compute_dtype)

    return call


def _require_plain(layer: Any) -> None:
    """Refuses what would need all rows at once."""
    problem = None
    if layer.embeddings_regularizer is not None:
        problem = "embeddings_regularizer"
    elif layer.embeddings_constraint is not None:
        problem = "embeddings_constraint"
    elif layer.lora_rank or layer.quantization_mode:
        problem = "lora_rank or a quantized dtype"
    if problem is not None:
        raise ArgumentError(
            fact=f"layer {layer.name!r} ({layer.input_dim} rows) has {problem}, and its rows are "
            "on parameter servers, which a step reads and changes one by one.",
            expected="an Embedding without it.",
            hint="use activity_regularizer, which sees the rows a batch uses, or weight decay of "
            "the optimizer, which acts on the rows a step uses.",
        )
