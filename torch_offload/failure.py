"""What a step that did not end leaves behind: why there is no further one, and until when."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from .distributed import local, storage

#: What is true from the first update of a step until its end is known.
UNFINISHED = (
    "an earlier optimizer step did not end, and nobody knows how far it came. Load a checkpoint of "
    "parameters and optimizer to go on."
)
#: Ranges of numbers that a message lists; models with many parameters without gradients have more.
_MAX_RANGES = 20


class Refusal:
    """Why no further step is allowed, until a checkpoint is loaded.

    Args:
        reason: the message.
        views: the tensors of the host state, which are not that of a whole step.
    """

    def __init__(self, reason: str, views: Iterable[torch.Tensor]) -> None:
        self.reason = reason
        self._versions = {storage(view): local(view)._version for view in views}

    def is_about(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is host state that nobody has written to since then."""
        version = self._versions.get(storage(tensor))
        return version is not None and version == local(tensor)._version


def half_way(
    error: BaseException,
    groups: Iterable[Mapping[str, Any]],
    started: Iterable[torch.Tensor],
) -> str:
    """Return why no further step is allowed after one that changed something and raised.

    Args:
        error: what it raised.
        groups: the optimizer's parameter groups.
        started: the parameters of the chunks that were updated or begun.
    """
    touched = {id(param) for param in started}
    params = chain.from_iterable(group["params"] for group in groups)
    numbers = [number for number, param in enumerate(params) if id(param) in touched]
    advice = "Load a checkpoint of parameters and optimizer to go on."
    what = f"{type(error).__name__}: {error}"
    if isinstance(error, torch.OutOfMemoryError):
        # Not its text: batch-size finders would take the refusal of each later step for another.
        what = type(error).__name__
        advice += " A smaller chunk_size or num_slots needs less memory on the device."
    return (
        f"an earlier optimizer step stopped half-way ({what}): parameters "
        f"{_ranges(numbers)} (counted as in state_dict()) were updated, those of the last chunk "
        f"perhaps in part, and the others were not. {advice}"
    )


def _ranges(numbers: Sequence[int]) -> str:
    """Write rising numbers as ranges: ``0-3, 7``."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    parts = [f"{a}-{b}" if b > a else str(a) for a, b in ranges[:_MAX_RANGES]]
    return ", ".join(parts + ["..."] * (len(ranges) > _MAX_RANGES)) or "none"
