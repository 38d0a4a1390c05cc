"""EmbeddingTable: a large array on servers, of which a step uses a few rows.

Owns the object users hold and the initial values, which are made where the rows are. How
rows are found and moved is in ``_ids`` and ``_participant``.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from mirrored import _context
from mirrored._errors import ArgumentError, ContextError
from mirrored._home import Home, Remote
from mirrored._parameter_server._catalog import VariableSpec
from mirrored._parameter_server._ids import used_rows
from mirrored._parameter_server._participant import Participant
from mirrored._parameter_server._sharing import gathered
from mirrored._sparse import IndexedSlices
from mirrored._values import NestLeaf, PerReplica

# Rows whose initial values are drawn together, wherever the cuts between servers are.
_BLOCK_ROWS = 8192

Initializer = Callable[[Any, tuple[int, ...], Any], Any]


class TableHome(Home):
    """A home that keeps tables too."""

    @property
    @abc.abstractmethod
    def participant(self) -> Participant:
        """In whose name the running code reads and writes."""

    def again(self, action: Callable[[], Any]) -> Any:
        """Acts, once more where servers were lost meanwhile and came back."""
        return action()

    @abc.abstractmethod
    def adopt_table(self, table: Any, make: Callable[[int, int], Any]) -> None:
        """Takes in a table just made, and how its first rows are made."""

    @abc.abstractmethod
    def spec_of(self, thing: Any) -> VariableSpec:
        """The description of a variable or table."""


@final
class EmbeddingTable(NestLeaf, Remote):
    """Rows on parameter servers, of which each step moves only those it uses.

    Make it in the scope of a ParameterServerStrategy. ``table.lookup(ids)`` in a step asks
    the servers for the different rows among the ids; the gradient that ``value_and_grad``
    returns for the table is of these rows alone, and ``apply_gradients`` updates them
    alone, with state of their own: momentum and decay act on a row in the steps that use
    it. Any Optax transformation that treats every element by itself will do.

    Args:
      rows: how many rows there are; ids go from 0 to ``rows - 1``.
      features: the length of a row.
      initializer: a function of (key, shape, dtype), such as ``jax.nn.initializers``
        returns; uniform in +-0.05 if left out. The values do not depend on the number of
        servers.
      seed: where the initial values come from.
      dtype: of the elements.
      name: used in messages and checkpoints; made up if left out.

    >>> import mirrored
    >>> strategy = mirrored.ParameterServerStrategy(worker_count=1, server_count=2)
    >>> with strategy.scope():
    ...     table = mirrored.EmbeddingTable(1000, 4, name="items")
    >>> table.lookup([[7, 8], [7, 9]]).shape
    (2, 2, 4)
    """

    def __init__(
        self,
        rows: int,
        features: int,
        initializer: Initializer | None = None,
        *,
        seed: int = 0,
        dtype: Any = jnp.float32,
        name: str | None = None,
    ) -> None:
        if not (isinstance(rows, int) and isinstance(features, int) and rows > 0 < features):
            raise ArgumentError(
                fact=f"EmbeddingTable was given {rows!r} rows of {features!r} features.",
                expected="two numbers, 1 or more.",
                hint="write EmbeddingTable(rows=1_000_000, features=64).",
            )
        home = _context.current().home
        if not isinstance(home, TableHome):
            raise ContextError(
                fact="an EmbeddingTable was made outside the scope of a ParameterServerStrategy.",
                expected="a table that lives on parameter servers.",
                hint="make it in `with strategy.scope():`; on other strategies use a Variable.",
            )
        self.shape = (rows, features)
        self.dtype = np.dtype(dtype)
        self.name = name or "table"
        self.trainable = True
        self._home: TableHome = home
        make = functools.partial(
            initial_rows,
            initializer=initializer or _uniform,
            seed=seed,
            features=features,
            dtype=self.dtype,
            count=rows,
        )
        home.adopt_table(self, make)

    def lookup(self, ids: Any) -> Any:
        """Returns the rows with these ids, in the shape of the ids and one axis more.

        In a step the ids must be computed from the step's arguments.
        """
        ids = ids if isinstance(ids, jax.Array) else jnp.asarray(ids)
        _require_integers(self.name, ids.dtype)
        differentiated = _context.current().differentiated
        rows = differentiated.get(self) if differentiated else None
        home, spec = self._home, self._home.spec_of(self)
        return home.again(lambda: home.participant.lookup(spec, ids, rows))

    def numpy(self) -> np.ndarray:
        """Returns all rows, on the host of who asks; for tables that fit there."""
        return self._home.again(self._all_rows)

    def _all_rows(self) -> np.ndarray:
        spec = self._home.spec_of(self)
        rows = np.empty(self.shape, self.dtype)
        for start in range(0, self.shape[0], _BLOCK_ROWS):
            ids = np.arange(start, min(start + _BLOCK_ROWS, self.shape[0]))
            rows[ids] = self._home.participant.take(spec, ids)
        return rows

    def pull(self, ids: Any) -> TableRows:
        """Brings the rows with these ids here, for a step of another strategy.

        This is how a table on servers goes with a dense part that is trained in lockstep:
        the rows are an argument of the step, gradients are taken of them as of a Variable,
        and the table's own optimizer sends them back. Each step sees all updates before it.
        Where the step runs in several processes, each calls this with its own part of the
        batch, and all get the rows of all (see ``shared_with`` of the servers' strategy).

        Args:
          ids: integers: an array, or a PerReplica of one, as distributed datasets yield.

        >>> import jax
        >>> import optax
        >>> import mirrored
        >>> servers = mirrored.ParameterServerStrategy(worker_count=1, server_count=2)
        >>> with servers.scope():
        ...     table = mirrored.EmbeddingTable(100, 4, jax.nn.initializers.ones)
        ...     table_optimizer = mirrored.Optimizer(optax.sgd(1.0))
        >>> strategy = mirrored.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> def step(rows):
        ...     def loss_fn():
        ...         return mirrored.mean(rows.lookup().sum(axis=1))
        ...
        ...     return mirrored.value_and_grad(loss_fn, rows)
        >>> (ids,) = strategy.distribute_dataset([7, 8, 7], batch_size=4)
        >>> rows = table.pull(ids)
        >>> loss, gradient = strategy.run(step, args=(rows,))
        >>> table_optimizer.apply_gradients([(rows.gradient(gradient), table)])
        >>> float(loss), [round(float(table.numpy()[row, 0]), 3) for row in (7, 8)]
        (4.0, [0.333, 0.667])
        """
        spec = self._home.spec_of(self)
        stacked = None
        if isinstance(ids, PerReplica):
            if ids.stacked is None:
                raise ArgumentError(
                    fact=f"pull of table {self.name!r} was given {ids!r}, which is not placed.",
                    expected="an array, or a batch of a distributed dataset.",
                    hint="use strategy.distribute_dataset.",
                )
            stacked = ids.stacked
        host = np.asarray(ids) if stacked is None else gathered(stacked)
        _require_integers(self.name, host.dtype)
        used = used_rows(spec, [host])
        (values,) = self._home.participant.fetch_rows([used])
        places: Any = used.places[0]
        if stacked is not None:
            whole = places
            placed = jax.make_array_from_callback(
                whole.shape, stacked.sharding, lambda part: whole[part]
            )
            places = PerReplica.from_stacked(placed, ids.row_counts, is_batch=ids.is_batch)
        return TableRows(values, places, used.rows, self.shape, self.name)

    def assign(self, values: Any, ids: Any = None) -> None:
        """Sets rows; the optimizer's state of them stays as it is.

        Args:
          values: a row for each id.
          ids: which rows; all, in order, if left out.
        """
        ids = np.arange(self.shape[0]) if ids is None else np.asarray(ids).reshape(-1)
        values = np.asarray(values)
        if values.shape != (len(ids), self.shape[1]) or len(np.unique(ids)) != len(ids):
            raise ArgumentError(
                fact=f"table {self.name!r} was given values of shape {values.shape} for "
                f"{len(ids)} ids, {len(np.unique(ids))} of them different.",
                expected=f"different ids, and values of shape {(len(ids), self.shape[1])}.",
                hint="leave ids out to set all rows.",
            )
        self._home.again(lambda: self._put(ids, values))

    def _put(self, ids: np.ndarray, values: np.ndarray) -> None:
        order = np.argsort(ids, kind="stable")
        spec, participant = self._home.spec_of(self), self._home.participant
        for start in range(0, len(ids), _BLOCK_ROWS):
            part = order[start : start + _BLOCK_ROWS]
            participant.put(spec, ids[part], values[part].astype(self.dtype))

    def read(self, *, lend: bool = True) -> Any:
        return self._home.participant.rows(self._home.spec_of(self))

    def __reduce__(self) -> Any:
        return self._home.pickled(self)

    def __repr__(self) -> str:
        return f"<EmbeddingTable {self.name!r} shape={self.shape} dtype={self.dtype}>"


@final
@jax.tree_util.register_pytree_node_class
class TableRows(Remote):
    """Rows of a table that a step uses, made by ``EmbeddingTable.pull``.

    Give it to the step as an argument; there ``lookup()`` returns the rows of the ids, and
    ``value_and_grad`` takes it like a Variable.
    """

    def __init__(
        self,
        values: Any,
        places: Any,
        numbers: np.ndarray | None,
        shape: tuple[int, int],
        name: str,
    ) -> None:
        # The different rows, padded to one of a few sizes so that nothing compiles anew.
        self.values = values
        # Where each id's row is among them.
        self.places = places
        # Not known inside steps, which should not compile anew for other numbers.
        self._numbers = numbers
        self.shape = shape
        self.name = name

    @property
    def dtype(self) -> Any:
        """The dtype of the elements."""
        return self.values.dtype

    def read(self, *, lend: bool = True) -> Any:
        """The different rows."""
        return self.values

    def lookup(self) -> Any:
        """The rows of the ids, in the shape of the ids and one axis more."""
        differentiated = _context.current().differentiated or {}
        return jnp.take(differentiated.get(self, self.values), self.places, axis=0, mode="clip")

    def gradient(self, of_rows: Any) -> IndexedSlices:
        """The table's gradient, given what ``value_and_grad`` returned: for ``apply_gradients``."""
        found = np.asarray(of_rows)
        if self._numbers is None or found.shape != self.values.shape:
            raise ArgumentError(
                fact=f"the gradient of rows of table {self.name!r} has shape {found.shape}, the "
                f"rows {np.shape(self.values)}.",
                expected="what value_and_grad returned for them, outside the step.",
                hint="return it from the step, and call gradient of what pull returned.",
            )
        return IndexedSlices(found[: len(self._numbers)], self._numbers, self.shape)

    def tree_flatten(self) -> tuple[tuple[Any, Any], tuple[tuple[int, int], str]]:
        """Splits into arrays and structure, for JAX."""
        return (self.values, self.places), (self.shape, self.name)

    @classmethod
    def tree_unflatten(cls, form: tuple[tuple[int, int], str], children: Any) -> TableRows:
        """Rebuilds from what tree_flatten gave."""
        values, places = children
        return cls(values, places, None, form[0], form[1])


def _require_integers(name: str, dtype: Any) -> None:
    if not jnp.issubdtype(dtype, jnp.integer):
        raise ArgumentError(
            fact=f"table {name!r} was given ids of dtype {dtype}.",
            expected="integers.",
            hint="convert them with .astype(int).",
        )


def initial_rows(
    start: int,
    stop: int,
    *,
    initializer: Initializer,
    seed: int,
    features: int,
    dtype: Any,
    count: int,
) -> np.ndarray:
    """Makes the initial values of some rows of a table, on the server that has them."""
    result = np.empty((stop - start, features), dtype)
    key = jax.random.key(seed)
    # The last block of a table is drawn whole, too: its values depend on nothing else.
    draw = jax.jit(lambda key: initializer(key, (min(_BLOCK_ROWS, count), features), dtype))
    for block in range(start // _BLOCK_ROWS, -(-stop // _BLOCK_ROWS)):
        first = block * _BLOCK_ROWS
        values = np.asarray(draw(jax.random.fold_in(key, block)))
        low, high = max(start, first), min(stop, first + len(values))
        result[low - start : high - start] = values[low - first : high - first]
    return result


def _uniform(key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.random.uniform(key, shape, dtype, -0.05, 0.05)
