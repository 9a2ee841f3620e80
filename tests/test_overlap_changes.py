"""Between steps another overlap can be chosen; and what state there will be can be asked."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import HashStore
from torch.distributed.fsdp import FullyShardedDataParallel
from training import assert_same

from torch_offload import (
    OffloadConfig,
    expected_state_bytes,
    finish,
    offload,
    offload_stats,
    set_overlap,
)

MODES = ("step", "backward", "forward", "auto")


def make_net(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(32, 32) for _ in range(5)]).to(device)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[int]:
    early = []
    for step in steps:
        data = torch.full((4, 32), 0.1 * step, device=net[0].weight.device)
        net(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if hasattr(optimizer, "_offload_core"):
            early.append(offload_stats(optimizer).num_early_chunks)
    return early


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(MODES, 2)))
def test_another_overlap_has_the_bits_of_plain(
    device: torch.device, first: str, second: str
) -> None:
    runs: list[Any] = []
    for overlap in (None, first):
        net = make_net(device)
        optimizer = torch.optim.AdamW(net.parameters())
        if overlap:
            offload(optimizer, OffloadConfig(chunk_size=10_000, overlap=overlap), model=net)
        early = train(net, optimizer, range(4))
        assert not overlap or bool(early[-1]) == (first in ("backward", "auto"))
        if overlap:
            set_overlap(optimizer, second)
        early = train(net, optimizer, range(4, 9))
        assert not overlap or bool(early[-1]) == (second in ("backward", "auto"))
        runs.append((list(net.parameters()), optimizer))
    assert_same(*runs)
    # what a caller asks for now is the config that it has
    offload(optimizer, OffloadConfig(chunk_size=10_000, overlap=second))


def test_in_the_middle_of_a_step_and_for_no_overlap_it_is_refused() -> None:
    net = make_net(torch.device("cpu"))
    optimizer = offload(torch.optim.AdamW(net.parameters()), OffloadConfig(overlap="backward"))
    train(net, optimizer, range(2))
    net(torch.ones(1, 32)).sum().backward()
    with pytest.raises(RuntimeError, match=r"set_overlap\(\) was called between backward"):
        set_overlap(optimizer, "step")
    optimizer.step()
    with pytest.raises(ValueError, match="overlap='sideways' is not known"):
        set_overlap(optimizer, "sideways")
    set_overlap(optimizer, "step")
    with pytest.raises(ValueError, match="is not offloaded"):
        set_overlap(torch.optim.AdamW(net.parameters()), "step")


@pytest.mark.parametrize("overlap", MODES)
def test_after_finish_the_model_can_be_moved_and_training_goes_on(
    device: torch.device, overlap: str
) -> None:
    runs: list[Any] = []
    for wanted in (None, overlap):
        net = make_net(device)
        optimizer = torch.optim.AdamW(net.parameters())
        if wanted:
            offload(optimizer, OffloadConfig(chunk_size=10_000, overlap=wanted), model=net)
        train(net, optimizer, range(4))
        net(torch.ones(2, 32, device=device)).sum().backward()
        optimizer.step()  # and no zero_grad()
        if wanted:
            finish(optimizer)
        net.cpu().to(device)
        optimizer.zero_grad()
        train(net, optimizer, range(4, 9))
        runs.append((list(net.parameters()), optimizer))
    assert_same(*runs)


def test_finish_gives_the_device_memory_of_the_slots_back() -> None:
    net = make_net(torch.device("cpu"))
    optimizer = offload(
        torch.optim.AdamW(net.parameters()), OffloadConfig(chunk_size=10_000, overlap="backward")
    )
    train(net, optimizer, range(3))
    (pipeline,) = optimizer._offload_core.pipelines.values()
    assert pipeline._kept or optimizer._offload_core.overlap._run is not None
    finish(optimizer)
    assert not pipeline._kept
    assert optimizer._offload_core.overlap._run is None
    assert all(train(net, optimizer, range(3, 5)))


def test_finish_in_the_middle_of_a_step_gives_it_up() -> None:
    net = make_net(torch.device("cpu"))
    optimizer = offload(
        torch.optim.AdamW(net.parameters()), OffloadConfig(chunk_size=10_000, overlap="backward")
    )
    train(net, optimizer, range(3))
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    net(torch.ones(2, 32)).sum().backward()
    finish(optimizer)
    net.cpu()
    with pytest.warns(UserWarning, match="training ended between backward"):
        optimizer.state_dict()
    with pytest.raises(RuntimeError, match=r"training ended between backward.*Load a checkpoint"):
        optimizer.step()
    net.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    optimizer.zero_grad()
    train(net, optimizer, range(3, 5))


def test_the_state_that_there_will_be(device: torch.device) -> None:
    net = make_net(device)
    net[0].requires_grad_(False)
    optimizer = offload(torch.optim.AdamW(net.parameters()))
    expected = 2 * 4 * sum(p.numel() for p in net.parameters() if p.requires_grad)
    assert expected_state_bytes(optimizer) == expected
    assert not optimizer.state
    train(net, optimizer, range(2))
    assert expected_state_bytes(optimizer) == expected


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.filterwarnings("ignore:FSDP will not all-gather:UserWarning")
@pytest.mark.filterwarnings("ignore:.*FullyShardedDataParallel.*deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*NO_SHARD.*:FutureWarning")
@pytest.mark.filterwarnings("ignore:FSDP is switching to use:UserWarning")
def test_parameters_of_fsdp1_are_refused_with_the_one_that_works(use_orig_params: bool) -> None:
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        net = FullyShardedDataParallel(
            make_net(torch.device("cpu")),
            use_orig_params=use_orig_params,
            device_id=torch.device("cpu"),
        )
        with pytest.raises(
            NotImplementedError, match=r"FSDP1.*fully_shard.*offload_optimizer_fsdp"
        ):
            offload(torch.optim.AdamW(net.parameters()))
    finally:
        torch.distributed.destroy_process_group()
