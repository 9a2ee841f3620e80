"""All ranks of a node see the same free bytes: none is taken twice, nothing that fits refused."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from training import make_params, set_grads

from torch_offload import host, offload, ranks
from torch_offload.host import HostStore
from torch_offload.ranks import num_local_ranks, take_in_turn

CPU = torch.device("cpu")
needs_locks = pytest.mark.skipif(ranks.fcntl is None, reason="this system has no file locks")


class Node:
    """Host memory with a number of free bytes, and ranks (threads here) that take it slowly."""

    def __init__(self, free: int, folder: Path) -> None:
        self.free = free
        self.lowest = free
        self.folder = folder
        self.refused: list[int] = []
        self._guard = threading.Lock()

    def take(self, needed: int) -> None:
        """What one rank does: look, touch page after page, or give up."""

        def touch(free: int | None) -> None:
            if free is None or needed > free:
                self.refused.append(needed)
                return
            for _ in range(10):
                time.sleep(0.002)
                with self._guard:
                    self.free -= needed // 10
                    self.lowest = min(self.lowest, self.free)

        take_in_turn(needed, lambda: self.free, touch, self.folder)

    def take_together(self, *needs: int) -> None:
        threads = [threading.Thread(target=self.take, args=(needed,)) for needed in needs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@pytest.fixture
def launched(monkeypatch) -> Callable[[int | None], None]:
    """Tells how many ranks the launcher started on this node, or that it does not say."""

    def launch(num_ranks: int | None) -> None:
        for name in ranks._VARIABLES:
            monkeypatch.delenv(name, raising=False)
        if num_ranks is not None:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_ranks))

    return launch


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "8", "SLURM_NTASKS_PER_NODE": "2"}, 8),
        ({"SLURM_NTASKS_PER_NODE": "4"}, 4),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, 3),
        ({"MPI_LOCALNRANKS": "5", "LOCAL_WORLD_SIZE": ""}, 5),
        ({"LOCAL_WORLD_SIZE": "0"}, 1),
        ({"LOCAL_WORLD_SIZE": "many", "SLURM_NTASKS_PER_NODE": "2(x3)"}, 1),
    ],
)
def test_number_of_ranks(environ, expected):
    assert num_local_ranks(environ) == expected


@needs_locks
@pytest.mark.parametrize("num_ranks", [None, 1, 4])
def test_ranks_that_start_together_never_take_more_than_there_is(launched, tmp_path, num_ranks):
    launched(num_ranks)
    node = Node(2500, tmp_path)
    node.take_together(1000, 1000, 1000, 1000)
    assert node.refused == [1000, 1000]
    assert node.lowest == node.free == 500


@pytest.mark.parametrize("num_ranks", [None, 1, 4])
def test_what_just_fits_is_not_refused(launched, tmp_path, num_ranks):
    launched(num_ranks)
    node = Node(4000, tmp_path)
    node.take_together(1000, 1000, 1000, 1000)
    assert node.refused == []
    assert node.free == 0


def test_a_rank_that_comes_late_does_not_count_the_others_twice(launched, tmp_path):
    launched(4)
    node = Node(4000, tmp_path)
    node.take_together(1000, 1000, 1000)
    node.take(1000)  # four times what it needs is four times what is left
    assert node.refused == []


def test_a_second_optimizer_takes_what_is_left(launched, tmp_path):
    launched(2)
    node = Node(2300, tmp_path)
    node.take_together(1000, 1000)
    node.take_together(150, 150)
    assert node.refused == []
    node.take(150)
    assert node.refused == [150]


def test_a_checkpoint_that_one_rank_loads_first(launched, tmp_path):
    launched(4)
    node = Node(4000, tmp_path)
    node.take(1000)
    node.take_together(1000, 1000, 1000)
    assert node.refused == []


def test_ranks_that_do_not_offload_are_not_counted(launched, tmp_path):
    launched(4)
    node = Node(1100, tmp_path)
    node.take(1000)
    assert node.refused == []


@needs_locks
def test_one_rank_needs_more_than_the_others(launched, tmp_path):
    launched(4)
    node = Node(4000, tmp_path)
    node.take_together(3500, 100, 100, 100)
    assert node.refused == []
    node = Node(3500, tmp_path)
    node.take_together(3500, 100, 100, 100)
    assert node.refused in ([3500], [100, 100, 100])
    assert node.lowest >= 0


def test_with_room_for_all_nobody_waits(launched, tmp_path):
    launched(4)
    together = threading.Barrier(4, timeout=20)

    def take() -> None:
        # Breaks unless all four are here at once.
        take_in_turn(1000, lambda: 4000, lambda free: together.wait(), tmp_path)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not together.broken


@pytest.fixture
def holder(tmp_path) -> Iterator[Callable[[], None]]:
    """A process that has the lock alone, until it is told to die."""
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from torch_offload.ranks import take_in_turn\n"
        "def take(free):\n"
        "    print('in', flush=True)\n"
        "    time.sleep(100)\n"
        "take_in_turn(10, lambda: 10, take, Path(sys.argv[1]))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "in\n"

    def die() -> None:
        process.kill()
        process.wait()

    yield die
    die()
    process.stdout.close()


@needs_locks
def test_a_killed_rank_does_not_block_the_others(holder, tmp_path):
    entered = threading.Event()

    def take() -> None:
        take_in_turn(1, lambda: 1000, lambda free: entered.set(), tmp_path)

    thread = threading.Thread(target=take)
    thread.start()
    assert not entered.wait(0.3), "the other process has the lock alone"
    holder()
    assert entered.wait(20)
    thread.join()


@needs_locks
def test_an_interruption_at_any_line_leaves_no_lock(tmp_path):
    """Also while its traceback is kept, as notebooks do."""
    kept: list[BaseException] = []

    def interrupted_at(number: int) -> bool:
        lines = 0

        def trace(frame: Any, event: str, argument: object) -> Any:
            nonlocal lines
            if frame.f_globals.get("__name__") != ranks.__name__:
                return None
            if event == "line":
                lines += 1
                if lines == number:
                    raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            take_in_turn(10, lambda: 10, lambda free: None, tmp_path)
        except KeyboardInterrupt as error:
            kept.append(error)
        finally:
            sys.settrace(before)
        return lines >= number

    number = 1
    while interrupted_at(number):
        lock = ranks._open(tmp_path)
        ranks.fcntl.flock(lock.file, ranks.fcntl.LOCK_EX | ranks.fcntl.LOCK_NB)  # raises if held
        del lock
        number += 1
    assert number > 15
    assert len(kept) == number - 1


@needs_locks
def test_patience_ends(holder, tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "_PATIENCE_S", 0.1)
    assert take_in_turn(10, lambda: 10, lambda free: free, tmp_path) == 10


@needs_locks
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_forked_during_a_turn_does_not_keep_the_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "_PATIENCE_S", 20.0)

    def fork(free: int | None) -> int:
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
        return child

    child = take_in_turn(10, lambda: 10, fork, tmp_path)
    try:
        started = time.monotonic()
        take_in_turn(10, lambda: 10, lambda free: None, tmp_path)
        assert time.monotonic() - started < 10
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_without_locks_the_free_bytes_still_count(tmp_path, monkeypatch):
    assert take_in_turn(10, lambda: 7, lambda free: free, tmp_path / "missing") == 7
    monkeypatch.setattr(ranks, "fcntl", None)
    assert take_in_turn(10, lambda: 7, lambda free: free, tmp_path) == 7
    assert take_in_turn(10, lambda: None, lambda free: free, tmp_path) is None


@needs_locks
def test_the_lock_is_not_a_link_and_belongs_to_the_user(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    name = f"torch_offload-{os.getuid()}.lock"
    (tmp_path / name).symlink_to(victim)
    assert ranks._open(tmp_path) is None
    assert victim.read_text() == "precious"
    (tmp_path / name).unlink()
    take_in_turn(1, lambda: 100, lambda free: None, tmp_path)
    assert (tmp_path / name).stat().st_mode & 0o777 == 0o600


PROCESS = """
import os, sys, time
from pathlib import Path
from torch_offload import host
import torch

