"""The numbers are bit for bit those of the plain optimizer, whatever the settings (I10)."""

from __future__ import annotations

import pytest
import torch
from training import FLAVOURS, assert_same, make_params, set_grads, train

from torch_offload import OffloadConfig, host, is_offloaded, offload, offload_stats

CHUNKS = {"a chunk per parameter": 1, "several chunks": 50_000, "one chunk": "1GiB"}


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunk_size", CHUNKS.values(), ids=CHUNKS.keys())
@pytest.mark.parametrize("num_slots", [2, 3, 4])
@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.Adam])
def test_same_bits_as_plain(device, flavour, dtype, chunk_size, num_slots, optimizer_class):
    kwargs = {"optimizer_class": optimizer_class, "dtype": dtype, **FLAVOURS[flavour]}
    plain = train(device, config=None, **kwargs)
    assert_same(plain, train(device, config=None, **kwargs))  # the control
    config = OffloadConfig(chunk_size=chunk_size, num_slots=num_slots)
    assert_same(plain, train(device, config=config, **kwargs))


@pytest.mark.parametrize("settings", [{"amsgrad": True}, {"maximize": True}, {}], ids=str)
def test_same_bits_with_other_settings(device, settings):
    plain = train(device, config=None, **settings)
    assert_same(plain, train(device, config=OffloadConfig(chunk_size=50_000), **settings))


def test_a_wrong_update_would_be_seen(device):
    plain = train(device, config=None, betas=(0.9, 0.999))
    other = train(device, config=OffloadConfig(), betas=(0.9, 0.998))
    with pytest.raises(AssertionError):
        assert_same(plain, other)


def test_complex_and_channels_last(device):
    def run(config):
        weight = torch.randn(8, 4, 3, 3, generator=torch.Generator().manual_seed(2)).to(device)
        params = [
            torch.nn.Parameter(weight.to(memory_format=torch.channels_last)),
            torch.nn.Parameter(torch.complex(*weight.unbind(1)[:2]).contiguous()),
        ]
        optimizer = torch.optim.AdamW(params, lr=0.1)
        if config:
            offload(optimizer, config)
        for _ in range(4):
            for p in params:
                p.grad = (p * p).detach().contiguous()
            optimizer.step()
        return params, optimizer

    plain = run(None)
    offloaded = run(OffloadConfig(chunk_size=4096))
    assert_same(plain, offloaded)
    state = offloaded[1].state[offloaded[0][0]]
    assert state["exp_avg"].is_contiguous(memory_format=torch.channels_last)


def test_state_between_steps_is_on_the_host(device):
    params, optimizer = train(device, config=OffloadConfig(chunk_size=50_000))
    for param in params:
        for key, value in optimizer.state.get(param, {}).items():
            if value.dim() > 0:
                assert value.device.type == "cpu", key
                assert value.untyped_storage().nbytes() == value.nbytes
                assert value.is_pinned() == (device.type == "cuda" and value.numel() > 0)


def test_steps_of_fused_stay_on_the_device(device):
    params, optimizer = train(device, config=OffloadConfig(), fused=True)
    assert optimizer.state[params[0]]["step"].device.type == device.type
    params, optimizer = train(device, config=OffloadConfig(), foreach=True)
    assert optimizer.state[params[0]]["step"].device.type == "cpu"


def test_parameter_without_gradient_costs_no_copy(device):
    params = make_params(device, shapes=[(64,), (128,), (256,)])
    optimizer = offload(torch.optim.AdamW(params))
    set_grads(params, 0)
    optimizer.step()
    stats = offload_stats(optimizer)
    assert (stats.h2d_bytes, stats.d2h_bytes) == (0, 8 * (64 + 128 + 256))
    set_grads(params, 1, lambda index, _: index != 1)
    optimizer.step()
    stats = offload_stats(optimizer)
    assert stats.h2d_bytes == stats.d2h_bytes == 8 * (64 + 256)
    assert stats.num_chunks == 1


