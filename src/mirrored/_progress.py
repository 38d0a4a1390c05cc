"""Showing how far a loop is, and the values it reports, without slowing it down.

Owns the display. Values are read from the devices only once they are there, and only
as often as the display changes, so that reporting a loss does not make a step wait.
"""

from __future__ import annotations

import abc
import atexit
import operator
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, final

import jax
import numpy as np

from mirrored import _compat
from mirrored._errors import ArgumentError, ArgumentTypeError
from mirrored._values import PerReplica
from mirrored._variable import Variable

_BAR_SECONDS = 0.25
_LINE_SECONDS = 5.0
# Grain's repeat() has the largest length there is.
_ENDLESS = sys.maxsize // 2


def progress(
    iterable: Iterable[Any], description: str | None = None, total: int | None = None
) -> Progress:
    """Wraps an iterable so that a loop over it shows how far it is, on standard error.

    On a terminal, with the extra ``progress`` installed, a bar; otherwise a line every
    few seconds and one at the end. Of several processes the first one shows it.

    Args:
      iterable: a distributed data set, or anything else to loop over.
      description: what stands before it.
      total: how many items there are, if the iterable does not know.

    >>> import numpy as np
    >>> import mirrored
    >>> strategy = mirrored.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> batches = mirrored.progress(strategy.distribute_dataset(np.arange(8.0), 4), "epoch 1")
    >>> for batch in batches:
    ...     batches.report(mean=strategy.reduce("mean", batch, axis=0))
    >>> len(batches)
    2
    """
    return Progress(iterable, description, total)


@final
class Progress:
    """What ``progress`` returns: iterate over it, and report values to it."""

    def __init__(self, iterable: Iterable[Any], description: str | None, total: int | None) -> None:
        if not isinstance(iterable, Iterable):
            raise ArgumentTypeError(
                fact=f"progress was given {iterable!r} ({type(iterable).__name__}).",
                expected="something to loop over.",
                hint="for a number of steps write mirrored.progress(range(steps)).",
            )
        if total is not None and (not isinstance(total, int) or total < 0):
            raise ArgumentError(
                fact=f"total={total!r}.",
                expected="how many items there will be, or None if that is not known.",
                hint="leave it out if the iterable has a length.",
            )
        self._iterable = iterable
        self._description = description or ""
        self._total = _length_of(iterable) if total is None else total
        self._values = _Values()

    def report(self, **values: Any) -> None:
        """Shows these values beside the count: numbers, arrays, PerReplica values, text.

        Costs next to nothing: arrays are read when the display changes, and only if
        they are there by then.
        """
        self._values.add(values)

    def __iter__(self) -> Iterator[Any]:
        if _compat.backend_has_started() and jax.process_index() != 0:
            yield from self._iterable
            return
        tally = _Tally(self._description, self._total)
        display = _Guarded(self._total)
        try:
            for item in self._iterable:
                yield item
                tally.count += 1
                now = time.monotonic()
                if now >= display.due:
                    display.show(tally, self._values, now)
            tally.finished = True
        finally:
            display.stop(tally, self._values)

    def __len__(self) -> int:
        if self._total is None:
            raise ArgumentTypeError(
                fact="how many items this loop has is not known.",
                expected="an iterable with a length, or total=.",
                hint="write mirrored.progress(iterable, total=1000).",
            )
        return self._total

    def __bool__(self) -> bool:
        return True


@final
class _Tally:
    """How far the loop is, and how fast."""

    def __init__(self, description: str, total: int | None) -> None:
        self.description = description
        self.total = total
        self.count = 0
        self.finished = False
        self._began = time.monotonic()
        self._first: tuple[float, int] | None = None

    def rate(self, now: float) -> float | None:
        """Items a second since the first look, which leaves the compilation out."""
        if self._first is None:
            self._first = (now, self.count)
        since, count = self._first
        if self.count > count:
            return (self.count - count) / max(now - since, 1e-9)
        return self.count / max(now - self._began, 1e-9) if self.count else None

    def counted(self) -> str:
        """The count, and of how many."""
        return f"{self.count}" if self.total is None else f"{self.count}/{self.total}"

    def pace(self, now: float) -> str:
        """The rate and the time left or taken."""
        rate = self.rate(now)
        shown = [] if rate is None else [f"{rate:.1f}/s" if rate >= 1 else f"{1 / rate:.1f} s each"]
        if self.finished or self.total is None or not rate:
            shown.append(f"{_duration(now - self._began)} taken")
        else:
            shown.append(f"{_duration(max(self.total - self.count, 0) / rate)} left")
        return ", ".join(shown)


@final
class _Values:
    """What was reported last, and what of it can be shown without waiting."""

    def __init__(self) -> None:
        self._latest: dict[str, Any] = {}
        self._is_new = False
        self._waiting: dict[str, Any] = {}
        self._text = ""

    def add(self, values: dict[str, Any]) -> None:
        """Takes a report; names it does not mention keep their last value."""
        self._latest = {**self._latest, **values}
        self._is_new = True

    def text(self, *, wait: bool = False) -> str:
        """Writes the newest values that are there.

        With ``wait``, the last ones. Otherwise one report is held until its arrays are
        computed: the very newest ones never would be in a loop that runs ahead.
        """
        if self._is_new and (wait or not self._waiting):
            self._waiting, self._is_new = self._latest, False
        if self._waiting and (wait or all(map(_is_ready, self._waiting.values()))):
            shown = [f"{name}={_written(value)}" for name, value in self._waiting.items()]
            self._text, self._waiting = ", ".join(shown), {}
        return self._text


