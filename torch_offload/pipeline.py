"""The pipeline of one device: obeys a schedule of copies in, updates and copies out.

It holds no policy and knows no optimizer: it is given pieces of *work*, each with the host bytes of
one chunk and a function that updates the chunk once its state is on the device. The waits are the
invariants I1 to I6 of DESIGN.md; each is one ``take`` of a handoff.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from .flow import Flow
from .notices import Notices
from .recording import Timeline
from .schedule import Job, plan_schedule
from .streams import CopyStreams, Handoff, caller_stream, on
from .work import Born, Creation, Traffic, Update, ends_of


class Pipeline:
    """Streams chunks through at most ``num_slots`` device buffers.

    Args:
        device: where the parameters are.
        num_slots: chunks in flight; fewer once the device had no memory for as many slots.
        notices: told of that.
    """

    def __init__(self, device: torch.device, num_slots: int, notices: Notices) -> None:
        self.device = device
        self.num_slots = num_slots
        self.streams = CopyStreams.create(device)
        self._notices = notices
        # Without streams there is nothing that would wait for a copy.
        self._is_async = self.streams.d2h is not None
        self._written: Handoff[None] | None = None
        self._read: Handoff[None] | None = None
        self._updated: Handoff[None] | None = None
        #: Slots that stay allocated between steps.
        self._kept: list[Handoff[torch.Tensor]] = []
        #: Who wants to know when copies and updates run.
        self.timeline: Timeline | None = None
        #: Copies may be in flight that no handoff tells of: a run was interrupted, and so was its
        #: end.
        self._adrift = False

    def synchronize(self) -> None:
        """Block the CPU until every copy from and to the host has ended, and every update (I4)."""
        if self._adrift and self._is_async:
            torch.accelerator.synchronize(self.device)
        self._adrift = False
        if self._written is not None:
            self._written.take_on_cpu()  # I4
            self._written = None
        for last in (self._read, self._updated):
            if last is not None:
                last.take_on_cpu()
        self._read = self._updated = None

    def update(self, work: Sequence[Update], traffic: Traffic) -> None:
        """Copy in, update and copy out every chunk of ``work``. Returns before it is done.

        The slots are allocated here, on the caller's stream, and given back to it at the end, so
        that activations can use their memory between steps.

        Raises:
            torch.OutOfMemoryError: the device has no memory for even one slot. Nothing was changed.
        """
        if not work:
            return
        caller = caller_stream(self.device)
        kept = self._kept_for(work)
        slots = kept or [Handoff(buffer, caller) for buffer in self._allocate(_travelers(work))]
        flow = Flow(self, caller, slots, traffic)
        try:
            flow.expect(work)
            for number in range(len(work)):
                flow.update(number)
        finally:
            if kept:
                self.copies_end_here()
            else:
                flow.give_back(caller)

    def flow_beside(self, work: Sequence[Update], traffic: Traffic) -> Flow:
        """Begin to update these chunks, and others, on the side stream.

        The slots are kept from then on, so that the first chunks of a step can be copied in before
        it begins. Only one such flow may be in use at a time.

        Raises:
            torch.OutOfMemoryError: the device has no memory for even one slot. Nothing was changed.
        """
        kept = self._kept_for(work)
        if kept is None:
            self.give_up_slots()
            with on(self.streams.side):
                buffers = self._allocate(_travelers(work), alike=True)
            kept = self._kept = [Handoff(buffer, self.streams.side) for buffer in buffers]
        return Flow(self, self.streams.side, kept, traffic)

    def give_up_slots(self) -> None:
        """Free the slots that are kept."""
        for slot in self._kept:
            slot.take(self.streams.side)  # I5
        self._kept = []

    def _kept_for(self, work: Sequence[Update]) -> list[Handoff[torch.Tensor]] | None:
        """Return the slots that are kept, if they are large enough."""
        needed = max((item.slot_bytes for item in work), default=0)
        fits = self._kept and all(slot.peek().numel() >= needed for slot in self._kept)
        return self._kept if fits else None

    def create(self, work: Sequence[Creation], traffic: Traffic) -> None:
        """Update parameters that have no state yet and move the new state to the host.

        At most ``num_slots`` chunks of new state are on the device at a time: the tensors that the
        optimizer makes take the place of the slots.
        """
        if not work:
            return
        d2h = self.streams.d2h
        caller = caller_stream(self.device)
        num_slots = min(self.num_slots, len(work))
        traffic.num_slots = max(traffic.num_slots, num_slots)
        slots: list[Handoff[list[Born]] | None] = [None] * num_slots
        slot_bytes = [0] * num_slots
        self._adrift = True
        try:
            for op in plan_schedule(len(work), num_slots, copy_in=False):
                slot = slots[op.slot]
                if op.job is Job.UPDATE:
                    if slot is not None:
                        slot.take(caller)  # I5: the allocator may reuse this memory from here on
                    slots[op.slot] = slot = None
                    slot_bytes[op.slot] = 0
                    with self.span("step"):
                        born = work[op.chunk].apply()
                    slots[op.slot] = Handoff(born, caller)
                    slot_bytes[op.slot] = sum(tensor.nbytes for tensor, _ in born)
                    traffic.staging_bytes = max(traffic.staging_bytes, sum(slot_bytes))
                else:
                    assert slot is not None
                    born = slot.take(d2h)  # I3
                    self._copy_born(born)
                    slots[op.slot] = Handoff(born, d2h)
                    traffic.d2h_bytes += slot_bytes[op.slot]
                del born  # a reference here would keep its memory past its turn
        finally:
            for slot in slots:
                if slot is not None:
                    slot.take(caller)  # I5
            self.copies_end_here()

    def _allocate(self, work: Sequence[Update], alike: bool = False) -> list[torch.Tensor]:
        """Allocate the slots for ``work``; fewer where the device has no memory for all.

        One is enough: the copies then wait for each other, and the numbers are the same (I10).
        """
        if not work:
            return []
        asked = min(self.num_slots, len(work))
        for num_slots in sorted({asked, min(asked, 2), 1}, reverse=True):
            sizes = _slot_sizes(work, num_slots)
            if alike:  # nobody knows in which one a chunk will be
                sizes = [max(sizes)] * num_slots
            try:
                buffers = [allocate_slot(size, self.device) for size in sizes]
            except torch.OutOfMemoryError:
                if num_slots == 1:
                    raise
            else:
                if num_slots < asked:
                    self.num_slots = num_slots
                    self._notices.slots_reduced(
                        self.device, asked, sum(_slot_sizes(work, asked)), num_slots, sum(sizes)
                    )
                return buffers
            # Outside of the handler: its traceback may hold what was allocated.
            if self.device.type != "cpu":
                torch.accelerator.empty_cache()
        raise AssertionError("one slot fits or raises")

    def copies_in_flight(self) -> None:
        """Note that copies are being issued that no handoff tells of yet."""
        self._adrift = True

    def copies_end_here(self) -> None:
        """Note that the last copy so far is the last one issued on each stream."""
        self._written = Handoff(None, self.streams.d2h)
        self._read = Handoff(None, self.streams.h2d)
        self._updated = Handoff(None, self.streams.side)  # of what stays on the device
        self._adrift = False

    def span(self, lane: str) -> AbstractContextManager[None]:
        """Record what is issued on the current stream inside of a ``with``, if that is wanted."""
        return nullcontext() if self.timeline is None else self.timeline.span(lane, self.device)

    def copy_in(self, item: Update, buffer: torch.Tensor) -> None:
        """Issue the copies of a chunk's state into a slot."""
        with on(self.streams.h2d), self.span("h2d"):
            for run in item.runs:
                in_slot, on_host = ends_of(item, run, buffer)
                in_slot.copy_(on_host, non_blocking=self._is_async)

    def copy_out(self, item: Update, buffer: torch.Tensor) -> None:
        """Issue the copies of a chunk's state out of a slot."""
        with on(self.streams.d2h), self.span("d2h"):
            for run in item.runs:
                in_slot, on_host = ends_of(item, run, buffer)
                on_host.copy_(in_slot, non_blocking=self._is_async)

    def _copy_born(self, born: list[Born]) -> None:
        with on(self.streams.d2h), self.span("d2h"):
            for tensor, home in born:
                home.copy_(tensor, non_blocking=self._is_async)


def _travelers(work: Sequence[Update]) -> list[Update]:
    return [item for item in work if item.block is not None]


def _slot_sizes(work: Sequence[Update], num_slots: int) -> list[int]:
    """Each slot is as large as the largest chunk that it will hold, so that one parameter that is
    larger than a chunk costs its size once."""
    return [max(item.slot_bytes for item in work[i::num_slots]) for i in range(num_slots)]


def allocate_slot(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Allocate one slot on the current stream: uint8, not initialised."""
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)
