"""The demo's model and its sizes: a byte-level GPT in plain PyTorch modules.

Nothing here knows about offload. `SIZES` is the table behind `make demo SIZE=...`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

# Both have a deterministic backward (flash does when deterministic algorithms are asked for);
# math takes what flash refuses, which is fp32 on a GPU.
_DETERMINISTIC_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True, kw_only=True)
class Size:
    """One preset: the model, the batch in sequences of `context` bytes, and the run's length."""

    hidden: int
    layers: int
    heads: int
    context: int
    batch: int
    steps: int
    lr: float
    bf16: bool = False  # autocast; parameters stay fp32
    checkpointing: bool = False
    gpu_gib: int = 0  # GPU memory that the plain run needs; 0: runs on a CPU as well

    @property
    def precision(self) -> str:
        """What the forward computes in, as Accelerate spells it."""
        return "bf16" if self.bf16 else "no"


SIZES = {
    "tiny": Size(hidden=32, layers=2, heads=2, context=32, batch=4, steps=6, lr=3e-3),
    "small": Size(hidden=128, layers=4, heads=4, context=128, batch=16, steps=50, lr=3e-3),
    "100m": Size(
        hidden=768, layers=14, heads=12, context=1024, batch=16, steps=60, lr=6e-4, bf16=True,
        gpu_gib=12,
    ),
    "1b": Size(
        hidden=2048, layers=20, heads=16, context=2048, batch=4, steps=20, lr=2e-4, bf16=True,
        checkpointing=True, gpu_gib=24,
    ),
}  # fmt: skip


class Block(nn.Module):
    """Pre-norm causal self-attention, then an MLP of four times the width."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1, self.norm2 = nn.LayerNorm(size.hidden), nn.LayerNorm(size.hidden)
        self.qkv = nn.Linear(size.hidden, 3 * size.hidden, bias=False)
        self.out = nn.Linear(size.hidden, size.hidden, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(size.hidden, 4 * size.hidden, bias=False),
            nn.GELU(),
            nn.Linear(4 * size.hidden, size.hidden, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, context, hidden) to the same shape."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        with sdpa_kernel(_DETERMINISTIC_ATTENTION):
            attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """A GPT over bytes. `forward` returns the loss, so that all of it runs under autocast."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.checkpointing = size.checkpointing
        self.embed = nn.Embedding(256, size.hidden)
        self.position = nn.Parameter(0.02 * torch.randn(size.context, size.hidden))
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.hidden)
        self.head = nn.Linear(size.hidden, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean next-byte loss in nats of int64 `tokens`, shape (batch, context + 1)."""
        x = self.embed(tokens[:, :-1]) + self.position
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())
