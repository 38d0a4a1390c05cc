"""Optimizer state in shards: an Optax transformation run on 1/R of every array.

Owns which parts of a transformation's state can be divided between replicas, and
running its update on this replica's part so that the numbers are those of the whole.
The update is traced with the true shapes, then followed operation by operation:
elementwise ones act on the shard, reductions of a whole array (norms, "all finite")
are completed over the replicas, and everything else that touches a divided array
(factored or matrix statistics, sorting, ...) is refused, never approximated.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

from mirrored import _compat
from mirrored._collectives import Communicator
from mirrored._errors import ArgumentError
from mirrored._types import ReduceOp

# fmt: off
ELEMENTWISE = frozenset((
    "abs", "acos", "acosh", "add", "and", "asin", "asinh", "atan", "atan2", "atanh",
    "bessel_i0e", "bessel_i1e", "cbrt", "ceil", "clamp", "convert_element_type", "copy",
    "copy_p", "cos", "cosh", "digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2",
    "expm1", "floor", "ge", "gt", "imag", "integer_pow", "is_finite", "le", "lgamma", "log",
    "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not",
    "optimization_barrier", "or", "pow", "pvary", "pcast", "real", "reduce_precision", "rem",
    "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical",
    "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor",
))
# fmt: on
_LOOPS = ("scan", "while")
_REDUCTIONS = {
    "reduce_sum": (ReduceOp.SUM, 0),
    "reduce_max": (ReduceOp.MAX, None),
    "reduce_min": (ReduceOp.MIN, None),
    "reduce_and": (ReduceOp.MIN, True),
    "reduce_or": (ReduceOp.MAX, False),
}


@final
@dataclasses.dataclass(frozen=True)
class Shard:
    """This replica's part of an array: a slice of its elements, padded to equal length."""

    values: Any
    shape: tuple[int, ...]


