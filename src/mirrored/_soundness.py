"""Which results of a replica program really are the same on all replicas.

JAX's types say what varies over replicas, but not through control flow: of a
``lax.cond`` on the replica's number, both branches constant, it says that the
result does not vary. This module owns following a traced program equation by
equation, branches and loops included, so that such a value is never stored as a
mirrored one; and refusing collectives that only some replicas would reach, and
gradients that JAX has summed behind the user's back.
"""

from __future__ import annotations

from typing import Any, final

from jax.extend.core import Literal

from mirrored import _compat
from mirrored._errors import ContextError, GradientError

_MAKE_EQUAL = ("psum", "pmax", "pmin", "all_gather_invariant", "all_gather_reduced")
_OTHER_COLLECTIVES = ("all_gather", "all_to_all", "ppermute", "psum_scatter", "reduce_scatter")
_READS_REF = ("get",)
_WRITES_REF = ("swap", "addupdate")


def varying_outputs(jaxpr: Any) -> list[bool]:
    """Says of each output of a replica program whether it may differ between replicas."""
    inputs = [_compat.type_varies_over_replicas(variable.aval) for variable in jaxpr.invars]
    return _Walk(jaxpr, inputs, diverged=False).run()


@final
class _Walk:
    """One pass over the equations of a (sub)program."""

    def __init__(self, jaxpr: Any, inputs: list[bool], *, diverged: bool) -> None:
        self._jaxpr = jaxpr
        self._diverged = diverged
        self._varies: dict[Any, bool] = dict(zip(jaxpr.invars, inputs, strict=True))

    def run(self) -> list[bool]:
        """Follows all equations; returns what the outputs are."""
        for equation in self._jaxpr.eqns:
            results = self._equation(equation)
            for variable, varies in zip(equation.outvars, results, strict=True):
                typed = _compat.type_varies_over_replicas(variable.aval)
                self._varies[variable] = varies or typed
        return [self._of(variable) for variable in self._jaxpr.outvars]

    def final_inputs(self) -> list[bool]:
        """What the inputs are at the end: a Ref among them may have been written."""
        return [self._varies[variable] for variable in self._jaxpr.invars]

    def _of(self, atom: Any) -> bool:
        # Literals have no entry; they are the same everywhere.
        return not isinstance(atom, Literal) and self._varies.get(atom, False)

    def _equation(self, equation: Any) -> list[bool]:
        name = equation.primitive.name
        inputs = [self._of(atom) for atom in equation.invars]
        count = len(equation.outvars)
        if name.startswith(_MAKE_EQUAL) or name.startswith(_OTHER_COLLECTIVES):
            if self._diverged and _crosses_replicas(equation):
                raise _unreachable_collective(name)
            return [not name.startswith(_MAKE_EQUAL)] * count
        if name == "cond":
            return self._cond(equation, inputs)
        if name == "while":
            return self._while(equation, inputs)
        if name == "scan":
            return self._scan(equation, inputs)
        if name in _WRITES_REF:
            self._mark(equation.invars[0], any(inputs) or self._diverged)
            return [any(inputs)] * count
        called = _called_jaxpr(equation)
        if called is not None:
            return self._call(called, equation.invars, inputs, diverged=self._diverged)
        return [any(inputs)] * count

    def _mark(self, atom: Any, varies: bool) -> None:
        if varies:
            self._varies[atom] = True

    def _call(self, jaxpr: Any, atoms: Any, inputs: list[bool], *, diverged: bool) -> list[bool]:
        walk = _Walk(jaxpr, inputs, diverged=diverged)
        outputs = walk.run()
        for atom, varies in zip(atoms, walk.final_inputs(), strict=True):
            if varies and not isinstance(atom, Literal):
                self._varies[atom] = True
        return outputs

    def _cond(self, equation: Any, inputs: list[bool]) -> list[bool]:
        index, *operands = inputs
        diverged = self._diverged or index
        atoms = equation.invars[1:]
        results = [index] * len(equation.outvars)
        for branch in equation.params["branches"]:
            outputs = self._call(_compat.open_program(branch), atoms, operands, diverged=diverged)
            results = [old or new for old, new in zip(results, outputs, strict=True)]
        return results

    def _while(self, equation: Any, inputs: list[bool]) -> list[bool]:
        params = equation.params
        test = _compat.open_program(params["cond_jaxpr"])
        body = _compat.open_program(params["body_jaxpr"])
        first = params["cond_nconsts"]
        second = first + params["body_nconsts"]
        atoms = equation.invars
        while True:
            carry = inputs[second:]
            tested = self._call(
                test, [*atoms[:first], *atoms[second:]], [*inputs[:first], *carry], diverged=False
            )
            uneven = tested[0]
            outputs = self._call(
                body,
                atoms[first:],
                inputs[first:],
                diverged=self._diverged or uneven,
            )
            merged = [old or new or uneven for old, new in zip(carry, outputs, strict=True)]
            now = [old or self._of(atom) for old, atom in zip(inputs, atoms, strict=True)]
            now[second:] = [old or new for old, new in zip(now[second:], merged, strict=True)]
            if now == inputs:
                return merged
            inputs = now

    def _scan(self, equation: Any, inputs: list[bool]) -> list[bool]:
        params = equation.params
        first, carry_count = _compat.scan_operand_counts(params)
        second = first + carry_count
        body = _compat.open_program(params["jaxpr"])
        while True:
            outputs = self._call(body, equation.invars, inputs, diverged=self._diverged)
            now = [old or self._of(atom) for old, atom in zip(inputs, equation.invars, strict=True)]
            now[first:second] = [
                old or new
                for old, new in zip(now[first:second], outputs[: second - first], strict=True)
            ]
            if now == inputs:
                return outputs
            inputs = now


