"""Strategy: devices that train in lockstep, and the calls that use them.

A strategy owns its placement and its compiled replica functions; what run,
reduce and the data calls mean is in the layers below. Strategy is abstract; which
devices the final ones put in the mesh is in ``_strategies``.
"""

from __future__ import annotations

import abc
import collections
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, final

import jax

from mirrored import _compat, _context, _debug, _objects
from mirrored._captures import fingerprint
from mirrored._data import (
    DistributedDataset,
    InputContext,
    distribute_arrays_or_batches,
    distribute_from_function,
)
from mirrored._errors import ArgumentError, require_callable
from mirrored._explain import explain_step
from mirrored._explanation import Explanation
from mirrored._finite import require_finite
from mirrored._placement import Placement
from mirrored._program_cache import NOT_REPEATED, Programs
from mirrored._reduce import gather_value, local_components, reduce_value
from mirrored._run import refuse_nested, run_replicas
from mirrored._types import ReduceOp
from mirrored._values import PerReplica, joined_values

_MOST_FUNCTIONS = 128


@final
class ValueContext:
    """What ``distribute_values_from_function`` tells its function about a replica."""

    def __init__(self, replica_id_in_sync_group: int = 0, num_replicas_in_sync: int = 1) -> None:
        self.replica_id_in_sync_group = replica_id_in_sync_group
        self.num_replicas_in_sync = num_replicas_in_sync

    def __repr__(self) -> str:
        return (
            f"ValueContext(replica_id_in_sync_group={self.replica_id_in_sync_group}, "
            f"num_replicas_in_sync={self.num_replicas_in_sync})"
        )