def shard_length(shape: tuple[int, ...], replica_count: int) -> int:
    """How many elements each replica keeps of an array."""
    return -(-math.prod(shape) // replica_count)


def as_rows(array: Any, replica_count: int) -> Any:
    """Writes an array as one row of elements for each replica, padded with zeros."""
    length = shard_length(array.shape, replica_count)
    flat = jnp.pad(array.reshape(-1), (0, length * replica_count - array.size))
    return flat.reshape(replica_count, length)


def own_shard(array: Any, communicator: Communicator) -> Shard:
    """Takes this replica's part of an array that is the same on all replicas."""
    rows = as_rows(array, communicator.replica_count)
    row = lax.dynamic_index_in_dim(rows, communicator.replica_id, keepdims=False)
    return Shard(communicator.own(row), array.shape)


def scatter_sum(arrays: list[Any], communicator: Communicator) -> list[Shard]:
    """Sums arrays over the replicas; each keeps its part. One collective a dtype."""
    count = communicator.replica_count
    shards: list[Any] = [None] * len(arrays)
    for indices in _by_dtype(arrays):
        rows = [as_rows(arrays[index], count) for index in indices]
        total = communicator.scatter_sum(jnp.concatenate(rows, axis=1))
        for index, part in zip(indices, _split(total, rows), strict=True):
            shards[index] = Shard(part, arrays[index].shape)
    return shards


def reduced_shards(
    gradients: list[Any], communicator: Communicator, *, mean: bool, dtype: Any
) -> list[Shard]:
    """Reduces what varies, and takes this replica's part of what is reduced already."""
    parts: list[Any] = [None] * len(gradients)
    varying = [index for index, value in enumerate(gradients) if communicator.is_own(value)]
    sent, divided = [], []
    for index, gradient in enumerate(gradients):
        if index not in varying:
            parts[index] = own_shard(gradient, communicator)
            continue
        if dtype is not None and jnp.issubdtype(gradient.dtype, jnp.floating):
            gradient = gradient.astype(dtype)
        # In float16 a sum may be infinite although the mean is not.
        divided.append(mean and gradient.dtype == jnp.float16)
        sent.append(gradient / communicator.replica_count if divided[-1] else gradient)
    with jax.named_scope("mirrored.scatter_gradients"):
        received = scatter_sum(sent, communicator) if sent else []
    for index, shard, was_divided in zip(varying, received, divided, strict=True):
        values = shard.values
        if mean and not was_divided:
            values = values / communicator.replica_count
        parts[index] = Shard(values.astype(gradients[index].dtype), shard.shape)
    return parts


def shard_flags(shards: list[Shard], communicator: Communicator) -> Any:
    """Returns one boolean for each array: whether all elements, of all parts, are finite."""
    own = jnp.stack([jnp.isfinite(shard.values).all() for shard in shards])
    return communicator.extreme(ReduceOp.MIN, [own.astype(jnp.int32)])[0] == 1


def gather_whole(shards: list[Shard], communicator: Communicator) -> list[Any]:
    """Puts the parts of all replicas together. One collective a dtype."""
    arrays: list[Any] = [None] * len(shards)
    for indices in _by_dtype([shard.values for shard in shards]):
        own = [shards[index].values[None] for index in indices]
        rows = communicator.gather(jnp.concatenate(own, axis=1)[0], 0, tiled=False)
        first = 0
        for index, part in zip(indices, own, strict=True):
            shape = shards[index].shape
            whole = rows[:, first : first + part.shape[1]].reshape(-1)[: math.prod(shape)]
            arrays[index] = whole.reshape(shape)
            first += part.shape[1]
    return arrays


def _by_dtype(arrays: list[Any]) -> list[list[int]]:
    groups: dict[Any, list[int]] = {}
    for index, array in enumerate(arrays):
        groups.setdefault(array.dtype, []).append(index)
    return list(groups.values())


def _split(total: Any, rows: list[Any]) -> list[Any]:
    parts, first = [], 0
    for row in rows:
        parts.append(total[first : first + row.shape[1]])
        first += row.shape[1]
    return parts


# --- which state is divided ----------------------------------------------------------


@final
class ShardedUpdate:
    """An Optax update traced for arrays of given shapes, to be run on shards of them."""

    def __init__(self, tx: Any, values: Any) -> None:
        shapes = jax.tree.map(lambda v: jax.ShapeDtypeStruct(jnp.shape(v), v.dtype), values)
        state = jax.eval_shape(tx.init, shapes)
        self.state_structure = jax.tree.structure(state)

        def update(gradients: Any, state: Any, values: Any) -> Any:
            updates, new_state = tx.update(gradients, state, values)
            new_structure = jax.tree.structure(new_state)
            if new_structure != self.state_structure:
                raise _refusal(what="changes the structure of its state")
            return updates, new_state

        self._jaxpr = jax.make_jaxpr(update)(shapes, state, shapes)
        self._shapes = [leaf.shape for leaf in jax.tree.leaves(state)]
        count = len(jax.tree.leaves(shapes))
        divided = [False] * len(self._shapes)
        while True:
            flags = [True] * count + divided + [True] * count
            results = _divided(self._jaxpr.jaxpr, flags)[count:]
            grown = [old or new for old, new in zip(divided, results, strict=True)]
            if grown == divided:
                break
            divided = grown
        self.is_divided = divided
        self._count = count

    def __call__(
        self, gradients: list[Shard], state: list[Any], values: list[Shard], communicator: Any
    ) -> tuple[list[Shard], list[Any]]:
        """Runs the update; divided state leaves are this replica's rows of elements."""
        wrapped = [
            Shard(leaf, shape) if divided else leaf
            for leaf, shape, divided in zip(state, self._shapes, self.is_divided, strict=True)
        ]
        run = _Evaluation(communicator)
        results = run.jaxpr(self._jaxpr.jaxpr, self._jaxpr.consts, [*gradients, *wrapped, *values])
        updates = [run.as_shard(result) for result in results[: self._count]]
        new_state = [
            run.as_shard(result).values if divided else result
            for result, divided in zip(results[self._count :], self.is_divided, strict=True)
        ]
        return updates, new_state


def _called(equation: Any) -> Any:
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        candidate = equation.params.get(key)
        if candidate is not None:
            return candidate
    return None


def _divided(jaxpr: Any, inputs: list[bool]) -> list[bool]:
    """Follows which values are divided, refusing what cannot be done on shards."""
    known = dict.fromkeys(jaxpr.constvars, False)
    known.update(zip(jaxpr.invars, inputs, strict=True))

    def of(atom: Any) -> bool:
        return False if isinstance(atom, Literal) else known[atom]

    for equation in jaxpr.eqns:
        flags = [of(atom) for atom in equation.invars]
        name = equation.primitive.name
        if not any(flags):
            results = [False] * len(equation.outvars)
        elif name == "cond":
            if flags[0]:
                raise _refusal(what="branches on a divided array")
            branches = [
                _divided(_compat.open_program(branch), flags[1:])
                for branch in equation.params["branches"]
            ]
            results = [any(column) for column in zip(*branches, strict=True)]
        elif name in ELEMENTWISE or _keeps_shape(equation):
            results = [True] * len(equation.outvars)
        elif name in _REDUCTIONS and _reduces_all(equation):
            results = [False]
        elif _called(equation) is None or name in _LOOPS:
            raise _refusal(what=f"uses {name!r} across the elements of an array")
        else:
            results = _divided(_compat.open_program(_called(equation)), flags)
        known.update(zip(equation.outvars, results, strict=True))
    return [of(atom) for atom in jaxpr.outvars]


def _keeps_shape(equation: Any) -> bool:
    names = ("broadcast_in_dim", "reshape", "squeeze", "expand_dims")
    shape = equation.outvars[0].aval.shape
    return equation.primitive.name in names and equation.invars[0].aval.shape == shape


def _reduces_all(equation: Any) -> bool:
    return len(equation.params["axes"]) == len(equation.invars[0].aval.shape)


def _refusal(*, what: str) -> ArgumentError:
    return ArgumentError(
        fact=f"the optimizer's transformation {what}, which a replica that keeps only its part of "
        "the state cannot do.",
        expected="shard_state=True with elementwise transformations (adam, adamw, sgd, lion, ...), "
        "also with clipping by global norm, trust ratios and other norms of whole arrays.",
        hint="leave shard_state out for this transformation.",
    )


@final
class _Evaluation:
    """Runs a traced update on shards."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def as_shard(self, value: Any) -> Shard:
        """Takes the replica's part of a value that is whole."""
        if isinstance(value, Shard):
            return value
        return own_shard(value, self._communicator)

    def jaxpr(self, jaxpr: Any, constants: Any, inputs: list[Any]) -> list[Any]:
        """Evaluates a (sub)program, equation by equation."""
        known = dict(zip(jaxpr.constvars, constants, strict=True))
        known.update(zip(jaxpr.invars, inputs, strict=True))

        def of(atom: Any) -> Any:
            if isinstance(atom, Literal):
                return jnp.asarray(atom.val, getattr(atom.aval, "dtype", None))
            return known[atom]

        for equation in jaxpr.eqns:
            results = self._equation(equation, [of(atom) for atom in equation.invars])
            known.update(zip(equation.outvars, results, strict=True))
        return [of(atom) for atom in jaxpr.outvars]

    def _equation(self, equation: Any, inputs: list[Any]) -> list[Any]:
        name = equation.primitive.name
        divided = any(isinstance(value, Shard) for value in inputs)
        called = None if name in _LOOPS else _called(equation)
        if called is not None and name != "cond":
            constants = getattr(called, "consts", ())
            return self.jaxpr(_compat.open_program(called), constants, inputs)
        if not divided:
            return _bind(equation, inputs)
        if name == "cond":
            return self._cond(equation, inputs)
        if _keeps_shape(equation):
            return [inputs[0]]
        if name in _REDUCTIONS:
            return [self._reduction(equation, inputs[0])]
        shape = next(value.shape for value in inputs if isinstance(value, Shard))
        own = [
            value
            if jnp.shape(value) == () and not isinstance(value, Shard)
            else self.as_shard(value).values
            for value in inputs
        ]
        if shape == ():
            # A number that is a parameter: its part is an array of one element.
            own = [jnp.reshape(value, (1,)) for value in own]
        own = [self._communicator.own(value) for value in own]
        return [Shard(result, shape) for result in _bind(equation, own)]

    def _reduction(self, equation: Any, shard: Shard) -> Any:
        op, neutral = _REDUCTIONS[equation.primitive.name]
        values = shard.values
        if neutral is None:
            least = op is ReduceOp.MAX
            if jnp.issubdtype(values.dtype, jnp.inexact):
                neutral = -jnp.inf if least else jnp.inf
            else:
                limits = jnp.iinfo(values.dtype)
                neutral = limits.min if least else limits.max
        length = values.shape[0]
        place = self._communicator.replica_id * length + jnp.arange(length)
        # The padding may have become anything on the way here.
        real = jnp.where(place < math.prod(shard.shape), values, jnp.asarray(neutral, values.dtype))
        if op is ReduceOp.SUM:
            return self._communicator.sum([jnp.sum(real, dtype=values.dtype)])[0]
        own = (jnp.max if op is ReduceOp.MAX else jnp.min)(real)
        if values.dtype == jnp.bool_:
            return self._communicator.extreme(op, [own.astype(jnp.int32)])[0].astype(jnp.bool_)
        return self._communicator.extreme(op, [own])[0]

    def _cond(self, equation: Any, inputs: list[Any]) -> list[Any]:
        branches = equation.params["branches"]
        flags = [isinstance(value, Shard) for value in inputs[1:]]
        divided = [_divided(_compat.open_program(branch), flags) for branch in branches]
        out_flags = [any(column) for column in zip(*divided, strict=True)]
        arrays = [value.values if isinstance(value, Shard) else value for value in inputs[1:]]
        shapes = [value.shape if isinstance(value, Shard) else None for value in inputs[1:]]

        def of(branch: Any) -> Callable[..., Any]:
            def evaluate(*arrays: Any) -> list[Any]:
                operands = [
                    array if shape is None else Shard(array, shape)
                    for array, shape in zip(arrays, shapes, strict=True)
                ]
                results = self.jaxpr(
                    _compat.open_program(branch), getattr(branch, "consts", ()), operands
                )
                return [
                    self._communicator.own(self.as_shard(result).values) if flag else result
                    for result, flag in zip(results, out_flags, strict=True)
                ]

            return evaluate

        results = lax.switch(inputs[0], [of(branch) for branch in branches], *arrays)
        out_shapes = [variable.aval.shape for variable in equation.outvars]
        return [
            Shard(result, shape) if flag else result
            for result, flag, shape in zip(results, out_flags, out_shapes, strict=True)
        ]


def _bind(equation: Any, inputs: list[Any]) -> list[Any]:
    results = equation.primitive.bind(*inputs, **equation.params)
    return results if equation.primitive.multiple_results else [results]
