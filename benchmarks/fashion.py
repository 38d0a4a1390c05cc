"""A CNN with batch norm on Fashion-MNIST: how long until 89 % of the test images are right.

    python benchmarks/fashion.py --data FOLDER --tensorflow-python PYTHON --torch-python PYTHON

Three convolutions with batch norm and a dense layer, batches of 128, Adam, two replicas on virtual
CPU devices (PyTorch: two processes). All start from the same weights and see the images in the
same order. A round is an epoch; after each one the test images are classified, outside the clock.
"""

from __future__ import annotations

import os
import pathlib
import statistics
from typing import Any

import driver
import workloads

REPLICAS = 2
EPOCHS = 6
TARGET = 0.89
RATE, EPSILON = 1e-3, 1e-7
# The moving averages of batch norm keep this share of what they were.
MOMENTUM, NORM_EPSILON = 0.9, 1e-3
CAVEATS = [
    "Two replicas on virtual CPU devices of one small machine.",
    f"The accuracy is {TARGET:.0%} of the 10,000 test images.",
    "Seconds to the accuracy count whole epochs, the first one with tracing and compiling.",
    "mirrored, hand-written JAX and stock Keras normalize over the global batch and train the "
    "same: their losses of the first epoch are compared. tf.distribute and PyTorch DDP normalize "
    "each replica's rows by themselves: another training, whose accuracy is told beside.",
]
TOLERANCE = 5e-3
CONTENDERS = {
    "mirrored fit": "jax",
    "hand-written JAX": "jax",
    "stock Keras DataParallel fit": "jax",
    "TensorFlow MirroredStrategy fit": "tensorflow",
    "PyTorch DDP": "torch",
}
APART = ("TensorFlow MirroredStrategy fit", "PyTorch DDP")


class Data:
    """Images and labels, shuffled anew for each epoch, the same way for every peer."""

    def __init__(self, folder: str) -> None:
        if folder == "drawn":
            found = workloads.fashion_drawn(workloads.FASHION_BATCH)
        else:
            found = workloads.fashion_data(pathlib.Path(folder))
        self.images, self.labels, self.test_images, self.test_labels = found
        self._epoch = 0

    def epoch(self) -> tuple[Any, Any]:
        order = workloads.fashion_order(len(self.images), self._epoch)
        self._epoch += 1
        return self.images[order], self.labels[order]


# --- Keras, on JAX and on TensorFlow ----------------------------------------------------------


