"""HostStore: the host memory that owns the state between steps, in blocks of exact size.

Vocabulary: a *block* holds one chunk, a *piece* is one anonymous mapping that holds one or several
whole blocks. It is registered with the driver at once, or in parts where it is too large for that:
no copy may cross a *seam*, which is where two registrations meet.

``torch.empty(pin_memory=True)`` rounds sizes up to powers of two and faults its pages in on one
thread. Here pages are touched by several threads, in huge pages where the system gives them, and
registered afterwards; figures in DESIGN.md.
"""

from __future__ import annotations

import ctypes
import itertools
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
from .forks import keep_in_children
from .memory import available_host_bytes
from .numa import node_of, prefer
from .ranks import num_local_ranks, take_in_turn

#: Blocks are gathered into pieces of about this size; a larger block is a piece of its own.
PIECE_BYTES = 256 * 2**20
#: Drivers refuse registrations of 512 GiB and more (r580); ours stay far below, unless one state
#: tensor is larger than this.
MAX_REGISTRATION_BYTES = 64 * 2**30
#: Python's default is shared memory: a forked child would write into its parent's state, and the
#: system gives no huge pages.
_PRIVATE: dict[str, int] = (
    {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
)
#: As many as the machine had on which the set-up was measured.
MAX_THREADS = 16


class _Piece:
    """One mapping. Its memory lives as long as a tensor in it, its registration as long as this.

    Args:
        num_bytes: its size, not 0.
        seams: where two registrations of it meet, multiples of the page size.
        node: the NUMA node that its pages should lie on.
    """

    def __init__(self, num_bytes: int, seams: Sequence[int] = (), node: int | None = None) -> None:
        self.num_bytes = num_bytes
        self.seams = tuple(seams)
        try:
            self.memory = mmap.mmap(-1, num_bytes, **_PRIVATE)
        except OSError as error:  # a limit of this process, which no file tells beforehand
            raise MemoryError(
                f"optimizer state needs {num_bytes:,} bytes more of host memory and the system "
                f"refused them: {error}. Raise the limit of address space (ulimit -v)."
            ) from error
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.pinned_bytes = 0
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                self.memory.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # a kernel without huge pages: small ones hold the same bytes
        if node is not None:
            prefer(self.address, num_bytes, node)

    def touch(self, start: int, stop: int) -> None:
        ctypes.memset(self.address + start, 0, stop - start)

    def register(self, device: torch.device, before_release: Callable[[], None]) -> str | None:
        """Page-lock the piece. Returns the driver's reason where it refuses some of it."""
        if device.type != "cuda":
            return f"{device.type} has no call that registers host memory"
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        portable = 1
        locked: list[tuple[int, int]] = []
        reason = None
        with torch.cuda.device(device):  # a new thread would open a context on GPU 0
            for start, stop in itertools.pairwise((0, *self.seams, self.num_bytes)):
                code = int(cudart.cudaHostRegister(self.address + start, stop - start, portable))
                if code:
                    reason = str(cudart.cudaGetErrorString(cudart.cudaError(code)))
                else:
                    locked.append((start, stop))
        if locked:
            self._hold(locked, device, before_release)
        return reason

    def _hold(
        self,
        locked: list[tuple[int, int]],
        device: torch.device,
        before_release: Callable[[], None],
    ) -> None:
        keep_in_children(self)
        finalizer = weakref.finalize(
            self, _unregister, self.memory, self.address, locked, device, before_release
        )
        finalizer.atexit = False  # the end of the process gives everything back
        self.pinned_bytes = sum(_page_round(stop - start) for start, stop in locked)
        if hasattr(mmap, "MADV_DONTFORK"):
            # After a fork, pages that either side writes are copied, and ours are written always.
            for start, stop in locked:
                self.memory.madvise(mmap.MADV_DONTFORK, start, stop - start)


def _unregister(
    memory: mmap.mmap,
    address: int,
    locked: list[tuple[int, int]],
    device: torch.device,
    before_release: Callable[[], None],
) -> None:
    before_release()  # the driver may still be writing here
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        for start, stop in locked:
            cudart.cudaHostUnregister(address + start)
            if hasattr(mmap, "MADV_DOFORK"):
                # Tensors that outlive us are ordinary memory again.
                memory.madvise(mmap.MADV_DOFORK, start, stop - start)


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
    def num_bytes(self) -> int:
        """Its size."""
        return self.bytes.numel()

    @property
    def address(self) -> int:
        """Where the first byte is in the process's memory."""
        return 0 if self.piece is None else self.piece.address + self.offset

    @property
    def seams(self) -> tuple[int, ...]:
        """Where a copy must end and another one begin: bytes from the start of the block, rising.

        Empty unless the block is larger than one registration may be.
        """
        return () if self.piece is None else self.piece.seams  # such a block is alone in its piece

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
        self._warned = False
        self._pieces: weakref.WeakSet[_Piece] = weakref.WeakSet()

    @property
    def num_bytes(self) -> int:
        """Bytes of all living blocks, page rounding included."""
        return sum(_page_round(piece.num_bytes) for piece in self._pieces)

    @property
    def pinned_bytes(self) -> int:
        """How many of them are page-locked."""
        return sum(piece.pinned_bytes for piece in self._pieces)

    def allocate(
        self, sizes: Sequence[int], borders: Sequence[Sequence[int]] | None = None
    ) -> list[Block]:
        """Allocate one block per size, zeroed. Memory is given back when the last block dies.

        Waits while another process of this node takes memory and there may not be enough for both.

        Args:
            sizes: bytes of each block, each a multiple of the alignment of chunks.
            borders: per block the offsets, rising, at which it may be registered in parts if it
                is larger than one registration should be; multiples of the page size count.

        Raises:
            MemoryError: the host has less memory than needed. Nothing was allocated.
        """
        started = time.perf_counter()
        plan = _plan_pieces(sizes)
        needed = sum(_page_round(size) for size, _, _ in plan)
        node = node_of(self.device)

        def take(available: int | None) -> list[_Piece | None]:
            if available is not None and needed > available:
                raise MemoryError(_too_large(needed, available, num_local_ranks()))
            pieces = [
                _Piece(size, _plan_seams(size, borders[first] if borders else ()), node)
                if size
                else None
                for size, first, _ in plan
            ]
            _touch([piece for piece in pieces if piece is not None])
            return pieces

        pieces = take_in_turn(needed, available_host_bytes, take)
        mapped = [piece for piece in pieces if piece is not None]
        if self._pin:
            self._register(mapped)
        self._pieces.update(mapped)
        blocks: list[Block] = []
        for piece, (_, _, members) in zip(pieces, plan, strict=True):
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

    def _register(self, pieces: Sequence[_Piece]) -> None:
        with _threads() as pool:
            refusals = list(
                pool.map(lambda piece: piece.register(self.device, self._before_release), pieces)
            )
        reasons = sorted({reason for reason in refusals if reason is not None})
        if reasons and not self._warned:
            self._warned = True
            refused = sum(_page_round(piece.num_bytes) - piece.pinned_bytes for piece in pieces)
            warnings.warn(
                f"host memory for optimizer state could not be pinned ({refused:,} bytes: "
                f"{'; '.join(reasons)}). It stays pageable: the numbers are the same, copies are "
                "slower. Raise the limit for locked memory (ulimit -l), or set pin_memory=False "
                "to silence this.",
                stacklevel=2,
            )


def _touch(pieces: Sequence[_Piece]) -> None:
    """Take the pages of new mappings from the system, in several threads."""
    # The largest spans that still give every thread one.
    span = max(64 * 2**20, sum(piece.num_bytes for piece in pieces) // _num_threads())
    parts = [
        (piece, start, min(start + span, piece.num_bytes))
        for piece in pieces
        for start in range(0, piece.num_bytes, span)
    ]
    with _threads() as pool:
        list(pool.map(lambda part: part[0].touch(part[1], part[2]), parts))


def _too_large(needed: int, available: int, ranks: int) -> str:
    shared, fewer = "", ""
    if ranks > 1:
        shared = (
            f", shared by the {ranks} ranks of this node ({needed * ranks:,} bytes if each of them "
            "needs as much)"
        )
        fewer = "run fewer ranks on a node, "
    return (
        f"optimizer state needs {needed:,} bytes of host memory, {available:,} bytes are available "
        f"(cgroup limit included){shared}. Give the job more memory, {fewer}or offload fewer "
        "parameters."
    )


def _plan_pieces(sizes: Sequence[int]) -> list[tuple[int, int, list[int]]]:
    """Gather consecutive blocks into pieces: bytes of the piece, first block, bytes of each."""
    pieces: list[tuple[int, int, list[int]]] = []
    members: list[int] = []
    total = 0
    for index, size in enumerate(sizes):
        if members and total + size > PIECE_BYTES:
            pieces.append((total, index - len(members), members))
            members, total = [], 0
        members.append(size)
        total += size
    if members:
        pieces.append((total, len(sizes) - len(members), members))
    return pieces


def _plan_seams(num_bytes: int, borders: Sequence[int]) -> list[int]:
    """Choose the fewest borders between which no registration is too large, as far as they allow.

    Never elsewhere: a copy of whatever lies between two borders must not fail.
    """
    allowed = [b for b in borders if 0 < b < num_bytes and b % mmap.PAGESIZE == 0]
    seams: list[int] = []
    start = 0
    for border, following in itertools.pairwise([*allowed, num_bytes]):
        if following - start > MAX_REGISTRATION_BYTES:
            seams.append(border)
            start = border
    return seams


def _page_round(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_num_threads(), thread_name_prefix="torch_offload_host")


def _num_threads() -> int:
    if hasattr(os, "sched_getaffinity"):
        return min(MAX_THREADS, len(os.sched_getaffinity(0)))
    return min(MAX_THREADS, os.cpu_count() or 1)