def test_frozen_parameter_gets_no_host_memory(device):
    params = make_params(device, shapes=[(64,), (1_000_000,)])
    params[1].requires_grad_(False)
    optimizer = offload(torch.optim.AdamW(params))
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    assert offload_stats(optimizer).host_bytes < 100_000
    params[1].requires_grad_(True)
    set_grads(params, 0)
    optimizer.step()
    assert offload_stats(optimizer).host_bytes >= 8_000_000


def test_parameters_added_and_replaced(device):
    def run(config):
        params = make_params(device, shapes=[(40, 3), (50,)])
        extra = make_params(device, shapes=[(9, 9)])
        optimizer = torch.optim.AdamW([params[0]], lr=0.1)
        if config:
            offload(optimizer, config)
        for step in range(6):
            if step == 2:
                optimizer.add_param_group({"params": [params[1]], "lr": 0.01})
            if step == 4:  # what Accelerate does under FSDP2: another object in the same place
                optimizer.state.pop(params[0])
                optimizer.param_groups[0]["params"][0] = extra[0]
            set_grads([*params, *extra], step)
            optimizer.step()
        return [*params, *extra], optimizer

    assert_same(run(None), run(OffloadConfig(chunk_size=300)))


def test_host_memory_of_removed_parameters_is_given_back(device, monkeypatch):
    monkeypatch.setattr(host, "PIECE_BYTES", 10_000)
    params = make_params(device, shapes=[(1000,), (1_000_000,)])
    optimizer = offload(torch.optim.AdamW(params), OffloadConfig(chunk_size=10_000))
    set_grads(params, 0)
    optimizer.step()
    before = offload_stats(optimizer).host_bytes
    optimizer.state.pop(params[1])
    del optimizer.param_groups[0]["params"][1], params[1]
    set_grads(params, 1)
    optimizer.step()
    assert offload_stats(optimizer).host_bytes < before / 10


def test_step_under_inference_mode_and_no_grad(device):
    def run(config, context):
        params = make_params(device)
        optimizer = torch.optim.AdamW(params, lr=0.1)
        if config:
            offload(optimizer, config)
        for step in range(3):
            set_grads(params, step)
            with context() if step == 0 and config else torch.no_grad():
                optimizer.step()
        return params, optimizer

    plain = run(None, torch.no_grad)
    assert_same(plain, run(OffloadConfig(), torch.no_grad))
    assert_same(plain, run(OffloadConfig(), torch.enable_grad))
    params, optimizer = run(OffloadConfig(), torch.inference_mode)
    assert is_offloaded(optimizer)
    assert not any(t.is_inference() for p in params for t in optimizer.state[p].values())
    assert_same(plain, (params, optimizer))


def test_closure_runs_once_and_before_the_update(device):
    def run(config):
        params = make_params(device)
        optimizer = torch.optim.AdamW(params, lr=0.1)
        if config:
            offload(optimizer, config)
        losses = []

        def closure():
            assert torch.is_grad_enabled()
            optimizer.zero_grad()
            loss = sum((p * p).sum() for p in params)
            loss.backward()
            losses.append(loss.item())
            return loss

        returned = [optimizer.step(closure).item() for _ in range(3)]
        assert returned == losses
        return params, optimizer

    assert_same(run(None), run(OffloadConfig(chunk_size=1)))


def test_grad_scaler_skips_and_unskips(device):
    def run(config, fused):
        params = make_params(device, shapes=[(64, 3), (7,)])
        optimizer = torch.optim.AdamW(params, lr=0.1, fused=fused)
        if config:
            offload(optimizer, config)
        scaler = torch.amp.GradScaler(device.type, init_scale=8.0)
        scaler.scale(torch.zeros(1, device=device))
        for step in range(5):
            set_grads(params, step)
            if step in (1, 3):
                params[0].grad[0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
        return params, optimizer

    for fused in (False, True):
        assert_same(run(None, fused), run(OffloadConfig(chunk_size=100), fused))
