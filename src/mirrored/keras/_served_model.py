"""A Keras model whose weights are on parameter servers, and its steps on workers.

Owns which weight is which variable or table, bringing values there and back, and the three
steps (train, test, predict) as functions for ``strategy.run``. What is scheduled, and what
becomes of results, is in ``_served_pass``.
"""

from __future__ import annotations

import collections
import weakref
from typing import Any, final

import jax
import keras
import numpy as np

from mirrored import _gradients
from mirrored._errors import ArgumentError
from mirrored._optimizer import Optimizer
from mirrored._parameter_server._rules import require_elementwise
from mirrored._variable import Variable
from mirrored.keras import _private, _served_travel
from mirrored.keras._served_rule import LEARNING_RATE, KerasRule
from mirrored.keras._served_tables import TableVariable

_SERVED: weakref.WeakKeyDictionary[Any, ServedModel] = weakref.WeakKeyDictionary()


def served(model: Any, strategy: Any) -> ServedModel:
    """Returns what stands for a model on its servers; made when first asked for."""
    found = _SERVED.get(model)
    if found is None:
        found = _SERVED[model] = ServedModel(model, strategy)
    found.update()
    return found


@final
class WorkerModel:
    """What a worker needs of a model: the steps, and what on the servers they use.

    Args:
      model: the Keras model; in a worker's own process a copy of it.
      weights: a variable or table for each of ``parameters_of(model)``; None for states of
        random seeds, which steps are given.
      optimizer: applies gradients there; None for a model without one.
      strategy: whose workers these are.
    """

    def __init__(self, model: Any, weights: list[Any], optimizer: Any, strategy: Any) -> None:
        self.model = model
        self.strategy = strategy
        self.optimizer = optimizer
        count = len(model.trainable_variables)
        self.trainable, self.non_trainable = weights[:count], weights[count:]
        self._content: Any = None

    def __reduce__(self) -> Any:
        if self._content is None:
            self._content = _served_travel.content_of(self.model)
        weights = [*self.trainable, *self.non_trainable]
        return rebuilt, (self._content, weights, self.optimizer, self.strategy)

    # --- steps, traced -----------------------------------------------------------

    def train_step(self, seeds: Any, metrics: Any, data: Any) -> Any:
        """One step; returns the states of random seeds and of metrics after it."""
        model = self.model
        x, y, sample_weight = _private.unpack(data)
        given: list[Any] = []

        def loss_fn() -> Any:
            given[:] = self._others(seeds)
            return model.compute_loss_and_updates(
                [_value(thing) for thing in self.trainable],
                list(given),
                metrics,
                x,
                y,
                sample_weight,
                training=True,
                optimizer_variables=_private.values_of(model.optimizer.variables),
            )

        (_, (loss, y_pred, others, metrics)), gradients = _gradients.value_and_grad(
            loss_fn, self.trainable, has_aux=True
        )
        metrics = _private.update_metrics(model, metrics, loss, data, y_pred)
        for thing, before, after in zip(self.non_trainable, given, others, strict=True):
            if isinstance(thing, Variable) and after is not before:
                thing.assign(after)
        self.optimizer.apply_gradients(list(zip(gradients, self.trainable, strict=True)))
        return self._seeds_of(others), metrics

    def test_step(self, metrics: Any, data: Any) -> Any:
        """Evaluates a batch; returns the state of metrics after it."""
        x, y, sample_weight = _private.unpack(data)
        seeds = _private.values_of(_seed_variables(self.model))
        loss, (_, y_pred, _, metrics) = self.model.compute_loss_and_updates(
            [_value(thing) for thing in self.trainable],
            self._others(seeds),
            metrics,
            x,
            y,
            sample_weight,
            training=False,
        )
        return _private.update_metrics(self.model, metrics, loss, data, y_pred)

    def predict_step(self, data: Any) -> Any:
        """Predicts a batch."""
        seeds = _private.values_of(_seed_variables(self.model))
        state = [_value(thing) for thing in self.trainable], self._others(seeds)
        outputs, _ = self.model.predict_step(state, data)
        return outputs

    def _others(self, seeds: Any) -> list[Any]:
        rest = iter(seeds)
        return [next(rest) if thing is None else _value(thing) for thing in self.non_trainable]

    def _seeds_of(self, others: list[Any]) -> list[Any]:
        pairs = zip(self.non_trainable, others, strict=True)
        return [value for thing, value in pairs if thing is None]

    # --- closures, on a worker ---------------------------------------------------

    def train(self, seeds: Any, metrics: Any, batches: Any) -> Any:
        """Takes a step for each batch."""
        _served_travel.finish(self.model, batches[0])
        count = 0
        for batch in batches:
            arguments = (seeds, metrics, batch)
            seeds, metrics = self.strategy.run(self.train_step, args=arguments)
            count += 1
        return _on_host((seeds, metrics)), count

    def test(self, metrics: Any, batches: Any) -> Any:
        """Evaluates batches."""
        _served_travel.finish(self.model, batches[0])
        for batch in batches:
            metrics = self.strategy.run(self.test_step, args=(metrics, batch))
        return _on_host(metrics)

    def predict(self, batches: Any) -> Any:
        """Predicts batches."""
        return [_on_host(self.strategy.run(self.predict_step, args=(batch,))) for batch in batches]


