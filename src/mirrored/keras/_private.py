"""The one place that knows Keras from the inside.

Owns every private Keras name this package uses, so that a new Keras version breaks one
file. Everything here reads or sets something of Keras; what it means is decided elsewhere.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import keras
import numpy as np
from keras.src import backend as keras_backend
from keras.src.backend.common import global_state
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from keras.src.initializers.random_initializers import RandomInitializer
from keras.src.trainers.data_adapters import array_slicing, data_adapter_utils
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.epoch_iterator import EpochIterator
from keras.src.utils.python_utils import pythonify_logs

__all__ = ["EpochIterator", "RandomInitializer", "pythonify_logs"]

Variable = keras_backend.Variable
_VERSION = tuple(int(part) for part in keras.__version__.split(".")[:2])
unpack = data_adapter_utils.unpack_x_y_sample_weight
class_weight_to_sample_weights = data_adapter_utils.class_weight_to_sample_weights


# --- variables ---------------------------------------------------------------------------------


def layout_of(variable: Any) -> Any:
    """Returns the layout Keras stored when it made a variable, or None."""
    return getattr(variable, "_layout", None)


def adopt(variable: Any, layout: Any) -> None:
    """Gives a variable a layout after its creation, and moves its value there."""
    variable._layout = layout
    if variable._value is not None:
        variable._value = jax.device_put(variable._value, layout.backend_layout, may_alias=False)


def disown(variable: Any) -> None:
    """Takes a variable's layout away and puts its value where JAX puts things by default."""
    variable._layout = None
    if variable._value is not None:
        variable._value = jax.numpy.asarray(np.asarray(variable._value))


def values_of(variables: Sequence[Any]) -> list[Any]:
    """Reads the stored arrays, without autocast."""
    return [variable._value for variable in variables]


def set_values(variables: Sequence[Any], values: Sequence[Any]) -> None:
    """Stores arrays that already have the variables' shapes, types and layouts."""
    for variable, value in zip(variables, values, strict=True):
        variable._value = value


def variable_lists(model: Any, kind: str) -> list[list[Any]]:
    """Returns the variables a step of this kind takes, in the order Keras passes them."""
    lists = [list(model.trainable_variables), list(model.non_trainable_variables)]
    if kind == "train":
        optimizer = getattr(model, "optimizer", None)
        lists.append([] if optimizer is None else list(optimizer.variables))
    if kind != "predict":
        lists.append(list(model.metrics_variables))
    return lists


def compile_marker(model: Any) -> Any:
    """Returns a variable that ``compile`` made, or None for an uncompiled model."""
    tracker = getattr(model, "_loss_tracker", None)
    return tracker.variables[0] if tracker is not None and tracker.variables else None


def forget_global_seed(is_ours: Callable[[Any], bool]) -> None:
    """Takes Keras's global seed generator off a strategy it was first used in.

    It belongs to everyone: models beside the strategy draw from it too.
    """
    generator = global_state.get_global_attribute("global_seed_generator")
    if generator is not None and is_ours(generator.state):
        disown(generator.state)


# --- models ------------------------------------------------------------------------------------


def is_built(model: Any) -> bool:
    """Says whether all layers of a model have their variables."""
    return all(layer.built for layer in model._flatten_layers())


def require_compiled(model: Any, method: str) -> None:
    """Raises Keras's own error for a model that was not compiled."""
    model._assert_compile_called(method)


def warn_if_trainable_changed(model: Any) -> None:
    """Lets Keras warn about ``trainable`` set after ``compile``.

    It takes layers that came to be since then for changed ones, such as the input layer
    of a Sequential model that was built by its first batch.
    """
    known = getattr(model, "_compiled_trainable_state", {})
    for layer in model._flatten_layers():
        known.setdefault(layer, layer.trainable)
    getattr(model, "_warn_if_trainable_state_changed", lambda: None)()


def symbolic_build(model: Any, **sources: Any) -> None:
    """Makes the variables of a compiled model, its metrics and its optimizer."""
    model._symbolic_build(**sources)


def build_by_call(model: Any, inputs: Any) -> None:
    """Makes the variables of a model that is not compiled, from one batch."""
    with keras_backend.StatelessScope():
        model(inputs)


def has_own_train_step(model: Any) -> bool:
    """Says whether the user's class has a ``train_step``."""
    return type(model).train_step is not keras.Model.train_step


def is_seed(variable: Any) -> bool:
    """Says whether a variable is the state of a ``SeedGenerator``."""
    return variable.name == "seed_generator_state"


def local_updates(
    model: Any, trainable: Any, non_trainable: Any, optimizer: Any, metrics: Any, data: Any
) -> tuple[list[Any], list[Any], list[Any]]:
    """Runs a model forward and back; returns gradients, other variables and metrics' state."""
    x, y, sample_weight = unpack(data)
    (_, (loss, y_pred, non_trainable, metrics)), gradients = jax.value_and_grad(
        model.compute_loss_and_updates, has_aux=True
    )(
        trainable,
        non_trainable,
        metrics,
        x,
        y,
        sample_weight,
        training=True,
        optimizer_variables=optimizer,
    )
    _, metrics = model._update_metrics_variables(metrics, loss, x, y, y_pred, sample_weight)
    return list(gradients), list(non_trainable), list(metrics)


