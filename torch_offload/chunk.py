"""How optimizer state is cut into chunks. Pure arithmetic: no CUDA, no tensors.

Vocabulary: a *chunk* is the state of consecutive parameters that shares one host block, a *place*
is where one parameter's state lies in it, *rows* are the part of a large parameter that is updated
at once, a *run* is a contiguous range of bytes that is copied by one call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

import torch

from .distributed import same_place

#: Every state tensor starts at a multiple of this many bytes, so that any dtype can be viewed
#: there and vectorised kernels and DMA see aligned addresses.
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One state tensor of one parameter: its key in ``optimizer.state[p]`` and its geometry.

    Of a DTensor it describes the local tensor, and ``wrapping`` the rest.
    """

    key: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    wrapping: Any = None

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements, without alignment."""
        return prod(self.shape) * self.dtype.itemsize

    def same_kind(self, other: TensorSpec) -> bool:
        """Whether a tensor like ``other`` can be copied to one like this without loss."""
        return (
            other.shape == self.shape
            and other.dtype == self.dtype
            and same_place(other.wrapping, self.wrapping)
        )


@dataclass(frozen=True, slots=True)
class Rows:
    """Part of a large parameter: from ``start`` to ``stop`` along ``dim``. That is the outermost in
    memory, so each of its state tensors has them in one contiguous range of bytes."""

    dim: int
    start: int
    stop: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return these rows of ``tensor``, as a view."""
        return tensor.narrow(self.dim, self.start, self.stop - self.start)

    def of_spec(self, spec: TensorSpec) -> TensorSpec:
        """Describe these rows of a tensor."""
        shape = list(spec.shape)
        shape[self.dim] = self.stop - self.start
        return replace(spec, shape=tuple(shape))


@dataclass(frozen=True, slots=True)
class Run:
    """Contiguous bytes that travel: offsets in the host block and in the slot, and their number."""

    host: int
    slot: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where one parameter's state lies in its chunk: byte offsets, relative to the chunk.

    ``param`` counts from the first parameter that was given to :func:`plan_chunks`.
    """

    param: int
    start: int
    stop: int
    tensors: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]

    def packed(self, rows: Rows) -> Place:
        """Return where the state of some rows lies in a slot that holds nothing else."""
        return _place(self.param, 0, [rows.of_spec(spec) for spec in self.tensors])

    def runs(self, rows: Rows | None) -> tuple[Run, ...]:
        """Return what travels when the parameter, or some rows of it, is updated."""
        if rows is None:
            return (Run(self.start, self.start, self.stop - self.start),)
        packed = self.packed(rows)
        return tuple(
            Run(host + rows.start * spec.num_bytes // spec.shape[rows.dim], slot, part.num_bytes)
            for spec, part, host, slot in zip(
                self.tensors, packed.tensors, self.offsets, packed.offsets, strict=True
            )
        )


@dataclass(frozen=True, slots=True)
class Chunk:
    """The state of consecutive parameters of one device, which shares one host block."""

    device: torch.device
    places: tuple[Place, ...]
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
    places: list[Place] = []

    def close() -> None:
        if places:
            chunks.append(Chunk(states[places[0].param][0], tuple(places), places[-1].stop))
            places.clear()

    for index, (device, tensors) in enumerate(states):
        size = sum(align(spec.num_bytes) for spec in tensors)
        if places and (
            places[-1].stop + size > chunk_bytes or device != states[places[0].param][0]
        ):
            close()
        places.append(_place(index, places[-1].stop if places else 0, tensors))
    close()
    return tuple(chunks)


def cut_rows(
    tensors: Sequence[TensorSpec], shape: tuple[int, ...], chunk_bytes: int
) -> tuple[Rows, ...]:
    """Cut a parameter into parts of about the same size whose state is at most ``chunk_bytes``.

    One row is the least: a parameter with longer rows has larger parts.

    Args:
        tensors: its state.
        shape: its own.
        chunk_bytes: upper bound of a part's state, in bytes.

    Returns:
        Nothing where it fits, or where rows of its state are no contiguous bytes.
    """
    size = sum(align(spec.num_bytes) for spec in tensors)
    if size <= chunk_bytes or any(spec.shape != shape for spec in tensors):
        return ()
    outermost = {_outermost(spec) for spec in tensors}
    dim = outermost.pop()
    if dim is None or outermost:
        return ()
    row_bytes = sum(spec.num_bytes for spec in tensors) // shape[dim]
    room = chunk_bytes - len(tensors) * (ALIGNMENT - 1)
    most = max(room // row_bytes, 1)
    count = -(-shape[dim] // most)
    edges = [shape[dim] * index // count for index in range(count + 1)]
    return tuple(Rows(dim, start, stop) for start, stop in pairwise(edges))


def _outermost(spec: TensorSpec) -> int | None:
    """Return the dimension along which a dense tensor can be cut into contiguous parts."""
    long = [dim for dim, length in enumerate(spec.shape) if length > 1]
    if not long:
        return None
    dim = max(long, key=lambda dim: spec.stride[dim])
    return dim if spec.stride[dim] * spec.shape[dim] == prod(spec.shape) else None


def _place(param: int, start: int, tensors: Sequence[TensorSpec]) -> Place:
    offsets = []
    offset = start
    for spec in tensors:
        offsets.append(offset)
        offset += align(spec.num_bytes)
    return Place(param, start, offset, tuple(tensors), tuple(offsets))


def merge_runs(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Merge runs, given in rising order, into the fewest.

    One copy is issued per run, so a chunk whose parameters all have gradients costs one copy in
    each direction. Empty runs vanish.
    """
    merged: list[Run] = []
    for run in runs:
        if not run.num_bytes:
            continue
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.host + last.num_bytes == run.host
            and last.slot + last.num_bytes == run.slot
        ):
            merged[-1] = replace(last, num_bytes=last.num_bytes + run.num_bytes)
        else:
            merged.append(run)
    return tuple(merged)