@final
class ServedModel:
    """A model of this program and its weights on servers."""

    def __init__(self, model: Any, strategy: Any) -> None:
        # Not the model itself, which is the key under which this is kept.
        self._model = weakref.ref(model)
        self.strategy = strategy
        self._variables: dict[int, Variable] = {}
        # The arrays the weights had when both sides last agreed.
        self._agreed: dict[int, Any] = {}
        self._optimizer_of: Any = None
        self._optimizer: Any = None
        self._rule: Any = None
        self._learning_rate: float | None = None
        self._order: list[int] = []
        # Made anew by each compile.
        self._marker: Any = None
        self.worker: Any = None
        # Whether that was found of the metrics of this compilation.
        self.metrics_add_up = False
        # How far a step moves the states of random seeds; None until one has run.
        self.seed_strides: list[np.ndarray] | None = None

    @property
    def model(self) -> Any:
        """The model."""
        return self._model()

    def update(self) -> None:
        """Takes in weights and an optimizer that are new since the last time."""
        model = self.model
        parameters = parameters_of(model)
        changed = self.worker is None or self._order != [id(weight) for weight in parameters]
        self._order = [id(weight) for weight in parameters]
        dense = [weight for weight in _dense(model) if id(weight) not in self._variables]
        if dense:
            _refuse_constraints(model)
        with self.strategy.scope():
            for weight in dense:
                (value,) = _private.values_of([weight])
                self._variables[id(weight)] = Variable(
                    np.asarray(value), trainable=weight.trainable, name=_name(weight)
                )
                self._agreed[id(weight)] = value
                changed = True
            optimizer = getattr(model, "optimizer", None)
            if optimizer is not None and optimizer is not self._optimizer_of:
                self._take_optimizer(optimizer)
                changed = True
            elif optimizer is not None and _private.compile_marker(model) is not self._marker:
                self._take_changes(optimizer)
        marker = _private.compile_marker(model)
        if changed or marker is not self._marker:
            self._marker = marker
            self.metrics_add_up = False
            self.worker = WorkerModel(
                model, [self._thing(w) for w in parameters], self._optimizer, self.strategy
            )
            self.seed_strides = None

    def _take_optimizer(self, optimizer: Any) -> None:
        rule = self._checked_rule(optimizer)
        self._optimizer = Optimizer(rule, name=f"keras.{optimizer.name}")
        self._optimizer_of = optimizer
        self._rule = rule
        self._learning_rate = None

    def _take_changes(self, optimizer: Any) -> None:
        """Of an optimizer that was compiled again; its state stays, as it does in Keras."""
        if KerasRule(optimizer).is_like(self._rule):
            return
        self._rule = self._checked_rule(optimizer)
        spec = self.strategy.home.optimizer_spec_of(self._optimizer)
        self.strategy.deployment.replace_rule(spec, self._rule)
        self._learning_rate = None

    def _checked_rule(self, optimizer: Any) -> KerasRule:
        rule = KerasRule(optimizer)
        shapes = [
            jax.ShapeDtypeStruct(weight.shape, keras.backend.standardize_dtype(weight.dtype))
            for weight in self.model.trainable_variables
        ]
        tables = any(isinstance(w, TableVariable) for w in self.model.trainable_variables)
        if tables or self.strategy.server_count > 1:
            require_elementwise(rule, shapes, "no server has all of the model's weights")
        return rule

    def _thing(self, weight: Any) -> Any:
        if isinstance(weight, TableVariable):
            return weight.table
        return self._variables.get(id(weight))

    # --- values there and back ---------------------------------------------------

    def push(self) -> None:
        """Brings to the servers what was set here since: weights, the learning rate."""
        for weight in _dense(self.model):
            (value,) = _private.values_of([weight])
            if value is not self._agreed[id(weight)]:
                self._variables[id(weight)].assign(np.asarray(value))
                self._agreed[id(weight)] = value
        optimizer = self._optimizer_of
        if optimizer is None or not isinstance(optimizer.learning_rate, _private.Variable):
            return
        rate = float(optimizer.learning_rate)
        if rate != self._learning_rate:
            home = self.strategy.home
            self.strategy.deployment.set_number(
                home.optimizer_spec_of(self._optimizer), LEARNING_RATE, rate
            )
            self._learning_rate = rate

    def pull(self) -> None:
        """Brings the dense weights here; tables stay where they are."""
        home, weights = self.strategy.home, _dense(self.model)
        specs = [home.spec_of(self._variables[id(weight)]) for weight in weights]
        for weight, value in zip(weights, home.participant.fetch(specs), strict=True):
            weight.assign(value)
            (self._agreed[id(weight)],) = _private.values_of([weight])

    def seeds(self, step: int) -> list[np.ndarray]:
        """The states of random seeds ``step`` steps after what the model holds."""
        states = [np.asarray(value) for value in _private.values_of(_seed_variables(self.model))]
        if self.seed_strides is None:
            return states
        return [
            (state + np.asarray(step, state.dtype) * stride).astype(state.dtype)
            for state, stride in zip(states, self.seed_strides, strict=True)
        ]

    def advance(self, steps: int) -> None:
        """Notes that steps were taken: random seeds and the count of steps move on."""
        moved = self.seeds(steps)
        for weight, state in zip(_seed_variables(self.model), moved, strict=True):
            weight.assign(state)
        self.model.optimizer.iterations.assign_add(steps)


