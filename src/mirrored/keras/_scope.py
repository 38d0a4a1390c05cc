"""What Keras does inside ``strategy.scope()``.

Owns the distribution that sees every variable made in the scope, and who belongs to
which strategy: variables by the layout they were given, models by where they were made.
"""

from __future__ import annotations

import contextlib
import random
import weakref
from collections.abc import Iterator
from typing import Any, final

import jax
import keras
import numpy as np

from mirrored import _workers
from mirrored._errors import ContextError, DeviceError
from mirrored._placement import Placement
from mirrored.keras import _private


@final
class MirroredLayout(keras.distribution.TensorLayout):
    """An equal copy on every device of one strategy, which it also names."""

    def __init__(self, rank: int, device_mesh: Any, strategy: Any) -> None:
        super().__init__((None,) * rank, device_mesh)
        self.strategy = strategy

    @property
    def backend_layout(self) -> jax.sharding.NamedSharding:
        """The JAX sharding; the strategy's own, so that all its arrays agree."""
        return self.strategy.placement.mirrored

    def __deepcopy__(self, memo: Any) -> MirroredLayout:
        # A copied variable stays on the strategy; devices cannot be copied.
        return self


@final
class MirroredDistribution(keras.distribution.DataParallel):
    """Keras's view of a strategy: every variable it makes is mirrored on it."""

    def __init__(self, strategy: Any) -> None:
        mesh = keras.distribution.DeviceMesh(
            shape=(strategy.num_replicas_in_sync,),
            axis_names=["replica"],
            devices=list(strategy.devices),
        )
        super().__init__(device_mesh=mesh, auto_shard_dataset=False)
        self.strategy = strategy

    def get_variable_layout(self, variable: Any) -> Any:
        """Mirrors a variable, unless it was given a layout of its own."""
        if self.strategy.placement.only_compiles:
            raise DeviceError(
                fact=f"the Keras variable {variable.path!r} was made on "
                f"{self.strategy.placement.describe()}, which is there to compile for.",
                expected="mirrored.Variable, NNX modules or plain arrays in a step that "
                "mirrored.plan.plan compiles: Keras needs values.",
                hint="write the step with model.stateless_call outside the scope, and give it "
                "the shapes of model.trainable_variables.",
            )
        found = _private.layout_of(variable)
        return found if found is not None else self.layout_for(variable)

    def layout_for(self, variable: Any) -> MirroredLayout:
        """The layout of a variable of this strategy."""
        return MirroredLayout(len(variable.shape), self.device_mesh, self.strategy)


_ENTERED: weakref.WeakSet[Any] = weakref.WeakSet()

# Models by the strategy in whose scope they were made: a model whose layers are built
# later has no variable that could tell.
_MADE_IN: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def distribution_of(strategy: Any) -> MirroredDistribution:
    """Makes Keras's view of a strategy."""
    return MirroredDistribution(strategy)


def current_strategy() -> Any:
    """Returns the strategy whose scope Keras is in, or None."""
    distribution = keras.distribution.distribution()
    return distribution.strategy if isinstance(distribution, MirroredDistribution) else None


def owner_of(variable: Any) -> Any:
    """Returns the strategy a Keras variable is mirrored on, or None."""
    layout = _private.layout_of(variable)
    if layout is None or isinstance(layout, MirroredLayout):
        return getattr(layout, "strategy", None)
    # Before 3.15 Keras keeps the sharding alone. Equal ones may be different strategies'.
    return next((each for each in _ENTERED if each.placement.mirrored is layout), None)


def made_in(model: Any) -> Any:
    """Returns the strategy in whose scope a model object was made, or None."""
    return _MADE_IN.get(model)


@contextlib.contextmanager
def variables_of(strategy: Any) -> Iterator[None]:
    """Mirrors the Keras variables made inside the block."""
    _ENTERED.add(strategy)
    with distribution_of(strategy).scope():
        try:
            yield
        finally:
            _private.forget_global_seed(lambda variable: owner_of(variable) is not None)


@contextlib.contextmanager
def draws_of_worker_0(placement: Placement) -> Iterator[None]:
    """Lets every worker's Python draw what worker 0's draws: Keras seeds initial weights so."""
    workers = _workers.connected() if placement.spans_processes else None
    if workers is None:
        yield
        return
    before = version, numbers, _ = random.getstate()
    agreed = workers.broadcast(np.array(numbers, np.uint32), "the seeds of Keras's initializers")
    if workers.process_id != 0:
        random.setstate((version, tuple(map(int, agreed)), None))
    try:
        yield
    finally:
        if workers.process_id != 0:
            random.setstate(before)


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Leaves the scope for the block, for models that do not belong to it."""
    before = keras.distribution.distribution()
    keras.distribution.set_distribution(None)
    try:
        yield
    finally:
        keras.distribution.set_distribution(before)


def require_jax_backend() -> None:
    """Raises where Keras runs on something other than JAX."""
    backend = keras.backend.backend()
    if backend != "jax":
        raise ContextError(
            fact=f"Keras runs on {backend}, and a model was made in the scope of a strategy.",
            expected="Keras on its JAX backend.",
            hint='set os.environ["KERAS_BACKEND"] = "jax" above the first `import keras`.',
        )


@contextlib.contextmanager
def refusing_models() -> Iterator[None]:
    """Raises for a model made inside the block: Keras runs on another backend than JAX."""
    global _refusing
    before, _refusing = _refusing, True
    try:
        yield
    finally:
        _refusing = before


_refusing = False


def note(model: Any) -> None:
    """Remembers a model just made, if a strategy is current."""
    if _refusing:
        require_jax_backend()
    strategy = current_strategy()
    if strategy is not None:
        _MADE_IN[model] = strategy
