"""``strategy.explain``: where the time and the memory of a step go.

Owns running a step a few times without leaving a trace in the user's state, and putting
together what was measured with what XLA says of the programs that ran. Reading traces is
in ``_timeline``, reading programs in ``_compiled``, the words and the picture in
``_explanation``.
"""

from __future__ import annotations

import collections
import contextlib
import inspect
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirrored import _context, _objects
from mirrored._compiled import ProgramFacts, facts_of
from mirrored._errors import ArgumentError
from mirrored._explanation import Explanation, with_program_memory
from mirrored._function import Function
from mirrored._placement import Placement
from mirrored._timeline import Timeline, record
from mirrored._types import BATCH, OPTIMIZER_STATE, OTHER_STATE, PARAMETERS
from mirrored._values import PerReplica
from mirrored._variable import Variable, live_variables

_MOST_TRIALS = 5
# Of arguments that a step donates, which lie on the devices at the same time.
_MOST_COPIES = 3


def explain_step(
    placement: Placement, step: Callable[..., Any], args: tuple[Any, ...], dataset: Any, steps: int
) -> Explanation:
    """Measures a step; see ``Strategy.explain``."""
    _context.require_cross_replica("strategy.explain")
    if not callable(step):
        raise ArgumentError(
            fact=f"explain was given {step!r}, which cannot be called.",
            expected="a step, and its arguments after it.",
            hint="write strategy.explain(step, batch), not strategy.explain(step(batch)).",
        )
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ArgumentError(
            fact=f"explain was given steps={steps!r}.",
            expected="how many steps to measure: an integer from 1.",
            hint="leave it out for 10.",
        )
    objects = _Objects(placement, step, args)
    memory = objects.memory()
    with objects.kept():
        calls = _Calls(step, args)
        calls.warm_up()
        host = min(calls.host_seconds() for _ in range(min(steps, _MOST_TRIALS)))
        wall = calls.seconds(steps)
        timeline = record(calls.prepared(steps))
        programs = [] if timeline is None else _programs(placement, timeline)
        if not programs and isinstance(step, (Function, jax.stages.Wrapped)):
            programs = [_compiled_anew(step, args)]
    return Explanation(
        name=getattr(step, "__qualname__", type(step).__name__),
        where=placement.describe(),
        replica_count=placement.replica_count,
        rows=objects.rows(),
        step=wall,
        host=host,
        input=None if dataset is None else _input_seconds(dataset, steps),
        compute=_share(timeline, "compute", wall),
        collectives_time=_share(timeline, "collectives", wall),
        programs=tuple(programs),
        memory=_with_the_largest(memory, programs),
    )


def _share(timeline: Timeline | None, what: str, wall: float) -> float | None:
    # Recording makes everything slower: its shares count, not its seconds.
    if timeline is None or timeline.wall <= 0:
        return None
    return min(1.0, getattr(timeline, what) / timeline.wall) * wall


def _with_the_largest(memory: dict[str, int], programs: list[ProgramFacts]) -> dict[str, int]:
    if not programs:
        return memory
    return with_program_memory(memory, max(programs, key=lambda program: program.peak))


# --- running the step -------------------------------------------------------------------------


class _Calls:
    """Calls of a step with the same arguments, although it may donate them."""

    def __init__(self, step: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._step = step
        self._args = args
        self._donates = True

    def warm_up(self) -> None:
        """Compiles; finds out whether the step takes its arguments' memory away."""
        args = self._fresh()
        jax.block_until_ready(self._step(*args))
        leaves = jax.tree.leaves(args)
        self._donates = any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves)
        jax.block_until_ready(self._step(*self._fresh()))

    def _fresh(self) -> tuple[Any, ...]:
        if not self._donates:
            return self._args
        copied = _objects.map_arguments(_copy, (self._args, {}))[0]
        return jax.block_until_ready(copied)

    def prepared(self, steps: int) -> Callable[[], None]:
        """Returns a run of some steps in which nothing but the steps happens."""
        count = min(steps, _MOST_COPIES) if self._donates else steps
        arguments = [self._fresh() for _ in range(count)]

        def run() -> None:
            result = None
            while arguments:
                result = self._step(*arguments.pop())
            jax.block_until_ready(result)

        return run

    def host_seconds(self) -> float:
        """How long the call itself takes, with devices that have room for it."""
        before, args = self._fresh(), self._fresh()
        # The first call after a wait finds cold caches, as none does in a loop.
        self._step(*before)
        start = time.perf_counter()
        result = self._step(*args)
        seconds = time.perf_counter() - start
        jax.block_until_ready(result)
        return seconds

    def seconds(self, steps: int) -> float:
        """How long a step takes among others, as in a loop."""
        if self._donates:
            total = 0.0
            for _ in range(steps):
                args = self._fresh()
                start = time.perf_counter()
                jax.block_until_ready(self._step(*args))
                total += time.perf_counter() - start
            return total / steps
        start = time.perf_counter()
        result = None
        for _ in range(steps):
            result = self._step(*self._args)
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / steps


