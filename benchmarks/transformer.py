"""The decoder-only transformer that bench_train.py trains, in plain torch, and its sizes.

Nothing here knows about offload. Every kernel is deterministic when
`torch.use_deterministic_algorithms(True)` is set.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint

# Flash has a deterministic backward when deterministic algorithms are asked for. On a GPU nothing
# else is allowed: math would be another benchmark.
_GPU_ATTENTION = [SDPBackend.FLASH_ATTENTION]
_CPU_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
_LOSS_TOKENS = 2048  # fp32 logits of so many tokens at once: 262 MB with 32,000 words


@dataclass(frozen=True, kw_only=True)
class Size:
    """One preset. `mlp` is the width inside the MLP."""

    hidden: int
    mlp: int
    layers: int
    heads: int
    vocabulary: int = 32_000


#: By the number of parameters.
SIZES = {
    "1e5": Size(hidden=64, mlp=88, layers=2, heads=2, vocabulary=256),
    "0.3e9": Size(hidden=1024, mlp=2816, layers=18, heads=8),
    "1e9": Size(hidden=2048, mlp=5632, layers=17, heads=16),
    "3.1e9": Size(hidden=3072, mlp=8192, layers=26, heads=24),
    "7e9": Size(hidden=4096, mlp=11520, layers=32, heads=32),
}


class Layer(nn.Module):
    """Pre-norm causal self-attention with rotary positions, then a SwiGLU MLP."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.attention_norm = nn.RMSNorm(size.hidden, eps=1e-6)
        self.qkv = nn.Linear(size.hidden, 3 * size.hidden, bias=False)
        self.out = nn.Linear(size.hidden, size.hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(size.hidden, eps=1e-6)
        self.gate = nn.Linear(size.hidden, size.mlp, bias=False)
        self.up = nn.Linear(size.hidden, size.mlp, bias=False)
        self.down = nn.Linear(size.mlp, size.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map (batch, sequence, hidden) to the same shape."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        )
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        with sdpa_kernel(_GPU_ATTENTION if x.is_cuda else _CPU_ATTENTION):
            attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        normed = self.mlp_norm(x)
        return x + self.down(silu(self.gate(normed)) * self.up(normed))


class Transformer(nn.Module):
    """Tokens and targets to the mean loss. Each layer is computed again in backward.

    The loss is computed in slices of tokens, each computed again in backward, so that logits do not
    set the peak of memory.
    """

    def __init__(self, size: Size, sequence: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.hidden)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.hidden, eps=1e-6)
        self.head = nn.Linear(size.hidden, size.vocabulary, bias=False)
        half = size.hidden // size.heads // 2
        frequencies = 10_000.0 ** (-torch.arange(half, dtype=torch.float32) / half)
        angles = torch.outer(torch.arange(sequence, dtype=torch.float32), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Map two (batch, sequence) tensors of token numbers to a 0-dim tensor."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = _again_in_backward(layer, x, self.cos, self.sin)
        hidden = self.norm(x).flatten(0, 1).split(_LOSS_TOKENS)
        parts = zip(hidden, targets.flatten().split(_LOSS_TOKENS), strict=True)
        losses = [_again_in_backward(self._loss, *part) for part in parts]
        return torch.stack(losses).sum() / targets.numel()

    def _loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(self.head(hidden).float(), targets, reduction="sum")


def build(size: Size, sequence: int, device: torch.device, seed: int = 0) -> Transformer:
    """Return the model with fp32 parameters on ``device``: the same numbers for the same seed.

    Seeds torch's global random state.
    """
    torch.manual_seed(seed)
    with torch.device(device):
        return Transformer(size, sequence)


def num_params(size: Size) -> int:
    """Return the number of parameters without allocating any."""
    with torch.device("meta"):
        return sum(p.numel() for p in Transformer(size, 1).parameters())


def _again_in_backward(function: object, *inputs: Tensor) -> Tensor:
    # Nothing in here draws random numbers.
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
