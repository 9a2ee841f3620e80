"""Host memory: exact blocks, storages of their own, and what is registered with the driver."""

from __future__ import annotations

import gc
import itertools
import mmap
from collections.abc import Callable, Iterator

import pytest
import torch
from fake_driver import CUDA, PAGE, Driver
from hypothesis import given
from hypothesis import strategies as st
from training import assert_same, train

from torch_offload import OffloadConfig, chunk, core, host
from torch_offload.chunk import TensorSpec
from torch_offload.host import HostStore

CPU = torch.device("cpu")
MIB = 2**20


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


def test_no_bytes_are_no_mapping(device):
    store = make_store(device, pin=True)
    blocks = store.allocate([0, 0])
    assert [block.piece for block in blocks] == [None, None]
    assert store.num_bytes == store.pinned_bytes == 0
    tensor = blocks[0].tensor(TensorSpec("x", (0, 5), (5, 1), torch.float32), 0)
    assert tensor.shape == (0, 5)
    assert not tensor.copy_(torch.empty(0, 5)).numel()
    assert store.allocate([]) == []


def test_a_block_larger_than_a_registration_is_cut_where_it_may_be(monkeypatch):
    monkeypatch.setattr(host, "PIECE_BYTES", PAGE)
    monkeypatch.setattr(host, "MAX_REGISTRATION_BYTES", 4 * PAGE)
    sizes = [PAGE, 4 * PAGE, 10 * PAGE + 64, 9 * PAGE]
    borders = [
        [],
        [0, PAGE],
        [0, PAGE, 3 * PAGE, 3 * PAGE + 64, 6 * PAGE, 10 * PAGE],
        [2 * PAGE, 3 * PAGE - 64],
    ]
    blocks = make_store().allocate(sizes, borders)
    assert [block.num_bytes for block in blocks] == sizes
    assert [block.seams for block in blocks] == [
        (),
        (),
        (3 * PAGE, 6 * PAGE, 10 * PAGE),
        (2 * PAGE,),
    ]
    assert make_store().allocate(sizes)[2].seams == ()


@given(
    num_bytes=st.integers(1, 50 * PAGE),
    borders=st.sets(
        st.tuples(st.integers(0, 50), st.sampled_from([0, 0, 0, 64])).map(
            lambda drawn: drawn[0] * PAGE + drawn[1]
        ),
        max_size=30,
    ).map(sorted),
    pages=st.integers(1, 30),
)
def test_registrations_cover_a_piece_and_none_is_too_large(num_bytes, borders, pages):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "MAX_REGISTRATION_BYTES", pages * PAGE)
        seams = host._plan_seams(num_bytes, borders)
    assert set(seams) <= {border for border in borders if 0 < border < num_bytes}
    assert all(seam % PAGE == 0 for seam in seams)
    allowed = [border for border in borders if border % PAGE == 0]
    for start, stop in itertools.pairwise([0, *seams, num_bytes]):
        too_large = stop - start > pages * PAGE
        assert not (too_large and any(start < border < stop for border in allowed))
    for start, _, stop in zip([0, *seams], seams, [*seams[1:], num_bytes], strict=False):
        assert stop - start > pages * PAGE, "two that could be one"


@pytest.fixture
def driver(monkeypatch) -> Iterator[Driver]:
    yield Driver.install(monkeypatch)
    gc.collect()  # what a failed test left is released where it was registered


def test_memory_is_registered_piece_by_piece_and_unregistered_in_the_end(driver):
    released: list[int] = []
    store = HostStore(CUDA, True, before_release=lambda: released.append(len(driver.registered)))
    blocks = store.allocate([300 * MIB, 64, 128, 0])
    assert sorted(driver.registered.values()) == [192, 300 * MIB]
    assert store.pinned_bytes == store.num_bytes == 300 * MIB + PAGE
    del blocks[0]
    assert list(driver.registered.values()) == [192]
    assert store.pinned_bytes == store.num_bytes == PAGE
    del blocks
    assert driver.registered == {}
    assert released == [2, 1], "asked before each release whether a copy is under way"


def test_a_large_piece_is_registered_in_parts(driver, monkeypatch):
    monkeypatch.setattr(host, "PIECE_BYTES", PAGE)
    monkeypatch.setattr(host, "MAX_REGISTRATION_BYTES", 4 * PAGE)
    store = make_store(CUDA, pin=True)
    blocks = store.allocate([10 * PAGE + 64], [[4 * PAGE, 8 * PAGE]])
    start = blocks[0].address
    parts = {start: 4 * PAGE, start + 4 * PAGE: 4 * PAGE, start + 8 * PAGE: 2 * PAGE + 64}
    assert driver.registered == parts
    assert store.pinned_bytes == store.num_bytes == 11 * PAGE
    del blocks
    assert driver.registered == {}


