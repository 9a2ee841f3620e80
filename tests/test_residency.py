"""gpu_budget: which chunks stay on the device, and that nothing else changes by it."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_overlap import CHUNK, model_of, simple
from test_overlap import train as train_net
from training import assert_same, train

from torch_offload import OffloadConfig, offload, offload_stats, residency, unoffload
from torch_offload.residency import Budget, what_is_free

SIZES = st.lists(st.integers(1, 100), max_size=30)


@given(SIZES, st.integers(0, 3000), st.booleans())
def test_the_budget_is_kept_and_used(sizes, num_bytes, from_end):
    chosen = Budget(num_bytes=num_bytes, from_end=from_end).choose(sizes)
    used = sum(sizes[i] for i in chosen)
    assert used <= num_bytes
    assert all(used + sizes[i] > num_bytes for i in set(range(len(sizes))) - set(chosen))
    assert chosen == sorted(set(chosen))


@given(SIZES, st.integers(0, 100))
def test_a_share_is_of_all_state(sizes, percent):
    half = len(sizes) // 2
    budget = Budget(share=percent / 100)
    first = budget.choose(sizes[:half])
    used = sum(sizes[i] for i in first)
    used += sum(sizes[half + i] for i in budget.choose(sizes[half:], sum(sizes[:half]), used))
    assert used <= percent / 100 * sum(sizes) + 1e-6
    assert percent < 100 or used == sum(sizes)


def test_the_chunks_whose_copies_would_be_seen():
    assert Budget(num_bytes=5).choose([2, 2, 2, 2]) == [0, 1]
    assert Budget(num_bytes=5, from_end=True).choose([2, 2, 2, 2]) == [2, 3]
    assert OffloadConfig(overlap="forward", gpu_budget=9).budget() == Budget(num_bytes=9)
    assert OffloadConfig(overlap="backward", gpu_budget=9).budget().from_end


@pytest.mark.parametrize(
    ("given_", "normal"),
    [
        (0, 0),
        ("0", 0),
        ("8GiB", 8 * 2**30),
        (123, 123),
        ("50%", "50%"),
        (" 12.5 % ".replace(" ", ""), "12.5%"),
        ("AUTO", "auto"),
    ],
)
def test_config(given_, normal):
    config = OffloadConfig(gpu_budget=given_)
    assert config.gpu_budget == normal
    assert OffloadConfig.from_text({"gpu_budget": str(config.gpu_budget)}) == config


@pytest.mark.parametrize("wrong", [-1, "101%", "x%", "much", True, 1.5, None, "-3%"])
def test_config_errors_name_the_field(wrong):
    with pytest.raises(ValueError, match="gpu_budget"):
        OffloadConfig(gpu_budget=wrong)


def test_what_is_free():
    gib = 2**30
    assert what_is_free(100 * gib, 1 * gib, 50 * gib) == 39 * gib
    assert what_is_free(8 * gib, 0, 2 * gib) == 5 * gib
    assert what_is_free(8 * gib, 0, 8 * gib) == 0


@pytest.mark.parametrize("budget", ["0%", "30%", 60_000, "100%"])
@pytest.mark.parametrize("flavour", [{"fused": True}, {"foreach": True}])
def test_same_bits_and_checkpoints(device, budget, flavour):
    plain = train(device, config=None, **flavour)
    config = OffloadConfig(chunk_size=20_000, gpu_budget=budget)
    params, optimizer = train(device, config=config, **flavour)
    assert_same(plain, (params, optimizer))
    stats = offload_stats(optimizer)
    total = optimizer._offload_core.planner.layout.num_bytes(params[0].device)
    limit = {"0%": 0, "30%": 0.3 * total, "100%": total}.get(str(budget), 60_000)
    assert (limit > 0) == (stats.resident_bytes > 0)
    assert stats.resident_bytes <= limit
    assert (stats.h2d_bytes == 0) == (budget == "100%")
    # On, in plain torch and in each place.
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True, map_location="cpu")

    def go_on(config):
        own = [copy.deepcopy(param) for param in params]
        state = copy.deepcopy(saved)
        return train(
            device, config=config, params=own, first_step=6, steps=3, state_dict=state, **flavour
        )

    expected = go_on(None)
    for other in (OffloadConfig(chunk_size=9_000, gpu_budget="50%"), config):
        assert_same(expected, go_on(other))
    unoffload(optimizer)
    assert_same(plain, (params, optimizer))


@pytest.mark.parametrize("overlap", ["step", "backward", "forward"])
@pytest.mark.parametrize("budget", ["50%", "100%"])
def test_in_every_mode(device, overlap, budget):
    def loop(model, optimizer, step):
        if step == 0 and overlap is not None and not hasattr(optimizer, "_offload_core"):
            pass
        simple(model, optimizer, step)

    plain = train_net(device, None, loop)
    params, optimizer = train_net(device, None, loop, steps=0)
    model = model_of[optimizer]
    config = OffloadConfig(chunk_size=CHUNK, overlap=overlap, gpu_budget=budget)
    offload(optimizer, config, model=model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    for step in range(6):
        simple(model, optimizer, step)
        schedule.step()
    assert_same(plain, (params, optimizer))
    assert offload_stats(optimizer).resident_bytes > 0


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", ["step", "backward", "forward"])
def test_auto_keeps_what_fits_and_says_so(monkeypatch, caplog, overlap):
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(residency, "MARGIN_BYTES", 0)
    plain = train_net(gpu, None, steps=8)
    params, optimizer = train_net(gpu, None, steps=0)
    model = model_of[optimizer]
    config = OffloadConfig(chunk_size=CHUNK, overlap=overlap, gpu_budget="auto")
    offload(optimizer, config, model=model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    resident = []
    for step in range(8):
        simple(model, optimizer, step)
        schedule.step()
        resident.append(offload_stats(optimizer).resident_bytes)
    assert_same(plain, (params, optimizer))
    assert resident[: residency.NUM_STEPS_WATCHED - 1] == [0] * (residency.NUM_STEPS_WATCHED - 1)
    assert resident[-1] > 0
    assert caplog.text.count('gpu_budget="auto"') == 1