ledger, needed, total = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])

def available():
    return total - sum(int(entry.name.split("-")[1]) for entry in ledger.iterdir())

def touch(piece, start, stop):
    time.sleep(0.5)
    (ledger / f"{os.getpid()}-{stop - start}").touch()

host.available_host_bytes = available
host._Piece.touch = touch
print("ready", flush=True)
sys.stdin.readline()
store = host.HostStore(torch.device("cpu"), False, lambda: None)
try:
    store.allocate([needed])
except MemoryError as error:
    print(error)
    assert store.num_bytes == 0
else:
    print("taken")
"""


@needs_locks
def test_processes_that_start_together(launched, tmp_path):
    """Three that need 4 MiB each, and 10 MiB of memory: two get theirs, one gets an error."""
    launched(3)
    needed, total = 2**22, 10 * 2**20
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(tmp_path), str(needed), str(total)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    said = sorted(process.communicate(timeout=60)[0] for process in processes)
    assert all(process.returncode == 0 for process in processes)
    assert said.count("taken\n") == 2
    message = (
        "needs 4,194,304 bytes of host memory, 2,097,152 bytes are available (cgroup limit "
        "included), shared by the 3 ranks of this node (12,582,912 bytes if each of them needs as "
        "much). Give the job more memory, run fewer ranks on a node, or offload fewer parameters."
    )
    assert sum(message in text for text in said) == 1


def test_too_little_memory_names_the_ranks_and_nothing_is_taken(launched, monkeypatch):
    params = make_params(CPU, shapes=[(1000, 10)])
    optimizer = offload(torch.optim.AdamW(params))
    set_grads(params, 0)
    launched(8)
    monkeypatch.setattr(host, "available_host_bytes", lambda: 10_000)
    monkeypatch.setattr(host.mmap, "mmap", None)  # any allocation would fail loudly
    with pytest.raises(
        MemoryError, match=r"needs 81,920 bytes .* 10,000 bytes are available .*"
    ) as e:
        optimizer.step()
    assert re.search(r"8 ranks of this node \(655,360 bytes", str(e.value))
    launched(None)
    with pytest.raises(MemoryError, match=r"limit included\)\. Give the job more memory, or off"):
        optimizer.step()
    assert optimizer.state_dict()["state"] == {}
    monkeypatch.undo()
    optimizer.step()


def test_memory_of_a_dead_optimizer_in_a_cycle_is_found_before_refusing(monkeypatch):
    """Frameworks make cycles: a trainer that is done is collected some time later."""
    store = HostStore(CPU, False, lambda: None)
    trainer: dict[str, object] = {"blocks": store.allocate([2**20])}
    trainer["self"] = trainer
    monkeypatch.setattr(host, "available_host_bytes", lambda: 2**20 - store.num_bytes)
    gc.disable()
    try:
        del trainer
        assert store.num_bytes == 2**20
        blocks = store.allocate([2**20])
    finally:
        gc.enable()
    assert store.num_bytes == 2**20
    assert len(blocks) == 1
