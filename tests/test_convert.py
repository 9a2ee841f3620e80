"""The conversion: the same object, and all that torch and users hang on it goes on working."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau
from training import SHAPES, assert_same, make_params, set_grads, train

from torch_offload import (
    OffloadConfig,
    is_offloaded,
    offload,
    offload_stats,
    synchronize,
    unoffload,
)


def test_same_object_and_class(device):
    optimizer = torch.optim.AdamW(make_params(device))
    groups, state = optimizer.param_groups, optimizer.state
    assert offload(optimizer) is optimizer
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.param_groups is groups
    assert optimizer.state is state
    assert type(optimizer).__name__ == "OffloadedAdamW"
    assert repr(optimizer).startswith("OffloadedAdamW (")
    assert is_offloaded(optimizer)
    assert type(torch.optim.AdamW(make_params(device))) is torch.optim.AdamW


def test_second_offload_with_the_same_config_changes_nothing(device):
    optimizer = offload(torch.optim.AdamW(make_params(device)), OffloadConfig(chunk_size="1MiB"))
    kind = type(optimizer)
    assert offload(optimizer, OffloadConfig(chunk_size=2**20)) is optimizer
    assert offload(optimizer) is optimizer
    assert type(optimizer) is kind


@pytest.mark.parametrize("when", ["before", "after", "both"])
@pytest.mark.parametrize("make", ["lambda", "one-cycle", "plateau"])
def test_schedulers_built_before_and_after(device, when, make):
    def schedule(optimizer):
        if make == "lambda":
            return LambdaLR(optimizer, lambda step: 0.5**step)
        if make == "one-cycle":
            return OneCycleLR(optimizer, max_lr=0.1, total_steps=20)
        return ReduceLROnPlateau(optimizer, patience=0)

    def run(config):
        params = make_params(device)
        optimizer = torch.optim.AdamW(params, lr=0.1)
        schedulers = []
        if when in ("before", "both"):
            schedulers.append(schedule(optimizer))
        if config:
            offload(optimizer, config)
        if when in ("after", "both"):
            schedulers.append(schedule(optimizer))
        for step in range(6):
            set_grads(params, step)
            optimizer.step()
            for scheduler in schedulers:
                scheduler.step(*([1.0] if make == "plateau" else []))
                assert scheduler.optimizer is optimizer
        if config:
            assert offload_stats(optimizer).d2h_bytes > 0, "the offload was bypassed"
            assert optimizer.state[params[0]]["exp_avg"].device.type == "cpu"
        return params, optimizer

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "lr_scheduler.step() before optimizer.step()"
        assert_same(run(None), run(OffloadConfig(chunk_size=50_000)))


def test_step_hooks_fire_once_a_step_also_after_a_load(device):
    params = make_params(device)
    optimizer = offload(torch.optim.AdamW(params), OffloadConfig(chunk_size=1))
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    for step in range(2):
        set_grads(params, step)
        optimizer.step()
    assert calls == ["pre", "post"] * 2
    optimizer.load_state_dict(optimizer.state_dict())
    set_grads(params, 3)
    optimizer.step()
    assert calls == ["pre", "post"] * 3


def test_convert_in_the_middle_and_back(device):
    plain = train(device, config=None, steps=6, has_grad=None, clip=None)
    params = make_params(device)
    half = len(params) // 2
    groups = [
        {"params": params[:half], "weight_decay": 0.1},
        {"params": params[half:], "weight_decay": 0.0, "lr": 3e-3},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    schedule = LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    for step in range(6):
        if step == 2:
            offload(optimizer, OffloadConfig(chunk_size=50_000))
            assert optimizer.state[params[0]]["exp_avg"].device.type == "cpu"
        if step == 4:
            unoffload(optimizer)
            assert type(optimizer) is torch.optim.AdamW
            assert not is_offloaded(optimizer)
            assert optimizer.state[params[0]]["exp_avg"].device.type == device.type
        set_grads(params, step)
        optimizer.step()
        schedule.step()
    assert_same(plain, (params, optimizer))


def test_state_that_a_user_puts_in_is_used_and_moves_to_the_host(device):
    plain = train(device, config=None, clip=None)
    params, optimizer = train(device, config=OffloadConfig(), clip=None)
    for run_params, run_optimizer in (plain, (params, optimizer)):
        run_optimizer.state[run_params[0]]["exp_avg"] = torch.full_like(run_params[0].detach(), 3.0)
        set_grads(run_params, 9)
        run_optimizer.step()
    assert_same(plain, (params, optimizer))
    assert optimizer.state[params[0]]["exp_avg"].device.type == "cpu"


def test_cleared_state_starts_afresh(device):
    def run(config):
        params, optimizer = train(device, config=config, clip=None)
        optimizer.state.clear()
        for step in range(2):
            set_grads(params, step)
            optimizer.step()
        return params, optimizer

    assert_same(run(None), run(OffloadConfig()))


def test_deepcopy_is_offloaded_and_independent(device):
    params, optimizer = train(device, config=OffloadConfig(chunk_size=50_000))
    clone = copy.deepcopy(optimizer)
    assert is_offloaded(clone)
    cloned = [p for group in clone.param_groups for p in group["params"]]
    assert_same((params, optimizer), (cloned, clone))
    before = optimizer.state[params[0]]["exp_avg"].clone()
    set_grads(cloned, 7)
    clone.step()
    synchronize(clone)
    assert torch.equal(optimizer.state[params[0]]["exp_avg"], before)
    assert not torch.equal(clone.state[cloned[0]]["exp_avg"], before)


def test_pickle_gives_the_plain_optimizer(device):
    params, optimizer = train(device, config=OffloadConfig())
    loaded = pickle.loads(pickle.dumps(optimizer))
    assert type(loaded) is torch.optim.AdamW
    assert_same(
        (params, optimizer), ([p for g in loaded.param_groups for p in g["params"]], loaded)
    )


def test_a_pickled_optimizer_continues_when_it_is_offloaded_again(device):
    def run(config, pickled):
        params, optimizer = train(device, config=config, has_grad=None)
        if pickled:
            optimizer = pickle.loads(pickle.dumps(optimizer))
            params = [p for group in optimizer.param_groups for p in group["params"]]
            if config:
                offload(optimizer, config)
        for step in range(6, 9):
            set_grads(params, step)
            optimizer.step()
        return params, optimizer

    config = OffloadConfig(chunk_size=50_000)
    plain = run(None, False)
    assert_same(plain, run(None, True))
    assert_same(plain, run(config, True))


def test_two_optimizers_do_not_mix(device):
    def run(config):
        params = make_params(device)
        optimizers = [torch.optim.AdamW(params[:4], lr=0.1), torch.optim.Adam(params[4:], lr=0.2)]
        if config:
            for optimizer in optimizers:
                offload(optimizer, config)
        for step in range(4):
            set_grads(params, step)
            for optimizer in optimizers:
                optimizer.step()
        return params, optimizers

    plain_params, plain = run(None)
    params, optimizers = run(OffloadConfig(chunk_size=50_000))
    assert_same((plain_params[:4], plain[0]), (params[:4], optimizers[0]))
    assert_same((plain_params[4:], plain[1]), (params[4:], optimizers[1]))


@pytest.mark.parametrize("convert_back", [False, True])
def test_nothing_keeps_the_optimizer_alive(device, convert_back):
    params = make_params(device)
    optimizer = offload(torch.optim.AdamW(params))
    set_grads(params, 0)
    optimizer.step()
    if convert_back:
        unoffload(optimizer)
        optimizer.step()
    alive = [weakref.ref(optimizer), weakref.ref(params[0])]
    gc.collect()
    gc.disable()  # reference counts alone must do it
    try:
        del optimizer, params
        assert [ref() for ref in alive] == [None, None]
    finally:
        gc.enable()


def test_a_tensor_kept_by_the_user_outlives_the_optimizer(device):
    params, optimizer = train(device, config=OffloadConfig())
    kept = optimizer.state[params[0]]["exp_avg"]
    values = kept.clone()
    del optimizer, params
    gc.collect()
    assert torch.equal(kept, values)


@pytest.mark.gpu
def test_parameters_that_move_to_the_gpu_take_their_state_along():
    def run(config):
        shapes = [shape for shape in SHAPES if shape]  # 0-dim state stays where it was made
        params, optimizer = train(torch.device("cpu"), config=config, shapes=shapes)
        for param in params:
            param.data = param.data.to("cuda")
            if config is None:
                state = optimizer.state.get(param, {})
                state.update({k: v.cuda() for k, v in state.items() if k != "step"})
        for step in range(3):
            set_grads(params, step)
            optimizer.step()
        return params, optimizer

    plain, offloaded = run(None), run(OffloadConfig(chunk_size=50_000))
    assert_same(plain, offloaded)
    assert offloaded[1].state[offloaded[0][0]]["exp_avg"].is_pinned()
