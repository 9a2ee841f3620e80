"""The small model, its data and its optimizer that the tests of both front ends train."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def make_net() -> nn.Module:
    """Return a net with shapes that chunk badly: a large matrix, vectors, a scalar-like layer."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 33), nn.Linear(33, 1)
    )


def make_batches(num_batches: int = 6) -> list[torch.Tensor]:
    """Return the same batches every time."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 16, generator=generator) for _ in range(num_batches)]


def make_optimizer(net: nn.Module, *, lr: float = 1e-2, **options: Any) -> torch.optim.AdamW:
    """Return AdamW with two groups that differ in every hyper-parameter that the update reads."""
    decay = [p for p in net.parameters() if p.ndim > 1]
    rest = [p for p in net.parameters() if p.ndim <= 1]
    groups = [
        {"params": decay, "weight_decay": 0.1},
        {"params": rest, "weight_decay": 0.0, "betas": (0.8, 0.9)},
    ]
    return torch.optim.AdamW(groups, lr=lr, **options)
