"""What a pipeline is given to do for one chunk, and what it tells of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .chunk import Run

#: A new state tensor on the device and the host tensor that will own its values.
Born = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Update:
    """Work on a chunk whose state is on the host.

    Attributes:
        block: the chunk's host bytes, uint8; ``None`` where it stays on the device.
        runs: the bytes that travel; the others have no gradient in this step.
        slot_bytes: how large its slot must be.
        apply: updates the chunk in place; given the slot. ``None`` where it becomes known later.
    """

    block: torch.Tensor | None
    runs: tuple[Run, ...]
    slot_bytes: int
    apply: Callable[[torch.Tensor | None], None] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that travel each way."""
        return sum(run.num_bytes for run in self.runs)


@dataclass(frozen=True, slots=True)
class Creation:
    """Work on parameters whose state does not exist yet: the first update makes it.

    Attributes:
        apply: runs the update and returns the new tensors with their places on the host.
    """

    apply: Callable[[], list[Born]]


@dataclass(slots=True)
class Traffic:
    """What one run of the pipeline moved, in bytes."""

    h2d_bytes: int = 0
    d2h_bytes: int = 0
    staging_bytes: int = 0
    num_slots: int = 0


def ends_of(item: Update, run: Run, slot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two sides of a copy: in the slot and on the host; both uint8."""
    assert item.block is not None
    in_slot = slot[run.slot : run.slot + run.num_bytes]
    return in_slot, item.block[run.host : run.host + run.num_bytes]
