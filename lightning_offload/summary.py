"""What a user is told at the start: where each part of the memory lives, and what that saves."""

from __future__ import annotations

from typing import Any

import torch

from torch_offload import OffloadConfig, expected_state_bytes

#: Types of devices whose memory is the host's.
_HOST_MEMORY = frozenset({"cpu", "mps"})
_GIB = 2**30


def summary(
    optimizer: Any, name: str, device: torch.device, config: OffloadConfig, reason: str
) -> str:
    """Return what is said of one optimizer.

    Args:
        optimizer: offloaded, with the parameters where they are trained.
        name: of its class.
        device: where that is.
        config: with the overlap that was chosen.
        reason: why that one.
    """
    mode = f"{name}, overlap={config.overlap!r} ({reason})"
    if device.type in _HOST_MEMORY:
        return (
            f"{mode}. Parameters are on {device}, whose memory is the host's: offload is a "
            "pass-through there and saves nothing."
        )
    params = [p for group in optimizer.param_groups for p in group["params"]]
    num_params = sum(_bytes(param) for param in params)
    num_grads = sum(_bytes(param) for param in params if param.requires_grad)
    num_state = expected_state_bytes(optimizer)
    slots = min(config.num_slots * config.chunk_bytes, num_state)
    kept = _kept_bytes(config, num_state)
    where = "page-locked host memory" if config.pin_memory else "host memory"
    stays = "" if not config.gpu_budget else f", but for gpu_budget={config.gpu_budget!r}"
    saved = max(num_state - slots - (kept or 0), 0)
    most = "at most " if kept is None else ""
    return (
        f"{mode}. On {device}: parameters {_gib(num_params)}, gradients {_gib(num_grads)}, up to "
        f"{_gib(slots)} of slots. In {where}: optimizer state {_gib(num_state)}{stays}. "
        f"Saved on {device}: {most}{_gib(saved)}."
    )


def _kept_bytes(config: OffloadConfig, num_state: int) -> int | None:
    """Return how much state stays on the device; ``None`` where that is decided later."""
    budget = config.gpu_budget
    if isinstance(budget, int):
        return min(budget, num_state)
    return None if budget == "auto" else int(num_state * float(budget.rstrip("%")) / 100)


def _bytes(param: torch.Tensor) -> int:
    own = param.to_local() if hasattr(param, "to_local") else param
    return int(own.nbytes)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"
