"""A model's steps as one XLA program that runs any number of them.

Owns the compiled program: the loop over a chunk, the true size of each batch, donated
state, and what comes out of it. The meaning of a step is Keras's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

from mirrored import _workers
from mirrored._errors import ArgumentError
from mirrored._placement import Placement
from mirrored.keras import _private
from mirrored.keras._chunk import Chunk, shard_rows
from mirrored.keras._flight import Pace
from mirrored.keras._packed_sums import can_be_packed, packed_sums
from mirrored.keras._per_replica import is_per_replica, per_replica_step

Step = Callable[[Any, Any], tuple[Any, Any]]


def step_of(model: Any, kind: str) -> Step:
    """Returns a model's own step as ``(state, data) -> (logs or outputs, state)``."""
    if _private.makes_own_function(model, kind):
        own = _private.make_own_function(model, kind)
        return lambda state, data: own(state, iter([data]))
    if kind != "predict":
        return getattr(model, f"{kind}_step")

    def predict_step(state: Any, data: Any) -> tuple[Any, Any]:
        outputs, non_trainable = model.predict_step(state, data)
        return outputs, (state[0], non_trainable)

    return predict_step


@dataclasses.dataclass(frozen=True)
class Traced:
    """One step on batches of one shape: the model's Python ran once to make it.

    Attributes:
      jaxpr: the step, from (state, chunk, position) to (outputs, state).
      shapes: the shapes of both, as the step returned them.
      capacity: how many batches a chunk has room for.
      by_row: which outputs have a row for each row of the batch.
      may_loop: whether several steps in one call are worth while.
      functions: the compiled programs, by whether they loop and keep all outputs.
    """

    jaxpr: Any
    shapes: Any
    capacity: int
    by_row: list[bool]
    may_loop: bool
    functions: dict[tuple[bool, bool], Callable[..., Any]]