def metric_results(model: Any, metrics: Any) -> Any:
    """Returns the logs that belong to a state of the metrics."""
    mapping = list(zip(model.metrics_variables, metrics, strict=True))
    with keras_backend.StatelessScope(state_mapping=mapping):
        return model.get_metrics_result()


def metrics_or_logs(model: Any, logs: Any, kind: str, *, untouched: bool) -> Any:
    """Returns the metrics' results where the step's logs are these metrics, else the logs.

    Keras's own step returns what the metrics are after it, so that, while nobody else has
    touched them, there is nothing to compute again.
    """
    own = any(
        getattr(type(model), name) is not getattr(keras.Model, name)
        for name in (f"{kind}_step", "compute_metrics")
    )
    if untouched and logs and not own:
        return logs
    return model._get_metrics_result_or_logs(logs)


def in_metric_order(model: Any, logs: Any) -> Any:
    """Returns logs as Keras returns them when no dictionary is wanted."""
    return model._flatten_metrics_in_order(logs)


def first_epoch(model: Any, initial_epoch: int) -> int:
    """Returns where to start: a callback (BackupAndRestore) may have set it, for this fit.

    Keras never takes it back, so that the next fit after a resumed one trains nothing.
    """
    chosen = model._initial_epoch or initial_epoch
    model._initial_epoch = None
    return chosen


def begin_lone_step(model: Any) -> None:
    """Does to the metrics what this Keras does before a step outside any epoch.

    Since 3.15 they tell of that step alone; before, of all since somebody reset them.
    """
    if _VERSION >= (3, 15):
        model.reset_metrics()


def lone_logs(logs: Any) -> Any:
    """Returns the logs of a step outside any epoch in the form this Keras has.

    Python numbers since 3.14, arrays before.
    """
    if _VERSION >= (3, 14):
        return pythonify_logs(logs)
    return keras.tree.map_structure(np.array, logs)


def should_evaluate(model: Any, epoch: int, validation_freq: Any) -> bool:
    """Says whether this epoch ends with a validation."""
    return model._should_eval(epoch, validation_freq)


def cached_evaluation(model: Any) -> Any:
    """Returns the validation source kept through ``fit``, or None."""
    return getattr(model, "_eval_epoch_iterator", None)


def keep_evaluation(model: Any, source: Any) -> None:
    """Keeps the validation source through ``fit``; None drops it."""
    object.__setattr__(model, "_eval_epoch_iterator", source)


def makes_own_function(model: Any, kind: str) -> bool:
    """Says whether the user's class makes the step function itself."""
    name = f"make_{kind}_function"
    return getattr(type(model), name) is not getattr(keras.Model, name)


def make_own_function(model: Any, kind: str) -> Any:
    """Lets the user's class make its step function, and returns it."""
    getattr(model, f"make_{kind}_function")()
    return step_function(model, kind)


def step_function(model: Any, kind: str) -> Any:
    """Returns what is stored as ``model.train_function`` and the like; compile resets it."""
    return getattr(model, f"{kind}_function")


def set_step_function(model: Any, kind: str, function: Any) -> None:
    """Stores ``model.train_function`` and the like."""
    object.__setattr__(model, f"{kind}_function", function)


def reset_step_state(model: Any) -> None:
    """Tells Keras that no state is kept outside the variables."""
    object.__setattr__(model, "_jax_state", None)
    object.__setattr__(model, "_jax_state_synced", True)


def most_epochs(epochs: int) -> int:
    """Returns ``epochs``, or fewer where ``keras.config`` limits them."""
    limit = keras.config.max_epochs()
    if not limit or limit >= epochs:
        return epochs
    warnings.warn(f"Limiting epochs to {limit}", stacklevel=2)
    return limit


def wraps_twice(function: Any) -> bool:
    """Says whether a function was wrapped by this package before."""
    return getattr(function, "_mirrored_wrapper", False)


def mark_wrapper(function: Any) -> Any:
    """Marks a function as wrapped by this package."""
    function._mirrored_wrapper = True
    return function


def profiles_batches(tensorboard: Any) -> bool:
    """Says whether a TensorBoard callback profiles single batches."""
    return bool(tensorboard._should_trace or tensorboard.write_steps_per_second)


# --- data --------------------------------------------------------------------------------------


def array_rows(adapter: Any) -> tuple[Any, int, int, bool] | None:
    """Returns arrays, row count, batch size and shuffle of data that is plain arrays.

    None for everything else, which is then read batch by batch.
    """
    if not isinstance(adapter, ArrayDataAdapter) or adapter._shuffle == "batch":
        return None
    sliceables = array_slicing.convert_to_sliceable(adapter._inputs, target_backend="jax")
    leaves, structure = jax.tree.flatten(sliceables)
    if not all(isinstance(leaf, array_slicing.NumpySliceable) for leaf in leaves):
        return None
    arrays = structure.unflatten([leaf.array for leaf in leaves])
    return arrays, adapter._num_samples, adapter._batch_size, bool(adapter._shuffle)


