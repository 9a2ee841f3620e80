"""Optimizer-state offload for PyTorch.

The state (Adam's moments) lives in pinned host memory and is streamed through a few GPU slots,
chunk by chunk, with copy-in, update and copy-out running at once. The numbers are bit for bit
those of the plain optimizer::

    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    offload(optimizer)          # converts in place, returns the same object
"""

from .config import OffloadConfig
from .optimizer import (
    attach_model,
    expected_state_bytes,
    finish,
    is_offloaded,
    last_microbatch,
    offload,
    offload_stats,
    prefetch,
    set_overlap,
    synchronize,
    timeline,
    unoffload,
)
from .stats import OffloadStats

__all__ = [
    "OffloadConfig",
    "OffloadStats",
    "attach_model",
    "expected_state_bytes",
    "finish",
    "is_offloaded",
    "last_microbatch",
    "offload",
    "offload_stats",
    "prefetch",
    "set_overlap",
    "synchronize",
    "timeline",
    "unoffload",
]