# Copies of models in a worker's own process, by what they were made of.
_COPIES: collections.OrderedDict[Any, WorkerModel] = collections.OrderedDict()
_MOST_COPIES = 8


def rebuilt(content: Any, weights: list[Any], optimizer: Any, strategy: Any) -> WorkerModel:
    """Finds or makes, in a worker's own process, what was sent there."""
    key = (content.config, *(id(weight) for weight in weights), id(optimizer))
    found = _COPIES.get(key)
    if found is None:
        found = WorkerModel(_served_travel.copy_of(content, weights), weights, optimizer, strategy)
        _COPIES[key] = found
        if len(_COPIES) > _MOST_COPIES:
            _COPIES.popitem(last=False)
    return found


def parameters_of(model: Any) -> list[Any]:
    """All state of a model that a step reads: weights, and states of random seeds."""
    return [*model.trainable_variables, *model.non_trainable_variables]


def _seed_variables(model: Any) -> list[Any]:
    return [weight for weight in model.non_trainable_variables if _private.is_seed(weight)]


def _dense(model: Any) -> list[Any]:
    return [
        weight
        for weight in parameters_of(model)
        if not isinstance(weight, TableVariable) and not _private.is_seed(weight)
    ]


def _value(thing: Any) -> Any:
    """What stands for a weight in a step; a table's rows are looked up by its layer."""
    if isinstance(thing, Variable):
        return thing.value
    return jax.numpy.zeros(thing.shape, thing.dtype)


def _name(weight: Any) -> str:
    return weight.path.replace("/", ".")


def _on_host(nest: Any) -> Any:
    return jax.tree.map(np.asarray, nest)


def _refuse_constraints(model: Any) -> None:
    for weight in model.trainable_variables:
        if weight.constraint is not None:
            raise ArgumentError(
                fact=f"weight {weight.path!r} has a constraint, {weight.constraint!r}, and is on "
                "parameter servers.",
                expected="weights without constraints: other workers' updates come in between.",
                hint="leave it out, or train with MultiWorkerMirroredStrategy.",
            )
