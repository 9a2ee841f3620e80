"""HostStore: the host memory that owns the state between steps, in blocks of exact size.

Vocabulary: a *block* holds one chunk, a *piece* is one anonymous mapping and one registration with
the driver that holds one or several whole blocks, so that a copy never crosses two registrations.

``torch.empty(pin_memory=True)`` rounds sizes up to powers of two and faults its pages in on one
thread. Here pages are touched by several threads, in huge pages where the system gives them, and
registered afterwards; figures in DESIGN.md.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from .chunk import TensorSpec
from .memory import available_host_bytes

#: Blocks are gathered into pieces of about this size; a larger block is a piece of its own.
PIECE_BYTES = 256 * 2**20
#: Drivers refuse registrations of 512 GiB and more (r580); pieces stay far below.
MAX_PIECE_BYTES = 64 * 2**30
#: Python's default is shared memory: a forked child would write into its parent's state, and the
#: system gives no huge pages.
_PRIVATE: dict[str, int] = (
    {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
)
#: As many as the machine had on which the set-up was measured.
MAX_THREADS = 16


class _Piece:
    """One mapping. Its memory lives as long as a tensor in it, its registration as long as this."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        try:
            self.memory = mmap.mmap(-1, num_bytes, **_PRIVATE)
        except OSError as error:  # a limit of this process, which no file tells beforehand
            raise MemoryError(
                f"optimizer state needs {num_bytes:,} bytes more of host memory and the system "
                f"refused them: {error}. Raise the limit of address space (ulimit -v)."
            ) from error
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.pinned = False
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                self.memory.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # a kernel without huge pages: small ones hold the same bytes

    def touch(self, start: int, stop: int) -> None:
        ctypes.memset(self.address + start, 0, stop - start)

    def register(self, device: torch.device, before_release: Callable[[], None]) -> str | None:
        """Page-lock the piece. Returns the driver's reason when it refuses."""
        if device.type != "cuda":
            return f"{device.type} has no call that registers host memory"
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with torch.cuda.device(device):  # a new thread would open a context on GPU 0
            portable = 1
            code = int(cudart.cudaHostRegister(self.address, self.num_bytes, portable))
        if code:
            return str(cudart.cudaGetErrorString(cudart.cudaError(code)))
        finalizer = weakref.finalize(
            self, _unregister, self.memory, self.address, device, before_release
        )
        finalizer.atexit = False  # the end of the process gives everything back
        self.pinned = True
        if hasattr(mmap, "MADV_DONTFORK"):
            # After a fork, pages that either side writes are copied, and ours are written always.
            self.memory.madvise(mmap.MADV_DONTFORK)
        return None


def _unregister(
    memory: mmap.mmap, address: int, device: torch.device, before_release: Callable[[], None]
) -> None:
    before_release()  # the driver may still be writing here
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
    if hasattr(mmap, "MADV_DOFORK"):
        memory.madvise(mmap.MADV_DOFORK)  # tensors that outlive us are ordinary memory again


@dataclass(frozen=True, slots=True)
class Block:
    """The host bytes of one chunk.

    Attributes:
        piece: what it lies in; ``None`` for no bytes.
        bytes: all of them, uint8, for copies of runs.
    """

    piece: _Piece | None = field(repr=False)
    offset: int
    bytes: torch.Tensor = field(repr=False)

    @property
    def address(self) -> int:
        """Where the first byte is in the process's memory."""
        return 0 if self.piece is None else self.piece.address + self.offset

    def tensor(self, spec: TensorSpec, offset: int) -> torch.Tensor:
        """Return a CPU tensor over part of the block, with a storage of exactly its own bytes.

        ``torch.save`` writes whole storages, so views of one arena would each write the arena.

        Args:
            spec: shape, strides and dtype.
            offset: first byte, counted from the start of the block.
        """
        if self.piece is None or spec.num_bytes == 0:
            return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="cpu")
        flat = torch.frombuffer(
            self.piece.memory,
            dtype=spec.dtype,
            count=spec.num_bytes // spec.dtype.itemsize,
            offset=self.offset + offset,
        )
        return flat.as_strided(spec.shape, spec.stride)