def build() -> Any:
    import keras

    layers = keras.layers
    body: list[Any] = []
    for filters in workloads.FASHION_FILTERS:
        body += [
            layers.Conv2D(filters, 3, strides=2, padding="same", use_bias=False),
            layers.BatchNormalization(momentum=MOMENTUM, epsilon=NORM_EPSILON),
            layers.ReLU(),
        ]
    model = keras.Sequential([keras.Input((28, 28, 1)), *body, layers.Flatten(), layers.Dense(10)])
    kernels = iter(workloads.fashion_weights())
    model.set_weights([next(kernels) if w.ndim > 1 else w for w in model.get_weights()])
    model.compile(
        keras.optimizers.Adam(RATE, epsilon=EPSILON),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


class KerasFit:
    """Epochs of fit."""

    def __init__(self, data: Data, scope: Any, *, fit_in_scope: bool = False) -> None:
        with scope():
            self._model = build()
        self._data, self._scope, self._fit_in_scope = data, scope, fit_in_scope

    def __call__(self) -> float:
        images, labels = self._data.epoch()
        options = {"batch_size": workloads.FASHION_BATCH, "shuffle": False, "verbose": 0}
        if self._fit_in_scope:
            with self._scope():
                return self._model.fit(images, labels, **options).history["loss"][0]
        return self._model.fit(images, labels, **options).history["loss"][0]

    def predicted(self) -> Any:
        import contextlib

        images = self._data.test_images
        with self._scope() if self._fit_in_scope else contextlib.nullcontext():
            return self._model.predict(images, batch_size=1000, verbose=0)


# --- hand-written JAX -------------------------------------------------------------------------


class HandWritten:
    """The same training, compiled for the whole mesh."""

    def __init__(self, data: Data, mesh: Any) -> None:
        import jax
        import jax.numpy as jnp
        import numpy as np
        import optax
        from jax.sharding import NamedSharding, PartitionSpec

        self._data, self._np, self._jax = data, np, jax
        *kernels, dense = workloads.fashion_weights()
        params = {
            "kernels": kernels,
            "scales": [np.ones(kernel.shape[-1], "f4") for kernel in kernels],
            "offsets": [np.zeros(kernel.shape[-1], "f4") for kernel in kernels],
            "dense": dense,
            "bias": np.zeros(10, "f4"),
        }
        averages = [(np.zeros(k.shape[-1], "f4"), np.ones(k.shape[-1], "f4")) for k in kernels]
        tx = optax.adam(RATE, eps=EPSILON)
        everywhere = NamedSharding(mesh, PartitionSpec())
        self._split = NamedSharding(mesh, PartitionSpec("replica"))
        self._state = jax.device_put((params, averages, tx.init(params)), everywhere)

        def forward(params, averages, images, training):
            x, after = images, []
            parts = zip(params["kernels"], params["scales"], params["offsets"], averages)
            for kernel, scale, offset, (mean, variance) in parts:
                x = jax.lax.conv_general_dilated(
                    x, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
                )
                if training:
                    own = x.mean((0, 1, 2)), x.var((0, 1, 2))
                    after.append(
                        jax.tree.map(
                            lambda old, new: old * MOMENTUM + new * (1 - MOMENTUM),
                            (mean, variance),
                            own,
                        )
                    )
                    mean, variance = own
                factor = jax.lax.rsqrt(variance + NORM_EPSILON) * scale
                x = jax.nn.relu(x * factor + (offset - mean * factor))
            return x.reshape(len(x), -1) @ params["dense"] + params["bias"], after

        def loss_fn(params, averages, images, labels):
            logits, after = forward(params, averages, images, True)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean(), after

        def step(state, images, labels):
            params, averages, moments = state
            gradient_of = jax.value_and_grad(loss_fn, has_aux=True)
            (loss, averages), gradients = gradient_of(params, averages, images, labels)
            updates, moments = tx.update(gradients, moments, params)
            return (optax.apply_updates(params, updates), averages, moments), loss * len(labels)

        self._step = jax.jit(step, donate_argnums=0)
        self._forward = jax.jit(lambda state, x: forward(*state[:2], x, False)[0])
        self._zero = jnp.float32(0)

    def __call__(self) -> float:
        images, labels = self._data.epoch()
        total, size, losses = self._zero, workloads.FASHION_BATCH, []
        for start in range(0, len(images), size):
            batch = images[start : start + size], labels[start : start + size]
            # The CPU's collectives hang if many steps are queued.
            if losses:
                losses[-1].block_until_ready()
            self._state, loss = self._step(self._state, *self._jax.device_put(batch, self._split))
            losses.append(loss)
        return float(sum(losses, total)) / len(images)

    def predicted(self) -> Any:
        images = self._data.test_images
        parts = [
            self._np.asarray(self._forward(self._state, images[start : start + 1000]))
            for start in range(0, len(images), 1000)
        ]
        return self._np.concatenate(parts)


# --- PyTorch ----------------------------------------------------------------------------------


class TorchReplica:
    """One process of the group: its share of each batch."""

    def __init__(self, data: Data) -> None:
        import torch

        nn = torch.nn
        self._data, self._torch = data, torch
        self._rank, self._replicas = torch.distributed.get_rank(), REPLICAS
        *kernels, dense = workloads.fashion_weights()
        layers: list[Any] = []
        for kernel in kernels:
            inside, outside = kernel.shape[2:]
            # "same" with stride 2: one row and one column of zeros behind an even image, on
            # both sides of an odd one.
            layers += [
                _same_padding(),
                nn.Conv2d(inside, outside, 3, stride=2, bias=False),
                nn.BatchNorm2d(outside, eps=NORM_EPSILON, momentum=1 - MOMENTUM),
                nn.ReLU(),
            ]
            with torch.no_grad():
                layers[-3].weight.copy_(torch.from_numpy(kernel.transpose(3, 2, 0, 1).copy()))
        # Rows of the dense kernel are ordered height, width, channels there.
        last = nn.Linear(len(dense), 10)
        channels = kernels[-1].shape[-1]
        flat = dense.reshape(4, 4, channels, 10).transpose(3, 2, 0, 1).reshape(10, -1)
        with torch.no_grad():
            last.weight.copy_(torch.from_numpy(flat.copy()))
            last.bias.zero_()
        self._model = nn.Sequential(*layers, nn.Flatten(), last)
        self._parallel = nn.parallel.DistributedDataParallel(self._model)
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=RATE, eps=EPSILON)
        self._criterion = nn.CrossEntropyLoss()

    def __call__(self) -> float:
        torch, size = self._torch, workloads.FASHION_BATCH
        self._parallel.train()
        images, labels = self._data.epoch()
        total = 0.0
        for start in range(0, len(images), size):
            rows = min(size, len(images) - start) // self._replicas
            own = slice(start + self._rank * rows, start + (self._rank + 1) * rows)
            x = torch.from_numpy(images[own]).permute(0, 3, 1, 2)
            self._optimizer.zero_grad()
            loss = self._criterion(self._parallel(x), torch.from_numpy(labels[own]).long())
            loss.backward()
            self._optimizer.step()
            total += loss.item() * rows * self._replicas
        return total / len(images)

    def predicted(self) -> Any:
        torch = self._torch
        self._model.eval()
        with torch.no_grad():
            images = torch.from_numpy(self._data.test_images).permute(0, 3, 1, 2)
            return torch.cat([self._model(part) for part in images.split(1000)]).numpy()


