"""Fewer slots where the device has no memory for all: the same numbers, one line, no way back."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from training import assert_same, make_params, set_grads

from torch_offload import OffloadConfig, offload, offload_stats, pipeline

#: One parameter a chunk.
SHAPES = [(64, 8)] * 5
CONFIG = OffloadConfig(chunk_size=2 * 4 * 64 * 8)
SLOT_BYTES = CONFIG.chunk_bytes
CPU = torch.device("cpu")


class SmallDevice:
    """Stands for a device with so many bytes; what is freed is free at once."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.num_refusals = 0
        self._slots: list[weakref.ref[torch.Tensor]] = []

    def allocate_slot(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        living = [slot() for slot in self._slots]
        if sum(s.numel() for s in living if s is not None) + num_bytes > self.num_bytes:
            self.num_refusals += 1
            raise torch.OutOfMemoryError(f"tried to allocate {num_bytes} bytes")
        made = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._slots.append(weakref.ref(made))
        return made


@pytest.fixture
def small_device(monkeypatch):
    def patch(num_bytes: int) -> SmallDevice:
        made = SmallDevice(num_bytes)
        monkeypatch.setattr(pipeline, "allocate_slot", made.allocate_slot)
        return made

    return patch


def start(device, config):
    params = make_params(device, shapes=SHAPES)
    optimizer = torch.optim.AdamW(params, lr=0.1)
    if config is not None:
        offload(optimizer, config)
    return params, optimizer


def go_on(params, optimizer, steps):
    for step in steps:
        set_grads(params, step)
        optimizer.step()
    return params, optimizer


@pytest.fixture
def said(caplog):
    """What was logged about slots that did not fit, so far."""
    return lambda: [r.getMessage() for r in caplog.records if "did not fit" in r.getMessage()]


@pytest.mark.parametrize(("room", "num_slots"), [(2.9, 2), (2, 2), (1.9, 1), (1, 1)])
def test_fewer_slots_give_the_same_numbers(
    device, small_device, said, monkeypatch, room, num_slots
):
    plain = go_on(*start(device, None), range(8))
    params, optimizer = start(device, CONFIG)
    go_on(params, optimizer, range(3))
    assert offload_stats(optimizer).num_slots == 3

    place = params[0].device
    memory = small_device(int(room * SLOT_BYTES))
    go_on(params, optimizer, range(3, 4))
    assert memory.num_refusals == 3 - num_slots
    assert offload_stats(optimizer).num_slots == num_slots
    assert offload_stats(optimizer).staging_bytes == num_slots * SLOT_BYTES
    assert said() == [
        f"AdamW: 3 slots (12,288 bytes) did not fit into the memory of {place}, so this and later "
        f"steps use {num_slots} ({num_slots * SLOT_BYTES:,} bytes). The numbers are the same, "
        "steps take longer. A smaller chunk_size needs less memory."
    ]

    monkeypatch.undo()  # there is memory again, but it may not last
    go_on(params, optimizer, range(4, 8))
    assert offload_stats(optimizer).num_slots == num_slots
    assert memory.num_refusals == 3 - num_slots
    assert len(said()) == 1
    assert_same(plain, (params, optimizer))


def test_it_is_said_once_an_optimizer(small_device, said):
    params, optimizer = start(CPU, CONFIG)
    go_on(params, optimizer, range(1))
    for room in (2, 1):
        small_device(room * SLOT_BYTES)
        go_on(params, optimizer, range(2))
    assert offload_stats(optimizer).num_slots == 1
    assert len(said()) == 1
    go_on(*start(CPU, CONFIG), range(2))
    assert len(said()) == 2


def test_new_state_uses_the_slots_that_are_left(device, small_device):
    def run(config):
        params, optimizer = start(device, config)
        for step in range(4):
            if step == 2 and config:
                small_device(2 * SLOT_BYTES)
            set_grads(params, step, lambda index, step: index == 0 or step > 0 or index == 1)
            if step == 3:
                more = make_params(device, shapes=SHAPES)
                optimizer.add_param_group({"params": more})
                set_grads(more, step)
            optimizer.step()
        return [*params, *more], optimizer

    plain, offloaded = run(None), run(CONFIG)
    assert_same(plain, offloaded)
    assert offload_stats(offloaded[1]).staging_bytes == 2 * SLOT_BYTES


def test_no_memory_for_one_slot_changes_nothing(device, small_device, said, monkeypatch):
    plain = go_on(*start(device, None), range(5))
    params, optimizer = go_on(*start(device, CONFIG), range(3))
    before = [param.detach().clone() for param in params]
    memory = small_device(SLOT_BYTES - 1)
    set_grads(params, 3)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError, match="tried to allocate 4096 bytes"):
            optimizer.step()
    assert memory.num_refusals == 2 * 3
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
    optimizer.state_dict()  # no warning: it is that of a whole step
    monkeypatch.undo()
    optimizer.step()
    go_on(params, optimizer, range(4, 5))
    assert_same(plain, (params, optimizer))
    assert offload_stats(optimizer).num_slots == 3
    assert said() == []


def test_no_memory_for_one_slot_after_new_state_is_half_way(device, small_device):
    params, optimizer = start(device, CONFIG)
    set_grads(params, 0, lambda index, _: index < 2)
    optimizer.step()
    small_device(SLOT_BYTES - 1)
    set_grads(params, 1)
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    message = r"half-way \(OutOfMemoryError.*parameters 2-4 .*smaller chunk_size or num_slots"
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()


@pytest.mark.gpu
@pytest.mark.parametrize(("room", "num_slots"), [(2.5, 2), (1.5, 1), (0.5, 0)])
def test_on_a_device_that_is_full(room, num_slots, said):
    device = torch.device("cuda", 0)
    slot_bytes = 64 * 2**20
    shapes = [(4096, 2048)] * 8  # 64 MiB of state each
    config = OffloadConfig(chunk_size=slot_bytes)

    def run(config):
        params = make_params(device, shapes=shapes)
        optimizer = torch.optim.AdamW(params, lr=0.1, fused=True)
        if config is not None:
            offload(optimizer, config)
        for param in params:
            param.grad = torch.full_like(param, 0.5)
        optimizer.step()
        return params, optimizer

    plain = run(None)
    for _ in range(2):
        plain[1].step()
    expected = [param.detach().cpu() for param in plain[0]]
    del plain
    params, optimizer = run(config)
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    cap = torch.cuda.memory_reserved(device) + int(room * slot_bytes)
    torch.cuda.set_per_process_memory_fraction(cap / total, device)
    try:
        if num_slots:
            optimizer.step()
        else:
            with pytest.raises(torch.OutOfMemoryError):
                optimizer.step()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    if not num_slots:
        optimizer.step()
    optimizer.step()
    assert offload_stats(optimizer).num_slots == (num_slots or 3)
    assert len(said()) == (num_slots > 0)
    for param, value in zip(params, expected, strict=True):
        assert torch.equal(param.cpu(), value)