@final
class Program:
    """The compiled steps of one kind of one model.

    Stored where Keras stores its own step function, so ``compile`` drops it.
    """

    def __init__(self, model: Any, kind: str, placement: Placement) -> None:
        self._model = model
        self._kind = kind
        self._step = step_of(model, kind)
        self._gives_rows = kind == "predict"
        self._placement = placement
        self._compiled = bool(
            model.jit_compile
            and not model.run_eagerly
            # What a function of the user's own does is its own business, compiling too.
            and not _private.makes_own_function(model, kind)
        )
        self.pace = Pace(_workers.connected() if placement.spans_processes else None)
        self._traces: dict[Any, Traced] = {}
        self._positions: dict[int, jax.Array] = {}

    @property
    def compiled(self) -> bool:
        """Whether steps are compiled; ``run_eagerly`` and ``jit_compile=False`` say no."""
        return self._compiled

    def __call__(self, state: Any, iterator: Any) -> tuple[Any, Any]:
        """Runs one step on the iterator's next batch, as Keras's step functions do."""
        data = jax.device_put(next(iterator), self._placement.mirrored)
        return self._step(state, data)

    def run(
        self, state: Any, chunk: Chunk, start: int, count: int, *, looped: bool, keep_all: bool
    ) -> tuple[Any, Any, Any]:
        """Runs ``count`` steps from batch ``start`` of a chunk.

        Args:
          state: Keras's state for this kind of step; its arrays are donated.
          chunk: the placed batches.
          start: the first batch.
          count: how many batches.
          looped: whether the program may run several; if not, ``count`` is 1.
          keep_all: whether to return what every step returned, stacked, or the last only.

        Returns:
          What the steps returned, the new state, and an array that is ready when they ran.
          With ``keep_all`` the first axis of what they returned is the batch's place in the
          chunk, or 0 alone if the program is not looped.
        """
        _separate(state, self._kept_arrays())
        if not self._compiled:
            outputs, state = self._step(state, chunk.structure.unflatten(chunk.leaves))
            return outputs, state, None
        function = self._function(self._traced(state, chunk), looped, keep_all)
        return function(state, chunk.leaves, self._position(start), self._position(count))

    def _kept_arrays(self) -> set[int]:
        """The arrays of the variables that this kind of step leaves where they are."""
        optimizer = getattr(self._model, "optimizer", None)
        if self._kind == "train" or optimizer is None:
            return set()
        return set(map(id, _private.values_of(optimizer.variables)))

    def may_loop(self, state: Any, chunk: Chunk) -> bool:
        """Says whether several steps in one call are worth while."""
        if not self._compiled or not chunk.stacked or chunk.capacity == 1:
            return False
        return self._traced(state, chunk).may_loop

    def _traced(self, state: Any, chunk: Chunk) -> Traced:
        sizes = tuple(len(values) for values in state)
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in chunk.leaves)
        key = (chunk.structure, chunk.rows, chunk.stacked, shapes, sizes)
        traced = self._traces.get(key)
        if traced is None:
            traced = self._traces[key] = self._trace(state, chunk)
        return traced

    def true_rows(self, state: Any, chunk: Chunk, host: list[np.ndarray]) -> list[np.ndarray]:
        """Takes the padding off the outputs of one batch."""
        if not self._compiled:
            return host
        by_row = self._traced(state, chunk).by_row
        return [
            leaf[: chunk.rows[0]] if cut else leaf for leaf, cut in zip(host, by_row, strict=True)
        ]

    def _position(self, number: int) -> jax.Array:
        # Placed once: a number given anew would be sent to every device in every call.
        found = self._positions.get(number)
        if found is None:
            found = self._positions[number] = self._placement.mirror(np.int32(number))
        return found

    def _trace(self, state: Any, chunk: Chunk) -> Traced:
        placement, structure, rows = self._placement, chunk.structure, chunk.rows
        size = rows[0] if self._gives_rows and rows else None
        by_row: list[bool] = []
        step = self._step
        if self._kind == "train" and is_per_replica(self._model, rows, placement.replica_count):
            step = per_replica_step(self._model, placement)

        def one_step(state: Any, leaves: Sequence[Any], position: Any) -> tuple[Any, Any]:
            if chunk.stacked:
                leaves = [
                    _take(placement, leaf, count, position)
                    for leaf, count in zip(leaves, rows, strict=True)
                ]
            outputs, new_state = step(state, structure.unflatten(leaves))
            flat, output_structure = jax.tree.flatten(outputs)
            flat = [jnp.asarray(leaf) for leaf in flat]
            # Known while tracing only: which outputs have a row for each row of the batch.
            by_row[:] = [
                size is not None and leaf.ndim > 0 and leaf.shape[0] == size for leaf in flat
            ]
            outputs = output_structure.unflatten([_settle(placement, leaf, size) for leaf in flat])
            return outputs, _same_types(placement, state, new_state)

        jaxpr, shapes = jax.make_jaxpr(one_step, return_shape=True)(
            state, chunk.leaves, self._position(0)
        )
        # XLA's CPU backend runs convolutions inside loops without its fast kernels: two
        # steps of a small CNN in one call took as long as four in two.
        may_loop = not (on_cpu(placement) and "conv_general_dilated" in str(jaxpr))
        return Traced(jaxpr, shapes, chunk.capacity, by_row, may_loop, {})

    def _function(self, traced: Traced, looped: bool, keep_all: bool) -> Callable[..., Any]:
        function = traced.functions.get((looped, keep_all))
        if function is not None:
            return function
        run = self._step_function(traced)
        output_structure = jax.tree.structure(traced.shapes[0])

        def program(state: Any, leaves: Any, start: Any, count: Any) -> Any:
            flat, structure = jax.tree.flatten(state)
            if looped:
                outputs, flat = _loop(run, traced, flat, leaves, start, count, keep_all)
                return output_structure.unflatten(outputs), structure.unflatten(flat), start + count
            results = run(*flat, *leaves, start)
            split = len(results) - len(flat)
            outputs, flat = results[:split], results[split:]
            if keep_all:
                outputs = [leaf[None] for leaf in outputs]
            return output_structure.unflatten(outputs), structure.unflatten(flat), start + 1

        function = jax.jit(
            program, donate_argnums=0, out_shardings=(None, self._placement.mirrored, None)
        )
        traced.functions[looped, keep_all] = function
        return function

    def _step_function(self, traced: Traced) -> Callable[..., Any]:
        # Elsewhere an all-reduce takes any number of arrays at once.
        meets_for_each = self._placement.replica_count > 1 and on_cpu(self._placement)
        if meets_for_each and not self._gives_rows and can_be_packed(traced.jaxpr):
            return packed_sums(traced.jaxpr, self._placement)
        return jax.extend.core.jaxpr_as_fun(traced.jaxpr)