def _same_padding() -> Any:
    import torch

    class SamePadding(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            border = (0, 1, 0, 1) if x.shape[-1] % 2 == 0 else (1, 1, 1, 1)
            return torch.nn.functional.pad(x, border)

    return SamePadding()


# --- the benchmark ----------------------------------------------------------------------------


def serve(peer: str, folder: str) -> None:
    if peer == "jax":
        os.environ["KERAS_BACKEND"] = "jax"
        import mirrored.testing

        mirrored.testing.use_cpu_devices(REPLICAS)
        import jax
        import keras

        import mirrored

        # What JAX does once in a process is not the first contender's to pay.
        jax.block_until_ready(jax.jit(lambda x: x + 1)(1.0))
        strategy = mirrored.MirroredStrategy()
        names = [f"cpu:{index}" for index in range(REPLICAS)]
        stock = keras.distribution.DataParallel(devices=names)
        makers = {
            "mirrored fit": lambda: KerasFit(Data(folder), strategy.scope),
            "hand-written JAX": lambda: HandWritten(Data(folder), strategy.mesh),
            "stock Keras DataParallel fit": lambda: KerasFit(
                Data(folder), stock.scope, fit_in_scope=True
            ),
        }
    elif peer == "tensorflow":
        os.environ["KERAS_BACKEND"] = "tensorflow"
        import tensorflow as tf

        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0],
            [tf.config.LogicalDeviceConfiguration()] * REPLICAS,
        )
        mirrored_tf = tf.distribute.MirroredStrategy([f"cpu:{i}" for i in range(REPLICAS)])
        makers = {
            "TensorFlow MirroredStrategy fit": lambda: KerasFit(Data(folder), mirrored_tf.scope)
        }
    else:
        import torch

        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo")
        makers = {"PyTorch DDP": lambda: TorchReplica(Data(folder))}
    made: dict[str, Any] = {}

    def make(name: str) -> Any:
        made[name] = makers[name]()
        return made[name]

    def accuracy(name: str) -> dict[str, Any]:
        predicted = made[name].predicted()
        right = (predicted.argmax(-1) == Data(folder).test_labels).mean()
        return {"accuracy": float(right)}

    driver.serve(make, lambda loss: None, more={"accuracy": accuracy})


def measure(given: Any, started: dict[str, driver.Process]) -> dict[str, Any]:
    """Trains all peers for the same number of epochs, in turn: a case."""
    runners = {name: started[peer] for name, peer in CONTENDERS.items() if peer in started}
    found: dict[str, dict[str, Any]] = {
        name: {"losses": [], "accuracies": [], "rounds": [], "unit": "s an epoch"}
        for name in runners
    }
    for epoch in range(given.rounds):
        for name in list(runners) if epoch % 2 == 0 else list(runners)[::-1]:
            process, figures = runners[name], found[name]
            if epoch == 0:
                answer = process.ask(make=name)
                seconds, loss = answer["seconds"], answer["loss"]
                figures["first_epoch_s"] = seconds
            else:
                answer = process.ask(time=1, of=name, warm=0, value=1)
                seconds, loss = answer["wall"] / 1e6, answer["loss"]
                figures["rounds"].append(round(seconds, 3))
            figures["losses"].append(loss)
            figures["accuracies"].append(process.ask(accuracy=name)["accuracy"])
        print(
            f"epoch {epoch + 1}:",
            ", ".join(f"{name} {found[name]['accuracies'][-1]:.4f}" for name in found),
            flush=True,
        )
        if epoch == 0:
            curves = {n: f["losses"] for n, f in found.items() if n not in APART}
            driver.compare_curves(curves, 0.05 if given.small else TOLERANCE)
    for figures in found.values():
        figures["median"] = statistics.median(figures["rounds"])
        seconds, figures["seconds_to_accuracy"] = 0.0, None
        for took, right in zip(
            [figures["first_epoch_s"], *figures["rounds"]], figures["accuracies"]
        ):
            seconds += took
            if right >= TARGET:
                figures["seconds_to_accuracy"] = seconds
                break
    ours, *others = found
    ratios = {f"{ours} / {base}": driver.ratio(found, ours, base) for base in others}
    own = found[ours]["seconds_to_accuracy"]
    for base in others:
        theirs = found[base]["seconds_to_accuracy"]
        if own and theirs:
            ratios[f"{ours} / {base}, to the accuracy"] = own / theirs
    case = {"name": f"R = {REPLICAS}", "target": TARGET}
    return case | {"contenders": found, "ratios": ratios}


def main() -> None:
    given = driver.options(
        __doc__,
        rounds=EPOCHS,
        peers=("tensorflow", "torch"),
        more=lambda parser: parser.add_argument("--data", help="folder of Fashion-MNIST"),
    )
    if given.serve:
        serve(*given.serve)
        return
    if not given.data and not given.small:
        raise SystemExit("where is Fashion-MNIST? hint: --data FOLDER; make bench finds it")
    folder = "drawn" if given.small else given.data
    counts = {"torch": REPLICAS}
    with driver.start(__file__, given.pythons, folder, counts=counts) as started:
        case = measure(given, started)
        versions = {peer: process.versions for peer, process in started.items()}
    driver.show(case)
    driver.write_result(given.json, "fashion", [case], versions, CAVEATS)


if __name__ == "__main__":
    main()
