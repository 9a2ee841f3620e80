"""Checkpoints are plain torch's, both ways, and loading is in place."""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from training import FLAVOURS, assert_same, make_params, set_grads, train

from torch_offload import OffloadConfig, offload, offload_stats

CONFIG = OffloadConfig(chunk_size=50_000)


def save(optimizer: torch.optim.Optimizer) -> bytes:
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    return buffer.getvalue()


def load(data: bytes, **kwargs) -> dict:
    return torch.load(io.BytesIO(data), weights_only=True, **kwargs)


def clone(params: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(p.detach().clone()) for p in params]


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("saved", [None, CONFIG], ids=["from plain", "from offloaded"])
@pytest.mark.parametrize("loaded", [None, CONFIG], ids=["to plain", "to offloaded"])
@pytest.mark.parametrize("map_location", ["cpu", None])
def test_continues_bit_exactly(device, flavour, dtype, saved, loaded, map_location):
    kwargs = {"dtype": dtype, **FLAVOURS[flavour]}
    params, optimizer = train(device, config=saved, **kwargs)
    checkpoint = load(save(optimizer), map_location=map_location)

    reference = train(device, config=None, **kwargs)
    reference_dict = load(save(reference[1]))
    resumed = {"first_step": 6, "steps": 3, **kwargs}
    plain = train(
        device, config=None, params=clone(reference[0]), state_dict=reference_dict, **resumed
    )
    other = train(device, config=loaded, params=clone(params), state_dict=checkpoint, **resumed)
    assert_same(plain, other)


#: Continues what it finds in a file; knows torch alone.
CONTINUE = """
import sys
sys.modules["torch_offload"] = None  # an import of it would fail
import torch

runs = torch.load(sys.argv[1], weights_only=True)
for name, run in runs.items():
    params = [torch.nn.Parameter(p) for p in run["params"]]
    sizes = [len(group["params"]) for group in run["optimizer"]["param_groups"]]
    left = iter(params)
    groups = [{"params": [next(left) for _ in range(size)]} for size in sizes]
    optimizer = getattr(torch.optim, name)(groups)
    optimizer.load_state_dict(run["optimizer"])
    for grads in run["grads"]:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizer.step()
    run.update(params=[p.detach() for p in params], optimizer=optimizer.state_dict())
torch.save(runs, sys.argv[1])
"""


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_same_keys_dtypes_and_size_as_plain(device, flavour):
    # `step` tensors are tiny and many here, so sizes are compared with room for nothing else.
    plain = train(device, config=None, **FLAVOURS[flavour])[1]
    offloaded = train(device, config=CONFIG, **FLAVOURS[flavour])[1]
    assert abs(len(save(offloaded)) / len(save(plain)) - 1) < 0.01
    expected, found = plain.state_dict(), offloaded.state_dict()
    assert expected["param_groups"] == found["param_groups"]
    assert list(expected["state"]) == list(found["state"])
    for index, values in expected["state"].items():
        assert list(values) == list(found["state"][index])
        for key, value in values.items():
            assert value.dtype == found["state"][index][key].dtype


def test_a_process_without_this_project_continues_bit_exactly(device, tmp_path: Path):
    kinds = {
        "AdamW": {"fused": True, "amsgrad": True},
        "SGD": {"momentum": 0.9, "nesterov": True, "foreach": True},
        "RMSprop": {"centered": True, "momentum": 0.5},
    }
    runs, expected = {}, {}
    for name, settings in kinds.items():
        kwargs = {"optimizer_class": getattr(torch.optim, name), **settings}
        params, optimizer = train(device, config=CONFIG, has_grad=None, **kwargs)
        grads = []
        for step in range(6, 9):
            set_grads(params, step)
            grads.append([p.grad for p in params])
        values = [p.detach() for p in params]
        runs[name] = {"params": values, "optimizer": optimizer.state_dict(), "grads": grads}
        plain_params, plain = train(device, config=None, has_grad=None, **kwargs)
        for step in range(6, 9):
            set_grads(plain_params, step)
            plain.step()
        expected[name] = plain_params, plain
    file = tmp_path / "runs.pt"
    torch.save(runs, file)
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    env["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # or torch would import what is installed
    subprocess.run(
        [sys.executable, "-c", CONTINUE, str(file)], check=True, cwd=tmp_path, env=env, timeout=120
    )
    for name, found in torch.load(file, weights_only=True).items():
        plain_params, plain = expected[name]
        for param, value in zip(plain_params, found["params"], strict=True):
            torch.testing.assert_close(value, param.detach(), rtol=0, atol=0)
        saved = plain.state_dict()
        assert found["optimizer"]["param_groups"] == saved["param_groups"]
        assert found["optimizer"]["state"].keys() == saved["state"].keys()
        for index, state in saved["state"].items():
            for key, value in state.items():
                other = found["optimizer"]["state"][index][key]
                torch.testing.assert_close(other, value, rtol=0, atol=0, check_stride=False)


def test_state_dict_before_the_first_step_is_empty(device):
    optimizer = offload(torch.optim.AdamW(make_params(device)))
    assert optimizer.state_dict()["state"] == {}
    assert len(optimizer.state) == 0
    assert offload_stats(optimizer).host_bytes == 0


def test_loading_is_in_place_and_leaves_the_dict_alone(device):
    params, optimizer = train(device, config=CONFIG)
    saved = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(saved)

    def addresses() -> dict[torch.Tensor, int]:
        return {p: s["exp_avg"].data_ptr() for p, s in optimizer.state.items() if p.dim() > 0}

    before = addresses()
    host_bytes = offload_stats(optimizer).host_bytes
    optimizer.load_state_dict(saved)
    assert addresses() == before
    assert offload_stats(optimizer).host_bytes == host_bytes
    set_grads(params, 1)
    optimizer.step()
    optimizer.state_dict()
    for index, values in kept["state"].items():
        for key, value in values.items():
            assert torch.equal(saved["state"][index][key], value)


def test_loading_its_own_state_dict_changes_nothing(device):
    _, optimizer = train(device, config=CONFIG)
    before = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())
    after = optimizer.state_dict()["state"]
    for index, values in before["state"].items():
        for key, value in values.items():
            assert torch.equal(after[index][key], value)


