"""How optimizer state is cut into chunks. Pure arithmetic: no CUDA, no tensors.

Vocabulary: a *chunk* is the state of consecutive parameters that shares one host block, a *place*
is where one parameter's state lies in it, a *part* is what is updated at once of a parameter that
has more state than a chunk holds, a *run* is a contiguous range of bytes that one call copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import gcd, prod
from typing import Any

import torch

from .distributed import same_place

#: Every state tensor starts at a multiple of this many bytes, so that any dtype can be viewed
#: there and vectorised kernels and DMA see aligned addresses.
ALIGNMENT = 64
#: So that memory can be registered in parts, tensor by tensor, where a block is larger than the
#: driver takes at once: large tensors end at a multiple of the largest page size.
_LARGE_BYTES, _LARGE_ALIGNMENT = 2**30, 2**16
#: Parts of a parameter that were smaller would cost more calls than they save memory.
LEAST_PART_BYTES = 4096
#: Elements that torch's multi-tensor GPU kernels load at once, where a tensor allows it.
VECTOR = 4


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
class Part:
    """Part of a large parameter, contiguous in memory in each of its state tensors.

    Attributes:
        spans: (dimension, start, stop), the outermost in memory first. All but the last are one
            index long.
    """

    spans: tuple[tuple[int, int, int], ...]

    @property
    def is_first(self) -> bool:
        """Whether it starts where the parameter does."""
        return not any(start for _, start, _ in self.spans)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this part of ``tensor``, as a view."""
        for dim, start, stop in self.spans:
            tensor = tensor.narrow(dim, start, stop - start)
        return tensor

    def of_spec(self, spec: TensorSpec) -> TensorSpec:
        """Describe this part of a tensor."""
        shape = list(spec.shape)
        for dim, start, stop in self.spans:
            shape[dim] = stop - start
        return replace(spec, shape=tuple(shape))

    def offset(self, spec: TensorSpec) -> int:
        """Return its first byte, counted from the start of a tensor."""
        return sum(start * spec.stride[dim] for dim, start, _ in self.spans) * spec.dtype.itemsize


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

    def packed(self, part: Part) -> Place:
        """Return where the state of a part lies in a slot that holds nothing else."""
        return _place(self.param, 0, [part.of_spec(spec) for spec in self.tensors])

    def runs(self, part: Part | None) -> tuple[Run, ...]:
        """Return what travels when the parameter, or a part of it, is updated."""
        if part is None:
            return (Run(self.start, self.start, self.stop - self.start),)
        packed = self.packed(part)
        return tuple(
            Run(host + part.offset(spec), slot, own.num_bytes)
            for spec, own, host, slot in zip(
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
    """Round up to the next multiple of :data:`ALIGNMENT`, or of a page for large tensors."""
    alignment = _alignment(num_bytes)
    return -(-num_bytes // alignment) * alignment


def _alignment(num_bytes: int) -> int:
    return ALIGNMENT if num_bytes < _LARGE_BYTES else _LARGE_ALIGNMENT


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


def cut_parts(
    tensors: Sequence[TensorSpec], shape: tuple[int, ...], chunk_bytes: int
) -> tuple[Part, ...]:
    """Cut a parameter into parts of about the same size whose state is at most ``chunk_bytes``.

    They are rows along the dimension that is outermost in memory, or parts of one row where a row
    is larger than that, and so on. None is smaller than :data:`LEAST_PART_BYTES`.

    Args:
        tensors: its state.
        shape: its own.
        chunk_bytes: upper bound of a part's state, in bytes.

    Returns:
        Nothing where it fits, or where its state tensors do not lie alike and without gaps.
    """
    size = sum(align(spec.num_bytes) for spec in tensors)
    if size <= chunk_bytes or any(spec.shape != shape for spec in tensors):
        return ()
    orders = {_dense_order(spec) for spec in tensors}
    order = orders.pop()
    if not order or orders:
        return ()
    padding = len(tensors) * (_alignment(chunk_bytes) - 1)
    room = max(chunk_bytes - padding, LEAST_PART_BYTES)
    num_elements = room // sum(spec.dtype.itemsize for spec in tensors)
    parts = tuple(_parts(order, shape, max(num_elements, 1), ()))
    return parts if len(parts) > 1 else ()


def _parts(
    order: tuple[int, ...],
    shape: tuple[int, ...],
    num_elements: int,
    outer: tuple[tuple[int, int, int], ...],
) -> Iterator[Part]:
    dim, inner = order[0], order[1:]
    row = prod(shape[other] for other in inner)
    if inner and row > num_elements:
        for index in range(shape[dim]):
            yield from _parts(inner, shape, num_elements, (*outer, (dim, index, index + 1)))
        return
    step = VECTOR // gcd(row, VECTOR)  # rows that are whole vectors
    if step * row > num_elements:
        step = 1
    count = -(-shape[dim] // max(num_elements // row // step * step, 1))
    length = -(-shape[dim] // (count * step)) * step
    for start in range(0, shape[dim], length):
        yield Part((*outer, (dim, start, min(start + length, shape[dim]))))


def in_whole_vectors(parts: Iterable[Part], tensors: Sequence[TensorSpec]) -> bool:
    """Whether the parts, and the whole, are made of whole vectors.

    torch's fused GPU kernels take another path for a tensor that is not, or does not start at one,
    and round in another way there (Adam with weight decay).
    """
    return all(
        prod(spec.shape) % VECTOR == 0
        and (part.offset(spec) // spec.dtype.itemsize) % VECTOR == 0
        and prod(part.of_spec(spec).shape) % VECTOR == 0
        for spec in tensors
        for part in parts
    )


def _dense_order(spec: TensorSpec) -> tuple[int, ...]:
    """Return the dimensions longer than 1, the outermost in memory first; none where a tensor has
    gaps."""
    long = [dim for dim, length in enumerate(spec.shape) if length > 1]
    long.sort(key=lambda dim: spec.stride[dim], reverse=True)
    expected = 1
    for dim in reversed(long):
        if spec.stride[dim] != expected:
            return ()
        expected *= spec.shape[dim]
    return tuple(long)


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


def split_runs(runs: Iterable[Run], seams: Sequence[int]) -> tuple[Run, ...]:
    """Split runs at offsets in the host block that no copy may cross."""
    split: list[Run] = []
    for run in runs:
        stop = run.host + run.num_bytes
        edges = [run.host, *(seam for seam in seams if run.host < seam < stop), stop]
        split += [Run(a, run.slot + a - run.host, b - a) for a, b in pairwise(edges)]
    return tuple(split)
