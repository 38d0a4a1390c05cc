"""Compiled programs as XLA describes them: collectives, memory, arithmetic.

Owns reading them; the one reader of compiled programs for explain, plan and benchmarks.
Who compiled a program, and whether its devices exist, makes no difference here.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from typing import Any, final

_COLLECTIVE = re.compile(
    r"= (?P<shapes>\(?[a-z0-9(]+\[[^=]*?) "
    r"(?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)"
    r"(?P<start>-start)?\("
)
_SHAPE = re.compile(r"(?P<dtype>pred|[a-z]+(?P<bits>\d+)[a-z0-9]*)\[(?P<dimensions>[0-9,]*)\]")

# Calls of cuBLAS, cuDNN, oneDNN and the like, whose arithmetic XLA's analysis takes for nothing.
_LIBRARY_CALL = re.compile(r'custom_call_target="__(cublas|cudnn|onednn|triton|cusolver|cutlass)')

# In the names XLA gives operations, and NCCL and RCCL give kernels.
_COLLECTIVE_NAMES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "ncclDevKernel",
    "ncclKernel",
)


def is_collective(operation: str) -> bool:
    """Says whether an operation, by its name in a program or a trace, is a collective."""
    return operation.removeprefix("%").startswith(_COLLECTIVE_NAMES)


@final
@dataclasses.dataclass(frozen=True)
class Collective:
    """The collectives of one kind in a program.

    Attributes:
      kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all" or
        "collective-permute".
      count: how many there are; one in a loop counts once.
      bytes: the size of their results on each device, together.
    """

    kind: str
    count: int
    bytes: int


@final
@dataclasses.dataclass(frozen=True)
class ProgramFacts:
    """What XLA says about one compiled program; sizes in bytes, on each device.

    Attributes:
      name: the name of the program.
      collectives: by kind.
      flops: floating-point operations of one run, or None where XLA does not count them: a
        program whose products are done by a library's kernels, as on GPUs.
      arguments: the size of what goes in.
      donated: the part of it whose memory the results take over.
      outputs: the size of what comes out, donated or not.
      temporaries: what is needed in between.
    """

    name: str
    collectives: tuple[Collective, ...]
    flops: float | None
    arguments: int
    donated: int
    outputs: int
    temporaries: int

    @property
    def peak(self) -> int:
        """What a device must have free: arguments, results beside them, temporaries."""
        return self.arguments + self.outputs - self.donated + self.temporaries


def facts_of(name: str, text: str, memory: Any, cost: Any) -> ProgramFacts:
    """Reads a program.

    Args:
      name: what to call it.
      text: the compiled program as text.
      memory: XLA's memory statistics, or None.
      cost: XLA's cost analysis: a dictionary, a list of them, or None.
    """
    if isinstance(cost, (list, tuple)):
        cost = cost[0] if cost else None
    flops = None if cost is None or _LIBRARY_CALL.search(text) else cost.get("flops")

    def size(what: str) -> int:
        return 0 if memory is None else int(getattr(memory, f"{what}_size_in_bytes"))

    return ProgramFacts(
        name,
        collectives_of(text),
        None if flops is None or flops < 0 else float(flops),
        size("argument"),
        size("alias"),
        size("output"),
        size("temp"),
    )


def collectives_of(text: str) -> tuple[Collective, ...]:
    """Finds the collectives of a compiled program, by kind in order of appearance."""
    counts: collections.Counter[str] = collections.Counter()
    sizes: collections.Counter[str] = collections.Counter()
    # Long tuples carry comments such as /*index=5*/.
    for match in _COLLECTIVE.finditer(re.sub(r"/\*.*?\*/", "", text)):
        kind = match["kind"]
        results = [_bytes_of(shape) for shape in _SHAPE.finditer(match["shapes"])]
        names_what_goes_in = kind == "all-gather" or match["shapes"].startswith("((")
        if match["start"] and kind != "collective-permute" and names_what_goes_in:
            # Started ones name what goes in before what comes out; all-reduces since JAX 0.11.
            results = results[len(results) // 2 :]
        elif match["start"] and kind == "collective-permute":
            results = results[1:2]
        counts[kind] += 1
        sizes[kind] += sum(results)
    return tuple(Collective(kind, count, sizes[kind]) for kind, count in counts.items())


def _bytes_of(shape: re.Match[str]) -> int:
    bits = int(shape["bits"] or 8)
    size = 1
    for dimension in filter(None, shape["dimensions"].split(",")):
        size *= int(dimension)
    return size * bits // 8
