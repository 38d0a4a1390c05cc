"""ServerHome: parameter servers as the home of variables and optimizers.

Owns which object stands for which description in this process. Who reads and writes is
the participant in whose name the code runs: a worker in a closure, otherwise the
coordinator; a home of a worker's own process has no coordinator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mirrored import _context
from mirrored._errors import ArgumentError, ContextError, OwnershipError
from mirrored._parameter_server._catalog import OptimizerSpec, VariableSpec
from mirrored._parameter_server._embedding import TableHome


class ServerHome(TableHome):
    """Variables on servers, as one process sees them."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._specs: dict[int, VariableSpec] = {}
        self._spec_of: dict[Any, VariableSpec] = {}
        # By the optimizer itself, which the home keeps alive with what it describes.
        self._optimizers: dict[Any, OptimizerSpec] = {}

    @property
    def generation(self) -> int:
        """Changes when something was made: steps traced before do not know it."""
        return len(self._specs)

    def specs(self) -> list[VariableSpec]:
        """What there is, oldest first."""
        return [self._specs[number] for number in sorted(self._specs)]

    def know(self, thing: Any, spec: VariableSpec) -> None:
        """Notes which object stands for what in this process."""
        self._specs[spec.number] = spec
        self._spec_of[thing] = spec

    def know_optimizer(self, optimizer: Any, spec: OptimizerSpec) -> None:
        """Notes which optimizer is which."""
        self._optimizers[optimizer] = spec

    def spec_of(self, thing: Any) -> VariableSpec:
        """The description of a variable or table."""
        spec = self._spec_of.get(thing)
        if spec is None:
            name = getattr(thing, "name", repr(thing))
            raise OwnershipError(
                fact=f"{name!r} was used with {self._strategy!r}, in whose scope it was not made.",
                expected="variables of the strategy that runs.",
                hint="make it in `with strategy.scope():`.",
            )
        return spec

    def optimizer_spec_of(self, optimizer: Any) -> OptimizerSpec:
        """The description of an optimizer."""
        return self._optimizers[optimizer]

    def read(self, variable: Any) -> Any:
        return self.participant.read(self.spec_of(variable))

    def write(self, variable: Any, action: str, value: Any) -> None:
        self.participant.write(self.spec_of(variable), action, value)

    def apply_gradients(self, optimizer: Any, pairs: list[tuple[Any, Any]]) -> None:
        described = [(gradient, self.spec_of(thing)) for gradient, thing in pairs]
        for gradient, spec in described:
            if gradient is None:
                raise ArgumentError(
                    fact=f"the gradient of {spec.name!r} is None.",
                    expected="an array.",
                    hint="leave the pair out.",
                )
        self.participant.apply(self._optimizers[optimizer], described)

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return self.participant.run(self._strategy, function, args, kwargs, replica=False)

    def pickled(self, thing: Any) -> tuple[Any, ...]:
        if thing in self._optimizers:
            return load_optimizer, (self._optimizers[thing],)
        return load_variable, (self.spec_of(thing),)

    def adopt(self, variable: Any, value: Any) -> None:
        what = f"variable {variable.name!r}"
        raise self._not_here(what)

    def adopt_table(self, table: Any, make: Callable[[int, int], Any]) -> None:
        """Takes in a table just made, and how its first rows are made."""
        what = f"table {table.name!r}"
        raise self._not_here(what)

    def adopt_optimizer(self, optimizer: Any, tx: Any) -> None:
        what = f"optimizer {optimizer.name!r}"
        raise self._not_here(what)

    def _not_here(self, what: str) -> ContextError:
        return ContextError(
            fact=f"{what} was made on a worker.",
            expected="variables, tables and optimizers made by the program that schedules.",
            hint="make them in `with strategy.scope():`, outside the functions given to schedule.",
        )


def load_variable(spec: VariableSpec) -> Any:
    """Finds what a pickled variable is in the process that loads it."""
    return _loading_home().loaded_variable(spec)


def load_optimizer(spec: OptimizerSpec) -> Any:
    """Finds what a pickled optimizer is in the process that loads it."""
    return _loading_home().loaded_optimizer(spec)


def load_strategy() -> Any:
    """Finds what a pickled strategy is in the process that loads it."""
    return _loading_home().strategy


def _loading_home() -> Any:
    home = _context.current().home
    if home is None:
        raise ContextError(
            fact="something that is on parameter servers was unpickled outside a worker.",
            expected="it to travel with closures only.",
            hint="pass it to schedule, or capture it in the function scheduled.",
        )
    return home
