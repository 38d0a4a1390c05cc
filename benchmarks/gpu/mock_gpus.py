"""What a step of GPT-2 small would send between 8 GPUs, compiled where there is one.

    python benchmarks/gpu/mock_gpus.py --gpus 8

XLA is told of GPUs that are not there, and compiles for them; nothing runs. Printed are the
collectives of the compiled program, with their bytes, and its memory on each device. Without any
GPU it does the same for virtual CPU devices and a small model.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import re
import sys
from typing import Any

sys.path.append(str(pathlib.Path(__file__).parent.parent))

import jax
import results
from contender import jax_problem
from steps import functional_step

import mirrored
import mirrored.testing

_COLLECTIVE = re.compile(
    r"= (?P<shapes>\(?[a-z0-9]+\[[^=]*?) "
    r"(?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
_SHAPE = re.compile(r"(?P<dtype>[a-z]+)(?P<bits>\d+)\[(?P<dims>[0-9,]*)\]")


def collectives(text: str) -> dict[str, dict[str, int]]:
    """Counts the collectives of a compiled program and the bytes of their results."""
    found: dict[str, dict[str, int]] = collections.defaultdict(lambda: {"count": 0, "bytes": 0})
    # Long tuples carry comments such as /*index=5*/.
    for match in _COLLECTIVE.finditer(re.sub(r"/\*.*?\*/", "", text)):
        entry = found[match["kind"]]
        entry["count"] += 1
        for shape in _SHAPE.finditer(match["shapes"]):
            size = int(shape["bits"]) // 8
            for dimension in filter(None, shape["dims"].split(",")):
                size *= int(dimension)
            entry["bytes"] += size
    return dict(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--cpu", action="store_true", help="virtual CPU devices, small model")
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    if options.cpu:
        mirrored.testing.use_cpu_devices(options.gpus)
    else:
        jax.config.update("jax_mock_gpu_topology", f"1x{options.gpus}x1")
        jax.config.update("jax_use_mock_gpu_client", True)
    problem, _ = jax_problem("gpt2", options.cpu)
    strategy = mirrored.MirroredStrategy()
    count = strategy.num_replicas_in_sync
    placement = strategy.placement

    def mirrored_shape(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placement.mirrored)

    weights = jax.tree.map(mirrored_shape, problem.weights)
    state = (weights, {}, jax.tree.map(mirrored_shape, jax.eval_shape(problem.tx.init, weights)))
    batch = tuple(
        mirrored.PerReplica.from_stacked(
            jax.ShapeDtypeStruct((count, *item.shape), item.dtype, sharding=placement.split)
        )
        for item in problem.batch
    )
    compiled = functional_step(problem, strategy).lower(state, batch).compile()
    memory: Any = compiled.memory_analysis()
    parameters = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weights))
    found = {
        "devices": count,
        "parameter_bytes": parameters,
        "collectives": collectives(compiled.as_text()),
        "memory": {
            "arguments": memory.argument_size_in_bytes,
            "of them donated": memory.alias_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
        },
    }
    print(json.dumps(found, indent=1))
    case = {"name": f"R = {count}", "contenders": {"mirrored": found}, "ratios": {}}
    caveats = ["Compiled for GPUs that are not there; nothing ran."]
    versions = {"jax": results.versions()}
    results.write_result(options.json, f"gpu-mock-{count}", [case], versions, caveats)


if __name__ == "__main__":
    main()
