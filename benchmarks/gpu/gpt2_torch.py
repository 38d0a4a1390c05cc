"""GPT-2 small in PyTorch, as its users write it: autocast, fused attention, fused AdamW."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Attention and a perceptron, each behind a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        rows, context, width = x.shape
        triple = self.qkv(self.norm1(x)).split(width, dim=2)
        query, key, value = (
            item.view(rows, context, self.heads, width // self.heads).transpose(1, 2)
            for item in triple
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(rows, context, width))
        h = functional.gelu(self.up(self.norm2(x)), approximate="tanh")
        return x + self.down(h)


class GPT2(nn.Module):
    """The whole model; its forward pass returns the loss."""

    def __init__(self, size: Any) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)

    def forward(self, tokens: Any, targets: Any) -> Any:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))

    def load(self, weights: dict[str, np.ndarray]) -> None:
        """Takes the weights of the JAX model."""
        state = {"tokens.weight": weights["tokens"], "positions.weight": weights["positions"]}
        for name, value in weights.items():
            layer, _, part = name.rpartition("/")
            place = f"blocks.{layer}." if layer else ""
            if part.startswith("norm"):
                norm, _, kind = part.partition("_")
                state[f"{place}{norm}.{'weight' if kind == 'scale' else 'bias'}"] = value
            elif part.endswith("_bias"):
                state[f"{place}{part.removesuffix('_bias')}.bias"] = value
            elif layer:
                state[f"{place}{part}.weight"] = value.T
        self.load_state_dict({name: torch.tensor(value) for name, value in state.items()})


def make_step(size: Any, weights: dict[str, np.ndarray], batch: Any, device: str) -> Any:
    """Compiles the model under DistributedDataParallel of one process; returns a step."""
    model = GPT2(size).to(device)
    model.load(weights)
    parallel = nn.parallel.DistributedDataParallel(
        model, device_ids=[0] if device == "cuda" else None
    )
    compiled = torch.compile(parallel)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True
    )
    tokens, targets = (torch.tensor(item).long().to(device) for item in batch)

    def step() -> Any:
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = compiled(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step