def test_what_the_driver_refuses_stays_pageable_and_is_said_once(driver, monkeypatch):
    monkeypatch.setattr(host, "PIECE_BYTES", PAGE)
    monkeypatch.setattr(host, "MAX_REGISTRATION_BYTES", 4 * PAGE)
    driver.refuse = lambda num_bytes: num_bytes == 4 * PAGE
    store = make_store(CUDA, pin=True)
    borders = [[], [4 * PAGE], [], []]
    with pytest.warns(UserWarning, match="could not be pinned") as caught:
        blocks = store.allocate([PAGE, 6 * PAGE, 2 * PAGE, 4 * PAGE], borders)
    assert len(caught) == 1
    assert f"({8 * PAGE:,} bytes: error 1)" in str(caught[0].message)
    assert store.num_bytes == 13 * PAGE
    assert store.pinned_bytes == 5 * PAGE
    more = store.allocate([4 * PAGE])  # a second warning would be an error here
    assert (store.num_bytes, store.pinned_bytes) == (17 * PAGE, 5 * PAGE)
    del more
    for block in blocks:
        block.bytes.fill_(7)
        assert torch.equal(block.bytes, torch.full_like(block.bytes, 7))
    del blocks, block
    assert driver.registered == {}
    assert driver.calls.count("unregister") == 3


def test_training_with_half_of_the_memory_refused_is_exact(driver, monkeypatch):
    """The store believes in a GPU, parameters are on the CPU. A real one: test_host_gpu.py."""
    real = HostStore
    stores = []

    def store(device: torch.device, pin_memory: bool, before_release: Callable[[], None]):
        stores.append(real(CUDA, pin_memory, before_release))
        return stores[-1]

    monkeypatch.setattr(core, "HostStore", store)
    monkeypatch.setattr(host, "PIECE_BYTES", PAGE)
    driver.refuse = lambda num_bytes: num_bytes > 4 * PAGE
    plain = train(CPU, config=None)
    with pytest.warns(UserWarning, match="could not be pinned") as caught:
        offloaded = train(CPU, config=OffloadConfig(chunk_size=50_000))
    assert len(caught) == 1
    assert 0 < stores[0].pinned_bytes < stores[0].num_bytes
    assert_same(plain, offloaded)


def test_zero_bytes_are_never_registered(driver):
    """cudaHostRegister takes a size of 0 for an invalid value."""
    blocks = make_store(CUDA, pin=True).allocate([0, 64, 0])
    assert list(driver.registered.values()) == [64]
    assert blocks[0].bytes.numel() == 0


def test_training_copies_nothing_across_two_registrations(driver, monkeypatch):
    """State larger than one registration, and one tensor that alone is."""
    calls = []

    class Watched(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
            if function is torch.ops.aten.copy_.default:
                for tensor in tensors:
                    start = tensor.data_ptr()
                    stop = start + tensor.nbytes
                    inside = [a for a, n in driver.registered.items() if a < stop and start < a + n]
                    calls.append(len(inside))
            return function(*args, **(kwargs or {}))

    real = HostStore
    monkeypatch.setattr(chunk, "_LARGE_BYTES", 4 * PAGE)
    monkeypatch.setattr(chunk, "_LARGE_ALIGNMENT", PAGE)
    monkeypatch.setattr(host, "PIECE_BYTES", PAGE)
    monkeypatch.setattr(host, "MAX_REGISTRATION_BYTES", 8 * PAGE)
    monkeypatch.setattr(
        core, "HostStore", lambda device, pin, before_release: real(CUDA, pin, before_release)
    )
    shapes = [(6 * PAGE // 4 + 5,), (2 * PAGE // 4,), (7,), (10 * PAGE // 4 - 5,)]
    config = OffloadConfig(chunk_size=2 * PAGE)
    plain = train(CPU, config=None, shapes=shapes)
    with Watched():
        params, optimizer = train(CPU, config=config, shapes=shapes)
    assert_same(plain, (params, optimizer))
    assert max(driver.registered.values()) == 10 * PAGE
    assert max(calls) == 1
    assert calls.count(1) > 10
