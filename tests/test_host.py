"""Host memory: exact blocks, storages of their own, and how much the system says is free."""

from __future__ import annotations

import gc
import mmap

import pytest
import torch

from torch_offload import host
from torch_offload.chunk import TensorSpec
from torch_offload.host import HostStore
from torch_offload.memory import available_host_bytes

CPU = torch.device("cpu")


def make_store(device: torch.device = CPU, pin: bool = False) -> HostStore:
    return HostStore(device, pin, before_release=lambda: None)


def test_blocks_do_not_overlap_and_tensors_own_their_storage():
    blocks = make_store().allocate([128, 0, 4096, 64])
    for index, block in enumerate(blocks):
        block.bytes.fill_(index + 1)
    assert [set(block.bytes.tolist()) for block in blocks] == [{1}, set(), {3}, {4}]
    tensor = blocks[2].tensor(TensorSpec("x", (2, 3), (3, 1), torch.float32), 64)
    assert tensor.untyped_storage().nbytes() == 24
    tensor.fill_(1.0)
    assert blocks[2].bytes[64:88].view(torch.float32).tolist() == [1.0] * 6
    assert set(blocks[2].bytes[:64].tolist()) == {3}


def test_sizes_are_exact_but_for_pages(device):
    store = make_store(device, pin=True)
    sizes = [3 * 2**20 + 64, 128, 300 * 2**20]
    blocks = store.allocate(sizes)
    assert sum(sizes) <= store.num_bytes <= sum(sizes) + len(sizes) * mmap.PAGESIZE
    assert store.pinned_bytes == (store.num_bytes if device.type == "cuda" else 0)
    del blocks
    gc.collect()
    assert store.num_bytes == 0


def test_a_block_lies_inside_one_piece(monkeypatch):
    monkeypatch.setattr(host, "PIECE_BYTES", 1000)
    blocks = make_store().allocate([600, 600, 100, 5000, 64])
    pieces = [block.piece for block in blocks]
    assert pieces[1] is pieces[2]
    assert len({id(piece) for piece in pieces}) == 4
    assert pieces[3].num_bytes == 5000


def test_a_chunk_larger_than_a_registration_is_refused(monkeypatch):
    monkeypatch.setattr(host, "MAX_PIECE_BYTES", 1000)
    with pytest.raises(MemoryError, match="Use a smaller chunk_size"):
        make_store().allocate([100, 1064])


def write(root, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_available_memory_is_the_least_of_system_and_cgroups(tmp_path):
    assert available_host_bytes(tmp_path) is None
    write(tmp_path, "proc/meminfo", "MemTotal: 900 kB\nMemAvailable:    500 kB\n")
    assert available_host_bytes(tmp_path) == 500 * 1024
    write(tmp_path, "proc/self/cgroup", "0::/job/step\n")
    assert available_host_bytes(tmp_path) == 500 * 1024
    write(tmp_path, "sys/fs/cgroup/job/step/memory.max", "max\n")
    write(tmp_path, "sys/fs/cgroup/job/step/memory.current", "10\n")
    assert available_host_bytes(tmp_path) == 500 * 1024
    write(tmp_path, "sys/fs/cgroup/job/memory.max", "300000\n")
    write(tmp_path, "sys/fs/cgroup/job/memory.current", "250000\n")
    write(tmp_path, "sys/fs/cgroup/job/memory.stat", "anon 5\ninactive_file 20000\n")
    assert available_host_bytes(tmp_path) == 70_000
    write(tmp_path, "sys/fs/cgroup/job/memory.current", "900000\n")
    assert available_host_bytes(tmp_path) == 0


def test_available_memory_in_a_version_1_cgroup(tmp_path):
    write(tmp_path, "proc/meminfo", "MemAvailable: 500 kB\n")
    write(tmp_path, "proc/self/cgroup", "5:cpu:/a\n4:memory,hugetlb:/a\n")
    write(tmp_path, "sys/fs/cgroup/memory/a/memory.limit_in_bytes", "1000")
    write(tmp_path, "sys/fs/cgroup/memory/a/memory.usage_in_bytes", "400")
    assert available_host_bytes(tmp_path) == 600


def test_available_memory_here_is_a_number():
    assert (available_host_bytes() or 0) > 2**20
