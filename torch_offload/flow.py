"""Chunks on their way through the slots of a pipeline: obeys a schedule that is still being made.

The waits of a slot's life (I1, I2, I3, I5, I6 of DESIGN.md) are here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from .schedule import Job, Op, Schedule
from .streams import Handoff, on
from .work import Traffic, Update

if TYPE_CHECKING:
    from .pipeline import Pipeline


class Flow:
    """Chunks on their way through slots, while it becomes known which of them can be updated.

    Args:
        pipeline: that of the device.
        compute: the stream on which updates run.
        slots: uint8 buffers, each large enough for whatever comes into it; changed in place.
        traffic: what was moved is added to it.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        compute: torch.Stream | None,
        slots: list[Handoff[torch.Tensor]],
        traffic: Traffic,
    ) -> None:
        self._pipeline = pipeline
        self._compute = compute
        self._slots = slots
        self._schedule = Schedule(len(slots))
        self._work: list[Update] = []
        self._traffic = traffic
        traffic.num_slots = max(traffic.num_slots, len(slots))
        staging_bytes = sum(slot.peek().numel() for slot in slots)
        traffic.staging_bytes = max(traffic.staging_bytes, staging_bytes)
        pipeline.copies_in_flight()
        Handoff(None, pipeline.streams.d2h).take(pipeline.streams.h2d)  # I11

    def expect(self, work: Sequence[Update]) -> int:
        """Say what will come next, in this order: it is copied in as far as there are slots.

        Returns:
            The number of the first one.
        """
        first = len(self._work)
        self._work += work
        numbers = range(first, len(self._work))
        self._issue(self._schedule.expect(n for n in numbers if self._work[n].block is not None))
        return first

    def update(
        self, number: int, apply: Callable[[torch.Tensor | None], None] | None = None
    ) -> None:
        """Update a chunk on the compute stream, and move it out.

        Args:
            number: which one, counted in the order of :meth:`expect`.
            apply: what updates it, where its work does not say.
        """
        if self._work[number].block is None:
            update = apply or self._work[number].apply
            assert update is not None
            with on(self._compute), self._pipeline.span("step"):
                update(None)
            return
        self._pipeline.copies_in_flight()
        self._issue(self._schedule.update(number), apply)

    def is_loaded(self, number: int) -> bool:
        """Whether a chunk was copied in and not updated yet."""
        return number in self._schedule.loaded

    def wait_for(self, stream: torch.Stream | None) -> None:
        """Let updates from here on see everything that was issued on ``stream``."""
        if stream != self._compute:
            Handoff(None, stream).take(self._compute)  # I2

    def run(self, work: Callable[[], object]) -> None:
        """Issue something else on the compute stream."""
        with on(self._compute):
            work()

    def updates_so_far(self) -> Handoff[None]:
        """Return what to take before the memory of parameters and gradients is used."""
        return Handoff(None, self._compute)

    def pause(self) -> None:
        """Note that nothing is issued for a while."""
        self._pipeline.copies_end_here()

    def give_back(self, owner: torch.Stream | None) -> None:
        """Let the stream on which the slots were allocated have them for something else. Slots that
        are kept need not be given back: who comes next waits for what is in them."""
        for slot in self._slots:
            slot.take(owner)  # I5
        self._pipeline.copies_end_here()

    def _issue(
        self, ops: Sequence[Op], apply: Callable[[torch.Tensor | None], None] | None = None
    ) -> None:
        streams = self._pipeline.streams
        for op in ops:
            item, slot = self._work[op.chunk], self._slots[op.slot]
            if op.job is Job.COPY_IN:
                buffer = slot.take(streams.h2d)  # I1 when it was emptied, I6 when it is new
                self._pipeline.copy_in(item, buffer)
                self._slots[op.slot] = Handoff(buffer, streams.h2d)
                self._traffic.h2d_bytes += item.num_bytes
            elif op.job is Job.UPDATE:
                update = apply or item.apply
                assert update is not None
                buffer = slot.take(self._compute)  # I2
                with on(self._compute), self._pipeline.span("step"):
                    update(buffer)
                self._slots[op.slot] = Handoff(buffer, self._compute)
            else:
                buffer = slot.take(streams.d2h)  # I3
                self._pipeline.copy_out(item, buffer)
                self._slots[op.slot] = Handoff(buffer, streams.d2h)
                self._traffic.d2h_bytes += item.num_bytes