def on_cpu(placement: Placement) -> bool:
    """Says whether the replicas are CPU devices, whose programs XLA treats differently."""
    return placement.devices[0].platform == "cpu"


def _take(placement: Placement, leaf: Any, size: int | None, position: Any) -> Any:
    """One batch of a chunk, of its true size, split as evenly as it can be."""
    batch = jax.lax.dynamic_index_in_dim(leaf, position, 0, keepdims=False)
    if size is None:
        return batch
    if size != batch.shape[0]:
        batch = batch[:size]
    return jax.lax.with_sharding_constraint(batch, placement.split)


def _settle(placement: Placement, leaf: Any, rows: int | None) -> Any:
    """Gives what a step returned a placement that a program may return."""
    several_processes = len(placement.local_replica_ids) < placement.replica_count
    if leaf.ndim == 0 or rows is None or leaf.shape[0] != rows or several_processes:
        return jax.lax.with_sharding_constraint(leaf, placement.mirrored)
    padding = shard_rows(rows, placement.replica_count) * placement.replica_count - rows
    if padding:
        leaf = jnp.pad(leaf, [(0, padding)] + [(0, 0)] * (leaf.ndim - 1))
    return jax.lax.with_sharding_constraint(leaf, placement.split)


def _same_types(placement: Placement, before: Any, after: Any) -> Any:
    """Gives new state the structure, shapes and types of the old: it is stored in its place."""
    old, structure = jax.tree.flatten(before)
    new = jax.tree.leaves(after)
    if len(old) != len(new) or any(
        jnp.shape(first) != jnp.shape(second) for first, second in zip(old, new, strict=False)
    ):
        raise ArgumentError(
            fact=f"a step took state of {len(old)} arrays {[jnp.shape(leaf) for leaf in old]} "
            f"and returned {len(new)} arrays {[jnp.shape(leaf) for leaf in new]}.",
            expected="the same number of arrays, of the same shapes.",
            hint="return the state of train_step in the order it came in.",
        )
    return structure.unflatten(
        [
            jax.lax.with_sharding_constraint(
                jnp.asarray(second).astype(first.dtype), placement.mirrored
            )
            for first, second in zip(old, new, strict=True)
        ]
    )


def _loop(
    run: Callable[..., Any],
    traced: Traced,
    state: list[Any],
    leaves: Sequence[Any],
    start: Any,
    count: Any,
    keep_all: bool,
) -> tuple[list[Any], list[Any]]:
    """Runs the traced step any number of times; the number is known when the program runs."""
    kept = [
        jnp.zeros((traced.capacity, *shape.shape) if keep_all else shape.shape, shape.dtype)
        for shape in jax.tree.leaves(traced.shapes[0])
    ]

    def body(position: Any, carry: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
        current, kept = carry
        results = run(*current, *leaves, position)
        outputs, new = results[: len(kept)], results[len(kept) :]
        if keep_all:
            outputs = [
                jax.lax.dynamic_update_index_in_dim(buffer, output, position, 0)
                for buffer, output in zip(kept, outputs, strict=True)
            ]
        return list(new), list(outputs)

    state, kept = jax.lax.fori_loop(start, start + count, body, (state, kept))
    return kept, state


def _separate(state: tuple[list[Any], ...], kept: set[int]) -> None:
    """Copies arrays that stand in two variables: each is given away once, and no kept one."""
    seen = kept
    for values in state:
        for index, value in enumerate(values):
            if id(value) in seen:
                values[index] = jnp.copy(value)
            seen.add(id(value))


def program_for(model: Any, kind: str, placement: Placement) -> Program:
    """Returns a model's compiled steps, made when first asked for after ``compile``."""
    found = _private.step_function(model, kind)
    if not isinstance(found, Program):
        found = Program(model, kind, placement)
        _private.set_step_function(model, kind, found)
    return found
