"""ResNet-50 (v1.5) in plain JAX: float32 parameters, bfloat16 arithmetic, rows last in channels.

Owns the model and the parts of it that are worth writing by hand on a GPU:

- batch norm and the ReLU behind it are one function whose gradient needs the bfloat16 input and
  two numbers a channel, and which reads that input once for both sums;
- max pooling routes its gradient by the position of the maximum, with shifts and additions,
  instead of XLA's select-and-scatter.

Names and order of the parameters are those of torchvision, so that both can start equal.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

WIDE = jnp.float32
NARROW = jnp.bfloat16
STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))
_MOMENTUM = 0.1
_EPSILON = 1e-5


@dataclasses.dataclass(frozen=True)
class Size:
    """The dimensions of a batch."""

    rows: int = 256
    pixels: int = 224
    classes: int = 1000


def blocks() -> list[tuple[str, int, int, int]]:
    """Lists the bottleneck blocks: name, channels in, inner channels, stride."""
    found, channels = [], 64
    for stage, (width, depth) in enumerate(STAGES, 1):
        for index in range(depth):
            stride = 2 if stage > 1 and index == 0 else 1
            found.append((f"layer{stage}.{index}", channels, width, stride))
            channels = 4 * width
    return found


def initial_weights(size: Size, seed: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draws parameters and running statistics, convolutions as (height, width, in, out)."""
    generator = np.random.default_rng(seed)
    weights: dict[str, np.ndarray] = {}
    statistics: dict[str, np.ndarray] = {}

    def convolution(name: str, width: int, inside: int, outside: int) -> None:
        scale = float(np.sqrt(2 / (width * width * outside)))
        shape = (width, width, inside, outside)
        weights[f"{name}.weight"] = generator.standard_normal(shape, dtype=np.float32) * scale

    def norm(name: str, channels: int) -> None:
        weights[f"{name}.weight"] = np.ones(channels, np.float32)
        weights[f"{name}.bias"] = np.zeros(channels, np.float32)
        statistics[f"{name}.running_mean"] = np.zeros(channels, np.float32)
        statistics[f"{name}.running_var"] = np.ones(channels, np.float32)

    convolution("conv1", 7, 3, 64)
    norm("bn1", 64)
    for name, inside, width, stride in blocks():
        convolution(f"{name}.conv1", 1, inside, width)
        norm(f"{name}.bn1", width)
        convolution(f"{name}.conv2", 3, width, width)
        norm(f"{name}.bn2", width)
        convolution(f"{name}.conv3", 1, width, 4 * width)
        norm(f"{name}.bn3", 4 * width)
        if inside != 4 * width or stride != 1:
            convolution(f"{name}.downsample.0", 1, inside, 4 * width)
            norm(f"{name}.downsample.1", 4 * width)
    shape = (2048, size.classes)
    weights["fc.weight"] = generator.standard_normal(shape, dtype=np.float32) * 0.01
    weights["fc.bias"] = np.zeros(size.classes, np.float32)
    return weights, statistics


