"""Faults that users met in other optimizer offloaders: each kind is shown to be impossible here.

docs/faults.md lists all of them with the tests that show it, here and beside their subjects.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from training import assert_same, make_params, set_grads, train

from torch_offload import OffloadConfig, host, offload, offload_stats

CONFIG = OffloadConfig(chunk_size=500)
CPU = torch.device("cpu")


def make_net(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 33), nn.Linear(33, 1)
    ).to(device)


def batch(step: int, device: torch.device) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).to(device)


def backward(net: nn.Module, step: int, device: torch.device) -> None:
    net(batch(step, device)).square().mean().backward()


def both(device: torch.device, run: Callable[[OffloadConfig | None], Any]) -> Any:
    """Run plain and offloaded; parameters and state must have the same bits."""
    plain, offloaded = run(None), run(CONFIG)
    assert_same(plain, offloaded)
    return offloaded


# Weights, gradients and hyper-parameters belong to the user


def test_weights_loaded_after_the_optimizer_was_built_stay(device):
    """A step brings back the weights that the optimizer was built with
    (NVIDIA/Megatron-LM#5071)."""

    def run(config: OffloadConfig | None) -> Any:
        net = make_net(device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        if config:
            offload(optimizer, config)
        pretrained = {key: value + 1 for key, value in make_net(device).state_dict().items()}
        for step in range(4):
            if step in (0, 2):
                net.load_state_dict(pretrained)
            backward(net, step, device)
            optimizer.step()
            optimizer.zero_grad()
        return list(net.parameters()), optimizer

    both(device, run)


@pytest.mark.parametrize("edit", ["clip", "zero", "noise", "replace"])
def test_gradients_edited_between_backward_and_step(device, edit):
    """The update uses gradients as they were before clipping (deepspeedai/DeepSpeed#7302,
    pytorch/torchtitan#990)."""

    def run(config: OffloadConfig | None) -> Any:
        net = make_net(device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, eps=1e-3)
        if config:
            offload(optimizer, config)
        for step in range(4):
            backward(net, step, device)
            weight = next(net.parameters())
            assert weight.grad is not None
            if edit == "clip":
                nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
            elif edit == "zero":
                weight.grad.zero_()
            elif edit == "noise":
                weight.grad.add_(batch(step, device).mean())
            else:
                weight.grad = weight.grad * 0.5
            optimizer.step()
            optimizer.zero_grad()
        return list(net.parameters()), optimizer

    both(device, run)


def test_groups_of_uneven_size_keep_their_own_settings(device):
    """Every chunk uses the settings of the first group (deepspeedai/DeepSpeed#7905, #1751)."""

    def run(config: OffloadConfig | None) -> Any:
        params = make_params(device, shapes=[(40, 3)] * 11)
        groups: list[dict[str, Any]] = [
            {"params": params[:1], "lr": 0.1, "betas": (0.5, 0.6)},
            {"params": [], "lr": 9.0},
            {"params": params[1:8], "weight_decay": 0.3, "eps": 1e-2, "amsgrad": True},
            {"params": params[8:], "lr": 0.01, "maximize": True, "foreach": True},
        ]
        optimizer = torch.optim.AdamW(groups)
        if config:
            offload(optimizer, config)
        for step in range(4):
            set_grads(params, step)
            optimizer.step()
        return params, optimizer

    _, optimizer = both(device, run)
    assert offload_stats(optimizer).num_chunks >= 11
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 0, 7, 3]


def test_a_schedule_writes_to_the_groups_that_the_step_reads(device):
    """Wrappers without groups of their own leave schedulers without effect (pytorch/ao#959)."""
    params = make_params(device, shapes=[(3,)])
    optimizer = torch.optim.SGD(params, lr=1.0)
    group = optimizer.param_groups[0]
    offload(optimizer)
    schedule = LambdaLR(optimizer, lambda step: 0.5**step)
    assert optimizer.param_groups[0] is group
    for lr in (1.0, 0.5, 0.25):
        before = params[0].detach().clone()
        params[0].grad = torch.ones_like(params[0])
        optimizer.step()
        schedule.step()
        assert torch.equal(params[0], before - lr)


# Which parameters take part


def test_frozen_parameters_and_ones_that_thaw_later(device):
    """A frozen parameter breaks the constructor or never thaws (pytorch/ao#1209,
    deepspeedai/DeepSpeed#4055)."""

    def run(config: OffloadConfig | None) -> Any:
        net = make_net(device)
        params = list(net.parameters())
        for param in params[::2]:
            param.requires_grad_(False)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        if config:
            offload(optimizer, config)
        for step in range(6):
            backward(net, step, device)
            optimizer.step()
            optimizer.zero_grad()
            for param in params[step % 3 :: 3]:  # another set each time
                param.requires_grad_(not param.requires_grad)
        return params, optimizer

    both(device, run)


def test_an_expert_without_tokens_is_left_as_it_is(device):
    """A parameter without a gradient stops the step, or is updated (deepspeedai/DeepSpeed#5203,
    #5639)."""

    def run(config: OffloadConfig | None) -> Any:
        torch.manual_seed(0)
        experts = nn.ModuleList(nn.Linear(16, 7) for _ in range(4)).to(device)
        optimizer = torch.optim.AdamW(experts.parameters(), lr=0.01)
        if config:
            offload(optimizer, config)
        for step, chosen in enumerate([(0,), (1, 2), (0, 2), (), (0, 1, 2)]):
            for index in chosen:
                backward(experts[index], step, device)
            optimizer.step()
            optimizer.zero_grad()
        return list(experts.parameters()), optimizer

    params, optimizer = both(device, run)
    assert params[-1] not in optimizer.state, "the last expert never had a gradient"
    assert optimizer.state[params[0]]["step"] == 3


def test_a_layer_that_takes_the_place_of_another_is_trained(device):
    """Layers replaced after the optimizer was built silently never train
    (deepspeedai/DeepSpeed#8377)."""

    def run(config: OffloadConfig | None) -> Any:
        net = make_net(device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        if config:
            offload(optimizer, config)
        for step in range(4):
            if step == 2:
                old = list(net[3].parameters())
                net[3] = nn.Linear(64, 33).to(device)
                for param in old:
                    optimizer.state.pop(param)
                optimizer.param_groups[0]["params"][:] = net.parameters()
            backward(net, step, device)
            optimizer.step()
            optimizer.zero_grad()
        return list(net.parameters()), optimizer

    params, optimizer = both(device, run)
    assert optimizer.state[params[4]]["step"] == 2
    assert len(optimizer.state) == len(params)


def test_only_empty_parameters(device, monkeypatch):
    """Parameters without elements crash the step or the registration of their memory
    (deepspeedai/DeepSpeed#8280)."""

    def run(config: OffloadConfig | None) -> Any:
        params = [nn.Parameter(torch.empty(shape, device=device)) for shape in ((0,), (0, 5))]
        optimizer = torch.optim.AdamW(params)
        if config:
            offload(optimizer, config)
            monkeypatch.setattr(host.mmap, "mmap", None)  # no memory, so nothing to lock
        for step in range(3):
            set_grads(params, step)
            optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.step()
        return params, optimizer

    params, optimizer = both(device, run)
    assert optimizer.state[params[0]]["step"] == 4
    assert offload_stats(optimizer).host_bytes == 0


# State before the first step, and how it is made


def test_looking_at_state_before_the_first_step(device):
    """An empty entry, made by a look at the state, keeps it from being made
    (verl-project/verl#299)."""

    def run(config: OffloadConfig | None) -> Any:
        params = make_params(device, shapes=[(30, 3), (7,), ()])
        optimizer = torch.optim.AdamW(params, lr=0.1)
        if config:
            offload(optimizer, config)
        assert optimizer.state_dict()["state"] == {}
        assert optimizer.state[params[0]] == {}
        optimizer.load_state_dict(optimizer.state_dict())
        for step in range(3):
            set_grads(params, step)
            optimizer.step()
        return params, optimizer

    both(device, run)


@pytest.mark.parametrize("flavour", [{"foreach": True}, {"foreach": False}, {"fused": True}])
def test_planning_the_state_is_no_step(device, flavour):
    """State that is made by a step of zeros counts it: the first update is too small and weights
    decay twice (NVIDIA/Megatron-LM#5976)."""
    params = make_params(device, shapes=[(30, 3), (7,)])
    before = [p.detach().clone() for p in params]
    optimizer = offload(torch.optim.AdamW(params, lr=0.1, weight_decay=0.5, **flavour), CONFIG)
    optimizer.step()  # no gradients: plans host memory
    assert offload_stats(optimizer).host_bytes > 0
    assert len(optimizer.state) == 0
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
    set_grads(params, 0)
    optimizer.step()
    assert all(optimizer.state[p]["step"] == 1 for p in params)
    plain_params = [nn.Parameter(p.clone()) for p in before]
    plain = torch.optim.AdamW(plain_params, lr=0.1, weight_decay=0.5, **flavour)
    set_grads(plain_params, 0)
    plain.step()
    assert_same((plain_params, plain), (params, optimizer))


@pytest.mark.parametrize("flavour", [{"foreach": True}, {"foreach": False}, {"fused": True}])
def test_the_first_step_takes_no_more_than_its_slots(device, flavour):
    """The first step puts all state on the device at once (verl-project/verl#5364)."""
    params = make_params(device, shapes=[(64, 64)] * 20)
    config = OffloadConfig(chunk_size=2 * 4 * 64 * 64, num_slots=2)
    optimizer = offload(torch.optim.AdamW(params, **flavour), config)
    for step in range(3):
        set_grads(params, step)
        optimizer.step()
        stats = offload_stats(optimizer)
        assert stats.num_chunks == 20
        assert stats.staging_bytes == 2 * config.chunk_bytes, f"step {step}"


# Host memory: where it is taken, and in how many pieces


def test_host_memory_is_taken_in_the_first_step_alone(device, monkeypatch):
    """Memory locked inside a backward hook can deadlock with the collectives of other ranks;
    memory locked in each step is slow (PrimeIntellect-ai/prime-rl#3552)."""
    calls: list[str] = []
    real = host.HostStore.allocate

    def allocate(self: host.HostStore, *args: Any, **kwargs: Any) -> Any:
        calls.append(phase)
        return real(self, *args, **kwargs)

    net = make_net(device)
    optimizer = offload(torch.optim.AdamW(net.parameters(), lr=0.01), CONFIG)
    monkeypatch.setattr(host.HostStore, "allocate", allocate)  # the trial had some of its own
    for step in range(4):
        phase = f"backward {step}"
        backward(net, step, device)
        phase = f"step {step}"
        optimizer.step()
        phase = f"after step {step}"
        optimizer.state_dict()
        optimizer.zero_grad()
    assert set(calls) == {"step 0"}


def test_ten_thousand_parameters_share_a_few_pieces_of_memory(monkeypatch):
    """One registration a parameter takes minutes (PrimeIntellect-ai/prime-rl f34d0399f)."""
    sizes: list[int] = []
    real = host.mmap.mmap

    def mmap(fileno: int, length: int, **kwargs: Any) -> Any:
        sizes.append(length)
        return real(fileno, length, **kwargs)

    params = [nn.Parameter(torch.ones(5)) for _ in range(10_000)]
    optimizer = offload(
        torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True), OffloadConfig(chunk_size=6400)
    )
    monkeypatch.setattr(host.mmap, "mmap", mmap)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert offload_stats(optimizer).num_chunks == 100
    assert len(sizes) == 1
    assert sum(sizes) == 10_000 * 64  # each parameter's state is aligned


def test_a_chunk_smaller_than_the_largest_parameter_is_no_obstacle(device):
    """The step stops where free memory is less than one parameter's state (the swap optimizer of
    MindSpeed)."""

    def run(config: OffloadConfig | None) -> Any:
        params = make_params(device, shapes=[(200, 50), (3,), (100, 50), ()])
        optimizer = torch.optim.Adam(params, amsgrad=True)
        if config:
            offload(optimizer, OffloadConfig(chunk_size=1, num_slots=2))
        for step in range(3):
            set_grads(params, step)
            optimizer.step()
        return params, optimizer

    _, optimizer = both(device, run)
    stats = offload_stats(optimizer)
    # On a GPU the large ones are cut into parts of at least 4 KiB.
    assert stats.num_chunks == 4 if device.type == "cpu" else stats.num_chunks > 40
    assert device.type == "cpu" or stats.staging_bytes <= 2 * 4096


# Checkpoints


def test_saving_leaves_the_state_where_it_is(device):
    """State that was moved for a checkpoint stays on the device after it (NovaSky-AI/SkyRL#556)."""
    params, optimizer = train(device, config=CONFIG, has_grad=None)

    def places() -> list[Any]:
        return [
            (key, value.device, value.data_ptr())
            for state in optimizer.state.values()
            for key, value in state.items()
        ]

    before, allocated = places(), torch.cuda.memory_allocated() if device.type == "cuda" else 0
    host_bytes = offload_stats(optimizer).host_bytes
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    assert places() == before
    assert offload_stats(optimizer).host_bytes == host_bytes
    if device.type == "cuda":
        assert torch.cuda.memory_allocated() == allocated
    set_grads(params, 9)
    optimizer.step()
    assert places() == before


def test_a_parameter_that_never_had_a_gradient_is_absent_from_checkpoints(device):
    """An entry without values, made up for an unused parameter, breaks the load
    (verl-project/verl#7283)."""

    def run(config: OffloadConfig | None) -> Any:
        params, optimizer = train(device, config=config)
        saved = copy.deepcopy(optimizer.state_dict())
        assert 5 not in saved["state"]
        assert len(saved["state"]) == len(params) - 1
        again = torch.optim.AdamW([{"params": group["params"]} for group in optimizer.param_groups])
        if config:
            offload(again, config)
        again.load_state_dict(saved)
        for step in range(3):
            set_grads(params, step)  # now it gets one
            again.step()
        return params, again

    both(device, run)


def test_a_checkpoint_is_no_larger_than_its_tensors():
    """Views of one arena are each written with the whole arena (torchao's offload optimizer has a
    format of its own)."""
    params = make_params(CPU, shapes=[(200, 100)] * 6)
    optimizer = offload(torch.optim.AdamW(params), OffloadConfig(chunk_size="1GiB"))
    set_grads(params, 0)
    optimizer.step()
    for saved, num_params in ((optimizer.state_dict(), 6), (optimizer.state[params[2]], 1)):
        buffer = io.BytesIO()
        torch.save(saved, buffer)
        tensors = num_params * 2 * 200 * 100 * 4
        assert tensors < len(buffer.getvalue()) < tensors * 1.05


# Compiled code, several optimizers


@pytest.mark.parametrize("what", ["model", "loop"])
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # inside torch.compile
def test_compiled_model_and_compiled_training_step(device, what):
    """A compiled backward runs past the waits of the update (deepspeedai/DeepSpeed#8061)."""

    def run(config: OffloadConfig | None) -> Any:
        net = make_net(device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        if config:
            offload(optimizer, config)
        model = torch.compile(net, backend="aot_eager")

        def train_step(data: torch.Tensor) -> None:
            model(data).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        # The plain optimizer is not compiled: its compiled step may differ in the last bit.
        compiled = what == "loop" and config is not None
        once = torch.compile(train_step, backend="aot_eager") if compiled else train_step
        for step in range(4):
            once(batch(step, device))
        return list(net.parameters()), optimizer

    _, optimizer = both(device, run)
    assert offload_stats(optimizer).d2h_bytes > 0


def test_optimizers_of_all_kinds_in_one_process(device):
    """State kept on the class is shared by all optimizers (the swap optimizer of MindSpeed)."""
    kinds: list[tuple[Any, dict[str, Any]]] = [
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adagrad, {}),
    ]

    def run(config: OffloadConfig | None) -> list[Any]:
        runs = []
        for kind, settings in kinds:
            params = make_params(device, shapes=[(30, 3), (7,)])
            optimizer = kind(params, lr=0.1, **settings)
            if config:
                offload(optimizer, OffloadConfig(chunk_size=100 * (1 + len(runs))))
            runs.append((params, optimizer))
        for step in range(5):
            for index, (params, optimizer) in enumerate(runs):
                set_grads(params, step + index)
                optimizer.step()
        return runs

    for plain, offloaded in zip(run(None), run(CONFIG), strict=True):
        assert_same(plain, offloaded)