class _Display(abc.ABC):
    """A way to show a tally."""

    seconds: float

    @abc.abstractmethod
    def show(self, tally: _Tally, values: str, now: float) -> None:
        """While the loop runs."""

    @abc.abstractmethod
    def stop(self, tally: _Tally, values: str, now: float) -> None:
        """After the last item, or after the loop was left."""


@final
class _Lines(_Display):
    """Plain lines, for logs."""

    seconds = _LINE_SECONDS

    def show(self, tally: _Tally, values: str, now: float) -> None:
        self._write(tally, values, now, tally.counted())

    def stop(self, tally: _Tally, values: str, now: float) -> None:
        early = "" if tally.finished else "stopped at "
        self._write(tally, values, now, early + tally.counted())

    def _write(self, tally: _Tally, values: str, now: float, counted: str) -> None:
        before = f"{tally.description}: " if tally.description else ""
        after = f", {values}" if values else ""
        print(f"{before}{counted}, {tally.pace(now)}{after}", file=sys.stderr, flush=True)


@final
class _Bar(_Display):
    """A bar drawn by rich, which also lets prints of the loop pass above it."""

    seconds = _BAR_SECONDS

    def __init__(self, bar: Any, task: Any) -> None:
        self._bar = bar
        self._task = task
        bar.start()
        # Should the loop be left without anybody collecting its iterator, the cursor
        # must still come back.
        atexit.register(bar.stop)

    def show(self, tally: _Tally, values: str, now: float) -> None:
        self._bar.update(
            self._task,
            description=tally.description,
            completed=tally.count,
            pace=tally.pace(now),
            values=values,
        )

    def stop(self, tally: _Tally, values: str, now: float) -> None:
        try:
            self.show(tally, values, now)
        finally:
            self._bar.stop()
            atexit.unregister(self._bar.stop)


@final
class _Guarded:
    """A display whose own failures never reach the loop: it falls silent instead."""

    def __init__(self, total: int | None) -> None:
        self._display: _Display | None = None
        try:
            self._display = _make_display(total)
        except Exception:  # noqa: BLE001 (a terminal rich cannot write to)
            self._display = _Lines()
        self.due = time.monotonic() + self._display.seconds

    def show(self, tally: _Tally, values: _Values, now: float) -> None:
        self._attempt(lambda display: display.show(tally, values.text(), now))
        if self._display is not None:
            self.due = time.monotonic() + self._display.seconds

    def stop(self, tally: _Tally, values: _Values) -> None:
        text = ""
        try:
            # After an error a device may never finish what was reported.
            text = values.text(wait=tally.finished)
        except Exception:  # noqa: BLE001 (a value that cannot be shown is left out)
            text = ""
        self._attempt(lambda display: display.stop(tally, text, time.monotonic()))

    def _attempt(self, action: Any) -> None:
        if self._display is None:
            return
        try:
            action(self._display)
        except Exception:  # noqa: BLE001 (a closed terminal must not end a training run)
            self._display = None
            self.due = float("inf")


def _make_display(total: int | None) -> _Display:
    """Returns a bar where one can be drawn."""
    try:
        # Optional, and only of use on a terminal.
        from rich.console import Console  # noqa: PLC0415
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn  # noqa: PLC0415
        from rich.progress import Progress as RichProgress  # noqa: PLC0415
    except ImportError:
        return _Lines()
    console = Console(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:
        return _Lines()
    bar = RichProgress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[pace]}", markup=False),
        TextColumn("{task.fields[values]}", markup=False),
        console=console,
        refresh_per_second=1 / _BAR_SECONDS,
    )
    return _Bar(bar, bar.add_task("", total=total, pace="", values=""))


def _is_ready(value: Any) -> bool:
    array = _array_of(value)
    if not isinstance(array, jax.Array) or array.is_deleted():
        return True
    return _compat.is_computed(array)


def _array_of(value: Any) -> Any:
    if isinstance(value, Variable):
        return value.value
    if isinstance(value, PerReplica) and value.stacked is not None:
        return value.stacked
    return value


def _written(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        if isinstance(value, PerReplica):
            return " | ".join(_written(part) for part in value.components())
        # device_get, because a transfer guard may forbid what is not asked for by name.
        array = np.asarray(jax.device_get(_array_of(value)))
    except Exception:  # noqa: BLE001 (for example an array that was donated since)
        return "?"
    if array.size != 1:
        return f"{array.dtype}{list(array.shape)}"
    item = array.reshape(()).item()
    return f"{item:.4g}" if isinstance(item, float) else str(item)


def _length_of(iterable: Any) -> int | None:
    try:
        length = operator.length_hint(iterable, -1)
    except NotImplementedError:
        return None
    return length if 0 <= length < _ENDLESS else None


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
