"""Figures of offload as numbers that a tracker takes: ``accelerator.log(offload_metrics(...))``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from torch_offload import is_offloaded, offload_stats


def offload_metrics(optimizer: Any, prefix: str = "offload/") -> dict[str, float]:
    """Return what ``torch_offload.offload_stats`` knows of the last step, by name.

    Waits for the end of that step, so call it when something is logged and not at every step::

        accelerator.log({"loss": loss, **offload_metrics(optimizer)}, step=step)

    Args:
        optimizer: what ``prepare`` returned.
        prefix: what each name begins with.

    Returns:
        Each field of ``OffloadStats``, bytes and seconds; nothing for an optimizer that is not
        offloaded, so that a script may log the same with and without.
    """
    if optimizer is None or not is_offloaded(optimizer):
        return {}
    return {f"{prefix}{name}": value for name, value in asdict(offload_stats(optimizer)).items()}
