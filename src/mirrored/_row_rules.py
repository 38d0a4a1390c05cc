"""What one operation of a program does to the rows of a batch among its operands.

Owns the rules of operations that combine along axes or move them; those of parts of arrays are
in ``_row_pieces``. How a whole program is followed is in ``_row_mixing``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jax.extend.core import Literal

from mirrored import _compat, _row_pieces
from mirrored._row_layout import APART, MIXED, Known, Rows, shape_of, union_of

# What follows the leading axes in these is one matrix (or so many axes) for each.
_MATRICES = {
    "cholesky": 2,
    "cholesky_update": 2,
    "eig": 2,
    "eigh": 2,
    "geqrf": 2,
    "geqp3": 2,
    "hessenberg": 2,
    "householder_product": 2,
    "lu": 2,
    "lu_pivots_to_permutation": 1,
    "ormqr": 2,
    "qr": 2,
    "schur": 2,
    "svd": 2,
    "symmetric_product": 2,
    "triangular_solve": 2,
    "tridiagonal": 2,
    "tridiagonal_solve": 2,
}
_EACH_ITS_OWN = ("optimization_barrier", "device_put", "pvary", "pcast")
_KEEPS_NUMBERS = ("convert_element_type", "copy", "copy_p", *_EACH_ITS_OWN)
_CASTS = frozenset({"pvary", "pcast"})


def after_operation(equation: Any, operands: list[Known]) -> list[Known]:
    """What comes out of an equation that calls no other program."""
    name = equation.primitive.name
    if any(operand.mixed for operand in operands):
        return [MIXED] * len(equation.outvars)
    if name in _EACH_ITS_OWN and len(operands) == len(equation.outvars):
        return operands
    if all(operand.rows is None for operand in operands):
        return [_numbers(equation, operands)] * len(equation.outvars)
    if name not in _CASTS and _names_replicas(equation.params):
        return [MIXED] * len(equation.outvars)
    rule = _RULES.get(name)
    if rule is not None:
        return rule(equation, operands)
    along = _along(equation)
    return [_kept(equation, operands, along, out) for out in equation.outvars]


def _names_replicas(parameter: Any) -> bool:
    if isinstance(parameter, dict):
        return any(_names_replicas(item) for item in parameter.values())
    if isinstance(parameter, (tuple, list, set, frozenset)):
        return any(_names_replicas(item) for item in parameter)
    return isinstance(parameter, str) and parameter == _compat.REPLICA_AXIS


# --- operations that leave rows where they are, or take away or add whole axes ----------------


def _along(equation: Any) -> set[int]:
    """The axes of the operands along which an equation combines or reorders elements."""
    name, params = equation.primitive.name, equation.params
    rank = max(len(shape_of(atom)) for atom in equation.invars)
    if name in _MATRICES:
        return set(range(rank - _MATRICES[name], rank))
    if name == "fft":
        return set(range(rank - len(params["fft_lengths"]), rank))
    if "window_dimensions" in params:
        return {axis for axis, size in enumerate(params["window_dimensions"]) if size != 1}
    if name == "top_k":
        return {params.get("axis", rank - 1) % rank}
    if name == "approx_top_k":
        return {params["reduction_dimension"] % rank}
    if name.startswith(("reduce", "arg", "cum")) or name in ("sort", "rev"):
        along = {axis for key in ("axes", "dimensions") for axis in params.get(key, ())}
        return along | {params[key] for key in ("axis", "dimension") if key in params}
    return set()


def _kept(equation: Any, operands: list[Known], along: set[int], out: Any) -> Known:
    """Elementwise, along other axes than the rows', or away with axes that are not rows'."""
    reduces = equation.primitive.name.startswith(("reduce_", "arg")) or (
        equation.primitive.name == "reduce"
    )
    gone = along if reduces and "window_dimensions" not in equation.params else set()
    found = []
    for atom, operand in zip(equation.invars, operands, strict=True):
        if operand.rows is None:
            continue
        shape = shape_of(atom)
        axes = operand.rows.axes(shape)
        if axes is None or (operand.rows.count > 1 and along & set(axes)):
            return MIXED
        left = [axis for axis in range(len(shape)) if axis not in gone]
        where = {axis: place for place, axis in enumerate(left) if place < len(shape_of(out))}
        found.append(operand.rows.moved(shape, shape_of(out), where))
    return union_of(found)


def _reshape(equation: Any, operands: list[Known]) -> list[Known]:
    if equation.params.get("dimensions") not in (None, ()) and equation.primitive.name == "reshape":
        return [MIXED]
    return [Known(operands[0].rows)]


def _moved(equation: Any, operands: list[Known], where: Mapping[int, int]) -> list[Known]:
    rows = operands[0].rows
    assert rows is not None
    return [
        union_of([rows.moved(shape_of(equation.invars[0]), shape_of(equation.outvars[0]), where)])
    ]


def _transpose(equation: Any, operands: list[Known]) -> list[Known]:
    order = equation.params["permutation"]
    return _moved(equation, operands, {old: new for new, old in enumerate(order)})


def _broadcast(equation: Any, operands: list[Known]) -> list[Known]:
    return _moved(equation, operands, dict(enumerate(equation.params["broadcast_dimensions"])))


# --- products ---------------------------------------------------------------------------------


def _dot_general(equation: Any, operands: list[Known]) -> list[Known]:
    contracted, batched = equation.params["dimension_numbers"]
    shapes = [shape_of(atom) for atom in equation.invars[:2]]
    out = shape_of(equation.outvars[0])
    found, place = [], len(batched[0])
    for side in (0, 1):
        where = {axis: new for new, axis in enumerate(batched[side])}
        for axis in range(len(shapes[side])):
            if axis not in where and axis not in contracted[side]:
                where[axis] = place
                place += 1
        rows = operands[side].rows
        if rows is not None:
            found.append(rows.moved(shapes[side], out, where))
    return [union_of(found)]


def _convolution(equation: Any, operands: list[Known]) -> list[Known]:
    images, filters = operands[:2]
    numbers = equation.params["dimension_numbers"]
    if filters.rows is not None or images.rows is None:
        return [MIXED]
    if equation.params.get("batch_group_count", 1) != 1:
        return [MIXED]
    return _moved(equation, operands, {numbers.lhs_spec[0]: numbers.out_spec[0]})


def _ref(equation: Any, operands: list[Known]) -> list[Known]:
    whole = all(shape_of(out) == shape_of(equation.invars[0]) for out in equation.outvars)
    return [Known(operands[0].rows) if whole else MIXED] * len(equation.outvars)


def _of_the_left(equation: Any, operands: list[Known]) -> list[Known]:
    if any(known.rows is not None for known in operands[1:]):
        return [MIXED]
    return [_kept(equation, operands, set(), equation.outvars[0])]


_RULES = {
    **_row_pieces.RULES,
    **dict.fromkeys(("reshape", "squeeze", "expand_dims"), _reshape),
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "dot_general": _dot_general,
    "conv_general_dilated": _convolution,
    **dict.fromkeys(("ragged_dot_general", "scaled_dot", "scaled_matmul"), _of_the_left),
    "get": _ref,
    "swap": _ref,
}


# --- row numbers, which pick rows -------------------------------------------------------------


def _numbers(equation: Any, operands: list[Known]) -> Known:
    """What is known of a value made of nothing in the batch."""
    name, params = equation.primitive.name, equation.params
    if name == "iota":
        out = shape_of(equation.outvars[0])
        axis = params["dimension"]
        return Known(numbers=Rows(math.prod(out[axis + 1 :]), out[axis]))
    if name == "lt":
        limit = equation.invars[1]
        counts = operands[0].numbers is not None
        return Known(never=counts and isinstance(limit, Literal) and bool(limit.val <= 0))
    if name == "select_n" and operands[0].never:
        return operands[1]
    if name == "concatenate":
        return Known(columns=_row_pieces.columns_of(equation, operands))
    if name in _KEEPS_NUMBERS or name in ("squeeze", "broadcast_in_dim", "transpose", "reshape"):
        known = operands[0]
        if known.numbers is None:
            return dataclasses.replace(known, columns=())
        if name in ("broadcast_in_dim", "transpose"):
            rule = _broadcast if name == "broadcast_in_dim" else _transpose
            return Known(numbers=rule(equation, [Known(known.numbers)])[0].rows)
        return Known(numbers=known.numbers)
    return APART
