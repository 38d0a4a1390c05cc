"""What becomes of the rows of a batch in parts of arrays, and in arrays made of parts.

Owns the rules of cutting, stacking, padding, gathering and scattering; those of all other
operations are in ``_row_rules``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from mirrored._row_layout import (
    MIXED,
    Known,
    Rows,
    joined,
    same_axes,
    shape_of,
    union_of,
)


def _part(rows: Rows | None, shape: Sequence[int], cuts: Sequence[tuple[int, int]]) -> Rows | None:
    """The layout in a part: (start, size) for each axis."""
    shape = list(shape)
    for axis, (start, size) in enumerate(cuts):
        rows = None if rows is None else rows.part(shape, axis, start, size)
        shape[axis] = size
    return rows


def _slice(equation: Any, operands: list[Known]) -> list[Known]:
    params, shape = equation.params, shape_of(equation.invars[0])
    strides = params["strides"] or (1,) * len(shape)
    rows = operands[0].rows
    assert rows is not None
    if any(
        stride != 1 and axis in (rows.axes(shape) or {axis}) for axis, stride in enumerate(strides)
    ):
        return [MIXED]
    sizes = shape_of(equation.outvars[0])
    return [union_of([_part(rows, shape, list(zip(params["start_indices"], sizes, strict=True)))])]


def _split(equation: Any, operands: list[Known]) -> list[Known]:
    shape, axis, start = shape_of(equation.invars[0]), equation.params["axis"], 0
    found = []
    for size in equation.params["sizes"]:
        cuts = [(0, whole) for whole in shape]
        cuts[axis] = (start, size)
        found.append(union_of([_part(operands[0].rows, shape, cuts)]))
        start += size
    return found


def _numbers_of_one_row(indices: Sequence[Known]) -> list[Rows | None]:
    """The layouts of single numbers; those that are made of a row belong to it alone."""
    return [index.rows for index in indices if index.rows is not None]


def _dynamic_slice(equation: Any, operands: list[Known]) -> list[Known]:
    shape, out = shape_of(equation.invars[0]), shape_of(equation.outvars[0])
    found = _numbers_of_one_row(operands[1:])
    if operands[0].rows is not None:
        found.append(operands[0].rows.moved(shape, out, same_axes(shape)))
    return [union_of(found)]


def _dynamic_update_slice(equation: Any, operands: list[Known]) -> list[Known]:
    whole, update = operands[:2]
    shapes = [shape_of(atom) for atom in equation.invars[:2]]
    found = _numbers_of_one_row(operands[2:])
    for operand, shape in ((whole, shapes[0]), (update, shapes[1])):
        if operand.rows is not None:
            # What is not whole along the rows' axes is put among them.
            other = shapes[1] if operand is whole else shapes[0]
            same = same_axes(shape)
            fits = operand.rows.moved(shape, other, same) is not None
            found.append(operand.rows.moved(shape, shapes[0], same) if fits else None)
    return [union_of(found)]


def _pad(equation: Any, operands: list[Known]) -> list[Known]:
    return [
        union_of(
            [
                operand.rows.moved(
                    shape_of(atom), shape_of(equation.outvars[0]), same_axes(shape_of(atom))
                )
                if not any(
                    any(equation.params["padding_config"][axis])
                    for axis in operand.rows.axes(shape_of(atom)) or ()
                )
                else None
                for atom, operand in zip(equation.invars, operands, strict=True)
                if operand.rows is not None
            ]
        )
    ]


def _concatenate(equation: Any, operands: list[Known]) -> list[Known]:
    out = _put_together(
        operands,
        [shape_of(atom) for atom in equation.invars],
        equation.params["dimension"],
        shape_of(equation.outvars[0]),
    )
    return [dataclasses.replace(out, columns=columns_of(equation, operands))]


def _put_together(
    operands: list[Known], shapes: list[tuple[int, ...]], axis: int, out: Sequence[int]
) -> Known:
    beside = [
        known.rows.moved(shape, out, same_axes(shape))
        for shape, known in zip(shapes, operands, strict=True)
        if known.rows is not None
    ]
    together = union_of(beside)
    if together.mixed:
        # Not parts of the same rows, then: rows one after the other?
        return union_of([joined([known.rows for known in operands], shapes, axis)])
    return together


def _stack(equation: Any, operands: list[Known]) -> list[Known]:
    axis = equation.params["axis"]
    one_each = []
    for atom in equation.invars:
        shape = [*shape_of(atom)]
        shape.insert(axis, 1)
        one_each.append(tuple(shape))
    widened = [
        known
        if known.rows is None
        else union_of([known.rows.moved(shape_of(atom), shape, _around(axis, len(shape)))])
        for atom, known, shape in zip(equation.invars, operands, one_each, strict=True)
    ]
    if any(known.mixed for known in widened):
        return [MIXED]
    return [_put_together(widened, one_each, axis, shape_of(equation.outvars[0]))]


def _around(axis: int, rank: int) -> dict[int, int]:
    """Where axes go when another one is put before ``axis``; ``rank`` counts it."""
    return {old: old + (old >= axis) for old in range(rank - 1)}


def _unstack(equation: Any, operands: list[Known]) -> list[Known]:
    shape, axis = shape_of(equation.invars[0]), equation.params["axis"]
    one = [1 if place == axis else size for place, size in enumerate(shape)]
    back = {new: old for old, new in _around(axis, len(shape)).items()}
    found = []
    for number, out in enumerate(equation.outvars):
        cuts = [(number, 1) if place == axis else (0, size) for place, size in enumerate(shape)]
        rows = _part(operands[0].rows, shape, cuts)
        found.append(union_of([None if rows is None else rows.moved(one, shape_of(out), back)]))
    return found


def columns_of(equation: Any, operands: list[Known]) -> tuple[Rows | None, ...]:
    """Where columns are put together to one index each: what each column counts."""
    last = len(shape_of(equation.outvars[0])) - 1
    single = all(shape_of(atom)[-1] == 1 for atom in equation.invars)
    if equation.params["dimension"] != last or not single:
        return ()
    return tuple(known.numbers for known in operands)


def _indexed_axis(
    equation: Any, indices: Known, axis: int, starts: Sequence[int], rows: Rows
) -> Rows | None:
    """The numbers among ``indices`` that pick rows along an axis, if they are rows' own."""
    if axis not in starts:
        return None
    column = list(starts).index(axis)
    columns = indices.columns or (indices.numbers,)
    numbers = columns[column] if column < len(columns) and len(columns) == len(starts) else None
    if numbers is None:
        return None
    shape = shape_of(equation.invars[0])
    axes = rows.axes(shape)
    if axes != {axis: (1, shape[axis], 1)} or numbers.start + numbers.count > rows.count:
        return None
    return dataclasses.replace(numbers, start=rows.start + numbers.start, rounds=rows.rounds)