def test_partial_and_empty_entries(device):
    def run(config):
        params, optimizer = train(device, config=config)
        state = copy.deepcopy(optimizer.state_dict())
        del state["state"][0]
        state["state"][2] = {}
        optimizer.load_state_dict(state)
        assert params[0] not in optimizer.state
        set_grads(params, 8)
        optimizer.step()
        return params, optimizer

    assert_same(run(None), run(CONFIG))


def test_old_checkpoint_with_an_int_step_is_migrated(device):
    def run(config):
        params, optimizer = train(device, config=config, has_grad=None)
        state = copy.deepcopy(optimizer.state_dict())
        for values in state["state"].values():
            values["step"] = int(values["step"])
        optimizer.load_state_dict(state)
        assert all(torch.is_tensor(optimizer.state[p]["step"]) for p in params)
        set_grads(params, 8)
        optimizer.step()
        return params, optimizer

    assert_same(run(None), run(CONFIG))


def test_wider_moments_are_cast_as_plain_does(device):
    def run(config):
        params, optimizer = train(device, config=config, dtype=torch.bfloat16)
        state = copy.deepcopy(optimizer.state_dict())
        for values in state["state"].values():
            values["exp_avg"] = values["exp_avg"].float() * 1.001
        optimizer.load_state_dict(state)
        set_grads(params, 8)
        optimizer.step()
        return params, optimizer

    assert_same(run(None), run(CONFIG))


def test_hooks_see_the_whole_dict(device):
    _, optimizer = train(device, config=CONFIG)
    seen = []
    optimizer.register_load_state_dict_pre_hook(lambda o, d: seen.append((o, len(d["state"]))))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append((o, len(o.state))))
    optimizer.register_state_dict_post_hook(lambda o, d: seen.append((o, len(d["state"]))))
    optimizer.load_state_dict(optimizer.state_dict())
    count = len(optimizer.state)
    assert seen == [(optimizer, count)] * 3


@pytest.mark.parametrize("damage", ["groups", "params"])
def test_checkpoint_of_other_groups_is_refused(device, damage):
    _, optimizer = train(device, config=CONFIG)
    state = copy.deepcopy(optimizer.state_dict())
    before = copy.deepcopy(state)
    if damage == "groups":
        del state["param_groups"][1]
        message = "checkpoint has 1 parameter groups, the optimizer has 2"
    else:
        del state["param_groups"][1]["params"][0]
        message = "parameter group 1 has 4 parameters in the checkpoint and 5"
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    after = optimizer.state_dict()["state"]
    assert all(
        torch.equal(after[i][k], v)
        for i, values in before["state"].items()
        for k, v in values.items()
    )


@pytest.mark.gpu
def test_resume_needs_no_more_gpu_memory_than_a_chunk():
    device = torch.device("cuda")
    shapes = [(1024, 1024)] * 32
    config = OffloadConfig(chunk_size="16MiB", num_slots=2)
    params, optimizer = train(device, config=config, shapes=shapes, clip=None, fused=True)
    checkpoint = load(save(optimizer))
    del optimizer
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    resumed = offload(
        torch.optim.AdamW([{"params": params[:16]}, {"params": params[16:]}], fused=True), config
    )
    resumed.load_state_dict(checkpoint)
    assert torch.cuda.max_memory_allocated() - base < 2**20
    assert resumed.state[params[0]]["exp_avg"].is_pinned()
