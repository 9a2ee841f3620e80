"""Forked processes (DataLoader workers) beside registered memory: without it, and harmless."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import subprocess
import sys
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_driver import CUDA, PAGE, Driver
from linux import flags, forked
from training import assert_same, make_params

from torch_offload import OffloadConfig, core, host, offload
from torch_offload.host import Block, HostStore

MIB = 2**20
CPU = torch.device("cpu")

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]


@pytest.fixture
def driver(monkeypatch) -> Iterator[Driver]:
    yield Driver.install(monkeypatch)
    gc.collect()  # what a failed test left is released where it was registered


needs_smaps = pytest.mark.skipif(
    not Path("/proc/self/smaps").exists(), reason="needs Linux's /proc"
)


def allocate(*sizes: int) -> tuple[HostStore, list[Block]]:
    store = HostStore(CUDA, True, lambda: None)
    return store, store.allocate(sizes)


@needs_smaps
def test_registered_memory_is_not_copied_to_children(driver):
    _, blocks = allocate(4 * MIB)
    address = blocks[0].address
    kept = blocks[0].bytes.fill_(5)
    assert "dc" in flags(address)  # "do not copy on fork"

    def child() -> None:
        assert flags(address) == []

    forked(child)
    del blocks
    assert driver.registered == {}
    assert "dc" not in flags(address)
    forked(lambda: torch.testing.assert_close(kept, torch.full_like(kept, 5)))


@needs_smaps
def test_only_parts_that_are_registered_are_left_out(driver, monkeypatch):
    monkeypatch.setattr(host, "PIECE_BYTES", PAGE)
    monkeypatch.setattr(host, "MAX_REGISTRATION_BYTES", 64 * PAGE)
    driver.refuse = lambda num_bytes: num_bytes == 64 * PAGE
    store = HostStore(CUDA, True, lambda: None)
    with pytest.warns(UserWarning, match="could not be pinned"):
        blocks = store.allocate([100 * PAGE], [[64 * PAGE]])
    blocks[0].bytes.fill_(3)
    address = blocks[0].address
    assert "dc" not in flags(address + 63 * PAGE)
    assert "dc" in flags(address + 64 * PAGE)
    forked(lambda: check(int(blocks[0].bytes[: 64 * PAGE].sum()) == 3 * 64 * PAGE))


def check(holds: bool) -> None:
    assert holds


def test_a_child_releases_nothing_of_its_parent(driver):
    store, blocks = allocate(4 * MIB, 300 * MIB)
    pieces = [weakref.ref(block.piece) for block in blocks]
    registered = dict(driver.registered)
    driver.calls.clear()

    def child() -> None:
        nonlocal store, blocks
        del store, blocks
        gc.collect()
        assert driver.calls == []
        assert all(piece() is not None for piece in pieces)

    forked(child)
    assert driver.registered == registered
    assert driver.calls == []
    blocks[0].bytes.fill_(1)
    del blocks
    assert driver.calls == ["unregister"] * 2
    assert driver.registered == {}


SCRIPT = """
import os, sys
import pytest, torch
from fake_driver import CUDA, Driver
from torch_offload.host import HostStore

driver = Driver.install(pytest.MonkeyPatch())
store = HostStore(CUDA, True, lambda: print("release in", name, flush=True))
blocks = store.allocate([2**20, 2**29])
name = "parent"
child = os.fork()
if child == 0:
    name = "child"
    sys.exit(0)  # tears down every module
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status), len(driver.registered), flush=True)
blocks[0].bytes.fill_(1)
del blocks
"""


def test_the_end_of_a_child_that_leaves_like_a_script():
    tests = Path(__file__).parent
    path = os.pathsep.join([str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.stdout == "0 2\nrelease in parent\nrelease in parent\n", result.stderr
    assert result.returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="maps memory by Linux's call")
def test_a_child_does_not_unmap_what_it_put_in_the_same_place(driver):
    """The addresses are free in the child, so the system may give them to anybody."""
    _, blocks = allocate(4 * MIB)
    address = blocks[0].address
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    fixed = 0x10

    def child() -> None:
        nonlocal blocks
        own = libc.mmap(
            address,
            4 * MIB,
            mmap.PROT_READ | mmap.PROT_WRITE,
            mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed,
            -1,
            0,
        )
        assert own == address
        ctypes.memset(own, 7, 4 * MIB)
        del blocks
        gc.collect()
        assert ctypes.string_at(own + 2 * MIB, 3) == b"\7\7\7"  # a signal ends it otherwise

    forked(child)
    assert int(blocks[0].bytes.sum()) == 0


def test_a_grandchild_and_memory_registered_since(driver):
    _, first = allocate(MIB)

    def child() -> None:
        nonlocal first
        driver.registered.clear()  # the parent's, at addresses that are free here
        _, second = allocate(2 * MIB)
        second[0].bytes.fill_(9)
        forked(gc.collect)
        del first
        assert list(driver.registered.values()) == [2 * MIB]
        del second
        assert driver.registered == {}, "its own memory it releases"

    forked(child)
    assert len(driver.registered) == 1


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Gradients for two parameters, made in a worker."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((64, 100), float(index))


def train_on(samples: Iterable[torch.Tensor], config: OffloadConfig | None) -> Any:
    params = make_params(CPU, shapes=[(64, 100), (32, 100)])
    optimizer = torch.optim.AdamW(params, lr=0.1)
    if config is not None:
        offload(optimizer, config)
    for _ in range(3):
        for sample in samples:  # forks here, the first time or every time
            params[0].grad, params[1].grad = sample, sample[:32]
            optimizer.step()
    return params, optimizer


@pytest.mark.skipif(sys.platform == "darwin", reason="workers are not forked by default")
@pytest.mark.parametrize("persistent", [False, True])
def test_data_loader_workers_beside_registered_memory(driver, monkeypatch, persistent):
    config = OffloadConfig(chunk_size=10_000)
    monkeypatch.setattr(
        core,
        "HostStore",
        lambda device, pin_memory, before_release: HostStore(CUDA, True, before_release),
    )
    garbage: list[Any] = [train_on([torch.ones(64, 100)], config)]
    garbage.append(garbage)
    assert len(driver.registered) == 1

    def collect(worker: int) -> None:
        gc.collect()  # as it may happen at any time
        assert "unregister" not in driver.calls

    loader = torch.utils.data.DataLoader(
        Samples(),
        num_workers=2,
        batch_size=None,
        worker_init_fn=collect,
        multiprocessing_context="fork",
        persistent_workers=persistent,
    )
    gc.disable()
    try:
        del garbage  # of which each worker has a copy
        params, optimizer = train_on(loader, config)
        assert len(driver.registered) == 2
    finally:
        gc.enable()
    assert_same(train_on([Samples()[i] for i in range(6)], None), (params, optimizer))
    del optimizer
    gc.collect()
    assert driver.registered == {}
