"""What ``strategy.explain`` found, in words and as a picture.

Owns the numbers' names, the advice drawn from them, and how they are shown.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, final

from mirrored._compiled import Collective, ProgramFacts
from mirrored._errors import MissingDependencyError
from mirrored._types import BATCH, OPTIMIZER_STATE, OTHER_STATE, PARAMETERS

# Less than this share of a step in the devices' own work is worth a word.
_BUSY_ENOUGH = 0.5


@final
@dataclasses.dataclass(frozen=True)
class Explanation:
    """Where the time and the memory of a step go; returned by ``strategy.explain``.

    Print it, read its numbers, or draw it with ``save_picture``. Times are seconds a step,
    sizes bytes on each device.

    Attributes:
      name: the step.
      where: the strategy's devices.
      replica_count: how many replicas there are.
      rows: how many rows each replica gets in a step; None if unknown.
      step: one step among others, as in a loop.
      host: the part in which Python and the dispatch are busy; devices may work meanwhile.
      input: one batch of the dataset, if nothing else is done; None if none was given.
      compute: how long a device computes; None if the backend does not tell.
      collectives_time: how long it exchanges values, waiting for others included, while it
        computes nothing.
      programs: what XLA says of each program of the step.
      memory: by kind: "parameters", "optimizer state", "batch", "other state", "results"
        and "temporaries".
    """

    name: str
    where: str
    replica_count: int
    rows: int | None
    step: float
    host: float
    input: float | None
    compute: float | None
    collectives_time: float | None
    programs: tuple[ProgramFacts, ...]
    memory: dict[str, int]

    @property
    def idle(self) -> float | None:
        """How long a device has nothing to do in a step."""
        if self.compute is None or self.collectives_time is None:
            return None
        return max(0.0, self.step - self.compute - self.collectives_time)

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """The collectives of all programs of the step, by kind."""
        found: dict[str, Collective] = {}
        for program in self.programs:
            for one in program.collectives:
                before = found.get(one.kind, Collective(one.kind, 0, 0))
                found[one.kind] = Collective(
                    one.kind, before.count + one.count, before.bytes + one.bytes
                )
        return tuple(found.values())

    @property
    def warnings(self) -> tuple[str, ...]:
        """What slows the step down, and what to do about it."""
        return tuple(self._advice())

    def _advice(self) -> Any:
        if self.input is not None and self.input > self.step:
            yield (
                f"The input is the bottleneck: a batch takes {_time(self.input)}, a step "
                f"{_time(self.step)}. Read or augment in more threads or processes, or keep the "
                "data in memory."
            )
        compute, exchange, idle = self.compute, self.collectives_time, self.idle
        if compute is None or exchange is None or idle is None:
            return
        if compute >= _BUSY_ENOUGH * self.step:
            return
        rows = "" if self.rows is None else f" of {self.rows} rows"
        if exchange > idle:
            yield (
                f"The batch{rows} for each replica is too small: devices exchange values for "
                f"{_time(exchange)} and compute for {_time(compute)}. Give each more rows, or "
                "accumulate gradients over several batches before they are reduced."
            )
        else:
            yield (
                f"The batch{rows} for each replica is too small: devices compute for "
                f"{_time(compute)} of a step of {_time(self.step)} and wait for Python for most of "
                "the rest. Give each more rows, or run several steps in one call (jax.lax.scan)."
            )

    def __str__(self) -> str:
        lines = [f"A step of {self.name!r} on {self.where} takes {_time(self.step)}."]
        if self.rows is not None:
            lines[0] += f" Each replica gets {self.rows} rows."
        lines.append("time of a device")
        for name, seconds in self.times.items():
            lines.append(f"  {name:16} {_time(seconds):>10}  {seconds / self.step:5.0%}")
        if self.compute is None:
            lines.append("  this backend's traces do not tell")
        lines.append("beside it")
        lines.append(f"  {'host':16} {_time(self.host):>10}  Python and dispatch, in each step")
        if self.input is not None:
            lines.append(f"  {'input':16} {_time(self.input):>10}  a batch, in the background")
        lines += collective_lines(self.collectives)
        lines += memory_lines(self.memory)
        flops = [program.flops for program in self.programs if program.flops]
        if flops and self.compute:
            rate = sum(flops) / self.compute
            lines.append(f"arithmetic: {sum(flops):.3g} flops a device, {rate:.3g} a second")
        return "\n".join([*lines, *(f"! {text}" for text in self.warnings)])

    @property
    def times(self) -> dict[str, float]:
        """What a device does in a step, by name; empty if the backend does not tell."""
        if self.compute is None or self.collectives_time is None or self.idle is None:
            return {}
        return {
            "compute": self.compute,
            "collectives": self.collectives_time,
            "idle": self.idle,
        }

    def save_picture(self, path: str | os.PathLike[str]) -> None:
        """Draws times, collectives and memory into a PNG; needs the extra ``plot``."""
        try:
            from matplotlib.figure import Figure  # noqa: PLC0415 -- an extra
        except ImportError:
            raise MissingDependencyError(
                fact="the picture of an explanation needs matplotlib, which is not installed.",
                expected="the extra `plot`.",
                hint="pip install 'mirrored[plot]'.",
            ) from None
        figure = Figure(figsize=(9, 4.6), dpi=120, layout="constrained")
        figure.suptitle(f"{self.name}: {_time(self.step)} a step, {self.where}", fontsize=11)
        upper, lower = figure.subplots(2, 1, height_ratios=[3, 2])
        beside = {"host": self.host} | ({} if self.input is None else {"input": self.input})
        scale = 1e3
        rows = {"a device": self.times or {"not told": self.step}}
        rows |= {name: {name: seconds} for name, seconds in beside.items()}
        _bars(upper, rows, scale, _time, "milliseconds a step")
        _bars(lower, {"memory": self.memory}, 1 / 2**20, _size, "MiB on each device")
        text = ", ".join(
            f"{one.count} {one.kind} of {_size(one.bytes)}" for one in self.collectives
        )
        figure.supxlabel(f"collectives: {text or 'none'}", fontsize=9)
        figure.savefig(path)


def with_program_memory(memory: dict[str, int], program: ProgramFacts) -> dict[str, int]:
    """Adds what only XLA knows to the sizes of what went into a program."""
    whole = {
        **memory,
        OTHER_STATE: memory.get(OTHER_STATE, 0) + max(0, program.arguments - sum(memory.values())),
        "results": max(0, program.outputs - program.donated),
        "temporaries": program.temporaries,
    }
    return {role: size for role, size in whole.items() if size}


def collective_lines(collectives: Sequence[Collective]) -> list[str]:
    """Says which collectives a program has."""
    lines = ["collectives in the program, bytes of their results on each device"]
    lines += [f"  {one.kind:16} {_size(one.bytes):>10}  in {one.count}" for one in collectives]
    return lines if collectives else [*lines, "  none"]


def memory_lines(memory: Mapping[str, int]) -> list[str]:
    """Says what fills the memory of a device."""
    return [
        "memory on each device",
        *(f"  {name:16} {_size(size):>10}" for name, size in memory.items()),
    ]


_COLORS = {
    "compute": "#3366a8",
    "collectives": "#d9822b",
    "idle": "#c9ccd1",
    "not told": "#c9ccd1",
    "host": "#7a5195",
    "input": "#2a9d8f",
    PARAMETERS: "#3366a8",
    OPTIMIZER_STATE: "#7a5195",
    BATCH: "#2a9d8f",
    OTHER_STATE: "#8a8f98",
    "results": "#e3c26b",
    "temporaries": "#d9822b",
}


def _bars(
    axes: Any, rows: Mapping[str, Mapping[str, float]], scale: float, shown: Any, label: str
) -> None:
    """Draws stacked horizontal bars, the first row on top, each part named in the legend."""
    named: set[str] = set()
    for row, parts in rows.items():
        left = 0.0
        for name, size in parts.items():
            width = size * scale
            legend = None if name in named else f"{name} {shown(size)}"
            named.add(name)
            axes.barh(row, width, left=left, color=_COLORS[name], label=legend, height=0.6)
            left += width
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)


def _time(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1024
    return f"{count:.3g} GiB"
