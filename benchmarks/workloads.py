"""What is trained: data and starting weights, as NumPy arrays, the same for every peer.

Nothing here needs more than NumPy, so that it runs in every peer's environment.
"""

from __future__ import annotations

import gzip
import pathlib
from typing import Any

import numpy as np

# --- the custom loop: 784-10, batch 64, Adam -----------------------------------------------

LOOP_BATCHES = 16
LOOP_BATCH = 64
LEARNING_RATE = 1e-3


def loop_data() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Batches of images, their labels (one-hot), and the weights to start from."""
    generator = np.random.default_rng(0)
    images = generator.normal(size=(LOOP_BATCHES, LOOP_BATCH, 784)).astype("f4")
    labels = generator.integers(0, 10, (LOOP_BATCHES, LOOP_BATCH))
    weights = (generator.normal(size=(784, 10)) * 0.01).astype("f4")
    return images, np.eye(10, dtype="f4")[labels], weights


# --- growth: ten layers, so that a trace takes time -----------------------------------------

GROWTH_LAYERS, GROWTH_WIDTH, GROWTH_ROWS = 10, 64, 128


def growth_data() -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """A batch that 1 to 64 replicas can share, its targets, and a weight for each layer."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(GROWTH_ROWS, GROWTH_WIDTH)).astype("f4")
    y = generator.normal(size=(GROWTH_ROWS, GROWTH_WIDTH)).astype("f4")
    weights = [
        (generator.normal(size=(GROWTH_WIDTH, GROWTH_WIDTH)) / GROWTH_WIDTH**0.5).astype("f4")
        for _ in range(GROWTH_LAYERS)
    ]
    return x, y, weights


# --- many variables -------------------------------------------------------------------------

VARIABLE_SIZE = 16


def variable_values(count: int) -> list[np.ndarray]:
    """Values for ``count`` small variables, each of which a step multiplies by 0.999."""
    return [np.full(VARIABLE_SIZE, 1 + index / count, "f4") for index in range(count)]


# --- Fashion-MNIST: a CNN with batch norm ----------------------------------------------------

FASHION_BATCH = 128
FASHION_FILTERS = (16, 32, 64)


def fashion_data(folder: pathlib.Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Images (rows, 28, 28, 1) in [0, 1] and labels: for training, then for testing."""

    def read(name: str, header: int) -> np.ndarray:
        with gzip.open(folder / name) as file:
            return np.frombuffer(file.read(), np.uint8, offset=header)

    def images(name: str) -> np.ndarray:
        return read(name, 16).reshape(-1, 28, 28, 1).astype("f4") / 255

    return (
        images("train-images-idx3-ubyte.gz"),
        read("train-labels-idx1-ubyte.gz", 8).astype("i4"),
        images("t10k-images-idx3-ubyte.gz"),
        read("t10k-labels-idx1-ubyte.gz", 8).astype("i4"),
    )


def fashion_drawn(rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Drawn images in the same form, to try a script."""
    generator = np.random.default_rng(0)
    images = generator.random((2 * rows, 28, 28, 1), dtype="f4")
    labels = generator.integers(0, 10, 2 * rows).astype("i4")
    return images[:rows], labels[:rows], images[rows:], labels[rows:]


def fashion_order(rows: int, epoch: int) -> np.ndarray:
    """The order of the rows in an epoch, the same for every peer."""
    return np.random.default_rng(100 + epoch).permutation(rows)


def fashion_weights() -> list[dict[str, Any]]:
    """Kernels to start from: convolutions (3, 3, in, out), then the dense layer (in, out)."""
    generator = np.random.default_rng(0)
    layers, inside = [], 1
    for filters in FASHION_FILTERS:
        shape = (3, 3, inside, filters)
        layers.append((generator.normal(size=shape) * (2 / (9 * inside)) ** 0.5).astype("f4"))
        inside = filters
    pixels = 4 * 4
    dense = (generator.normal(size=(inside * pixels, 10)) * (1 / (inside * pixels)) ** 0.5).astype(
        "f4"
    )
    return [*layers, dense]