class Strategy(abc.ABC):
    """A set of devices that run one program in lockstep.

    Use one of MirroredStrategy, OneDeviceStrategy or MultiWorkerMirroredStrategy.
    """

    def __init__(self) -> None:
        self._functions: collections.OrderedDict[Any, Programs] = collections.OrderedDict()

    @property
    @abc.abstractmethod
    def placement(self) -> Placement:
        """The devices of the strategy as a mesh, for the layers that place arrays."""

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas gradients are aggregated over."""
        return self.placement.replica_count

    @property
    def devices(self) -> tuple[Any, ...]:
        """The devices, one a replica, in replica order."""
        return self.placement.devices

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The JAX mesh, with the one axis ``"replica"``."""
        return self.placement.mesh

    # --- contexts ----------------------------------------------------------------

    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Makes this strategy current: variables made inside are mirrored on its devices.

        >>> import mirrored
        >>> strategy = mirrored.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> with strategy.scope():
        ...     weights = mirrored.Variable([1.0, 2.0], name="weights")
        >>> len(weights.value.devices())
        2
        """
        with _context.scope(self, self.placement), _context.companions(self):
            yield self

    @contextlib.contextmanager
    def debug(self) -> Iterator[Strategy]:
        """Runs replica functions one after another, uncompiled, with concrete values.

        Inside the block ``print``, ``breakpoint()`` and NumPy work in replica functions
        and ``replica_id_in_sync_group`` is a Python integer; what ``mirrored.function`` made
        runs as the Python it is. Much slower.

        >>> import mirrored
        >>> strategy = mirrored.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> def replica_function():
        ...     print("replica", mirrored.get_replica_context().replica_id_in_sync_group)
        >>> with strategy.debug():
        ...     strategy.run(replica_function)
        replica 0
        replica 1
        """
        with _debug.debugging(self):
            yield self

    # --- running -----------------------------------------------------------------

    def run(self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None) -> Any:
        """Runs ``fn`` on every replica.

        PerReplica values anywhere in ``args`` and ``kwargs`` become this replica's
        component; everything else is given to all replicas. Arrays and Python numbers
        are traced; other Python values (bools, strings, objects) are given as they are, and the
        function is traced again for others: equal ones are told by their hash, those without
        one by what they are, so a change inside such an object is not seen.

        Args:
          fn: the replica function; traced once, whatever the number of replicas.
          args: a tuple or list of positional arguments.
          kwargs: a dictionary of keyword arguments.

        Returns:
          What ``fn`` returns, leaf by leaf: a plain array where it is provably the same
          on all replicas (the result of a collective, say), a PerReplica where it may
          differ, Python constants as they are.

        >>> import mirrored
        >>> strategy = mirrored.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> strategy.run(lambda x: 2 * x, args=(mirrored.PerReplica([1, 3]),))
        PerReplica[2 | 6]
        """
        args, kwargs = _context.require_argument_nest(args, kwargs)
        refuse_nested("strategy.run")
        _context.require_run(self, self.placement, fn)
        context = _context.current()
        if _debug.is_debugging(self):
            return _debug.run_one_after_another(self, self.placement, fn, args, kwargs)
        if context.frame is not None or _compat.a_program_is_being_staged():
            return run_replicas(self, self.placement, fn, args, kwargs)
        args, kwargs = _objects.map_arguments(
            lambda leaf: leaf.placed(self.placement) if isinstance(leaf, PerReplica) else leaf,
            (args, kwargs),
        )
        programs = self._programs_of(fn)
        result = NOT_REPEATED if kwargs else programs.repeated(args)
        return programs.call(args, kwargs) if result is NOT_REPEATED else result

    def _programs_of(self, fn: Callable[..., Any]) -> Programs:
        key = fingerprint(fn)
        programs = self._functions.get(key)
        if programs is None:

            def replicated(*args: Any, **kwargs: Any) -> Any:
                return run_replicas(self, self.placement, fn, args, kwargs)

            programs = self._functions[key] = Programs(replicated, fn)
            if len(self._functions) > _MOST_FUNCTIONS:
                self._functions.popitem(last=False)
        else:
            self._functions.move_to_end(key)
        return programs

    # --- values ------------------------------------------------------------------

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: Any = None) -> Any:
        """Reduces per-replica values to one, the same on all devices.

        Args:
          reduce_op: SUM, MEAN, MIN or MAX, as a ReduceOp or a string.
          value: a PerReplica value, or a nest of them.
          axis: None reduces elementwise over replicas; an integer or a tuple also
            reduces these axes of each component. MEAN then divides by the number of
            elements of all replicas together, so uneven and empty components count
            as they should. The mean of integers is float32.

        >>> import mirrored
        >>> strategy = mirrored.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> value = mirrored.PerReplica([[0, 1, 2, 3], [4, 5]])
        >>> float(strategy.reduce("mean", value, axis=0))
        2.5
        """
        _context.require_cross_replica("strategy.reduce")
        return reduce_value(self.placement, ReduceOp.parse(reduce_op), value, axis)

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenates the components of per-replica values along ``axis``.

        >>> import mirrored
        >>> strategy = mirrored.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> strategy.gather(mirrored.PerReplica([[1, 2], [3]]), axis=0).tolist()
        [1, 2, 3]
        """
        _context.require_cross_replica("strategy.gather")
        return gather_value(self.placement, value, axis)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns this process's components of a per-replica value, as a tuple.

        A value that is not per-replica is returned as a tuple of itself.

        >>> import mirrored
        >>> strategy = mirrored.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> strategy.local_results(mirrored.PerReplica([1, 2]))
        (1, 2)
        """
        return local_components(self.placement, value)

    def check_finite(self, nest: Any) -> None:
        """Raises NonFiniteError, naming the first leaf, if a NaN or infinity is in ``nest``.

        Args:
          nest: Variables, arrays, PerReplica values, or a nest of them.
        """
        _context.require_cross_replica("strategy.check_finite")
        require_finite(nest)

    def explain(
        self,
        step: Callable[..., Any],
        *args: Any,
        dataset: Any = None,
        steps: int = 10,
        picture: Any = None,
    ) -> Explanation:
        """Prints and returns where the time and the memory of a step go.

        The step runs a few times, some of them under the profiler; variables, NNX objects
        and Keras models are put back as they were, and arguments that it donates are copied
        first, for which the devices must have room. In several processes all must call it.

        Args:
          step: a ``mirrored.function``, a function under ``jax.jit`` or any other that calls
            ``run``; ``model.train_on_batch`` for the step of Keras's ``fit``.
          *args: the step's arguments.
          dataset: what the batches come from, to measure its time as well.
          steps: how many steps to measure.
          picture: where to draw it as a PNG, if anywhere; needs the extra ``plot``.

        Returns:
          An Explanation: times, collectives, memory and warnings.

        >>> import jax
        >>> import mirrored
        >>> strategy = mirrored.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> weight = jax.numpy.ones((8, 8))
        >>> @jax.jit
        ... def step(weight, x):
        ...     return strategy.reduce("sum", strategy.run(lambda w, x: w * x, args=(weight, x)))
        >>> found = strategy.explain(step, weight, mirrored.PerReplica([1.0, 2.0]))
        A step of 'step' on MirroredStrategy (2 devices: cpu:0, cpu:1) takes...
        >>> found.collectives, found.memory["parameters"]
        ((Collective(kind='all-reduce', count=1, bytes=256),), 256)
        """
        explanation = explain_step(self.placement, step, args, dataset, steps)
        if picture is not None:
            explanation.save_picture(picture)
        if jax.process_index() == 0:
            print(explanation)
        return explanation

    # --- data --------------------------------------------------------------------

    def distribute_dataset(
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
        remainder: str = "pad",
        prefetch: int = 2,
        shuffle: bool = False,
        seed: int = 0,
    ) -> DistributedDataset:
        """Splits global batches over the replicas; see ``DistributedDataset``.

        >>> import numpy as np
        >>> import mirrored
        >>> strategy = mirrored.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> for batch in strategy.distribute_dataset(np.arange(7), batch_size=4):
        ...     print(batch)
        PerReplica[[0 1] | [2 3]]
        PerReplica[[4 5] | [6]]
        """
        return distribute_arrays_or_batches(
            self.placement,
            dataset,
            batch_size=batch_size,
            remainder=remainder,
            prefetch=prefetch,
            shuffle=shuffle,
            seed=seed,
        )

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        *,
        prefetch: int = 2,
    ) -> DistributedDataset:
        """Distributes what ``dataset_fn(input_context)`` returns: batches for one replica each.

        The function is called once for each process (input pipeline), and again for each
        epoch if it is a generator function; consecutive elements go to consecutive replicas.
        """
        return distribute_from_function(self.placement, dataset_fn, prefetch=prefetch)

    def distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Makes a per-replica value by calling ``value_fn`` once for each local replica.

        >>> import mirrored
        >>> strategy = mirrored.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> strategy.distribute_values_from_function(lambda c: c.replica_id_in_sync_group * 10)
        PerReplica[0 | 10]
        """
        _context.require_cross_replica("strategy.distribute_values_from_function")
        require_callable(
            "distribute_values_from_function",
            value_fn,
            "write a function of the ValueContext: lambda context: values[context."
            "replica_id_in_sync_group].",
        )
        count = self.num_replicas_in_sync
        local = {
            index: value_fn(ValueContext(index, count))
            for index in self.placement.local_replica_ids
        }
        return joined_values(self.placement, local)

    # --- the spellings of tf.distribute -------------------------------------------

    experimental_local_results = local_results
    experimental_distribute_dataset = distribute_dataset
    experimental_distribute_datasets_from_function = distribute_datasets_from_function
    experimental_distribute_values_from_function = distribute_values_from_function

    def __repr__(self) -> str:
        return f"<{self.placement.describe()}>"

    def __reduce__(self) -> Any:
        raise ArgumentError(
            fact=f"{self!r} was pickled or copied.",
            expected="one strategy object in each process, since it owns devices.",
            hint="create the strategy where it is used.",
        )