def batch(size: Size, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Draws images (rows, height, width, 3) and labels."""
    generator = np.random.default_rng(seed)
    shape = (size.rows, size.pixels, size.pixels, 3)
    labels = generator.integers(0, size.classes, size.rows).astype(np.int32)
    return generator.standard_normal(shape, dtype=np.float32), labels


# --- batch norm ------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def batch_norm(x: Any, scale: Any, offset: Any, with_relu: bool) -> Any:
    """Normalizes each channel over the batch; returns also its mean and variance."""
    return _norm_forward(x, scale, offset, with_relu)[0]


def _norm_forward(x: Any, scale: Any, offset: Any, with_relu: bool) -> Any:
    wide = x.astype(WIDE)
    mean = wide.mean((0, 1, 2))
    variance = jnp.maximum((wide * wide).mean((0, 1, 2)) - mean * mean, 0)
    inverse = jax.lax.rsqrt(variance + _EPSILON)
    out = (wide - mean) * (inverse * scale) + offset
    out = (jnp.maximum(out, 0) if with_relu else out).astype(x.dtype)
    return (out, mean, variance), (x, mean, inverse, scale, offset)


def _norm_backward(with_relu: bool, kept: Any, gradients: Any) -> Any:
    x, mean, inverse, scale, offset = kept
    # The statistics are not differentiated: they go into the running means only.
    wide = gradients[0].astype(WIDE)
    normal = (x.astype(WIDE) - mean) * inverse
    if with_relu:
        wide = jnp.where(normal * scale + offset > 0, wide, 0)
    along = (wide * normal).mean((0, 1, 2))
    level = wide.mean((0, 1, 2))
    count = x.size // x.shape[-1]
    x_gradient = ((wide - level - normal * along) * (scale * inverse)).astype(x.dtype)
    return x_gradient, along * count, level * count


batch_norm.defvjp(_norm_forward, _norm_backward)


# --- max pooling -----------------------------------------------------------------------


def _shifted(x: Any, row: int, column: int) -> Any:
    height, width = x.shape[1] - 2, x.shape[2] - 2
    return x[:, row : row + height : 2, column : column + width : 2]


@jax.custom_vjp
def max_pool(x: Any) -> Any:
    """The maximum of 3 x 3 windows, 2 apart, of non-negative values."""
    return _pool_forward(x)[0]


def _pool_forward(x: Any) -> Any:
    padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    best = _shifted(padded, 0, 0)
    where = jnp.zeros(best.shape, jnp.int8)
    for place in range(1, 9):
        candidate = _shifted(padded, *divmod(place, 3))
        where = jnp.where(candidate > best, jnp.int8(place), where)
        best = jnp.maximum(best, candidate)
    return best, where


def _pool_backward(where: Any, gradient: Any) -> Any:
    total: Any = None
    for place in range(9):
        row, column = divmod(place, 3)
        part = jnp.where(where == place, gradient, 0)
        # Back to every second position, behind `row` and `column`; then without the border.
        spread = jax.lax.pad(
            part,
            jnp.zeros((), part.dtype),
            ((0, 0, 0), (row - 1, 2 - row, 1), (column - 1, 2 - column, 1), (0, 0, 0)),
        )
        total = spread if total is None else total + spread
    return (total,)


max_pool.defvjp(_pool_forward, _pool_backward)


# --- the model -------------------------------------------------------------------------


def _convolve(x: Any, weight: Any, stride: int = 1) -> Any:
    border = (weight.shape[0] - 1) // 2
    return jax.lax.conv_general_dilated(
        x,
        weight.astype(NARROW),
        (stride, stride),
        ((border, border), (border, border)),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def loss_fn(
    weights: dict[str, Any], statistics: dict[str, Any], images: Any, labels: Any
) -> tuple[Any, dict[str, Any]]:
    """The mean cross-entropy of a batch, and the new running statistics."""
    after = {}

    def norm(x: Any, name: str, *, with_relu: bool = True) -> Any:
        scale, offset = weights[f"{name}.weight"], weights[f"{name}.bias"]
        out, mean, variance = batch_norm(x, scale, offset, with_relu)
        count = x.size // x.shape[-1]
        for key, new in (("mean", mean), ("var", variance * (count / (count - 1)))):
            old = statistics[f"{name}.running_{key}"]
            after[f"{name}.running_{key}"] = old + _MOMENTUM * (jax.lax.stop_gradient(new) - old)
        return out

    x = norm(_convolve(images.astype(NARROW), weights["conv1.weight"], 2), "bn1")
    x = max_pool(x)
    for name, _, _, stride in blocks():
        h = norm(_convolve(x, weights[f"{name}.conv1.weight"]), f"{name}.bn1")
        h = norm(_convolve(h, weights[f"{name}.conv2.weight"], stride), f"{name}.bn2")
        h = norm(_convolve(h, weights[f"{name}.conv3.weight"]), f"{name}.bn3", with_relu=False)
        if f"{name}.downsample.0.weight" in weights:
            short = _convolve(x, weights[f"{name}.downsample.0.weight"], stride)
            x = norm(short, f"{name}.downsample.1", with_relu=False)
        x = jax.nn.relu(x + h)
    x = x.astype(WIDE).mean((1, 2)).astype(NARROW)
    logits = x @ weights["fc.weight"].astype(NARROW) + weights["fc.bias"].astype(NARROW)
    logits = logits.astype(WIDE)
    top = jax.nn.logsumexp(logits, axis=-1)
    return (top - jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]).mean(), after
