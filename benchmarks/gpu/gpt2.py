"""GPT-2 small in plain JAX: float32 parameters, bfloat16 arithmetic.

Owns the model and the parts of it that are worth writing by hand on a GPU. Each part has
a plain form (what autodiff makes of the textbook formula) and a tuned one of the same
meaning, so that ``Tuning`` says which is measured:

- the cross-entropy of the head takes its gradient while it goes over the rows in chunks, so
  that the logits of all rows never exist at once;
- layer norm and GELU keep their bfloat16 inputs for the gradient and nothing else;
- queries, keys and values come out of three products, so that no copy splits them.
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


@dataclasses.dataclass(frozen=True)
class Size:
    """The dimensions of the model and of a batch."""

    layers: int = 12
    heads: int = 12
    width: int = 768
    # 50,257 rounded up to a multiple of 128, as all who train it do.
    vocabulary: int = 50304
    context: int = 1024
    rows: int = 32


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Which parts are written by hand."""

    head: bool = True
    chunks: int = 4
    norm: bool = True
    gelu: bool = True
    three_products: bool = True
    flat: bool = True
    # None lets JAX choose; "cudnn" is the fused kernel.
    attention: str | None = "cudnn"


PLAIN = Tuning(head=False, norm=False, gelu=False, three_products=False, flat=False)
TUNED = Tuning()

_TRITON = "xla_gpu_enable_triton_gemm"
# What the parts bring, one by one: forms of the model, and compiler options beside the flags that
# the runner gives to all (it turns Triton's matrix products off).
VARIANTS: dict[str, tuple[Tuning, dict[str, Any]]] = {
    # The form that all are compared with, once more: how far apart equal programs lie.
    "tuned, again": (TUNED, {}),
    "plain": (PLAIN, {_TRITON: True}),
    "plain, flag": (PLAIN, {}),
    "tuned, no flag": (TUNED, {_TRITON: True}),
    "tuned, 8 chunks": (dataclasses.replace(TUNED, chunks=8), {}),
    "tuned, 2 chunks": (dataclasses.replace(TUNED, chunks=2), {}),
    "tuned, plain head": (dataclasses.replace(TUNED, head=False), {}),
    "tuned, plain norm": (dataclasses.replace(TUNED, norm=False), {}),
    "tuned, plain gelu": (dataclasses.replace(TUNED, gelu=False), {}),
    "tuned, one product": (dataclasses.replace(TUNED, three_products=False), {}),
    "tuned, rows apart": (dataclasses.replace(TUNED, flat=False), {}),
    "tuned, attention as JAX chooses": (dataclasses.replace(TUNED, attention=None), {}),
    "tuned, one product, 2 chunks": (
        dataclasses.replace(TUNED, three_products=False, chunks=2),
        {},
    ),
}


def initial_weights(size: Size, seed: int = 0) -> dict[str, np.ndarray]:
    """Draws the weights all peers start from, by name."""
    generator = np.random.default_rng(seed)

    def normal(*shape: int, scale: float = 0.02) -> np.ndarray:
        return generator.standard_normal(shape, dtype=np.float32) * scale

    width = size.width
    weights = {
        "tokens": normal(size.vocabulary, width),
        "positions": normal(size.context, width),
        "norm_scale": np.ones(width, np.float32),
        "norm_offset": np.zeros(width, np.float32),
    }
    deep = float(0.02 / np.sqrt(2 * size.layers))
    for layer in range(size.layers):
        weights |= {
            f"{layer}/norm1_scale": np.ones(width, np.float32),
            f"{layer}/norm1_offset": np.zeros(width, np.float32),
            f"{layer}/qkv": normal(width, 3 * width),
            f"{layer}/qkv_bias": np.zeros(3 * width, np.float32),
            f"{layer}/proj": normal(width, width, scale=deep),
            f"{layer}/proj_bias": np.zeros(width, np.float32),
            f"{layer}/norm2_scale": np.ones(width, np.float32),
            f"{layer}/norm2_offset": np.zeros(width, np.float32),
            f"{layer}/up": normal(width, 4 * width),
            f"{layer}/up_bias": np.zeros(4 * width, np.float32),
            f"{layer}/down": normal(4 * width, width, scale=deep),
            f"{layer}/down_bias": np.zeros(width, np.float32),
        }
    return weights


