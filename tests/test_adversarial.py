"""What is done to an optimizer behind its back: exact, or refused with a message."""

from __future__ import annotations

import copy
import os
import sys

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from training import assert_same, fail_at_chunk, make_params, set_grads, train

from torch_offload import (
    OffloadConfig,
    host,
    is_offloaded,
    offload,
    offload_stats,
    unoffload,
)

CONFIG = OffloadConfig(chunk_size=50_000)
CPU = torch.device("cpu")


def go_on(params, optimizer, steps=2):
    for step in range(20, 20 + steps):
        set_grads(params, step)
        optimizer.step()
    return params, optimizer


def both(device, meddle, **kwargs):
    """Train, meddle, train on: plain and offloaded must agree."""
    results = []
    for config in (None, CONFIG):
        params, optimizer = train(device, config=config, has_grad=None, clip=None, **kwargs)
        meddle(params, optimizer)
        results.append(go_on(params, optimizer))
    assert_same(*results)
    return results[1]


def moments(optimizer):
    return [(s, k) for s in optimizer.state.values() for k in s if k != "step"]


def test_state_memory_replaced_under_the_same_tensor(device):
    def meddle(params, optimizer):
        for state, key in moments(optimizer):
            state[key].data = state[key].data.clone().mul_(1.5)

    params, optimizer = both(device, meddle)
    # The new values are in host memory of ours again, so that they travel.
    assert optimizer.state_dict()["state"][0]["exp_avg"] is optimizer.state[params[0]]["exp_avg"]
    kept = optimizer.state[params[0]]["exp_avg"].clone()
    go_on(params, optimizer, 1)
    assert not torch.equal(kept, optimizer.state[params[0]]["exp_avg"])


def test_state_moved_to_the_device_and_back_by_data(device):
    """The widespread helper that moves an optimizer's state by ``value.data = value.data.to()``."""

    def meddle(params, optimizer):
        for place in (device, CPU, device):
            for state, key in moments(optimizer):
                state[key].data = state[key].data.to(place)

    both(device, meddle)


def test_state_put_into_shared_memory():
    both(CPU, lambda _, optimizer: [s[k].share_memory_() for s, k in moments(optimizer)])


def test_states_of_two_parameters_exchanged(device):
    def in_the_state(params, optimizer):
        p, q = params[0], params[6]
        q.data = p.data[:129, :65].clone()
        p.data = q.data.clone()
        optimizer.state[p], optimizer.state[q] = (
            {k: v.clone() for k, v in optimizer.state[q].items()},
            {k: v[:129, :65].clone() if v.dim() else v for k, v in optimizer.state[p].items()},
        )
        for a, b in ((p, q), (q, p)):
            assert optimizer.state[a]["exp_avg"].shape == b.shape
        optimizer.state[p], optimizer.state[q] = optimizer.state[q], optimizer.state[p]

    both(device, in_the_state)


def test_states_exchanged_with_a_parameter_that_rests(device):
    """Its state is in the place that the other one's goes back to."""

    def run(config):
        params = make_params(device, shapes=[(8, 8)] * 3)
        optimizer = torch.optim.AdamW(params, lr=0.1)
        if config:
            offload(optimizer, config)
        state = optimizer.state
        for step in range(5):
            if step == 2:
                state[params[0]], state[params[1]] = state[params[1]], state[params[0]]
            set_grads(params, step, lambda index, step: index == 0 or step != 2)
            optimizer.step()
        return params, optimizer

    assert_same(run(None), run(OffloadConfig(chunk_size=100)))


def test_own_state_dict_permuted_and_loaded(device):
    shapes = [(64, 9), (64, 9), (64, 9)]

    def meddle(params, optimizer):
        saved = optimizer.state_dict()
        state = saved["state"]
        state[0], state[1], state[2] = state[1], state[2], state[0]
        optimizer.load_state_dict(saved)

    both(device, meddle, shapes=shapes)


def test_a_load_hook_that_remaps(device):
    shapes = [(64, 9), (64, 9), (64, 9)]

    def meddle(params, optimizer):
        def hook(_, loaded):
            return {**loaded, "state": {i: loaded["state"][2 - i] for i in range(3)}}

        handle = optimizer.register_load_state_dict_pre_hook(hook)
        optimizer.load_state_dict(optimizer.state_dict())
        handle.remove()

    both(device, meddle, shapes=shapes)


