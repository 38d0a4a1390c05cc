"""One pass over the data on parameter servers: an epoch, an evaluation, a prediction.

Owns what is scheduled (some batches a closure), and putting results together: the state of
metrics adds up over batches, predictions stand in the order of the data.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Iterator
from typing import Any, final

import jax
import jax.numpy as jnp
import keras
import numpy as np

from mirrored._errors import ArgumentError, ServerError
from mirrored._parameter_server import ClusterCoordinator
from mirrored.keras import _private, _scope
from mirrored.keras._callbacks import BatchCalls, batch_calls
from mirrored.keras._interrupts import Interrupts
from mirrored.keras._ownership import require_whole
from mirrored.keras._served_data import OneBatch, WorkerData
from mirrored.keras._served_model import served
from mirrored.keras._source import Source, batches_of, read_rows

_STOP_FLAGS = {"train": "stop_training", "test": "stop_evaluating", "predict": "stop_predicting"}
_MOST_BATCHES = 16
_WAITING_FOR_EACH_WORKER = 2
# How often the progress bar is told the metrics.
_LOG_SECONDS = 0.2


def prepare(model: Any, strategy: Any, **data: Any) -> None:
    """Makes a compiled model's variables, but no arrays of the optimizer: servers have them.

    Args:
      model: the model.
      strategy: its strategy.
      **data: what shapes are found by: ``iterator`` or ``data_batch``, as in Keras.
    """
    own = _private.own_steps(model)
    if own or model.run_eagerly:
        what = f"a {own[0]} of its own" if own else "run_eagerly=True"
        raise ArgumentError(
            fact=f"model {model.name!r} has {what}, and its weights are on parameter servers.",
            expected="Keras's own steps (compute_loss, losses and layers may be yours): workers "
            "compute gradients, servers apply them.",
            hint="write the step with ClusterCoordinator.schedule, or debug on one device.",
        )
    _private.reset_step_state(model)
    with _scope.variables_of(strategy), _private.without_slots(model.optimizer):
        source = data.get("iterator")
        if isinstance(source, WorkerData):
            data = {"data_batch": _private.unpack(source.first())}
        _private.symbolic_build(model, **data)
    require_whole(model, strategy)


@final
class ServedPass:
    """Runs a model's steps of one kind on the workers; ``run`` is one epoch of it."""

    def __init__(
        self,
        model: Any,
        kind: str,
        strategy: Any,
        source: Any,
        callbacks: Any,
        interrupts: Interrupts,
    ) -> None:
        self._model = model
        self._kind = kind
        self._strategy = strategy
        self._source = source
        self._callbacks = callbacks
        self._served = served(model, strategy)
        self._coordinator = ClusterCoordinator(strategy)
        self._calls = batch_calls(callbacks, kind)
        self._checked = kind == "predict" or self._served.metrics_add_up
        self._total: list[Any] = []
        self._zeros: list[np.ndarray] = []
        self._outputs: list[Any] = []
        self._steps = 0
        self._told = 0.0
        self._logs: Any = {}

    def run(self, backup: Any = None, skipped: int = 0) -> Any:
        """Runs one epoch; returns its logs, or all rows' predictions.

        Args:
          backup: refused: batches end in no order that it could resume from.
          skipped: always 0 without it.
        """
        if backup is not None:
            raise ArgumentError(
                fact=f"Backup was given to fit of model {self._model.name!r}, whose weights are "
                "on parameter servers.",
                expected="ModelCheckpoint, or ClusterCoordinator.save, which saves optimizers too.",
                hint="call coordinator.save() between two fits, or in on_epoch_end.",
            )
        self._served.push()
        self._zeros = [np.asarray(v) for v in _private.values_of(self._model.metrics_variables)]
        self._total, self._outputs, self._steps = list(self._zeros), [], 0
        pending: collections.deque[Any] = collections.deque()
        try:
            self._run(pending)
        except ServerError:
            raise
        except BaseException:
            self._abandon(pending)
            raise
        if self._kind == "predict":
            return _joined(self._outputs)
        self._settle()
        return self._results()

    def _run(self, pending: collections.deque[Any]) -> None:
        window = 1
        if self._calls is not BatchCalls.EVERYTHING:
            window = _WAITING_FOR_EACH_WORKER * self._strategy.worker_count
        for group in self._groups():
            pending.append((group, self._schedule(group)))
            self._steps += len(group)
            first = self._kind == "train" and self._served.seed_strides is None
            while len(pending) >= (1 if first else window):
                self._take(*pending.popleft())
                first = False
            if getattr(self._model, _STOP_FLAGS[self._kind]):
                break
        while pending:
            self._take(*pending.popleft())

    # --- what is scheduled -------------------------------------------------------

    def _groups(self) -> Iterator[list[Any]]:
        """Batches that go to a worker together; of equal kinds of batches only the last differs."""
        size = self._group_size()
        group: list[Any] = []
        source = self._source
        numbered = batches_of(source) if isinstance(source, Source) else source.numbers()
        for batch, begin, end in numbered:
            if not isinstance(self._source, WorkerData):
                batch = jax.tree.map(np.asarray, read_rows(batch))
            if not self._checked:
                self._check_metrics(source.first() if isinstance(source, WorkerData) else batch)
            group.append((batch, begin, end))
            if len(group) == size:
                yield group
                group = []
        if group:
            yield group

    def _group_size(self) -> int:
        if self._calls in (BatchCalls.EVERYTHING, BatchCalls.LOGS):
            return 1
        steps = self._source.num_batches
        if steps is None:
            return 1
        # Enough closures that all workers end at about the same time.
        return max(1, min(_MOST_BATCHES, steps // (4 * self._strategy.worker_count)))

    def _schedule(self, group: list[Any]) -> Any:
        batches: Any = [batch for batch, _, _ in group]
        if isinstance(self._source, WorkerData):
            worker_function = self._source.closure(self._served.worker, self._kind)
            arguments: tuple[Any, ...] = (self._source.iterator(self._coordinator), len(batches))
        else:
            worker_function = getattr(self._served.worker, self._kind)
            arguments = (batches,)
        if self._kind == "train":
            arguments = (self._served.seeds(self._steps), self._zeros, *arguments)
        elif self._kind == "test":
            arguments = (self._zeros, *arguments)
        return self._coordinator.schedule(worker_function, args=arguments)

    # --- what comes back ---------------------------------------------------------

    def _take(self, group: list[Any], result: Any) -> None:
        value = result.fetch()
        if self._kind == "predict":
            self._outputs += value
        else:
            metrics = value
            if self._kind == "train":
                (seeds, metrics), count = value
                self._learn_strides(seeds, count)
            self._total = [
                total + (state - zero)
                for total, state, zero in zip(self._total, metrics, self._zeros, strict=True)
            ]
        self._tell(group)

    def _learn_strides(self, seeds: list[np.ndarray], count: int) -> None:
        if self._served.seed_strides is None:
            before = self._served.seeds(0)
            self._served.seed_strides = [
                ((after - start) // count).astype(start.dtype)
                for after, start in zip(seeds, before, strict=True)
            ]

    def _tell(self, group: list[Any]) -> None:
        if self._calls is BatchCalls.NO_CALLS:
            return
        if self._calls is BatchCalls.EVERYTHING and self._kind == "train":
            self._served.pull()
        if self._kind != "predict":
            now = time.monotonic()
            if self._calls is not BatchCalls.NOTHING or now - self._told > _LOG_SECONDS:
                self._logs, self._told = self._results(), now
        begins = getattr(self._callbacks, f"on_{self._kind}_batch_begin")
        ends = getattr(self._callbacks, f"on_{self._kind}_batch_end")
        for position, (_, begin, end) in enumerate(group):
            if begin is not None:
                begins(begin)
            if end is None:
                continue
            if self._kind == "predict":
                outputs = self._outputs[len(self._outputs) - len(group) + position]
                ends(end, {"outputs": outputs})
            else:
                ends(end, self._logs)
        if self._kind == "train":
            self._served.push()

    def _results(self) -> Any:
        state = [jnp.asarray(value) for value in self._total]
        return dict(_private.metric_results(self._model, state))

    def _settle(self) -> None:
        """Brings here what the pass has changed."""
        for variable, value in zip(self._model.metrics_variables, self._total, strict=True):
            variable.assign(value)
        if self._kind == "train":
            self._served.advance(self._steps)
            self._served.pull()

    def _abandon(self, pending: collections.deque[Any]) -> None:
        """Waits for closures under way; the first error among them is being raised already."""
        try:
            self._coordinator.join()
        except Exception:  # noqa: BLE001 (whatever a closure raised; the caller raises it)
            return
        finally:
            pending.clear()

    def _check_metrics(self, batch: Any) -> None:
        """Refuses metrics whose state does not add up: workers see different batches."""
        self._checked = True
        x, _, _ = _private.unpack(batch)
        outputs = keras.tree.map_structure(
            lambda spec: jnp.full(spec.shape, 0.5, spec.dtype),
            _private.output_spec(self._model, x),
        )
        zeros = [jnp.asarray(value) for value in self._zeros]
        loss = jnp.asarray(1.0)
        once = _private.update_metrics(self._model, zeros, loss, batch, outputs)
        twice = _private.update_metrics(self._model, once, loss, batch, outputs)
        variables = self._model.metrics_variables
        for variable, zero, first, second in zip(variables, zeros, once, twice, strict=True):
            if not np.allclose(second - first, first - zero, rtol=1e-4, equal_nan=True):
                raise ArgumentError(
                    fact=f"the state of metric {_private.metric_with(self._model, variable)!r} "
                    f"({variable.name}) does not add up over batches, and on parameter servers "
                    "each worker sees some of them.",
                    expected="metrics that count and sum, as those of Keras do.",
                    hint="compute it in a callback, from model.predict.",
                )
        self._served.metrics_add_up = True


def one_served(model: Any, strategy: Any, kind: str, data: Any) -> Any:
    """Takes one step, outside any epoch; returns its logs or predictions."""
    callbacks = keras.callbacks.CallbackList([], model=model)
    setattr(model, _STOP_FLAGS[kind], False)
    return ServedPass(model, kind, strategy, OneBatch(data), callbacks, Interrupts()).run()


def _joined(outputs: list[Any]) -> Any:
    if not outputs:
        return None
    return jax.tree.map(lambda *parts: np.concatenate(parts), *outputs)
