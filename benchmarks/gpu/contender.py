"""One contender of one workload, in a process of its own, driven over its standard streams.

    python contender.py WORKLOAD NAME [--small]

Reads a line of JSON for each request and answers with one: ``{"losses": n}`` trains n steps and
returns their losses, ``{"time": n}`` trains n steps and returns microseconds a step (``wall``,
until the last loss is there, and ``host``, until the last call has returned), ``{"memory": 1}``
returns the peak of bytes in use on the device, ``{"end": 1}`` ends. Whatever else the libraries
print goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

WORKLOADS = ("gpt2", "resnet50", "loop")


def jax_problem(workload: str, small: bool, plain: bool) -> Any:
    """Makes the problem that the three JAX styles share."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from steps import Problem

    if workload == "gpt2":
        import gpt2

        size = gpt2.Size(2, 2, 64, 256, 32, 4) if small else gpt2.Size()
        tuning = gpt2.PLAIN if plain else gpt2.TUNED
        if small:
            tuning = gpt2.dataclasses.replace(tuning, attention=None)

        def loss_fn(weights, statistics, tokens, targets):
            return gpt2.loss_fn(weights, tokens, targets, size, tuning), statistics

        tx = optax.adamw(3e-4, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)
        return Problem(gpt2.initial_weights(size), {}, gpt2.batch(size), loss_fn, tx)
    if workload == "resnet50":
        import resnet50

        size = resnet50.Size(4, 32, 10) if small else resnet50.Size()
        weights, statistics = resnet50.initial_weights(size)
        tx = optax.chain(optax.add_decayed_weights(5e-5), optax.sgd(1e-3, momentum=0.9))
        return Problem(weights, statistics, resnet50.batch(size), resnet50.loss_fn, tx)
    generator = np.random.default_rng(0)
    weights = {
        "W": generator.standard_normal((784, 10), dtype=np.float32) * 0.01,
        "b": np.zeros(10, np.float32),
    }
    images = generator.standard_normal((64, 784), dtype=np.float32)
    labels = generator.integers(0, 10, 64).astype(np.int32)

    def loss_fn(weights, statistics, images, labels):
        logits = jnp.dot(images, weights["W"], precision=jax.lax.Precision.HIGHEST) + weights["b"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), statistics

    return Problem(weights, {}, (images, labels), loss_fn, optax.adam(1e-3))


def jax_contender(workload: str, name: str, small: bool) -> tuple[Any, Any, Any]:
    """Returns a step, a way to wait for its result, and the peak of memory."""
    import jax
    from steps import STYLES

    style, _, variant = name.partition("-")
    step = STYLES[style](jax_problem(workload, small, plain=variant == "plain"))

    def peak() -> int:
        statistics = jax.local_devices()[0].memory_stats()
        return statistics["peak_bytes_in_use"] if statistics else 0

    return step, jax.block_until_ready, peak


def torch_contender(workload: str, small: bool) -> tuple[Any, Any, Any]:
    """The same for PyTorch, in a process group of one."""
    import tempfile

    import torch
    import torch.distributed

    store = f"file://{tempfile.mkdtemp()}/store"
    torch.distributed.init_process_group("nccl", init_method=store, rank=0, world_size=1)
    if workload == "gpt2":
        import gpt2
        import gpt2_torch

        size = gpt2.Size()
        step = gpt2_torch.make_step(size, gpt2.initial_weights(size), gpt2.batch(size))
    elif workload == "resnet50":
        import resnet50
        import resnet50_torch

        size = resnet50.Size()
        step = resnet50_torch.make_step(resnet50.initial_weights(size)[0], resnet50.batch(size))
    else:
        import loop_torch

        problem = jax_free_loop()
        step = loop_torch.make_step(*problem)
    return step, lambda _: torch.cuda.synchronize(), torch.cuda.max_memory_allocated


def jax_free_loop() -> tuple[Any, Any]:
    """The weights and the batch of the small loop, as above."""
    import numpy as np

    generator = np.random.default_rng(0)
    weights = generator.standard_normal((784, 10), dtype=np.float32) * 0.01
    images = generator.standard_normal((64, 784), dtype=np.float32)
    return weights, (images, generator.integers(0, 10, 64))


def serve(step: Callable[[], Any], wait: Callable[[Any], Any], peak: Any, answers: Any) -> None:
    """Answers requests until told to end."""
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any] = {}
        if "losses" in request:
            answer["losses"] = [float(step()) for _ in range(request["losses"])]
        elif "time" in request:
            wait(step())
            start = time.perf_counter()
            for _ in range(request["time"]):
                result = step()
            returned = time.perf_counter()
            wait(result)
            scale = 1e6 / request["time"]
            answer["wall"] = (time.perf_counter() - start) * scale
            answer["host"] = (returned - start) * scale
        elif "memory" in request:
            answer["memory"] = int(peak())
        else:
            return
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("name")
    parser.add_argument("--small", action="store_true", help="toy sizes, to try the script")
    options = parser.parse_args()
    # The answers keep the real standard output to themselves.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    start = time.perf_counter()
    if options.name.startswith("torch"):
        step, wait, peak = torch_contender(options.workload, options.small)
    else:
        step, wait, peak = jax_contender(options.workload, options.name, options.small)
    wait(step())
    answers.write(json.dumps({"ready": time.perf_counter() - start}) + "\n")
    answers.flush()
    serve(step, wait, peak, answers)


if __name__ == "__main__":
    main()