def _gather(equation: Any, operands: list[Known]) -> list[Known]:
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    whole, indices = operands[:2]
    shape, index_shape = (shape_of(atom) for atom in equation.invars[:2])
    out = shape_of(equation.outvars[0])
    offsets = [int(axis) for axis in numbers.offset_dims]
    batch = [axis for axis in range(len(out)) if axis not in offsets]
    # The last axis of the indices is one index.
    places = dict(enumerate(batch))
    found = []
    if indices.rows is not None:
        found.append(indices.rows.moved(index_shape, out, places))
    if whole.rows is not None:
        lost = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
        kept = [axis for axis in range(len(shape)) if axis not in lost]
        where = {
            axis: offset
            for axis, offset in zip(kept, offsets, strict=True)
            if sizes[axis] == shape[axis]
        }
        for axis, other in zip(
            numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True
        ):
            where[int(axis)] = places[int(other)]
        moved = whole.rows.moved(shape, out, where)
        axes = whole.rows.axes(shape)
        if moved is None and axes is not None and len(axes) == 1:
            (axis,) = axes
            own = _indexed_axis(equation, indices, axis, numbers.start_index_map, whole.rows)
            own = own if sizes[axis] == 1 else None
            moved = (
                None if own is None else own.moved(_columnless(index_shape, indices), out, places)
            )
        found.append(moved)
    return [union_of(found)]


def _columnless(index_shape: Sequence[int], indices: Known) -> list[int]:
    """The shape of one column of indices, which its layout is about."""
    return [*index_shape[:-1], 1] if indices.columns else list(index_shape)


def _scatter(equation: Any, operands: list[Known]) -> list[Known]:
    numbers = equation.params["dimension_numbers"]
    whole, indices, updates = operands[:3]
    shape, index_shape, update_shape = (shape_of(atom) for atom in equation.invars[:3])
    window = [int(axis) for axis in numbers.update_window_dims]
    scattered = [axis for axis in range(len(update_shape)) if axis not in window]
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    kept = [axis for axis in range(len(shape)) if axis not in gone]
    indexed = [int(axis) for axis in numbers.scatter_dims_to_operand_dims]
    # Where each axis of the indices, and of the updates, ends up.
    of_indices = {
        int(axis): int(other)
        for axis, other in zip(
            numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True
        )
    }
    rows_axis = None
    for axis in indexed:
        own = _indexed_axis(
            equation, indices, axis, indexed, Rows(math.prod(shape[axis + 1 :]), shape[axis])
        )
        along = None if own is None else own.axes(_columnless(index_shape, indices))
        if own is not None and along is not None and len(along) == 1 and own.count == shape[axis]:
            (place,) = along
            if along[place] == (1, own.count, 1):
                of_indices[place], rows_axis = axis, axis
    of_updates = {scattered[place]: axis for place, axis in of_indices.items()}
    of_updates |= {
        place: axis
        for place, axis in zip(window, kept, strict=True)
        if update_shape[place] == shape[axis]
    }
    found = []
    if indices.rows is not None:
        found.append(indices.rows.moved(index_shape, shape, of_indices))
    if updates.rows is not None:
        found.append(updates.rows.moved(update_shape, shape, of_updates))
    if whole.rows is not None:
        part = {
            axis
            for place, axis in zip(window, kept, strict=True)
            if update_shape[place] != shape[axis]
        }
        chosen = ({*numbers.inserted_window_dims} | part) - {rows_axis}
        axes = whole.rows.axes(shape)
        stays = axes is not None and (whole.rows.count == 1 or not chosen & set(axes))
        found.append(whole.rows if stays else None)
    return [union_of(found)]


RULES: dict[str, Callable[[Any, list[Known]], list[Known]]] = {
    "slice": _slice,
    "split": _split,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "pad": _pad,
    "concatenate": _concatenate,
    "stack": _stack,
    "unstack": _unstack,
    "gather": _gather,
    **dict.fromkeys(
        ("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"),
        _scatter,
    ),
}
"""by the name of the operation"""
