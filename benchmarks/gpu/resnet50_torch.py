"""ResNet-50 of torchvision, as PyTorch's users train it: autocast, channels last, compiled."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torchvision
from torch import nn


def make_step(weights: dict[str, np.ndarray], batch: Any, device: str) -> Any:
    """Compiles the model under DistributedDataParallel of one process; returns a step."""
    torch.backends.cudnn.benchmark = True
    model = torchvision.models.resnet50(num_classes=weights["fc.bias"].size)
    state = {
        name: torch.tensor(
            value.transpose(3, 2, 0, 1)
            if value.ndim == 4
            else value.T
            if value.ndim == 2
            else value
        )
        for name, value in weights.items()
    }
    missing = model.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys
    assert all("running" in name or "batches" in name for name in missing.missing_keys)
    model = model.to(device).to(memory_format=torch.channels_last)
    ids = [0] if device == "cuda" else None
    compiled = torch.compile(nn.parallel.DistributedDataParallel(model, device_ids=ids))
    optimizer = torch.optim.SGD(
        model.parameters(), lr=1e-3, momentum=0.9, weight_decay=5e-5, fused=True
    )
    images = torch.tensor(batch[0]).permute(0, 3, 1, 2).to(device)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.tensor(batch[1]).long().to(device)

    def step() -> Any:
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(compiled(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step