def test_load_under_inference_mode_and_from_tensors_with_grad(device):
    def meddle(params, optimizer):
        saved = copy.deepcopy(optimizer.state_dict())
        for values in saved["state"].values():
            values["exp_avg"].requires_grad_(True)
        for _ in range(2):
            with torch.inference_mode():
                optimizer.load_state_dict(saved)
            optimizer.load_state_dict(saved)
        for state, key in moments(optimizer):
            state[key].requires_grad_(False)

    both(device, meddle)


def test_offload_under_inference_mode(device):
    def run(config):
        params, optimizer = train(device, config=None, clip=None)
        if config:
            with torch.inference_mode():
                offload(optimizer, config)
        return go_on(params, optimizer)

    assert_same(run(None), run(CONFIG))


def test_step_with_a_dimension_keeps_its_dtype(device):
    def run(config):
        params, optimizer = train(device, config=config, dtype=torch.bfloat16, clip=None)
        saved = copy.deepcopy(optimizer.state_dict())
        for values in saved["state"].values():
            values["step"] = torch.tensor([1001.0])
        optimizer.load_state_dict(saved)
        return go_on(params, optimizer)

    plain, offloaded = run(None), run(CONFIG)
    assert_same(plain, offloaded)
    assert offloaded[1].state[offloaded[0][0]]["step"].item() == 1003


def test_swap_tensors(device):
    def meddle(params, optimizer):
        other = torch.nn.Parameter(torch.full_like(params[0], 0.5))
        torch.utils.swap_tensors(params[0], other)

    both(device, meddle)


def test_a_gradient_with_other_strides(device):
    """torch's foreach kernels take another path for the whole list then."""

    def run(config, **kwargs):
        params = make_params(device, shapes=[(64, 32)] * 4)
        optimizer = torch.optim.AdamW(params, lr=0.1, **kwargs)
        if config:
            offload(optimizer, config)
        for step in range(4):
            set_grads(params, step)
            params[1].grad = params[1].grad.t().contiguous().t()
            optimizer.step()
        return params, optimizer

    flavours = [{"foreach": True}, {"foreach": False}]
    if device.type == "cpu":  # the CUDA kernel of the plain optimizer refuses other strides
        flavours.append({"fused": True})
    for kwargs in flavours:
        assert_same(run(None, **kwargs), run(OffloadConfig(chunk_size=1), **kwargs))


def test_a_parameter_class_of_its_own_in_the_group(device):
    class Mine(torch.nn.Parameter):
        pass

    def run(config):
        params = make_params(device)
        params[3] = Mine(params[3].detach())
        optimizer = torch.optim.AdamW(params, lr=0.1)
        if config:
            offload(optimizer, config)
        return go_on(params, optimizer, 4)

    assert_same(run(None), run(OffloadConfig(chunk_size=1)))


def test_a_module_replaced_behind_the_optimizer(device):
    """Its old parameters get no gradient any more, the new ones are in no group: as in plain."""

    def run(config):
        torch.manual_seed(5)
        model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)]).to(device)
        params = list(model.parameters())
        optimizer = torch.optim.AdamW(params, lr=0.1)
        if config:
            offload(optimizer, config)
        for step in range(6):
            if step == 3:
                model[1] = torch.nn.Linear(8, 8).to(device)
            optimizer.zero_grad()
            model(torch.ones(2, 8, device=device)).square().sum().backward()
            optimizer.step()
        assert optimizer.state[params[2]]["step"] == 3
        assert optimizer.state[params[0]]["step"] == 6
        return [*params, *model[1].parameters()], optimizer

    assert_same(run(None), run(OffloadConfig(chunk_size=1)))


def test_forty_dimensions_and_a_default_device(device):
    params = make_params(device, shapes=[(1,) * 38 + (2, 3), (0, 3), (5,)])
    optimizer = offload(torch.optim.AdamW(params, lr=0.1), CONFIG)
    for param in params:
        param.grad = torch.ones_like(param)
    with device:  # what is made without a device lands there
        optimizer.step()
    assert all(optimizer.state[p]["exp_avg"].device == CPU for p in params)
    assert torch.equal(optimizer.state[params[0]]["exp_avg"], torch.full(params[0].shape, 0.1))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # inside torch.compile