def _crosses_replicas(equation: Any) -> bool:
    axes = equation.params.get("axes", equation.params.get("axis_name", ()))
    return _compat.REPLICA_AXIS in (axes if isinstance(axes, (tuple, list)) else (axes,))


def _unreachable_collective(name: str) -> ContextError:
    return ContextError(
        fact=f"a collective ({name.removesuffix('_invariant')}) stands under a condition or in a "
        "loop that differs between replicas, so only some of them would reach it and wait there "
        "for ever.",
        expected="collectives that every replica reaches.",
        hint="take the collective out of the jax.lax.cond or while_loop, or decide on a value "
        'that is the same everywhere (ctx.all_reduce("max", condition)).',
    )


def _called_jaxpr(equation: Any) -> Any:
    """The program of a plain call (jit, checkpoint, custom_vjp, ...), or None."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        candidate = equation.params.get(name)
        inner = _compat.open_program(candidate)
        if _compat.is_program(inner) and len(inner.invars) == len(equation.invars):
            return inner
    return None


def replica_program(jaxpr: Any) -> Any:
    """Finds the program of one replica in the trace of all of them."""
    for equation in jaxpr.jaxpr.eqns:
        if equation.primitive.name == "shard_map":
            inner = equation.params["jaxpr"]
            return _compat.open_program(inner)
    message = "the trace of a run holds no shard_map"
    raise AssertionError(message)


def captured_constants(jaxpr: Any) -> dict[int, Any]:
    """The values, by number, of those inputs of the replicas' program that are constants."""
    values = dict(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))
    for equation in jaxpr.jaxpr.eqns:
        if equation.primitive.name == "shard_map":
            return {
                index: values[atom]
                for index, atom in enumerate(equation.invars)
                if not isinstance(atom, Literal) and atom in values
            }
    return {}