def _copy(leaf: Any) -> Any:
    if isinstance(leaf, PerReplica):
        if leaf.stacked is None:
            return leaf
        return PerReplica.from_stacked(
            jnp.copy(leaf.stacked), leaf.row_counts, is_batch=leaf.is_batch
        )
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf


def _input_seconds(dataset: Iterable[Any], steps: int) -> float:
    """How long the next batch takes if nothing else is done."""
    position = getattr(dataset, "get_state", lambda: None)()
    batches = iter(dataset)
    # The first ones were prepared before anybody asked.
    for _ in itertools.islice(batches, 3):
        pass
    start = time.perf_counter()
    read = list(itertools.islice(batches, steps))
    jax.block_until_ready(jax.tree.leaves(read))
    seconds = time.perf_counter() - start
    close = getattr(batches, "close", None)
    if close is not None:
        close()
    if position is not None:
        getattr(dataset, "set_state", lambda state: None)(position)
    if not read:
        raise ArgumentError(
            fact="the dataset given to explain ended before its fourth batch.",
            expected="enough batches to tell how long one takes.",
            hint="give it the whole dataset, not a single batch.",
        )
    return seconds / len(read)


# --- what the step holds ----------------------------------------------------------------------


class _Objects:
    """The state that a step works on: Variables, objects of other libraries, arguments."""

    def __init__(self, placement: Placement, step: Any, args: tuple[Any, ...]) -> None:
        self._placement = placement
        self._args = args
        self._owner = step.__self__ if inspect.ismethod(step) else None
        if isinstance(step, Function):
            self._variables = step.variables_used(*args)
        elif isinstance(step, jax.stages.Wrapped) or any(self._foreign()):
            # Variables would be constants of it; a Keras model has its own.
            self._variables = []
        else:
            # Which ones it touches is not known.
            self._variables = live_variables(placement)
        leaves = jax.tree.leaves(args, is_leaf=lambda leaf: _is_leaf(leaf))
        objects = [leaf for leaf in leaves if _objects.is_object(leaf)]
        self._taken = _objects.take(objects) if objects else None

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Puts the state back as it was, whatever the steps made of it."""
        stored = [(variable, jnp.copy(variable.storage)) for variable in self._variables]
        foreign = [(variable, jnp.copy(variable.value)) for variable, _ in self._foreign()]
        held = [] if self._taken is None else [_copy(array) for array in self._taken.arrays]
        try:
            yield
        finally:
            for variable, array in stored:
                variable.storage = array
            for variable, array in foreign:
                variable.assign(array)
            if self._taken is not None:
                self._taken.write(dict(enumerate(held)))

    def memory(self) -> dict[str, int]:
        """The bytes on each device, by what they are for."""
        sizes = collections.Counter(state_sizes(self._variables, self._taken))
        for variable, role in self._foreign():
            sizes[role] += _device_bytes(variable.value)
        plain = OTHER_STATE if self._variables or self._owner is not None else PARAMETERS
        placed = jax.tree.map(
            lambda leaf: leaf.placed(self._placement) if isinstance(leaf, PerReplica) else leaf,
            self._args,
            is_leaf=_is_leaf,
        )
        sizes.update(role_sizes(placed, plain))
        for leaf, _ in _leaves(self._args):
            if isinstance(leaf, np.ndarray):
                # Keras splits what it is given; a program gets the whole on each device.
                split = self._placement.replica_count if self._owner is not None else 1
                sizes[BATCH] += leaf.nbytes // split
        return {role: sizes[role] for role in _ROLES if sizes[role]}

    def rows(self) -> int | None:
        """The rows that each replica gets in a step, where that is known."""
        for leaf, _ in _leaves(self._args):
            if isinstance(leaf, PerReplica):
                shape = leaf.placed(self._placement).stacked.shape
                if len(shape) > 1:
                    return int(shape[1])
            elif isinstance(leaf, np.ndarray) and leaf.ndim and self._owner is not None:
                return -(-len(leaf) // self._placement.replica_count)
        return None

    def _foreign(self) -> Iterator[tuple[Any, str]]:
        """Yields the variables of a Keras model whose method the step is, with their roles."""
        model = self._owner
        if model is None:
            return
        trainable = set(map(id, getattr(model, "trainable_variables", ())))
        optimizer = getattr(getattr(model, "optimizer", None), "variables", ())
        metrics = getattr(model, "metrics_variables", ())
        optimizers = set(map(id, optimizer))
        seen: set[int] = set()
        for variable in (*getattr(model, "variables", ()), *optimizer, *metrics):
            if id(variable) in seen or not isinstance(getattr(variable, "value", None), jax.Array):
                continue
            seen.add(id(variable))
            if id(variable) in trainable:
                yield variable, PARAMETERS
            else:
                yield variable, OPTIMIZER_STATE if id(variable) in optimizers else OTHER_STATE


_ROLES = (PARAMETERS, OPTIMIZER_STATE, BATCH, OTHER_STATE)


def role_sizes(args: Any, plain: str = PARAMETERS) -> dict[str, int]:
    """The bytes on each device of placed arrays, or shapes with a place, by what they are for.

    Args:
      args: the arguments of a step.
      plain: what arrays are that stand in no batch and no state of Optax.
    """
    sizes: collections.Counter[str] = collections.Counter()
    for leaf, inside_optax in _leaves(args):
        if isinstance(leaf, PerReplica):
            sizes[BATCH] += _device_bytes(leaf.stacked)
        elif isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
            sizes[OPTIMIZER_STATE if inside_optax else plain] += _device_bytes(leaf)
    return {role: sizes[role] for role in _ROLES if sizes[role]}


def state_sizes(variables: Iterable[Variable], taken: _objects.Taken | None) -> dict[str, int]:
    """The bytes on each device of Variables and of objects taken apart, by what they are for."""
    sizes: collections.Counter[str] = collections.Counter()
    for variable in variables:
        sizes[variable.role] += _device_bytes(variable.storage)
    if taken is not None:
        for array, role in zip(taken.arrays, taken.roles(), strict=True):
            sizes[role] += _device_bytes(array)
    return dict(sizes)


def _is_leaf(leaf: Any) -> bool:
    return isinstance(leaf, (PerReplica, Variable)) or _objects.is_object(leaf)


def _leaves(nest: Any, inside_optax: bool = False) -> Iterator[tuple[Any, bool]]:
    """Yields leaves, and whether they stand in a state of Optax."""

    def is_state(node: Any) -> bool:
        return not inside_optax and type(node).__module__.partition(".")[0] == "optax"

    for leaf in jax.tree.leaves(nest, is_leaf=lambda node: _is_leaf(node) or is_state(node)):
        if is_state(leaf):
            yield from _leaves(leaf, inside_optax=True)
        elif not _objects.is_object(leaf):
            yield leaf, inside_optax


def _device_bytes(array: Any) -> int:
    shape = array.sharding.shard_shape(array.shape)
    itemsize = array.dtype.itemsize
    return int(np.prod(shape, dtype=int)) * itemsize


def _compiled_anew(step: Any, args: tuple[Any, ...]) -> ProgramFacts:
    """Reads the program where the trace does not lead to it."""
    compiled = step.lower(*args).compile()
    cost, memory = compiled.cost_analysis(), compiled.memory_analysis()
    return facts_of(step.__name__, compiled.as_text() or "", memory, cost)


# --- the programs that ran --------------------------------------------------------------------


def _programs(placement: Placement, timeline: Timeline) -> list[ProgramFacts]:
    """Finds the programs of a trace among those that the devices hold."""
    client = placement.devices[placement.local_replica_ids[0]].client
    candidates = collections.defaultdict(list)
    for executable in client.live_executables():
        module = executable.hlo_modules()[0]
        if module.name in timeline.operations:
            candidates[module.name].append((executable, module))
    found = []
    for name, operations in timeline.operations.items():
        # Several programs may share a name: the one that ran has all operations seen.
        for executable, module in candidates[name]:
            text = module.to_string()
            if all(f"{operation} = " in text for operation in operations):
                cost, memory = executable.cost_analysis(), executable.get_compiled_memory_stats()
                found.append(facts_of(name.removeprefix("jit_"), text, memory, cost))
                break
    return found