def test_compiled_step(device):
    def run(config):
        params = make_params(device)
        optimizer = torch.optim.AdamW(params, lr=0.1)
        if config:
            offload(optimizer, config)
        step = torch.compile(optimizer.step) if config else optimizer.step
        for i in range(3):
            set_grads(params, i)
            step()
        return params, optimizer

    assert_same(run(None), run(CONFIG))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_does_not_write_into_our_state():
    params, optimizer = train(CPU, config=CONFIG)
    before = copy.deepcopy(optimizer.state_dict())
    child = os.fork()
    if child == 0:
        for state, key in moments(optimizer):
            state[key].fill_(9.0)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for index, values in before["state"].items():
        assert torch.equal(values["exp_avg"], optimizer.state_dict()["state"][index]["exp_avg"])
    go_on(params, optimizer)


def test_a_step_bound_before_the_conversion_is_noticed(device):
    params = make_params(device)
    optimizer = torch.optim.AdamW(params)
    bound = optimizer.step
    offload(optimizer)
    set_grads(params, 0)
    before = [p.detach().clone() for p in params]
    with pytest.raises(RuntimeError, match=r"bound before offload\(\) was called"):
        bound()
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"bound before offload\(\) was called"):
        bound()


def test_a_step_bound_while_offloaded_works_after_unoffload(device):
    def run(config):
        params = make_params(device)
        optimizer = torch.optim.AdamW(params)
        if config:
            offload(optimizer, config)
        bound = optimizer.step
        set_grads(params, 0)
        bound()
        if config:
            unoffload(optimizer)
        set_grads(params, 1)
        bound()
        return params, optimizer

    assert_same(run(None), run(CONFIG))


def test_scheduler_built_while_offloaded_goes_on_after_unoffload(device):
    params = make_params(device)
    optimizer = offload(torch.optim.AdamW(params, lr=1.0))
    scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
    unoffload(optimizer)
    set_grads(params, 0)
    optimizer.step()
    scheduler.step()  # a warning is an error here
    assert optimizer.param_groups[0]["lr"] == 0.5
    offload(optimizer)
    optimizer.step()
    assert offload_stats(optimizer).d2h_bytes > 0


def test_unoffload_refuses_a_replaced_step():
    optimizer = offload(torch.optim.AdamW(make_params(CPU)))
    inner = optimizer.step
    optimizer.step = lambda *args: inner(*args)
    with pytest.raises(ValueError, match=r"Call unoffload\(\) before whatever replaced it"):
        unoffload(optimizer)
    assert is_offloaded(optimizer)


def test_failed_conversion_leaves_the_optimizer_as_it_was(device, monkeypatch):
    params, optimizer = train(device, config=None, clip=None)
    step, state = optimizer.__dict__["step"], dict(optimizer.state)
    monkeypatch.setattr(host, "available_host_bytes", lambda: 100)
    with pytest.raises(MemoryError):
        offload(optimizer)
    assert optimizer.__dict__["step"] is step
    assert dict(optimizer.state) == state
    assert optimizer.state[params[0]]["exp_avg"].device.type == device.type
    assert not is_offloaded(optimizer)


def test_a_parameter_listed_twice_is_refused():
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = torch.optim.AdamW([p := make_params(CPU)[0], p])
    with pytest.raises(ValueError, match="group 0 lists a parameter twice"):
        offload(optimizer)
    params = make_params(CPU)
    optimizer = torch.optim.AdamW([{"params": params[:2]}, {"params": params[2:]}])
    offload(optimizer)
    optimizer.param_groups[1]["params"].append(params[0])
    set_grads(params, 0)
    with pytest.raises(ValueError, match="group 1 lists a parameter twice, or one that an earl"):
        optimizer.step()
    with pytest.raises(ValueError, match="group 1 lists a parameter twice"):
        offload(unoffload(optimizer))


