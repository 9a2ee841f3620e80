"""What is said once per optimizer, in one line, while training goes on.

It is logged and not warned: a run with ``-W error`` must not stop in the middle of a step because
of advice. Without any logging set up, Python prints the line to stderr.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from .distributed import local
from .layout import Layout
from .shard import Shard

LOGGER = logging.getLogger("torch_offload")
#: Types of devices whose memory is the host's.
_HOST_MEMORY = frozenset({"cpu", "mps"})


class Notices:
    """Says each thing once.

    Args:
        name: the optimizer's class, which each line starts with.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._said: set[str] = set()
        self._has_stepped = False

    def slots_reduced(
        self, device: torch.device, asked: int, asked_bytes: int, left: int, left_bytes: int
    ) -> None:
        """The slots did not fit into the device's memory, fewer did.

        Args:
            device: where.
            asked: slots that did not fit, of together ``asked_bytes``.
            asked_bytes: see ``asked``.
            left: slots that fit, of together ``left_bytes``.
            left_bytes: see ``left``.
        """
        self._once(
            "slots",
            f"{asked} slots ({asked_bytes:,} bytes) did not fit into the memory of {device}, so "
            f"this and later steps use {left} ({left_bytes:,} bytes). The numbers are the same, "
            "steps take longer. A smaller chunk_size needs less memory.",
        )

    def after_step(
        self, shards: Sequence[Shard], layout: Layout, staging_bytes: int, chunk_bytes: int
    ) -> None:
        """After the first step that updated something, say what its user may want to change.

        Args:
            shards: what it updated.
            layout: where state is.
            staging_bytes: most bytes of state that were on a device during the step.
            chunk_bytes: the bound of a chunk.
        """
        if self._has_stepped or not shards:
            return
        self._has_stepped = True
        state_bytes = sum(local(view).nbytes for home in layout for view in home.views.values())
        self.no_help({shard.param.device.type for shard in shards}, state_bytes, staging_bytes)
        whole = [layout.home(shard.param) for shard in shards if shard.part is None]
        sizes = [
            home.hosted.chunk.num_bytes
            for home in whole
            if home is not None
            and not home.is_resident
            and home.hosted.chunk.device.type not in _HOST_MEMORY
        ]
        self.large_chunks(max(sizes, default=0), chunk_bytes)

    def large_chunks(self, largest_bytes: int, chunk_bytes: int) -> None:
        """A parameter is updated as a whole, whatever ``chunk_size`` says.

        Args:
            largest_bytes: the largest chunk with one.
            chunk_bytes: the bound of a chunk.
        """
        if largest_bytes > chunk_bytes:
            self._once(
                "large chunks",
                f"the state of a parameter ({largest_bytes:,} bytes) is larger than chunk_size "
                f"({chunk_bytes:,} bytes) and can only be updated as a whole, because this "
                "optimizer's update is not element-wise or the parameter's memory cannot be cut. "
                "Each slot takes that much memory on the device.",
            )

    def kept(self, device: torch.device, num_bytes: int, free_bytes: int) -> None:
        """``gpu_budget="auto"`` has decided.

        Args:
            device: where.
            num_bytes: of state that stay there from now on.
            free_bytes: that the first steps left free, less a margin.
        """
        self._once(
            f"kept on {device}",
            f'{num_bytes:,} bytes of state stay on {device} (gpu_budget="auto"): the first steps '
            f"left {free_bytes:,} bytes free, a margin not counted.",
        )

    def chosen(self, overlap: str, reason: str) -> None:
        """``overlap="auto"`` has decided."""
        self._once("chosen", f'overlap="auto" goes on with {overlap!r}: {reason}.')

    def not_beside(self, overlap: str, reason: str) -> None:
        """A step is taken as a whole, though another overlap was asked for."""
        self._once(
            f"{overlap}: {reason}",
            f"overlap={overlap!r} has no effect: {reason}. The numbers are the same, and step() "
            "takes as long as the copies.",
        )

    def no_memory_ahead(self) -> None:
        """The device has no memory for the slots of the next step after one that is done."""
        self._once(
            "no memory ahead",
            "the device has no memory left for a slot after step(), so nothing is copied in before "
            "the next backward, which needs it. Set a smaller chunk_size or num_slots.",
        )

    def no_help(self, devices: set[str], state_bytes: int, staging_bytes: int) -> None:
        """Offload cannot help: told after the first step that updated something.

        Args:
            devices: types of the devices that the parameters are on.
            state_bytes: bytes of all state that travels.
            staging_bytes: most bytes of state that were on a device during the step.
        """
        if not state_bytes:
            return
        if devices <= _HOST_MEMORY:
            self._once(
                "no help",
                f"the parameters are on {' and '.join(sorted(devices))}, where their state "
                f"({state_bytes:,} bytes) is in host memory anyway: offload saves nothing. Move "
                "the model to another device before the first step, or train without offload.",
            )
        elif state_bytes <= staging_bytes:
            self._once(
                "no help",
                f"all of the state ({state_bytes:,} bytes) fits into the slots "
                f"({staging_bytes:,} bytes), so step() has it on the device at once and offload "
                "saves memory between steps only. Set a smaller chunk_size or num_slots, or train "
                "without offload.",
            )

    def _once(self, topic: str, text: str) -> None:
        if topic not in self._said:
            self._said.add(topic)
            LOGGER.warning("%s: %s", self._name, text)