def batch(size: Size, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Draws tokens with the skew of words, and the tokens that follow them."""
    generator = np.random.default_rng(seed)
    ranks = generator.zipf(1.3, (size.rows, size.context + 1))
    tokens = ((ranks - 1) % size.vocabulary).astype(np.int32)
    return tokens[:, :-1].copy(), tokens[:, 1:].copy()


# --- layer norm ------------------------------------------------------------------------


def plain_norm(x: Any, scale: Any, offset: Any) -> Any:
    """Normalizes the last axis, in float32."""
    wide = x.astype(WIDE)
    mean = wide.mean(-1, keepdims=True)
    variance = ((wide - mean) ** 2).mean(-1, keepdims=True)
    normal = (wide - mean) * jax.lax.rsqrt(variance + 1e-5)
    return (normal * scale + offset).astype(NARROW)


@jax.custom_vjp
def norm(x: Any, scale: Any, offset: Any) -> Any:
    """The same; its gradient needs the bfloat16 input and two numbers a row."""
    return _norm_forward(x, scale, offset)[0]


def _norm_forward(x: Any, scale: Any, offset: Any) -> Any:
    wide = x.astype(WIDE)
    mean = wide.mean(-1, keepdims=True)
    variance = (wide * wide).mean(-1, keepdims=True) - mean * mean
    inverse = jax.lax.rsqrt(variance + 1e-5)
    out = ((wide - mean) * inverse * scale + offset).astype(NARROW)
    return out, (x, mean, inverse, scale)


def _norm_backward(kept: Any, gradient: Any) -> Any:
    x, mean, inverse, scale = kept
    wide = gradient.astype(WIDE)
    normal = (x.astype(WIDE) - mean) * inverse
    scaled = wide * scale
    along = (scaled * normal).mean(-1, keepdims=True)
    level = scaled.mean(-1, keepdims=True)
    rows = tuple(range(x.ndim - 1))
    return (
        ((scaled - level - normal * along) * inverse).astype(x.dtype),
        (wide * normal).sum(rows),
        wide.sum(rows),
    )


norm.defvjp(_norm_forward, _norm_backward)


# --- GELU ------------------------------------------------------------------------------

_SLOPE = float(np.sqrt(2 / np.pi))
_CUBE = 0.044715


def plain_gelu(x: Any) -> Any:
    """GELU in its tanh form."""
    return jax.nn.gelu(x, approximate=True)


@jax.custom_vjp
def gelu(x: Any) -> Any:
    """The same; its gradient is computed again from the bfloat16 input."""
    return _gelu(x)


def _gelu(x: Any) -> Any:
    # (1 + tanh(u)) / 2 is the logistic function of 2 u, which costs one exponential.
    wide = x.astype(WIDE)
    return (wide * jax.lax.logistic(2 * _SLOPE * wide * (1 + _CUBE * wide * wide))).astype(x.dtype)


def _gelu_backward(x: Any, gradient: Any) -> Any:
    wide = x.astype(WIDE)
    square = wide * wide
    gate = jax.lax.logistic(2 * _SLOPE * wide * (1 + _CUBE * square))
    inner = 2 * _SLOPE * (1 + 3 * _CUBE * square)
    slope = gate + wide * gate * (1 - gate) * inner
    return ((gradient.astype(WIDE) * slope).astype(x.dtype),)


gelu.defvjp(lambda x: (_gelu(x), x), _gelu_backward)


# --- the head --------------------------------------------------------------------------


def plain_cross_entropy(x: Any, table: Any, targets: Any) -> Any:
    """The mean cross-entropy of the logits x @ table.T."""
    logits = (x @ table.T).astype(WIDE)
    top = jax.nn.logsumexp(logits, axis=-1)
    return (top - jnp.take_along_axis(logits, targets[:, None], -1)[:, 0]).mean()


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def cross_entropy(x: Any, table: Any, targets: Any, chunks: int) -> Any:
    """The same, over rows in chunks."""
    return _cross_entropy(x, table, targets, chunks)[0]


def _cross_entropy(x: Any, table: Any, targets: Any, chunks: int) -> Any:
    rows = x.shape[0]
    loss = jnp.zeros((), WIDE)
    x_gradients = []
    table_gradient = jnp.zeros(table.shape, WIDE)
    for part, wanted in zip(jnp.split(x, chunks), jnp.split(targets, chunks)):
        logits = part @ table.T
        wide = logits.astype(WIDE)
        top = jax.nn.logsumexp(wide, axis=-1, keepdims=True)
        chosen = jnp.take_along_axis(logits, wanted[:, None], -1).astype(WIDE)
        loss = loss + (top - chosen).sum()
        is_target = jnp.arange(table.shape[0])[None, :] == wanted[:, None]
        gradient = ((jnp.exp(wide - top) - is_target) * (1 / rows)).astype(NARROW)
        x_gradients.append(gradient @ table)
        table_gradient = table_gradient + jax.lax.dot_general(
            gradient, part, (((0,), (0,)), ((), ())), preferred_element_type=WIDE
        )
    return loss / rows, (jnp.concatenate(x_gradients), table_gradient.astype(table.dtype))


def _cross_entropy_backward(chunks: int, kept: Any, gradient: Any) -> Any:
    x_gradient, table_gradient = kept
    scale = gradient.astype(NARROW)
    return x_gradient * scale, table_gradient * scale.astype(table_gradient.dtype), None


cross_entropy.defvjp(_cross_entropy, _cross_entropy_backward)


# --- the model -------------------------------------------------------------------------


def loss_fn(weights: dict[str, Any], tokens: Any, targets: Any, size: Size, tuning: Tuning) -> Any:
    """The mean loss of a batch."""
    narrow = {
        name: value if "norm" in name else value.astype(NARROW) for name, value in weights.items()
    }
    normalize = norm if tuning.norm else plain_norm
    activate = gelu if tuning.gelu else plain_gelu
    rows, context = tokens.shape
    width, heads = size.width, size.heads
    if tuning.flat:
        # One row a token from here on. Given (rows, context, width), XLA lays the rows out
        # along the last axis to please the sum over rows in the gradient of the positions,
        # and transposes in every layer.
        x = weights["tokens"][tokens.reshape(-1)].astype(NARROW)
        x = x + jnp.tile(narrow["positions"][:context], (rows, 1))
    else:
        x = narrow["tokens"][tokens] + narrow["positions"][:context]
    for layer in range(size.layers):
        part = {
            name.partition("/")[2]: value
            for name, value in narrow.items()
            if name.startswith(f"{layer}/")
        }
        h = normalize(x, part["norm1_scale"], part["norm1_offset"])
        if tuning.three_products:
            triple = [
                h @ weight + bias
                for weight, bias in zip(
                    jnp.split(part["qkv"], 3, axis=1), jnp.split(part["qkv_bias"], 3)
                )
            ]
        else:
            triple = jnp.split(h @ part["qkv"] + part["qkv_bias"], 3, axis=-1)
        query, key, value = (item.reshape(rows, context, heads, width // heads) for item in triple)
        mixed = jax.nn.dot_product_attention(
            query, key, value, is_causal=True, implementation=tuning.attention
        ).reshape(x.shape)
        x = x + (mixed @ part["proj"] + part["proj_bias"])
        h = normalize(x, part["norm2_scale"], part["norm2_offset"])
        h = activate(h @ part["up"] + part["up_bias"])
        x = x + (h @ part["down"] + part["down_bias"])
    x = normalize(x, narrow["norm_scale"], narrow["norm_offset"]).reshape(-1, width)
    flat = targets.reshape(-1)
    if tuning.head:
        return cross_entropy(x, narrow["tokens"], flat, tuning.chunks)
    return plain_cross_entropy(x, narrow["tokens"], flat)
