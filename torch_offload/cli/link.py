"""Measures copies between host and GPUs: by direction and size, for one GPU and for all at once.

Vocabulary: a *way* is h2d, d2h or duplex (both at once). Every figure is bytes a second each way
and GPU. A CPU can stand in for a GPU: its copies are synchronous and say nothing of a link.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..host import HostStore
from ..streams import CopyStreams, on

WAYS = {"h2d": ("h2d",), "d2h": ("d2h",), "duplex": ("h2d", "d2h")}
SIZES = (1 * 2**20, 4 * 2**20, 16 * 2**20, 64 * 2**20, 256 * 2**20)
#: Host memory that copies go over, each way and GPU: no cache holds it.
SPAN_BYTES = 2**30
#: Copies of one sample, at least, and their bytes at most.
_NUM_COPIES, _SAMPLE_BYTES = 16, 4 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Copies of one size in one way. `bytes_per_s` has one figure for each repeat."""

    devices: tuple[int, ...]
    way: str
    copy_bytes: int
    bytes_per_s: tuple[float, ...]

    @property
    def median(self) -> float:
        """Bytes a second, each way and GPU."""
        return statistics.median(self.bytes_per_s)


class Link:
    """Buffers and streams of one device. Host memory is taken as it is for optimizer state: pinned,
    on the GPU's NUMA node.

    Args:
        device: a GPU, or the CPU.
        span_bytes: host memory for each direction.
        copy_bytes: the largest copy.
    """

    def __init__(self, device: torch.device, span_bytes: int, copy_bytes: int) -> None:
        self.device = device
        span = max(span_bytes // copy_bytes, 1) * copy_bytes
        store = HostStore(device, True, lambda: synchronize(device))
        self._blocks = store.allocate([span for _ in WAYS["duplex"]])
        self._host = {w: b.bytes for w, b in zip(WAYS["duplex"], self._blocks, strict=True)}
        self._slot = {
            way: torch.empty(copy_bytes, dtype=torch.uint8, device=device) for way in self._host
        }
        streams = CopyStreams.create(device)
        self._stream = {"h2d": streams.h2d, "d2h": streams.d2h}

    def issue(self, way: str, copy_bytes: int, number: int) -> None:
        """Issue one copy in each direction of ``way``, over the ``number``-th piece of the span."""
        for direction in WAYS[way]:
            host, slot = self._host[direction], self._slot[direction][:copy_bytes]
            start = number * copy_bytes % (host.numel() // copy_bytes * copy_bytes)
            piece = host[start : start + copy_bytes]
            with on(self._stream[direction]):
                if direction == "h2d":
                    slot.copy_(piece, non_blocking=True)
                else:
                    piece.copy_(slot, non_blocking=True)


def num_copies(copy_bytes: int) -> int:
    """Return how many copies make one sample."""
    return max(_NUM_COPIES, min(_SAMPLE_BYTES // copy_bytes, 256))


def measure(
    links: Sequence[Link], indices: Sequence[int], way: str, copy_bytes: int, repeats: int
) -> Sample:
    """Time copies on all these links at once."""
    count = num_copies(copy_bytes)

    def copies() -> None:
        for number in range(count):
            for link in links:
                link.issue(way, copy_bytes, number)

    copies()  # warm up
    speeds = tuple(count * copy_bytes / _timed(links, copies) for _ in range(repeats))
    return Sample(devices=tuple(indices), way=way, copy_bytes=copy_bytes, bytes_per_s=speeds)


def measure_all(
    devices: Sequence[torch.device],
    *,
    sizes: Sequence[int] = SIZES,
    repeats: int = 5,
    span_bytes: int = SPAN_BYTES,
    tick: Callable[[str], None] = lambda _: None,
) -> list[Sample]:
    """Measure every way and size on each device, then the largest size on all of them at once.

    Takes ``2 * span_bytes`` of pinned host memory for each device while it runs.

    Args:
        devices: in the order in which they are numbered.
        sizes: bytes of a copy.
        repeats: samples of each.
        span_bytes: as in :class:`Link`.
        tick: is told what begins; :func:`num_ticks` times.
    """
    samples = []
    links = [Link(device, span_bytes, max(sizes)) for device in devices]
    for index, link in enumerate(links):
        for way in WAYS:
            for size in sizes:
                tick(f"GPU {index}, {way}, {size // 2**20} MiB")
                samples.append(measure([link], [index], way, size, repeats))
    if len(links) > 1:
        for way in WAYS:
            tick(f"all GPUs, {way}")
            samples.append(measure(links, range(len(links)), way, max(sizes), repeats))
    return samples


def num_ticks(num_devices: int, sizes: Sequence[int] = SIZES) -> int:
    """Return how often :func:`measure_all` says that something begins."""
    return len(WAYS) * (num_devices * len(sizes) + (num_devices > 1))


def _timed(links: Sequence[Link], work: Callable[[], None]) -> float:
    for link in links:
        synchronize(link.device)
    began = time.perf_counter()
    work()
    for link in links:
        synchronize(link.device)
    return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
