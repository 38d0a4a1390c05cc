"""One library on one workload, in a process of its own, driven over its standard streams.

    python contender.py gpt2|resnet50|loop jax|torch [--small]

Answers the requests of ``driver.serve``, and beside them

- ``{"memory": 1}``: the ``peak_bytes`` in use on the device since the process began;
- ``{"needed": name}``: ``needed_bytes``, all living arrays and what the compiled program says it
  takes beside them (JAX only).
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import weakref
from collections.abc import Callable
from typing import Any

sys.path.append(str(pathlib.Path(__file__).parent.parent))

import driver

WORKLOADS = ("gpt2", "resnet50", "loop")


def jax_problem(workload: str, small: bool, variant: str = "") -> tuple[Any, dict[str, Any]]:
    """Makes the problem that the three JAX styles share; and the compiler's options for it."""
    import jax
    import jax.numpy as jnp
    import optax
    from steps import Problem

    if workload == "gpt2":
        import gpt2

        size = gpt2.Size(2, 2, 64, 256, 32, 4) if small else gpt2.Size()
        tuning, compiler_options = gpt2.VARIANTS[variant] if variant else (gpt2.TUNED, {})
        if small:
            tuning = gpt2.dataclasses.replace(tuning, attention=None)
            compiler_options = {}

        def loss_fn(weights, statistics, tokens, targets):
            return gpt2.loss_fn(weights, tokens, targets, size, tuning), statistics

        tx = optax.adamw(3e-4, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)
        made = Problem(gpt2.initial_weights(size), {}, gpt2.batch(size), loss_fn, tx)
        return made, compiler_options
    if workload == "resnet50":
        import resnet50

        size = resnet50.Size(4, 32, 10) if small else resnet50.Size()
        weights, statistics = resnet50.initial_weights(size)
        tx = optax.chain(optax.add_decayed_weights(5e-5), optax.sgd(1e-3, momentum=0.9))
        return Problem(weights, statistics, resnet50.batch(size), resnet50.loss_fn, tx), {}
    weights, batch = loop_data()

    def loss_fn(weights, statistics, images, labels):
        logits = jnp.dot(images, weights["W"], precision=jax.lax.Precision.HIGHEST) + weights["b"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), statistics

    return Problem(weights, {}, batch, loss_fn, optax.adam(1e-3)), {}


def loop_data() -> tuple[Any, Any]:
    """The weights and the batch of the dispatch-bound loop."""
    import numpy as np

    generator = np.random.default_rng(0)
    weights = {
        "W": generator.standard_normal((784, 10), dtype=np.float32) * 0.01,
        "b": np.zeros(10, np.float32),
    }
    images = generator.standard_normal((64, 784), dtype=np.float32)
    return weights, (images, generator.integers(0, 10, 64).astype(np.int32))


class Jax:
    """Makes contenders called STYLE or, for the hand-written style, jax-VARIANT."""

    def __init__(self, workload: str, small: bool) -> None:
        import jax
        import steps

        self._workload, self._small, self._steps = workload, small, steps
        self._device = jax.local_devices()[0]
        # A step that is dropped frees its state on the device: it is not held here.
        self._made: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self.wait = jax.block_until_ready

    def make(self, name: str) -> Callable[[], Any]:
        style, _, variant = name.partition("-")
        problem, compiler_options = jax_problem(self._workload, self._small, variant)
        made = self._made[name] = self._steps.STYLES[style](problem, compiler_options)
        return made

    def needed(self, name: str) -> dict[str, Any]:
        import jax

        memory = self._made[name].lower().compile().memory_analysis()
        parts = {
            "arguments": memory.argument_size_in_bytes,
            "outputs": memory.output_size_in_bytes,
            "aliased": memory.alias_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
        }
        # Everything on the device while the program runs: all arrays that somebody holds, the
        # program's own arguments among them, and what it needs beside them.
        held = sum(array.nbytes for array in jax.live_arrays())
        results = parts["outputs"] - parts["aliased"]
        return {"needed_bytes": held + results + parts["temporaries"], "parts": parts}

    def peak(self) -> int:
        statistics = self._device.memory_stats()
        return statistics["peak_bytes_in_use"] if statistics else 0


class Torch:
    """Makes the one contender of PyTorch, in a process group of one."""

    def __init__(self, workload: str, small: bool) -> None:
        import tempfile

        import torch
        import torch.distributed

        self._workload, self._small, self._torch = workload, small, torch
        self._on_gpu = torch.cuda.is_available()
        store = f"file://{tempfile.mkdtemp()}/store"
        backend = "nccl" if self._on_gpu else "gloo"
        torch.distributed.init_process_group(backend, init_method=store, rank=0, world_size=1)
        torch.set_float32_matmul_precision("high")

    def make(self, name: str) -> Callable[[], Any]:
        device = "cuda" if self._on_gpu else "cpu"
        if self._workload == "gpt2":
            import gpt2
            import gpt2_torch

            size = gpt2.Size(2, 2, 64, 256, 32, 4) if self._small else gpt2.Size()
            return gpt2_torch.make_step(size, gpt2.initial_weights(size), gpt2.batch(size), device)
        if self._workload == "resnet50":
            import resnet50
            import resnet50_torch

            size = resnet50.Size(4, 32, 10) if self._small else resnet50.Size()
            weights = resnet50.initial_weights(size)[0]
            return resnet50_torch.make_step(weights, resnet50.batch(size), device)
        import loop_torch

        return loop_torch.make_step(*loop_data(), device)

    def needed(self, name: str) -> dict[str, Any]:
        return {"needed_bytes": 0}

    def wait(self, loss: Any) -> None:
        if self._on_gpu:
            self._torch.cuda.synchronize()

    def peak(self) -> int:
        return self._torch.cuda.max_memory_allocated() if self._on_gpu else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("library", choices=["jax", "torch"])
    parser.add_argument("--small", action="store_true", help="toy sizes, to try the script")
    options = parser.parse_args()
    library = {"jax": Jax, "torch": Torch}[options.library](options.workload, options.small)
    driver.serve(
        library.make,
        library.wait,
        more={"memory": lambda _: {"peak_bytes": int(library.peak())}, "needed": library.needed},
    )


if __name__ == "__main__":
    main()
