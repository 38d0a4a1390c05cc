"""Which results of a traced replica function combine rows of its batch with each other.

A padded row is harmless as long as every row is computed from itself alone. This module compares
the program for a batch with the one for a batch of one row more: axes that grew are rows, so a
sum, a sort or a product along one of them is seen as what it is. It errs on the side of "does
not mix": what it cannot follow (rows picked by index, programs of another form) passes.
"""

from __future__ import annotations

from typing import Any

from jax.extend.core import Literal

from mirrored import _compat

# What a value is, ordered: the larger one of several is what comes of them.
APART = 0
"""made of nothing in the batch"""
ROW_BY_ROW = 1
"""made of the batch, each row of its own row"""
MIXED = 2
"""made of several rows"""

_ALONG_AXES = ("axes", "dimensions")
_ALONG_AXIS = ("axis", "dimension")


def mixing_outputs(program: Any, longer: Any, inputs: list[int]) -> list[bool]:
    """Says of each output of ``program`` whether it combines rows.

    Args:
      program: a traced replica function.
      longer: the same one for a batch of one row more.
      inputs: what each input of the program is.
    """
    found = _follow(_compat.open_program(program), _compat.open_program(longer), inputs)
    if found is None:
        return [False] * len(_compat.open_program(program).outvars)
    return [state == MIXED for state in found]


def _follow(program: Any, longer: Any, inputs: list[int]) -> list[int] | None:
    """What the outputs are; None where the two programs are not of one form."""
    if len(program.eqns) != len(longer.eqns) or len(program.invars) != len(inputs):
        return None
    known = dict(zip(program.invars, inputs, strict=True))

    def of(atom: Any) -> int:
        return APART if isinstance(atom, Literal) else known.get(atom, APART)

    for equation, grown in zip(program.eqns, longer.eqns, strict=True):
        if equation.primitive is not grown.primitive or len(equation.invars) != len(grown.invars):
            return None
        states = [of(atom) for atom in equation.invars]
        state = max(states, default=APART)
        if state == ROW_BY_ROW:
            below = _below(equation, grown, states)
            if below is None:
                return None
            state = MIXED if _mixes(equation, grown) else max(state, below)
        known.update(dict.fromkeys(equation.outvars, state))
    return [of(atom) for atom in program.outvars]


def _below(equation: Any, grown: Any, states: list[int]) -> int | None:
    """What comes out of the programs that an equation calls."""
    worst = APART
    for inner, longer in zip(
        _compat.programs_in(equation.params), _compat.programs_in(grown.params), strict=False
    ):
        fits = len(inner.invars) == len(states)
        entering = states if fits else [max(states)] * len(inner.invars)
        if equation.primitive.name == "scan":
            # What is carried may be made of the batch after the first round.
            first, count = _compat.scan_operand_counts(equation.params)
            entering = list(entering)
            entering[first : first + count] = [max(states)] * count
        found = _follow(inner, longer, entering)
        if found is None:
            return None
        worst = max([worst, *found])
    return worst


def _rows_of(atom: Any, grown: Any) -> set[int]:
    """The axes of an operand that grew with the batch."""
    before, after = atom.aval.shape, grown.aval.shape
    if len(before) != len(after):
        return set()
    return {axis for axis, size in enumerate(before) if size != after[axis]}


def _mixes(equation: Any, grown: Any) -> bool:
    """Whether an equation combines along rows, or moves them."""
    name, params = equation.primitive.name, equation.params
    rows = [_rows_of(*pair) for pair in zip(equation.invars, grown.invars, strict=True)]
    if name == "dot_general":
        (left, right), _ = params["dimension_numbers"]
        return bool(rows[0] & set(left) or rows[1] & set(right))
    if name == "slice":
        starts, limits = params["start_indices"], params["limit_indices"]
        shape = equation.invars[0].aval.shape
        return any(starts[axis] != 0 or limits[axis] != shape[axis] for axis in rows[0])
    if name == "pad":
        return any(any(params["padding_config"][axis]) for axis in rows[0])
    if name == "concatenate":
        return len(rows) > 1 and any(params["dimension"] in axes for axes in rows)
    if name == "scan":
        _, carried = _compat.scan_operand_counts(params)
        return bool(carried) and params["length"] != grown.params["length"]
    if name.startswith(("reduce_", "arg", "cum")) or name in ("sort", "rev"):
        along = {axis for key in _ALONG_AXES for axis in params.get(key, ())}
        along |= {params[key] for key in _ALONG_AXIS if key in params}
        return any(along & axes for axes in rows)
    return False
