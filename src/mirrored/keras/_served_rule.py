"""A Keras optimizer as the rule that parameter servers apply.

Owns the translation: the optimizer's own ``stateless_apply`` is traced where the variables
are, so a step is Keras's to the last digit, and what of an optimizer cannot be had there is
refused. Rules travel to servers in processes of their own, which import this module.
"""

from __future__ import annotations

import os
from typing import Any, final

# A server's process has imported no Keras yet, and its default backend is another.
os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import keras

from mirrored._errors import ArgumentError
from mirrored._parameter_server._rules import Rule
from mirrored.keras import _private, _scope

# Where the learning rate is in a rule's state, as ``jax.tree_util.keystr`` says it.
LEARNING_RATE = "['numbers']['learning_rate']"

_NAMED = ("iteration", "learning_rate")


@final
class KerasRule(Rule):
    """What a Keras optimizer computes of values and gradients.

    Its state is {"numbers": {name: scalar}, "slots": {name: [one array a value]}}: the
    numbers belong to the optimizer as a whole, slots go where their values are.
    """

    def __init__(self, optimizer: Any) -> None:
        require_supported(optimizer)
        self.name = optimizer.name
        self._config: Any = keras.saving.serialize_keras_object(optimizer)

    def is_like(self, other: KerasRule) -> bool:
        """Whether both compute the same, whatever the learning rate is at the moment."""
        return self._said() == other._said()

    def _said(self) -> Any:
        config = dict(self._config["config"])
        if not isinstance(config["learning_rate"], dict):
            # A number, which is told to servers each time it changes.
            del config["learning_rate"]
        return config

    def init(self, values: list[Any]) -> Any:
        _, described = self._built(values)
        return self._packed(described, [variable.value for variable, _, _ in described])

    def update(self, gradients: list[Any], state: Any, values: list[Any]) -> tuple[Any, Any]:
        optimizer, described = self._built(values)
        given = [
            state["numbers"][name] if index is None else state["slots"][name][index]
            for _, name, index in described
        ]
        new_values, new_state = optimizer.stateless_apply(given, list(gradients), list(values))
        return list(new_values), self._packed(described, list(new_state))

    def _built(self, values: list[Any]) -> tuple[Any, list[tuple[Any, str, int | None]]]:
        """The optimizer with stand-ins for these values, and what each of its variables is."""
        with _scope.outside():
            optimizer: Any = keras.saving.deserialize_keras_object(self._config)
            stand_ins = [
                keras.Variable(
                    jax.numpy.zeros(value.shape, value.dtype), dtype=value.dtype, name=f"v{index}"
                )
                for index, value in enumerate(values)
            ]
            slots = _private.slots_made_by_build(optimizer, stand_ins)
        described: list[tuple[Any, str, int | None]] = []
        for position, variable in enumerate(optimizer.variables):
            # Names that Keras makes up are others each time.
            own = variable.name if variable.name in _NAMED else f"number {position}"
            name, index = slots.get(id(variable), (own, None))
            described.append((variable, name, index))
        return optimizer, described

    @staticmethod
    def _packed(described: list[tuple[Any, str, int | None]], arrays: list[Any]) -> Any:
        numbers: dict[str, Any] = {}
        slots: dict[str, list[Any]] = {}
        for (_, name, index), array in zip(described, arrays, strict=True):
            if index is None:
                numbers[name] = array
            else:
                slots.setdefault(name, []).append(array)
        return {"numbers": numbers, "slots": slots}


def require_supported(optimizer: Any) -> None:
    """Refuses optimizers whose steps are not those of values, gradients and slots alone."""
    name = type(optimizer).__name__
    problem = None
    if isinstance(optimizer, (keras.optimizers.Adafactor, keras.optimizers.Muon)):
        problem = "looks at whole matrices"
    elif isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        problem = "scales the loss by what happened in the steps before"
    elif optimizer.loss_scale_factor is not None:
        problem = "scales the loss (loss_scale_factor)"
    elif optimizer.use_ema:
        problem = "keeps an average of the weights (use_ema=True)"
    elif optimizer.gradient_accumulation_steps:
        problem = "accumulates gradients over steps (gradient_accumulation_steps)"
    elif _private.excludes_from_weight_decay(optimizer):
        problem = "leaves some weights out of weight decay (exclude_from_weight_decay)"
    if problem is not None:
        raise ArgumentError(
            fact=f"the model was compiled with {name}, which {problem}, for parameter servers.",
            expected="SGD, Adam, AdamW, Adagrad, Adadelta, Adamax, RMSprop, Nadam, Lion or Ftrl "
            "(or one of your own that needs no more), with learning rate schedules, momentum, "
            "weight decay and clipping by value.",
            hint="leave it out, or train with MultiWorkerMirroredStrategy.",
        )
