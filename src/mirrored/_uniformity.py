"""Uniformity: which values of a traced replica function are equal on all replicas.

JAX's types say which values are the same by construction; but a parameter is cast to
this replica's own when it enters, so whatever is computed from it varies by type, even
where every replica computes the same. This module follows a traced program and finds
those values: they depend on nothing that differs between replicas. It errs on the side
of "differs".
"""

from __future__ import annotations

from typing import Any

from jax.extend.core import Literal

from mirrored import _compat

# What a value depends on, as bits.
NOTHING = 0
REPLICA = 1
"""something that differs between replicas"""
ROWS = 2
"""the number of real rows of the batch"""

_AXIS = _compat.REPLICA_AXIS
# JAX's types are not asked about anything else: they do not see through control flow.
_MAKE_EQUAL = ("psum", "pmax", "pmin", "all_gather_invariant", "all_gather_reduced")
_CASTS = frozenset({"pvary", "pcast"})
_REF_READS = frozenset({"get"})
_REF_WRITES = frozenset({"swap", "addupdate"})
_HOST = ("callback", "infeed", "recv", "partition_id", "rng_uniform")


def output_dependence(jaxpr: Any, inputs: list[int]) -> list[int]:
    """Returns, for each output of ``jaxpr``, the bits of what it depends on."""
    jaxpr = _compat.open_program(jaxpr)
    known: dict[Any, int] = dict.fromkeys(jaxpr.constvars, NOTHING)
    known.update(zip(jaxpr.invars, inputs, strict=True))

    def of(atom: Any) -> int:
        return NOTHING if isinstance(atom, Literal) else known[atom]

    for equation in jaxpr.eqns:
        bits = [of(atom) for atom in equation.invars]
        results = _through(equation, bits)
        for variable, result in zip(equation.outvars, results, strict=True):
            known[variable] = result
        _write_refs(equation, bits, known)
    return [of(atom) for atom in jaxpr.outvars]


def _through(equation: Any, bits: list[int]) -> list[int]:
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        return _scan(params, bits)
    if name == "while":
        return _while(params, bits)
    if name == "cond":
        return _cond(params, bits)
    if name.startswith(_MAKE_EQUAL) and not any(
        _compat.type_varies_over_replicas(variable.aval) for variable in equation.outvars
    ):
        return [_union(bits) & ~REPLICA] * len(equation.outvars)
    called = _called(equation)
    if called is not None:
        return output_dependence(called, bits)
    combined = _union(bits)
    if _is_source(equation) or any(_has_source(inner) for inner in _compat.programs_in(params)):
        combined |= REPLICA
    return [combined] * len(equation.outvars)


def _called(equation: Any) -> Any:
    """Finds the one jaxpr that an equation calls with exactly its own operands."""
    if _has_refs(equation):
        return None
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        candidate = equation.params.get(key)
        jaxpr = _compat.open_program(candidate)
        fits = (
            _compat.is_program(jaxpr)
            and len(jaxpr.invars) == len(equation.invars)
            and len(jaxpr.outvars) == len(equation.outvars)
        )
        if fits and equation.primitive.name != "shard_map":
            return jaxpr
    return None


def _scan(params: dict[str, Any], bits: list[int]) -> list[int]:
    body = params["jaxpr"]
    if _jaxpr_has_refs(body):
        return _all_of(body, bits)
    constant_count, carry_count = _compat.scan_operand_counts(params)
    constants = bits[:constant_count]
    carry = bits[constant_count : constant_count + carry_count]
    scanned = bits[constant_count + carry_count :]
    while True:
        results = output_dependence(body, [*constants, *carry, *scanned])
        grown = [old | new for old, new in zip(carry, results[:carry_count], strict=True)]
        if grown == carry:
            return [*grown, *results[carry_count:]]
        carry = grown


def _while(params: dict[str, Any], bits: list[int]) -> list[int]:
    condition, body = params["cond_jaxpr"], params["body_jaxpr"]
    condition_count, body_count = params["cond_nconsts"], params["body_nconsts"]
    condition_constants = bits[:condition_count]
    body_constants = bits[condition_count : condition_count + body_count]
    carry = bits[condition_count + body_count :]
    if _jaxpr_has_refs(body) or _jaxpr_has_refs(condition):
        combined = _union(bits)
        if _has_source(condition) or _has_source(body):
            combined |= REPLICA
        return [combined] * len(carry)
    while True:
        stop = _union(output_dependence(condition, [*condition_constants, *carry]))
        results = output_dependence(body, [*body_constants, *carry])
        # The number of rounds decides every result.
        grown = [old | new | stop for old, new in zip(carry, results, strict=True)]
        if grown == carry:
            return grown
        carry = grown


def _cond(params: dict[str, Any], bits: list[int]) -> list[int]:
    choice, operands = bits[0], bits[1:]
    branches = params["branches"]
    if any(_jaxpr_has_refs(branch) for branch in branches):
        combined = _union(bits)
        if any(_has_source(branch) for branch in branches):
            combined |= REPLICA
        return [combined] * len(_compat.open_program(branches[0]).outvars)
    results = [output_dependence(branch, operands) for branch in branches]
    return [choice | _union(column) for column in zip(*results, strict=True)]


def _all_of(jaxpr: Any, bits: list[int]) -> list[int]:
    combined = _union(bits) | (REPLICA if _has_source(jaxpr) else NOTHING)
    return [combined] * len(_compat.open_program(jaxpr).outvars)


def _write_refs(equation: Any, bits: list[int], known: dict[Any, int]) -> None:
    """What is written into a Ref is read from it later."""
    if equation.primitive.name in _REF_READS or not _has_refs(equation):
        return
    written = _union(bits)
    if equation.primitive.name not in _REF_WRITES and any(
        _has_source(inner) for inner in _compat.programs_in(equation.params)
    ):
        written |= REPLICA
    for atom in equation.invars:
        if _compat.is_ref_type(atom.aval):
            known[atom] = known[atom] | written


def _has_refs(equation: Any) -> bool:
    return any(_compat.is_ref_type(atom.aval) for atom in equation.invars)


def _jaxpr_has_refs(jaxpr: Any) -> bool:
    jaxpr = _compat.open_program(jaxpr)
    return any(_compat.is_ref_type(variable.aval) for variable in jaxpr.invars)


def _is_source(equation: Any) -> bool:
    """Says whether an equation makes a value that differs out of values that do not."""
    name = equation.primitive.name
    if name in _CASTS:
        return False
    return (
        name.startswith(_HOST)
        or name.endswith("callback")
        or any(_names_axis(parameter) for parameter in equation.params.values())
    )


def _names_axis(parameter: Any) -> bool:
    if isinstance(parameter, (tuple, list, set, frozenset)):
        return any(_names_axis(item) for item in parameter)
    return isinstance(parameter, str) and parameter == _AXIS


def _has_source(jaxpr: Any) -> bool:
    jaxpr = _compat.open_program(jaxpr)
    for equation in jaxpr.eqns:
        differs = any(
            _compat.type_varies_over_replicas(variable.aval) for variable in equation.outvars
        )
        if differs and _is_source(equation):
            return True
        if any(_has_source(inner) for inner in _compat.programs_in(equation.params)):
            return True
    return False


def _union(bits: Any) -> int:
    combined = NOTHING
    for one in bits:
        combined |= one
    return combined
