"""Host memory dies with its optimizer, by reference counts alone, whatever happened before."""

from __future__ import annotations

import copy
import gc
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from training import fail_at_chunk, make_params, set_grads, train

from torch_offload import OffloadConfig, host, offload, offload_stats, unoffload
from torch_offload.core import OffloadCore
from torch_offload.host import HostStore
from torch_offload.pipeline import Pipeline

MIB = 2**20
SMALL = OffloadConfig(chunk_size=50_000)
KINDS = (OffloadCore, HostStore, Pipeline, host._Piece, torch.optim.AdamW, torch.optim.SGD)


@pytest.fixture
def survivors() -> Iterator[Callable[[], list[object]]]:
    """Lists what is alive now and was not before. Whatever is part of a cycle stays: nobody
    collects garbage during the test."""
    train(torch.device("cpu"), config=SMALL, steps=1)  # the first import of dynamo keeps frames
    gc.collect()
    before = weakref.WeakSet(_living())
    gc.disable()
    yield lambda: [found for found in _living() if found not in before]
    gc.enable()
    gc.collect()


def _living() -> list[object]:
    return [found for found in gc.get_objects() if issubclass(type(found), KINDS)]


def trained(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    train(device, config=SMALL, steps=3)


def scheduled_before(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    params = make_params(device)
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    offload(optimizer, SMALL)
    for step in range(2):
        set_grads(params, step)
        optimizer.step()
        scheduler.step()


def converted_with_state(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    params, optimizer = train(device, config=None, steps=2)
    offload(optimizer, SMALL)
    set_grads(params, 3)
    optimizer.step()


def copied(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer = train(device, config=SMALL, steps=2)
    clone = copy.deepcopy(optimizer)
    assert offload_stats(clone).host_bytes > 0


def loaded(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer = train(device, config=SMALL, steps=2)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def taken_back(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    params, optimizer = train(device, config=SMALL, steps=2)
    unoffload(optimizer)
    set_grads(params, 3)
    optimizer.step()


def failed_half_way(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    params, optimizer = train(device, config=SMALL, steps=2)
    set_grads(params, 3)
    fail_at_chunk(monkeypatch, 2)
    with pytest.raises(RuntimeError, match="boom"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="stopped half-way"):
        optimizer.step()


def too_large(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    params = make_params(device)
    optimizer = offload(torch.optim.AdamW(params), SMALL)
    set_grads(params, 0)
    with monkeypatch.context() as patch:
        patch.setattr(host, "available_host_bytes", lambda: 10)
        with pytest.raises(MemoryError):
            optimizer.step()
    optimizer.step()


def conversion_failed(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer = train(device, config=None, steps=2)
    with monkeypatch.context() as patch:
        patch.setattr(host, "available_host_bytes", lambda: 10)
        with pytest.raises(MemoryError):
            offload(optimizer, SMALL)


@pytest.mark.parametrize(
    "life",
    [
        trained,
        scheduled_before,
        converted_with_state,
        copied,
        loaded,
        taken_back,
        failed_half_way,
        too_large,
        conversion_failed,
    ],
)
def test_nothing_is_part_of_a_cycle(
    life: Callable[[torch.device, pytest.MonkeyPatch], None],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    survivors: Callable[[], list[object]],
):
    life(device, monkeypatch)
    assert survivors() == []


def test_host_memory_lives_as_long_as_a_state_tensor_and_no_longer(device, survivors):
    params, optimizer = train(device, config=SMALL, steps=2)
    kept = optimizer.state[params[0]]["exp_avg"]
    expected = kept.clone()
    memory = weakref.ref(
        optimizer._offload_core.planner.layout.home(params[0]).hosted.block.piece.memory
    )
    del optimizer
    assert survivors() == []
    assert memory() is not None
    assert torch.equal(kept, expected)
    kept.add_(1)
    assert not kept.is_pinned()
    del kept
    assert memory() is None


def test_unoffload_gives_host_memory_back_at_once(device, survivors):
    _, optimizer = train(device, config=SMALL, steps=2)
    pieces = weakref.WeakSet(store_pieces(optimizer))
    assert pieces
    unoffload(optimizer)
    assert not pieces


def store_pieces(optimizer: torch.optim.Optimizer) -> list[host._Piece]:
    stores = optimizer._offload_core._stores.values()
    return [piece for store in stores for piece in store._pieces]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")
def test_100_lives_leave_nothing_behind(device, survivors):
    """4 MiB of state each: memory, mappings and pinned bytes are those of the first ones."""

    def life() -> None:
        params = make_params(device, shapes=[(256, 1024), (256, 1000), (77,)])
        optimizer = offload(torch.optim.AdamW(params), OffloadConfig(chunk_size="2MiB"))
        for step in range(2):
            for param in params:
                param.grad = torch.full_like(param, step + 1.0)
            optimizer.step()
        assert offload_stats(optimizer).host_bytes > 3 * MIB

    def measure() -> tuple[int, int, int]:
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
        with open("/proc/self/maps") as maps:
            mappings = sum(1 for _ in maps)
        on_device = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        return resident, mappings, on_device

    for _ in range(10):
        life()
    before = measure()
    for _ in range(100):
        life()
    after = measure()
    assert after[0] - before[0] < 64 * MIB, (before, after)
    assert after[1] - before[1] < 30, (before, after)
    assert after[2] == before[2]
    assert survivors() == []
