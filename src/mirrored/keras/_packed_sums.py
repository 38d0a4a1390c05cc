"""A traced step whose sums over the replicas travel together, in one array.

XLA's CPU devices meet once for every array of an all-reduce, also where several arrays are
combined into one operation; processes that talk through Gloo do too. A step has a sum for each
weight and each metric. Here the traced step is rewritten before it is compiled: a contraction
over the rows of the batch becomes one over each replica's rows, and what is left, the sums over
the replicas, waits until something needs it, and is then made for all of them at once.

The rewritten step computes the same whatever axes are taken for rows: any contraction may be
made in R parts. Which axes hold rows is a guess that decides about speed only.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any, final

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jax.sharding import NamedSharding, PartitionSpec

from mirrored._compat import REPLICA_AXIS, open_program
from mirrored._placement import Placement

# In one process meeting once more is cheaper than moving this much memory twice.
_MOST_BYTES = 1 << 19

# What calls a program that stands among its parameters, under which name.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
# Whose results may have any axes in common with the operands.
_OPAQUE = ("scan", "while", "cond", "shard_map", "remat", "checkpoint", "sort", "rev")


@dataclasses.dataclass(frozen=True)
class _Line:
    """An equation, with numbers for the values that go in and come out; None for literals."""

    equation: Any
    operands: list[int | None]
    results: list[int]


def packed_sums(program: Any, placement: Placement) -> Callable[..., list[Any]]:
    """Returns a function that computes what a traced program does, with few large sums.

    Args:
      program: the traced step; rows of its batch were constrained to ``placement.split``.
      placement: the replicas.
    """
    flat = _FlatProgram(program)
    return lambda *arguments: _Evaluation(flat, placement).run(arguments)


def can_be_packed(program: Any) -> bool:
    """Says whether lines of a program may change places: it does nothing but compute."""
    return not program.effects


@final
class _FlatProgram:
    """The equations of a program and of those it calls, one after the other."""

    def __init__(self, program: Any) -> None:
        self._numbers = itertools.count()
        self.lines: list[_Line] = []
        self.constants: dict[int, Any] = {}
        opened = open_program(program)
        self.arguments = [next(self._numbers) for _ in opened.invars]
        self.results = self._enter(program, list(self.arguments))

    def _constant(self, value: Any) -> int:
        number = next(self._numbers)
        self.constants[number] = value
        return number

    def _enter(self, program: Any, arguments: list[int]) -> list[int]:
        opened = open_program(program)
        known = dict(zip(opened.invars, arguments, strict=True))
        for variable, value in zip(opened.constvars, program.consts, strict=True):
            known[variable] = self._constant(value)
        for equation in opened.eqns:
            called = _called(equation)
            if called is not None:
                inner = [
                    self._constant(_typed(atom)) if isinstance(atom, Literal) else known[atom]
                    for atom in equation.invars
                ]
                known.update(zip(equation.outvars, self._enter(called, inner), strict=True))
                continue
            operands = [
                None if isinstance(atom, Literal) else known[atom] for atom in equation.invars
            ]
            results = [next(self._numbers) for _ in equation.outvars]
            known.update(zip(equation.outvars, results, strict=True))
            self.lines.append(_Line(equation, operands, results))
        return [
            self._constant(atom.val) if isinstance(atom, Literal) else known[atom]
            for atom in opened.outvars
        ]


def _typed(literal: Any) -> Any:
    """The value of a literal, of the type it has where it stands."""
    return jnp.asarray(literal.val, literal.aval.dtype)


def _called(equation: Any) -> Any:
    """The program that an equation does nothing but call, or None."""
    name = _CALLS.get(equation.primitive.name)
    if name is None or name not in equation.params:
        return None
    asked = (*equation.params.get("in_shardings", ()), *equation.params.get("out_shardings", ()))
    if any(isinstance(sharding, jax.sharding.Sharding) for sharding in asked):
        return None
    called = equation.params[name]
    return called if len(open_program(called).invars) == len(equation.invars) else None


@final
class _Evaluation:
    """One run of a flat program, while it is traced again."""

    def __init__(self, program: _FlatProgram, placement: Placement) -> None:
        self._program = program
        self._placement = placement
        self._count = placement.replica_count
        self._values: dict[int, Any] = dict(program.constants)
        # Values whose sum over the first axis is still to be made: one part for each replica.
        self._parts: dict[int, Any] = {}
        # What these values are; parts of half precision are wider, as one device sums them.
        self._types: dict[int, Any] = {}
        # The axis of a value that holds rows.
        self._rows: dict[int, int] = {}

    def run(self, arguments: Iterable[Any]) -> list[Any]:
        """Evaluates; a line that needs a sum waits until nothing else can be done."""
        self._values.update(zip(self._program.arguments, arguments, strict=True))
        lines, results = self._program.lines, self._program.results
        while lines:
            waiting = [line for line in lines if not self._evaluated(line)]
            self._sum([*results, *(number for line in waiting for number in line.operands)])
            lines = waiting
        return [self._values[number] for number in self._program.results]

    def _evaluated(self, line: _Line) -> bool:
        if any(number is not None and number not in self._values for number in line.operands):
            return False
        with (
            jax.named_scope(str(line.equation.source_info.name_stack)),
            line.equation.ctx.manager,
        ):
            part = self._in_parts(line)
            if part is None:
                self._bind(line)
            else:
                self._parts[line.results[0]] = part
                self._types[line.results[0]] = line.equation.outvars[0].aval.dtype
        return True

    def _bind(self, line: _Line) -> None:
        equation = line.equation
        operands = [self._operand(line, index) for index in range(len(line.operands))]
        found = equation.primitive.bind(
            *operands, **equation.primitive.get_bind_params(equation.params)
        )
        results = found if equation.primitive.multiple_results else [found]
        self._values.update(zip(line.results, results, strict=True))
        for number, variable in zip(line.results, equation.outvars, strict=True):
            axis = self._rows_after(line, variable.aval)
            if axis is not None:
                self._rows[number] = axis

    def _operand(self, line: _Line, index: int) -> Any:
        """A known operand of a line."""
        number = line.operands[index]
        return line.equation.invars[index].val if number is None else self._values[number]

    # --- from rows to parts ---------------------------------------------------------------

    def _in_parts(self, line: _Line) -> Any:
        """What a line contracts over rows, made by each replica of its own; None if it does not."""
        name = line.equation.primitive.name
        if name == "dot_general":
            return self._dot_in_parts(line)
        if name == "reduce_sum":
            axis = self._row_axis(line, 0)
            if axis is None or axis not in line.equation.params["axes"]:
                return None
            axes = tuple(each + (each >= axis) for each in line.equation.params["axes"])
            split = self._split(self._operand(line, 0), axis)
            split = split.astype(_sum_type(split.dtype))
            parameters = {**line.equation.params, "axes": axes, "out_sharding": None}
            summed = line.equation.primitive.bind(split, **parameters)
            before = axis - sum(each < axis for each in axes)
            return self._by_replica(jnp.moveaxis(summed, before, 0))
        return None

    def _dot_in_parts(self, line: _Line) -> Any:
        parameters = line.equation.params
        (left, right), (left_batch, right_batch) = parameters["dimension_numbers"]
        rows = [self._row_axis(line, 0), self._row_axis(line, 1)]
        pairs = [
            (first, second)
            for first, second in zip(left, right, strict=True)
            if first == rows[0] or second == rows[1]
        ]
        if not pairs:
            return None
        first, second = pairs[0]
        if line.equation.invars[0].aval.shape[first] % self._count:
            return None

        def shifted(axes: Any, axis: int) -> tuple[int, ...]:
            return tuple(each + (each >= axis) for each in axes)

        numbers = (
            (shifted(left, first), shifted(right, second)),
            ((first, *shifted(left_batch, first)), (second, *shifted(right_batch, second))),
        )
        return self._by_replica(
            line.equation.primitive.bind(
                self._split(self._operand(line, 0), first),
                self._split(self._operand(line, 1), second),
                **{
                    **parameters,
                    "dimension_numbers": numbers,
                    "out_sharding": None,
                    "preferred_element_type": _sum_type(line.equation.outvars[0].aval.dtype),
                },
            )
        )

    def _row_axis(self, line: _Line, index: int) -> int | None:
        number = line.operands[index]
        axis = None if number is None else self._rows.get(number)
        if axis is None or line.equation.invars[index].aval.shape[axis] % self._count:
            return None
        return axis

    def _split(self, value: Any, axis: int) -> Any:
        """An axis becomes two: the replicas, and the rows of each."""
        shape = value.shape
        sizes = (*shape[:axis], self._count, shape[axis] // self._count, *shape[axis + 1 :])
        split = NamedSharding(self._placement.mesh, PartitionSpec(*[None] * axis, REPLICA_AXIS))
        return jax.lax.with_sharding_constraint(value.reshape(sizes), split)

    def _by_replica(self, parts: Any) -> Any:
        return jax.lax.with_sharding_constraint(parts, self._placement.split)

    # --- from parts to sums ---------------------------------------------------------------

    def _sum(self, numbers: list[int | None]) -> None:
        """Makes the sums of these values, small ones of a type in one array."""
        together: dict[Any, list[int]] = {}
        for number in dict.fromkeys(numbers):
            if number is None or number not in self._parts:
                continue
            part = self._parts[number]
            if part.nbytes // self._count > _MOST_BYTES and not self._spans_processes():
                total = self._total(self._parts.pop(number))
                self._values[number] = total.astype(self._types[number])
            else:
                together.setdefault(part.dtype, []).append(number)
        for members in together.values():
            parts = [self._parts.pop(number) for number in members]
            # Along the second axis: see per_replica.
            flat = jnp.concatenate([part.reshape(self._count, -1) for part in parts], axis=1)
            total = self._total(self._by_replica(flat))
            start = 0
            for number, part in zip(members, parts, strict=True):
                size = math.prod(part.shape[1:])
                own = total[start : start + size].reshape(part.shape[1:])
                self._values[number] = own.astype(self._types[number])
                start += size

    def _spans_processes(self) -> bool:
        return self._placement.spans_processes

    def _total(self, parts: Any) -> Any:
        total = jnp.sum(parts, axis=0, dtype=parts.dtype)
        return jax.lax.with_sharding_constraint(total, self._placement.mirrored)

    # --- where rows are -------------------------------------------------------------------

    def _rows_after(self, line: _Line, result: Any) -> int | None:
        """The axis of a result that holds rows, as far as can be told."""
        equation, name = line.equation, line.equation.primitive.name
        shape = getattr(result, "shape", ())
        if name == "sharding_constraint" and equation.params["sharding"] == self._placement.split:
            return 0 if shape and shape[0] % self._count == 0 else None
        if name in _OPAQUE or not shape:
            return None
        for index, number in enumerate(line.operands):
            axis = None if number is None else self._rows.get(number)
            if axis is None:
                continue
            before = equation.invars[index].aval.shape
            moved = _moved_axis(equation, index, axis, before, shape)
            if moved is not None and shape[moved] % self._count == 0:
                return moved
        return None


def _sum_type(dtype: Any) -> Any:
    """What values of a type are summed in."""
    return jnp.float32 if dtype in (jnp.bfloat16, jnp.float16) else dtype


def _moved_axis(
    equation: Any, index: int, axis: int, before: tuple[int, ...], after: tuple[int, ...]
) -> int | None:
    """Where an axis of an operand is in the result."""
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, batch) = params["dimension_numbers"]
        own, own_batch = contracted[index], batch[index]
        if axis in own:
            return None
        if axis in own_batch:
            return own_batch.index(axis)
        free = [each for each in range(len(before)) if each not in (*own, *own_batch)]
        return (len(own_batch) if index == 0 else len(after) - len(free)) + free.index(axis)
    if name == "transpose":
        return params["permutation"].index(axis)
    if name == "broadcast_in_dim":
        moved = params["broadcast_dimensions"][axis]
        return moved if after[moved] == before[axis] else None
    if name == "reshape":
        ahead = math.prod(before[:axis])
        for moved, size in enumerate(after):
            if math.prod(after[:moved]) == ahead and size > 1:
                return moved
        return None
    gone = params.get("axes", params.get("dimensions") if name == "squeeze" else None)
    if isinstance(gone, tuple) and len(before) - len(gone) == len(after):
        return None if axis in gone else axis - sum(each < axis for each in gone)
    # Most others work element by element, or leave the rows where they were.
    same = len(before) == len(after) and before[axis] == after[axis]
    return axis if same else None