def split_validation(data: tuple[Any, Any, Any], fraction: float) -> tuple[Any, Any, Any, Any]:
    """Returns x, y and sample_weight without their last part, and that part."""
    parts: Any = array_slicing.train_validation_split(data, validation_split=fraction)
    (x, y, sample_weight), validation = parts
    return x, y, sample_weight, validation


def next_step(source: Any) -> Any:
    """Advances a source's own count of steps; its iterator of batches comes with it."""
    return next(source._epoch_iterator)


def is_sparse(leaf: Any) -> bool:
    """Says whether a leaf of a batch is one of JAX's sparse arrays."""
    return data_adapter_utils.is_jax_sparse(leaf)


# --- optimizers and layers on parameter servers ------------------------------------------------


def slots_made_by_build(optimizer: Any, variables: Sequence[Any]) -> dict[int, tuple[str, int]]:
    """Builds an optimizer; returns, by the id of each variable it made, its slot.

    A slot is what the optimizer keeps for each of ``variables``: a name and whose it is.
    """
    places = {id(variable): index for index, variable in enumerate(variables)}
    slots: dict[int, tuple[str, int]] = {}
    original = optimizer.add_variable_from_reference

    def noted(reference_variable: Any, name: str | None = None, **kwargs: Any) -> Any:
        made = original(reference_variable, name=name, **kwargs)
        slots[id(made)] = (name or "var", places[id(reference_variable)])
        return made

    object.__setattr__(optimizer, "add_variable_from_reference", noted)
    optimizer.build(list(variables))
    return slots


def excludes_from_weight_decay(optimizer: Any) -> bool:
    """Says whether ``exclude_from_weight_decay`` was called on an optimizer."""
    return bool(getattr(optimizer, "_exclude_from_weight_decay", None)) or (
        getattr(optimizer, "_exclude_from_weight_decay_pattern", None) is not None
    )


def update_metrics(model: Any, metrics: Any, loss: Any, data: Any, y_pred: Any) -> list[Any]:
    """Returns the metrics' state after one more batch."""
    x, y, sample_weight = unpack(data)
    _, metrics = model._update_metrics_variables(metrics, loss, x, y, y_pred, sample_weight)
    return list(metrics)


def in_shape_inference() -> bool:
    """Says whether the running code only finds out shapes."""
    return in_symbolic_scope()


def embeddings_of(layer: Any) -> Any:
    """Returns the weight of an embedding layer, or None before it is built."""
    return getattr(layer, "_embeddings", None)


def give_embeddings(layer: Any, weight: Any) -> None:
    """Gives an embedding layer its weight; it is built then."""
    layer._embeddings = weight
    layer.built = True


def all_layers(model: Any) -> list[Any]:
    """Returns all layers inside a model, at any depth."""
    return list(model._flatten_layers(include_self=False))


def compile_arguments(model: Any) -> dict[str, Any]:
    """Returns what ``compile`` was given."""
    config = getattr(model, "_compile_config", None)
    return {} if config is None else dict(config.config)


@contextlib.contextmanager
def without_slots(optimizer: Any) -> Iterator[None]:
    """Keeps Keras from making an optimizer's arrays for each weight inside the block."""
    if optimizer is None or optimizer.built:
        yield
        return
    optimizer.built = True
    try:
        yield
    finally:
        optimizer.built = False


def own_steps(model: Any) -> list[str]:
    """The names of methods that say what a step is, where the user's class has its own."""
    names = ("train_step", "test_step", "make_train_function", "make_test_function")
    names = (*names, "make_predict_function")
    return [name for name in names if getattr(type(model), name) is not getattr(keras.Model, name)]


def output_spec(model: Any, x: Any) -> Any:
    """Returns shapes and types of what a model returns for a batch."""
    inputs = keras.tree.map_structure(
        lambda leaf: keras.KerasTensor(np.shape(leaf), dtype=str(np.asarray(leaf).dtype)), x
    )
    return keras_backend.compute_output_spec(model, inputs)


def metric_with(model: Any, variable: Any) -> str:
    """Returns the name of the metric a variable belongs to."""
    found = ""
    pending = list(model.metrics)
    while pending:
        metric = pending.pop()
        if any(each is variable for each in metric.variables):
            # The metrics inside it, if it holds some, say it better.
            found = metric.name
            pending = list(getattr(metric, "metrics", []))
    return found


def give_layout(variable: Any) -> None:
    """Gives a variable just made the layout of the current scope, which names its strategy."""
    distribution = keras.distribution.distribution()
    if distribution is not None and layout_of(variable) is None:
        variable._layout = distribution.get_variable_layout(variable)