def refuse_gradients_summed_by_jax(inner: Any, operand_count: int) -> None:
    """Refuses a gradient with respect to an array that is the same on all replicas by type.

    Such an array was closed over by the replica function, or made in it. JAX sums its gradient
    over the replicas by itself; averaged or summed again, or taken for this replica's own, it
    is quietly wrong.
    """
    unexplained = _Sums().of(inner, [False] * len(inner.invars), transposed=False)[0]
    if not unexplained:
        return
    captured = {
        (variable.aval.shape, variable.aval.dtype)
        for variable in inner.invars[: len(inner.invars) - operand_count]
    }
    shape, dtype = min(unexplained & captured or unexplained, key=str)
    raise GradientError(
        fact="the gradient with respect to an array that the replica function closed over or made "
        f"itself ({dtype}{list(shape)}) was taken inside strategy.run, where JAX sums it over the "
        "replicas by itself.",
        expected="parameters passed to the replica function as arguments, so that their gradient "
        "is this replica's own.",
        hint="pass it through args: strategy.run(fn, args=(params, batch)); mark one made inside "
        "with mirrored.get_replica_context().own(params); or use mirrored.value_and_grad, which "
        "reduces exactly once.",
    )


@final
class _Sums:
    """Tells the sums over replicas that differentiation inserted for no good reason.

    What a collective made is shared by all replicas, and so is what is computed from it alone:
    the gradient of such a value is summed for a good reason. Each of them explains one sum of
    its shape that comes later; a collective that averages the gradient once more explains
    nothing, since it comes after it. It errs on the side of "explained".
    """

    def __init__(self) -> None:
        self._shared: dict[Any, int] = {}

    def of(
        self, jaxpr: Any, from_collective: list[bool], *, transposed: bool
    ) -> tuple[set[Any], list[bool]]:
        """Returns what is unexplained, and which outputs were made of a collective's result."""
        made = dict(zip(jaxpr.invars, from_collective, strict=True))
        unexplained: set[Any] = set()

        def is_made(atom: Any) -> bool:
            return False if isinstance(atom, Literal) else made.get(atom, False)

        for equation in jaxpr.eqns:
            inputs = [is_made(atom) for atom in equation.invars]
            backward = _is_backward(equation, transposed)
            if equation.primitive.name.startswith((*_MAKE_EQUAL, "all_gather")):
                unexplained |= self._collective(equation, backward=backward)
                outputs = True
            else:
                outputs, below = self._below(equation, inputs, backward=backward)
                unexplained |= below
            for variable in equation.outvars:
                shared = outputs and not _compat.type_varies_over_replicas(variable.aval)
                made[variable] = shared
                if shared and not backward:
                    self._count(variable, 1)
        return unexplained, [is_made(atom) for atom in jaxpr.outvars]

    def _collective(self, equation: Any, *, backward: bool) -> set[Any]:
        if not backward:
            return set()
        shapes = {variable: self._count(variable, -1) for variable in equation.outvars}
        return {
            (variable.aval.shape, variable.aval.dtype)
            for variable, left in shapes.items()
            if left < 0
        }

    def _below(self, equation: Any, inputs: list[bool], *, backward: bool) -> tuple[bool, set[Any]]:
        outputs, unexplained = any(inputs), set()
        for inner in _compat.programs_in(equation.params):
            fits = len(inner.invars) == len(inputs)
            entering = inputs if fits else [any(inputs)] * len(inner.invars)
            found, leaving = self.of(inner, entering, transposed=backward)
            unexplained |= found
            outputs = outputs or any(leaving)
        return outputs, unexplained

    def _count(self, variable: Any, change: int) -> int:
        shape = (variable.aval.shape, variable.aval.dtype)
        self._shared[shape] = self._shared.get(shape, 0) + change
        return self._shared[shape]


def _is_backward(equation: Any, transposed: bool) -> bool:
    """Whether differentiation made an equation; what jax.checkpoint computes again is not."""
    place = str(equation.source_info.name_stack)
    return (transposed or "transpose(" in place) and "rematted_computation" not in place
