"""How optimizer state is cut into chunks. Pure arithmetic: no CUDA, no tensors.

Vocabulary: a *shard* is the part of one parameter's state that is stepped at once (today always
the whole parameter), a *chunk* is consecutive shards whose state travels together and shares one
host block, a *run* is a contiguous range of bytes of a chunk that is copied by one call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch

#: Every state tensor starts at a multiple of this many bytes, so that any dtype can be viewed
#: there and vectorised kernels and DMA see aligned addresses.
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One state tensor of one parameter: its key in ``optimizer.state[p]`` and its geometry."""

    key: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements, without alignment."""
        return prod(self.shape) * self.dtype.itemsize

    def matches(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` can be copied here without losing anything."""
        return tuple(tensor.shape) == self.shape and tensor.dtype == self.dtype


@dataclass(frozen=True, slots=True)
class Shard:
    """Where one parameter's state lies in its chunk: byte offsets, relative to the chunk."""

    param: int
    start: int
    stop: int
    tensors: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive shards of one device whose state moves together. ``param`` counts from the
    first parameter that was given to :func:`plan_chunks`."""

    device: torch.device
    shards: tuple[Shard, ...]
    num_bytes: int


def align(num_bytes: int) -> int:
    """Round up to the next multiple of :data:`ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def plan_chunks(
    states: Sequence[tuple[torch.device, Sequence[TensorSpec]]], chunk_bytes: int
) -> tuple[Chunk, ...]:
    """Cut the state of consecutive parameters into chunks of at most ``chunk_bytes``.

    A chunk never mixes devices. A parameter whose state is larger than ``chunk_bytes`` becomes a
    chunk of its own. Every parameter is in exactly one chunk, in the order given.

    Args:
        states: per parameter the device that steps it and the state tensors that travel.
        chunk_bytes: upper bound of a chunk, in bytes.
    """
    chunks: list[Chunk] = []
    shards: list[Shard] = []
    used = 0

    def close() -> None:
        nonlocal used
        if shards:
            chunks.append(Chunk(states[shards[0].param][0], tuple(shards), used))
            shards.clear()
        used = 0

    for index, (device, tensors) in enumerate(states):
        size = sum(align(spec.num_bytes) for spec in tensors)
        if shards and (used + size > chunk_bytes or device != states[shards[0].param][0]):
            close()
        offsets = []
        offset = used
        for spec in tensors:
            offsets.append(offset)
            offset += align(spec.num_bytes)
        shards.append(Shard(index, used, offset, tuple(tensors), tuple(offsets)))
        used = offset
    close()
    return tuple(chunks)


def merge_runs(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Merge byte ranges, given in rising order, into the fewest contiguous runs.

    One copy is issued per run, so a chunk whose parameters all have gradients costs one copy in
    each direction. Empty ranges vanish.
    """
    runs: list[tuple[int, int]] = []
    for start, stop in ranges:
        if start == stop:
            continue
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], stop)
        else:
            runs.append((start, stop))
    return tuple(runs)
