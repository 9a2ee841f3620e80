"""Optimizer-state offload for PyTorch.

The state (Adam's moments) lives in pinned host memory and is streamed through a few GPU slots,
chunk by chunk, with copy-in, update and copy-out running at once. The numbers are bit for bit
those of the plain optimizer::

    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    offload(optimizer)          # converts in place, returns the same object

Names are imported when they are first used: a launcher that only wants the settings must not wait
for the rest.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .config import OffloadConfig

if TYPE_CHECKING:
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


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = importlib.import_module(".stats" if name == "OffloadStats" else ".optimizer", __name__)
    globals()[name] = getattr(home, name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
