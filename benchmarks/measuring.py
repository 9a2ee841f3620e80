"""What the benchmarks measure with: an idle device, memory figures, the link, marks, a hash.

Vocabulary: a *mark* is a named point on the current stream; a *lap* is the time between two marks,
named after the one that ends it.
"""

from __future__ import annotations

import gc
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import torch
from torch import Tensor

from record import Record

COPY_BYTES = 256 * 2**20
_PIECE_BYTES = 64 * 2**20
_LINK = {"h2d": ("h2d",), "d2h": ("d2h",), "duplex": ("h2d", "d2h")}


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free(device: torch.device) -> None:
    """Give unused memory of the device and of the host back to the system."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()


def memory(device: torch.device) -> Record:
    """Return the device's memory figures, in bytes; all None without a GPU."""
    names = ("allocated", "reserved", "peak_allocated", "peak_reserved")
    if device.type != "cuda":
        return dict.fromkeys(f"{name}_bytes" for name in names)
    cuda = torch.cuda
    reads = (
        cuda.memory_allocated,
        cuda.memory_reserved,
        cuda.max_memory_allocated,
        cuda.max_memory_reserved,
    )
    return {f"{name}_bytes": read(device) for name, read in zip(names, reads, strict=True)}


def reset_peak(device: torch.device) -> None:
    """Begin a new measurement of peak memory."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def timed(device: torch.device, work: Callable[[], object]) -> float:
    """Return the seconds from an idle device to an idle device."""
    synchronize(device)
    began = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - began


def link_samples(
    device: torch.device,
    kinds: Sequence[str] = ("duplex",),
    repeats: int = 7,
    before: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Return bytes per second each way, in copies of 256 MiB of pinned memory.

    Each sample moves 4 GiB each way. Empty lists without a GPU.

    Args:
        device: where the copies go to and come from.
        kinds: "h2d" or "d2h" alone, "duplex" for both at once.
        repeats: samples of each kind.
        before: called before each sample and not timed, as a barrier is.
    """
    if device.type != "cuda":
        return {kind: [] for kind in kinds}
    num_pieces, num_rounds = 4, 4  # 1 GiB of host memory each way: no cache holds it
    host = {
        way: torch.empty(num_pieces, COPY_BYTES, dtype=torch.uint8, pin_memory=True)
        for way in _LINK["duplex"]
    }
    slot = {way: torch.empty(COPY_BYTES, dtype=torch.uint8, device=device) for way in host}
    streams = {way: torch.cuda.Stream(device) for way in host}

    def copies(ways: Sequence[str]) -> None:
        for piece in [*range(num_pieces)] * num_rounds:
            for way in ways:
                pair = (slot[way], host[way][piece])
                target, source = pair if way == "h2d" else reversed(pair)
                with torch.cuda.stream(streams[way]):
                    target.copy_(source, non_blocking=True)

    num_bytes = num_rounds * num_pieces * COPY_BYTES
    samples: dict[str, list[float]] = {}
    for kind in kinds:
        ways = _LINK[kind]
        copies(ways)  # warm up
        samples[kind] = []
        for _ in range(repeats):
            synchronize(device)
            before()
            samples[kind].append(num_bytes / timed(device, lambda ways=ways: copies(ways)))
    return samples


class Laps:
    """Marks on the current stream of one device. Without a GPU they are points of wall time.

    Making a mark does not wait for anything; reading the seconds waits for the last mark.
    """

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self._marks: list[tuple[str, torch.cuda.Event | float]] = []

    def mark(self, name: str) -> None:
        """End the lap ``name`` here."""
        if not self._gpu:
            self._marks.append((name, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((name, event))

    def wait(self) -> None:
        """Block the CPU until the last mark is reached."""
        _, last = self._marks[-1]
        if not isinstance(last, float):
            last.synchronize()

    def steps(self, end: str) -> list[list[tuple[str, float, float]]]:
        """Return name, start and end of the laps of each step, in seconds from the step's start.

        The first mark is where the first step starts.

        Args:
            end: the mark that ends a step.
        """
        self.wait()
        steps: list[list[tuple[str, float, float]]] = []
        laps: list[tuple[str, float, float]] = []
        _, start = self._marks[0]
        began = 0.0
        for name, at in self._marks[1:]:
            ended = _seconds(start, at)
            laps.append((name, began, ended))
            began = ended
            if name == end:
                steps.append(laps)
                laps, start, began = [], at, 0.0
        return steps


class Hash:
    """sha256 of tensors' bytes: of pieces of 64 MiB in several threads, then of the pieces' hashes.

    Keeps pinned buffers: one object is for all the measurements of a run.
    """

    def __init__(self, device: torch.device) -> None:
        self._num_threads = min(16, os.cpu_count() or 1)
        self._buffers: SimpleQueue[Tensor] = SimpleQueue()
        pin, num_bytes = device.type == "cuda", _PIECE_BYTES
        for _ in range(self._num_threads):
            self._buffers.put(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pin))

    def __call__(self, tensors: Iterable[Tensor]) -> str:
        """Return the hash in hex. Nothing may change the tensors meanwhile.

        Of a DTensor only what this process has counts.
        """
        pieces = [
            piece
            for tensor in tensors
            for piece in getattr(tensor.detach(), "to_local", tensor.detach)()
            .reshape(-1)
            .view(torch.uint8)
            .split(_PIECE_BYTES)
        ]
        with ThreadPoolExecutor(self._num_threads) as pool:
            return hashlib.sha256(b"".join(pool.map(self._piece, pieces))).hexdigest()

    def _piece(self, piece: Tensor) -> bytes:
        buffer = self._buffers.get()
        try:
            host = buffer[: piece.numel()]
            host.copy_(piece)
            return hashlib.sha256(host.numpy()).digest()
        finally:
            self._buffers.put(buffer)


def _seconds(start: torch.cuda.Event | float, end: torch.cuda.Event | float) -> float:
    if isinstance(start, float) or isinstance(end, float):
        return end - start
    return start.elapsed_time(end) / 1000.0
