"""The order in which copies and updates are issued, as a value. Pure: no CUDA, no tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache


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


@lru_cache(maxsize=64)
def plan_schedule(num_chunks: int, num_slots: int, *, copy_in: bool = True) -> tuple[Op, ...]:
    """Return the order of issue for a step over ``num_chunks`` chunks.

    Chunk *i* uses slot ``i % num_slots``. Copies in run ``num_slots - 1`` chunks ahead of the
    update, so that while one chunk is updated another one is copied in and a third one out.

    Args:
        num_chunks: chunks that take part in this step.
        num_slots: device buffers; at least 1.
        copy_in: ``False`` for chunks whose state does not exist yet.
    """
    return tuple(_ops(num_chunks, num_slots, copy_in))


def _ops(num_chunks: int, num_slots: int, copy_in: bool) -> Iterator[Op]:
    ahead = max(num_slots - 1, 0)
    if copy_in:
        for chunk in range(min(ahead, num_chunks)):
            yield Op(Job.COPY_IN, chunk, chunk % num_slots)
    for chunk in range(num_chunks):
        if copy_in and chunk + ahead < num_chunks:
            coming = chunk + ahead
            yield Op(Job.COPY_IN, coming, coming % num_slots)
        yield Op(Job.UPDATE, chunk, chunk % num_slots)
        yield Op(Job.COPY_OUT, chunk, chunk % num_slots)
