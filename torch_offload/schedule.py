"""The order in which copies and updates are issued, as values. Pure: no CUDA, no tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Job(Enum):
    """What one operation does with its chunk."""

    COPY_IN = "h2d"
    UPDATE = "update"
    COPY_OUT = "d2h"


@dataclass(frozen=True, slots=True)
class Op:
    """One job on one chunk, in one slot. ``chunk`` counts the chunks of this step."""

    job: Job
    chunk: int
    slot: int


class Schedule:
    """Tells what to issue next, while it becomes known which chunk can be updated.

    Chunks are copied in ahead, in the order in which they are expected, as far as there are slots;
    so while one is updated, others are copied in and out. Whatever order they then come in, each is
    updated at once; one that was expected before gives up its slot if another needs it, and is
    copied in again when its turn comes.

    Args:
        num_slots: device buffers; at least 1.
        copy_in: ``False`` for chunks whose state does not exist yet.
    """

    def __init__(self, num_slots: int, *, copy_in: bool = True) -> None:
        self._copy_in = copy_in
        self._free = deque(range(num_slots))
        #: Chunks that are expected and in no slot, in order.
        self._coming: deque[int] = deque()
        #: Chunk to slot, the first one expected first.
        self._loaded: dict[int, int] = {}

    @property
    def loaded(self) -> tuple[int, ...]:
        """The chunks that were copied in and not updated yet."""
        return tuple(self._loaded)

    def expect(self, chunks: Iterable[int]) -> list[Op]:
        """Append chunks to those that will come. Returns the copies in that can be issued."""
        self._coming.extend(chunks)
        return self._ahead()

    def update(self, chunk: int) -> list[Op]:
        """Return what to issue for a chunk that can be updated now, and what that makes room for.

        Args:
            chunk: one that was not updated yet, expected or not.
        """
        ops = []
        slot = self._loaded.pop(chunk, None)
        if slot is None:
            overtakes = chunk in self._coming
            if overtakes:
                self._coming.remove(chunk)
            slot = self._free.popleft() if self._free else self._evict(overtakes)
            if self._copy_in:
                ops.append(Op(Job.COPY_IN, chunk, slot))
        ops += [Op(Job.UPDATE, chunk, slot), Op(Job.COPY_OUT, chunk, slot)]
        self._free.append(slot)
        return ops + self._ahead()

    def _evict(self, are_late: bool) -> int:
        """Take the slot of a chunk that waits in it: of the first one if all are late, which may
        not come at all, else of the last one, which is copied in again as soon as there is room."""
        chunk = next(iter(self._loaded)) if are_late else next(reversed(self._loaded))
        if not are_late:
            self._coming.appendleft(chunk)
        return self._loaded.pop(chunk)

    def _ahead(self) -> list[Op]:
        ops = []
        while self._copy_in and self._free and self._coming:
            chunk, slot = self._coming.popleft(), self._free.popleft()
            self._loaded[chunk] = slot
            ops.append(Op(Job.COPY_IN, chunk, slot))
        return ops


def plan_schedule(num_chunks: int, num_slots: int, *, copy_in: bool = True) -> list[Op]:
    """Return the order of issue for a step over ``num_chunks`` chunks that can all be updated.

    Chunk *i* uses slot ``i % num_slots``.

    Args:
        num_chunks: chunks that take part in this step.
        num_slots: device buffers; at least 1.
        copy_in: ``False`` for chunks whose state does not exist yet.
    """
    schedule = Schedule(num_slots, copy_in=copy_in)
    ops = schedule.expect(range(num_chunks))
    for chunk in range(num_chunks):
        ops += schedule.update(chunk)
    return ops
