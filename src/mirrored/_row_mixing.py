"""Which results of a traced replica function combine rows of its batch with each other.

A padded row is harmless as long as every row is computed from itself alone. This module
follows a traced program and keeps, for every value made of the batch, where its rows lie: through
arithmetic, reshapes, products, convolutions, sorts, loops and branches; also where they are cut
into consecutive parts and put together again (microbatches), or picked by a row's own number
(``logits[arange(n), labels]``). It errs on the side of "combines": rows picked by any other number,
written to places found at run time, or brought into another order count as combined, even where
each comes back to its place in the end. Only code that is no part of the trace (callbacks, kernels)
is taken at its word: rows that go in and come out along the same axis are taken to stay apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from jax.extend.core import Literal

from mirrored import _compat
from mirrored._row_layout import APART, MIXED, Known, Rows, constant, union
from mirrored._row_rules import after_operation


def mixing_outputs(
    program: Any, is_batch: Sequence[bool], constants: Mapping[int, Any]
) -> list[bool]:
    """Says of each output of a replica's program whether it combines rows.

    Args:
      program: a traced replica function; batches enter and results leave as (1, rows, ...).
      is_batch: which of its inputs are batches.
      constants: the values, by number, of those inputs that are known.
    """
    program = _compat.open_program(program)
    inputs = []
    for index, (variable, batch) in enumerate(zip(program.invars, is_batch, strict=True)):
        shape = variable.aval.shape
        if batch:
            inputs.append(Known(Rows(math.prod(shape[2:]), shape[1]).normal()))
        else:
            inputs.append(constant(constants.get(index)))
    outputs = []
    for atom, found in zip(program.outvars, _follow(program, inputs), strict=True):
        shape = atom.aval.shape
        in_place = len(shape) > 1 and found.rows == Rows(math.prod(shape[2:]), shape[1]).normal()
        outputs.append(found.mixed or (found.rows is not None and not in_place))
    return outputs


def _follow(program: Any, inputs: Sequence[Known]) -> list[Known]:
    """What is known of the outputs of a program."""
    program = _compat.open_program(program)
    known: dict[Any, Known] = dict.fromkeys(program.constvars, APART)
    known.update(zip(program.invars, inputs, strict=True))

    def of(atom: Any) -> Known:
        return constant(atom.val) if isinstance(atom, Literal) else known.get(atom, APART)

    for equation in program.eqns:
        operands = [of(atom) for atom in equation.invars]
        for variable, result in zip(equation.outvars, _through(equation, operands), strict=True):
            known[variable] = result
        _write_refs(equation, operands, known)
    return [of(atom) for atom in program.outvars]


def _write_refs(equation: Any, operands: list[Known], known: dict[Any, Known]) -> None:
    """What is written into a Ref is read from it later."""
    refs = [atom for atom in equation.invars if _compat.is_ref_type(atom.aval)]
    if not refs or equation.primitive.name == "get":
        return
    for ref in refs:
        written = [
            operand
            for atom, operand in zip(equation.invars, operands, strict=True)
            if atom is not ref and (operand.mixed or operand.rows is not None)
        ]
        if written:
            whole = equation.primitive.name in ("swap", "addupdate") and len(written) == 1
            whole = whole and equation.invars[1].aval.shape == ref.aval.shape
            before = known.get(ref, APART)
            known[ref] = union([before, *written]) if whole else MIXED


def _through(equation: Any, operands: list[Known]) -> list[Known]:
    """What comes out of an equation."""
    rule = _WITH_PROGRAMS.get(equation.primitive.name)
    if rule is not None:
        return rule(equation, operands)
    called = _called(equation)
    return after_operation(equation, operands) if called is None else _follow(called, operands)


def _called(equation: Any) -> Any:
    """The one program that an equation calls with its own operands, or None."""
    for inner in _compat.programs_in(equation.params):
        shapes = [tuple(variable.aval.shape) for variable in inner.invars]
        same = shapes == [tuple(atom.aval.shape) for atom in equation.invars]
        return inner if same and len(inner.outvars) == len(equation.outvars) else None
    return None


def _scan(equation: Any, operands: list[Known]) -> list[Known]:
    params = equation.params
    constant_count, carry_count = _compat.scan_operand_counts(params)
    shapes = [tuple(atom.aval.shape) for atom in equation.invars]
    first = constant_count + carry_count
    constants, carry = operands[:constant_count], operands[constant_count:first]
    rounds = _Rounds(equation)
    pieces = [
        rounds.piece(known, shape)
        for known, shape in zip(operands[first:], shapes[first:], strict=True)
    ]
    carry = [union([known]) for known in carry]
    while True:
        results = _follow(params["jaxpr"], [*constants, *carry, *pieces])
        grown = [
            MIXED if rounds.is_piece(after) else union([before, after])
            for before, after in zip(carry, results[:carry_count], strict=True)
        ]
        if grown == carry:
            break
        carry = grown
    stacked = [
        rounds.stacked(known, tuple(out.aval.shape))
        for known, out in zip(results[carry_count:], equation.outvars[carry_count:], strict=True)
    ]
    return [*carry, *stacked]


@final
class _Rounds:
    """The rounds of a scan that goes over the rows of a batch."""

    def __init__(self, equation: Any) -> None:
        self._scan = id(equation)

    def piece(self, known: Known, shape: tuple[int, ...]) -> Known:
        """What one round sees of an array that is gone over."""
        rows = known.rows
        if known.mixed or rows is None:
            return union([known])
        axes = rows.axes(shape)
        if axes is None:
            return MIXED
        if 0 not in axes:
            moved = rows.moved(shape, shape[1:], {axis: axis - 1 for axis in axes})
            return MIXED if moved is None else Known(moved)
        outside, rounds, inside = axes[0]
        if outside != 1 or inside != 1:
            return MIXED
        each = rows.count // rounds
        token = (self._scan, rounds, rows)
        return Known(Rows(rows.inner, each, 0, (*rows.rounds, token)).normal())

    def is_piece(self, known: Known) -> bool:
        """Whether a value belongs to the rows of one round."""
        rounds = () if known.rows is None else known.rows.rounds
        return bool(rounds) and rounds[-1][0] == self._scan

    def stacked(self, known: Known, out: tuple[int, ...]) -> Known:
        """What the results of all rounds together are."""
        rows = known.rows
        if known.mixed or rows is None:
            return union([known])
        size = math.prod(out[1:])
        if not self.is_piece(known):
            moved = rows.moved(out[1:], out, {axis: axis + 1 for axis in range(len(out) - 1)})
            return MIXED if moved is None else Known(moved)
        _, rounds, whole = rows.rounds[-1]
        each = whole.count // rounds
        outermost = rows.count == 1 or rows.inner * rows.count == size
        if rows.start != 0 or rows.count != each or not outermost:
            return MIXED
        inner = size if rows.count == 1 else rows.inner
        return Known(Rows(inner, whole.count, whole.start, whole.rounds).normal())


def _while(equation: Any, operands: list[Known]) -> list[Known]:
    params = equation.params
    of_condition, of_body = params["cond_nconsts"], params["body_nconsts"]
    condition, body = operands[:of_condition], operands[of_condition : of_condition + of_body]
    carry = [union([known]) for known in operands[of_condition + of_body :]]
    while True:
        (goes_on,) = _follow(params["cond_jaxpr"], [*condition, *carry])
        results = _follow(params["body_jaxpr"], [*body, *carry])
        # The number of rounds decides every result.
        grown = [
            union([before, after, goes_on]) for before, after in zip(carry, results, strict=True)
        ]
        if grown == carry:
            return grown
        carry = grown


def _cond(equation: Any, operands: list[Known]) -> list[Known]:
    branches = [_follow(branch, operands[1:]) for branch in equation.params["branches"]]
    return [union([operands[0], *column]) for column in zip(*branches, strict=True)]


_WITH_PROGRAMS: dict[str, Callable[[Any, list[Known]], list[Known]]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