def test_parameters_over_the_same_memory_are_refused(device):
    params = make_params(device, shapes=[(5, 3), (4,), (5, 3)])
    params[2].data = params[0].data
    optimizer = offload(torch.optim.AdamW(params))
    set_grads(params, 0)
    with pytest.raises(NotImplementedError, match=r"two parameters .* share memory. Tie"):
        optimizer.step()
    flat = torch.zeros(100, device=device)
    views = [torch.nn.Parameter(flat[:50]), torch.nn.Parameter(flat[50:])]
    go_on(views, offload(torch.optim.AdamW(views)), 1)


def test_a_checkpoint_without_values_is_refused_before_anything_changes(device):
    params, optimizer = train(device, config=CONFIG, has_grad=None)
    before = copy.deepcopy(optimizer.state_dict())
    broken = copy.deepcopy(before)
    broken["state"][8]["exp_avg_sq"] = broken["state"][8]["exp_avg_sq"].to("meta")
    with pytest.raises(ValueError, match=r"'exp_avg_sq' in the checkpoint .*device meta"):
        optimizer.load_state_dict(broken)
    for index, values in before["state"].items():
        assert torch.equal(values["exp_avg"], optimizer.state_dict()["state"][index]["exp_avg"])
    go_on(params, optimizer)


def test_a_load_that_stops_half_way_is_noticed(device, monkeypatch):
    from torch_offload import layout

    params, optimizer = train(device, config=CONFIG, has_grad=None)
    saved = copy.deepcopy(optimizer.state_dict())
    real, calls = layout.Home.receive, []

    def receive(self, key, source):
        calls.append(key)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(self, key, source)

    monkeypatch.setattr(layout.Home, "receive", receive)
    with pytest.raises(KeyboardInterrupt):
        optimizer.load_state_dict(saved)
    set_grads(params, 1)
    with pytest.raises(RuntimeError, match="stopped half-way"):
        optimizer.step()
    monkeypatch.undo()
    optimizer.load_state_dict(saved)
    go_on(params, optimizer)


def test_an_error_before_any_update_can_be_corrected(device):
    def run(config):
        params, optimizer = train(device, config=config, has_grad=None, clip=None)
        set_grads(params, 7)
        betas = optimizer.param_groups[0]["betas"]
        optimizer.param_groups[0]["betas"] = None
        with pytest.raises(TypeError):
            optimizer.step()
        optimizer.param_groups[0]["betas"] = betas
        return go_on(params, optimizer)

    assert_same(run(None), run(OffloadConfig(chunk_size=10**9)))


def tear(optimizer, params, monkeypatch):
    """Let a step stop after its first chunk."""
    fail_at_chunk(monkeypatch, 2)
    set_grads(params, 7)
    with pytest.raises(RuntimeError, match="boom"):
        optimizer.step()
    monkeypatch.undo()


def test_a_torn_step_is_not_healed_by_its_own_state(device, monkeypatch):
    params, optimizer = train(device, config=OffloadConfig(chunk_size=1), has_grad=None)
    own = optimizer.state_dict()
    good = copy.deepcopy(own)
    tear(optimizer, params, monkeypatch)
    optimizer.load_state_dict(own)
    with pytest.raises(RuntimeError, match="stopped half-way"):
        optimizer.step()
    with pytest.warns(UserWarning, match="not that of a whole step"):
        unoffload(clone := copy.deepcopy(optimizer))
    assert not is_offloaded(clone)
    optimizer.load_state_dict(good)
    go_on(params, optimizer)


def test_one_large_parameter_costs_its_size_once(device):
    params = make_params(device, shapes=[(10,), (1000, 1000), (10,), (10,), (10,)])
    optimizer = offload(torch.optim.AdamW(params), OffloadConfig(chunk_size=256, num_slots=3))
    for _ in range(2):
        set_grads(params, 0)
        optimizer.step()
        assert offload_stats(optimizer).staging_bytes <= 8_000_000 + 3 * 256


def test_extreme_configs(device):
    params = make_params(device)
    optimizer = offload(torch.optim.AdamW(params), OffloadConfig(num_slots=10**9, chunk_size=1))
    go_on(params, optimizer)
    for size in ("9" * 400 + "GB", sys.maxsize + 1):
        with pytest.raises(ValueError, match="more than any memory holds"):
            OffloadConfig(chunk_size=size)