class HostStore:
    """Allocates blocks of host memory for one device, page-locked where possible.

    Args:
        device: the device that copies from and to the blocks.
        pin_memory: page-lock the memory. Without a device that can, it stays pageable.
        before_release: called before memory is unlocked; must block until no copy uses it.
    """

    def __init__(
        self, device: torch.device, pin_memory: bool, before_release: Callable[[], None]
    ) -> None:
        self.device = device
        self.setup_s = 0.0
        self._pin = pin_memory and device.type != "cpu"
        self._before_release = before_release
        self._pieces: weakref.WeakSet[_Piece] = weakref.WeakSet()

    @property
    def num_bytes(self) -> int:
        """Bytes of all living blocks, page rounding included."""
        return sum(_page_round(piece.num_bytes) for piece in self._pieces)

    @property
    def pinned_bytes(self) -> int:
        """How many of them are page-locked."""
        return sum(_page_round(piece.num_bytes) for piece in self._pieces if piece.pinned)

    def allocate(self, sizes: Sequence[int]) -> list[Block]:
        """Allocate one block per size, zeroed. Memory is given back when the last block dies.

        Args:
            sizes: bytes of each block, each a multiple of the alignment of chunks.

        Raises:
            MemoryError: the host has less memory than needed. Nothing was allocated.
        """
        started = time.perf_counter()
        plan = _plan_pieces(sizes)
        needed = sum(_page_round(size) for size, _ in plan)
        available = available_host_bytes()
        if available is not None and needed > available:
            raise MemoryError(
                f"optimizer state needs {needed:,} bytes of host memory, {available:,} bytes are "
                "available (cgroup limit included). Give the job more memory, or offload fewer "
                "parameters."
            )
        pieces = [_Piece(size) if size else None for size, _ in plan]
        mapped = [piece for piece in pieces if piece is not None]
        self._prepare(mapped)
        self._pieces.update(mapped)
        blocks: list[Block] = []
        for piece, (_, members) in zip(pieces, plan, strict=True):
            offset = 0
            for size in members:
                flat = (
                    torch.frombuffer(piece.memory, dtype=torch.uint8, count=size, offset=offset)
                    if piece is not None and size
                    else torch.empty(0, dtype=torch.uint8, device="cpu")
                )
                blocks.append(Block(piece, offset, flat))
                offset += size
        self.setup_s += time.perf_counter() - started
        return blocks

    def _prepare(self, pieces: Sequence[_Piece]) -> None:
        threads = min(MAX_THREADS, _num_cpus())
        # The largest spans that still give every thread one.
        span = max(64 * 2**20, sum(piece.num_bytes for piece in pieces) // threads)
        with ThreadPoolExecutor(threads, thread_name_prefix="torch_offload_host") as pool:
            touched = [
                pool.submit(piece.touch, start, min(start + span, piece.num_bytes))
                for piece in pieces
                for start in range(0, piece.num_bytes, span)
            ]
            for task in touched:
                task.result()
            if not self._pin:
                return
            refusals = list(
                pool.map(lambda piece: piece.register(self.device, self._before_release), pieces)
            )
        reasons = sorted({reason for reason in refusals if reason is not None})
        if reasons:
            refused = sum(piece.num_bytes for piece in pieces if not piece.pinned)
            warnings.warn(
                f"host memory for optimizer state could not be pinned ({refused:,} bytes: "
                f"{'; '.join(reasons)}). It stays pageable: the numbers are the same, copies are "
                "slower. Raise the limit for locked memory (ulimit -l), or set pin_memory=False "
                "to silence this.",
                stacklevel=2,
            )


def _plan_pieces(sizes: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Gather consecutive blocks into pieces: (bytes of the piece, bytes of its blocks)."""
    pieces: list[tuple[int, list[int]]] = []
    members: list[int] = []
    total = 0
    for size in sizes:
        if size > MAX_PIECE_BYTES:
            raise MemoryError(
                f"one chunk of {size:,} bytes is larger than one registration of host memory "
                f"may be ({MAX_PIECE_BYTES:,} bytes). Use a smaller chunk_size."
            )
        if members and total + size > PIECE_BYTES:
            pieces.append((total, members))
            members, total = [], 0
        members.append(size)
        total += size
    if members:
        pieces.append((total, members))
    return pieces


def _page_round(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _num_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
