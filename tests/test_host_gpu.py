"""Host memory and a real driver: refusals, seams, forks and the place of the pages."""

from __future__ import annotations

import gc
import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_driver import PAGE
from linux import flags, forked, policy_at, system_call
from training import assert_same, set_grads, train

from torch_offload import OffloadConfig, chunk, host, numa, offload, offload_stats, synchronize
from torch_offload.host import HostStore
from torch_offload.memory import available_host_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]

GPU = torch.device("cuda", 0)
MIB = 2**20
GIB = 2**30


def gpu_is_well() -> bool:
    """Whether no error is left behind that a later launch, copy or wait would find."""
    ones = torch.ones(1024, device=GPU).add_(1)
    torch.cuda.synchronize()
    return bool((ones.cpu() == 2).all())


@pytest.fixture
def small_registrations(monkeypatch) -> None:
    """Limits so small that ordinary parameters reach them."""
    monkeypatch.setattr(chunk, "_LARGE_BYTES", 4 * PAGE)
    monkeypatch.setattr(chunk, "_LARGE_ALIGNMENT", PAGE)
    monkeypatch.setattr(host, "PIECE_BYTES", PAGE)
    monkeypatch.setattr(host, "MAX_REGISTRATION_BYTES", 8 * PAGE)


SHAPES = [(6 * PAGE // 4 + 5,), (2 * PAGE // 4,), (7,), (10 * PAGE // 4 - 5,)]


@pytest.mark.parametrize("chunk_size", [2 * PAGE, 64 * PAGE])
@pytest.mark.parametrize("flavour", [{"fused": True}, {"foreach": True}])
def test_state_larger_than_one_registration_is_exact(small_registrations, chunk_size, flavour):
    """In parts, and as a whole: a copy across two registrations fails."""
    plain = train(GPU, config=None, shapes=SHAPES, **flavour)
    config = OffloadConfig(chunk_size=chunk_size)
    params, optimizer = train(GPU, config=config, shapes=SHAPES, **flavour)
    assert_same(plain, (params, optimizer))
    stats = offload_stats(optimizer)
    assert stats.pinned_bytes == stats.host_bytes
    home = optimizer._offload_core.planner.layout.home(params[0])
    assert home.hosted.block.seams
    for values in optimizer.state.values():
        assert torch.equal(values["exp_avg"].to(GPU).cpu(), values["exp_avg"])  # a user's own copy
    assert gpu_is_well()


class Refusing:
    """The real runtime, asked with flags that it refuses: always, or every second time."""

    def __init__(self, every: int) -> None:
        self._real = torch.cuda.cudart()
        self._asked = itertools.count(1)
        self._every = every

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> Any:
        refused = next(self._asked) % self._every == 0
        return self._real.cudaHostRegister(address, num_bytes, 0xFFFF if refused else flags)


@pytest.mark.parametrize("every", [1, 2])
def test_a_refusal_leaves_no_error_behind_and_the_numbers_right(
    small_registrations, monkeypatch, every
):
    """It happens in the threads that register; copies do not go beyond what was refused."""
    plain = train(GPU, config=None, shapes=SHAPES)
    cudart = Refusing(every)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    with pytest.warns(UserWarning, match="could not be pinned .*invalid argument") as caught:
        offloaded = train(GPU, config=OffloadConfig(chunk_size=64 * PAGE), shapes=SHAPES)
    assert len(caught) == 1
    assert gpu_is_well()
    stats = offload_stats(offloaded[1])
    assert stats.pinned_bytes < stats.host_bytes
    assert (stats.pinned_bytes > 0) == (every > 1)
    assert_same(plain, offloaded)
    del offloaded
    assert gpu_is_well()


def test_a_child_goes_without_the_memory_and_its_end_changes_nothing():
    config = OffloadConfig(chunk_size=50_000)
    params, optimizer = train(GPU, config=config, steps=3)
    state = optimizer.state[params[0]]["exp_avg"]
    address = state.data_ptr()
    assert "dc" in flags(address)

    def child() -> None:
        nonlocal optimizer, state
        assert flags(address) == []
        del optimizer, state
        gc.collect()

    forked(child)
    assert state.is_pinned()
    assert "dc" in flags(address)
    assert gpu_is_well()
    reference = train(GPU, config=None, steps=3)
    for trained, stepped in ((params, optimizer), reference):
        for step in range(3, 6):
            set_grads(trained, step)
            stepped.step()
    assert_same(reference, (params, optimizer))
    del optimizer
    assert "dc" not in flags(address)
    kept = state.clone()
    forked(lambda: torch.testing.assert_close(state, kept, rtol=0, atol=0))


class Noise(torch.utils.data.Dataset[torch.Tensor]):
    """Batches made in a worker."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1024,), float(index))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_forked_beside_16_gib_of_registered_memory(persistent):
    if torch.cuda.mem_get_info(GPU)[0] < 24 * GIB or (available_host_bytes() or 0) < 24 * GIB:
        pytest.skip("needs 24 GiB of free memory on the GPU and on the host")
    params = [torch.nn.Parameter(torch.zeros(2**28, device=GPU)) for _ in range(8)]  # 1 GiB each
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = offload(torch.optim.AdamW(params, lr=0.1, fused=True))
    optimizer.step()
    synchronize(optimizer)
    assert offload_stats(optimizer).pinned_bytes >= 16 * GIB
    free = available_host_bytes()
    assert free is not None
    lowest = free
    loader = torch.utils.data.DataLoader(
        Noise(),
        batch_size=4,
        num_workers=4,
        pin_memory=True,
        multiprocessing_context="fork",
        persistent_workers=persistent,
    )
    seen = 0
    for _ in range(3):
        for number, batch in enumerate(loader):
            seen += int(batch.to(GPU, non_blocking=True)[:, 0].sum().item())
            if number % 4 == 0:
                optimizer.step()
                lowest = min(lowest, available_host_bytes() or 0)
    assert seen == 3 * sum(range(64))
    synchronize(optimizer)
    assert free - lowest < 4 * GIB, "children have no copy of the state"
    first = optimizer.state[params[0]]
    assert first["step"].item() == 13
    # Gradients were 1 throughout: exp_avg is 1 - 0.9 ** 13 everywhere, in every parameter.
    for param in params:
        values = optimizer.state[param]["exp_avg"]
        assert values.is_pinned()
        assert torch.equal(values, values[:1].expand_as(values))
        assert abs(values[0].item() - (1 - 0.9**13)) < 1e-5
    assert torch.isfinite(params[0]).all()
    assert gpu_is_well()


def test_pages_lie_on_the_node_of_the_gpu_where_there_are_several():
    node = numa.node_of(GPU)
    nodes = list(Path("/sys/devices/system/node").glob("node[0-9]*"))
    if node is None:
        slot = numa._pci_slot(GPU)
        file = Path("/sys/bus/pci/devices") / str(slot) / "numa_node"
        told = file.read_text().strip() if file.exists() else None
        assert len(nodes) < 2 or told in (None, "-1")
        pytest.skip(f"{len(nodes)} node(s), the GPU in {slot} is said to be at {told}")
    blocks = HostStore(GPU, True, lambda: None).allocate([64 * MIB])
    address = blocks[0].address
    if policy_at(0)[0] != 0 or policy_at(address)[0] == 0:
        pytest.skip("a policy of the user, or none allowed")
    preferred = 1
    assert policy_at(address)[0] == preferred
    pages = torch.arange(address, address + 64 * MIB, PAGE, dtype=torch.int64)
    where = torch.full((len(pages),), -1, dtype=torch.int32)
    move_pages = {"x86_64": 279, "aarch64": 239}[os.uname().machine]
    if system_call(move_pages, 0, len(pages), pages.data_ptr(), 0, where.data_ptr(), 0):
        pytest.skip("this system does not tell where pages are")
    assert (where == node).float().mean() > 0.95
