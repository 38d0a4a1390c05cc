"""What a step of GPT-2 small would send between 8 GPUs, compiled where there is one.

    python benchmarks/gpu/mock_gpus.py --gpus 8

XLA is told of GPUs that are not there, and compiles for them; nothing runs. Printed are the
collectives of the compiled program, with their bytes, and its memory on each device. Without any
GPU it does the same for virtual CPU devices and a small model.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parent.parent))

import jax
import results
from contender import jax_problem
from steps import functional_step

import mirrored.plan
import mirrored.testing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--cpu", action="store_true", help="virtual CPU devices, small model")
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    if options.cpu:
        mirrored.testing.use_cpu_devices(options.gpus)
    # Before anything else uses JAX.
    strategy = mirrored.plan.strategy(f"{'cpu' if options.cpu else 'gpu'}:{options.gpus}")
    problem, _ = jax_problem("gpt2", options.cpu)
    state = (problem.weights, {}, jax.eval_shape(problem.tx.init, problem.weights))
    batch = tuple(
        mirrored.plan.batch(
            strategy,
            jax.ShapeDtypeStruct((options.gpus * item.shape[0], *item.shape[1:]), item.dtype),
        )
        for item in problem.batch
    )
    planned = mirrored.plan.plan(strategy, functional_step(problem, strategy), state, batch)
    program = planned.program
    found = {
        "devices": options.gpus,
        "parameter_bytes": planned.memory["parameters"],
        "collectives": {
            one.kind: {"count": one.count, "bytes": one.bytes} for one in program.collectives
        },
        "memory": {
            "arguments": program.arguments,
            "of them donated": program.donated,
            "temporaries": program.temporaries,
        },
    }
    print(json.dumps(found, indent=1))
    case = {"name": f"R = {options.gpus}", "contenders": {"mirrored": found}, "ratios": {}}
    caveats = ["Compiled for GPUs that are not there; nothing ran."]
    versions = {"jax": results.versions()}
    results.write_result(options.json, f"gpu-mock-{options.gpus}", [case], versions, caveats)


if __name__ == "__main__":
    main()
