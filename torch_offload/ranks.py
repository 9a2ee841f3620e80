"""The ranks of one node take host memory in turn, since each of them sees the same free bytes.

Vocabulary: a *turn* lasts from the look at the free bytes until the pages are touched, so that the
next one finds them taken.

Why not ``needed * ranks <= free``: a rank that comes late would count what the others have taken
twice, and so would a second optimizer or a checkpoint that one rank loads first; and where one rank
of four offloads, three would be counted that take nothing. Under a lock the free bytes are true for
whoever holds it: nothing is refused that fits, whoever comes when, and nobody takes what is not
there. The number of ranks only tells whether there is room for all at once: then they need not wait
for each other.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

T = TypeVar("T")

#: Where launchers say how many ranks they started on this node.
_VARIABLES = (
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_NTASKS_PER_NODE",
)
#: More than one node runs, where nobody says how many. Too many costs nothing but a wait.
_MANY = 16
#: Whoever waits longer than any memory takes to be touched goes on without the lock.
_PATIENCE_S = 60.0
_PAUSE_S = 0.01


def num_local_ranks(environ: Mapping[str, str] = os.environ) -> int:
    """Return how many ranks the launcher started on this node; 1 where it did not say."""
    for name in _VARIABLES:
        text = environ.get(name, "")
        if text.isdecimal() and int(text) > 0:
            return int(text)
    return 1


def take_in_turn(
    needed: int,
    available: Callable[[], int | None],
    take: Callable[[int | None], T],
    folder: Path | None = None,
) -> T:
    """Call ``take`` with the bytes of host memory that are free while no other rank takes them.

    Args:
        needed: bytes that it wants to take and touch.
        available: tells the free bytes of the node; ``None`` where they are unknown.
        take: takes them, or raises.
        folder: where the lock is; for tests.

    Returns:
        What ``take`` returns.
    """
    lock = _open(folder)
    # Twice, for an interruption may come in a ``finally``, too: the lock of a rank that goes on
    # after Ctrl-C, with the traceback kept somewhere, would stop all the others. Closing the file
    # would not do: a process that was forked meanwhile has it, too.
    try:
        try:
            # Together while there is room for all of them, and alone where there may not be.
            _wait(lock, shared=True)
            free = available()
            ranks = num_local_ranks()
            if free is not None and needed * (ranks if ranks > 1 else _MANY) > free:
                _wait(lock, shared=False)
                free = available()
                if free is not None and needed > free:
                    gc.collect()  # an optimizer that died as part of a framework's cycle
                    free = available()
            return take(free)
        finally:
            _unlock(lock)
    finally:
        _unlock(lock)


class _Lock:
    """An open file, closed when nobody holds this."""

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self.file = os.open(path, flags, 0o600)
        weakref.finalize(self, os.close, self.file)


def _open(folder: Path | None) -> _Lock | None:
    """Open this user's lock on this machine; ``None`` where there can be none."""
    if fcntl is None:
        return None
    shared_memory = Path("/dev/shm")  # on no network, and the same one for every rank
    try:
        if folder is None:
            folder = shared_memory if shared_memory.is_dir() else Path(tempfile.gettempdir())
        return _Lock(folder / f"torch_offload-{os.getuid()}.lock")
    except OSError:
        return None


def _wait(lock: _Lock | None, *, shared: bool) -> None:
    """Take the lock, or change the one that is held; never waits while holding it."""
    if lock is None:
        return
    how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    until = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until:
        try:
            fcntl.flock(lock.file, how | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            _unlock(lock)
            time.sleep(_PAUSE_S)
        except OSError:  # a file system without locks
            return


def _unlock(lock: _Lock | None) -> None:
    if lock is None:
        return
    try:
        fcntl.flock(lock.file, fcntl.LOCK_UN)
    except OSError:
        pass
