"""Parameters that are DTensors, on two processes: FSDP2 and tensor parallelism, bit for bit."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from training import FLAVOURS

from torch_offload import OffloadConfig, offload, offload_stats, unoffload

#: Cuts the net below into several chunks.
CONFIG = OffloadConfig(chunk_size=2000)
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    **{f"AdamW {name}": (torch.optim.AdamW, kwargs) for name, kwargs in FLAVOURS.items()},
    "AdamW default": (torch.optim.AdamW, {}),
    "AdamW amsgrad": (torch.optim.AdamW, {"amsgrad": True, "maximize": True}),
    "SGD momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "SGD momentum for-loop": (torch.optim.SGD, {"momentum": 0.9, "foreach": False}),
    "SGD without state": (torch.optim.SGD, {}),
    "Adagrad": (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}),
    "NAdam": (torch.optim.NAdam, {}),
    "ASGD": (torch.optim.ASGD, {}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
}
#: Classes of which torch's own step fails on sharded parameters, because a shard does not do.
FAIL = {"Muon": (torch.optim.Muon, {}), "Adafactor": (torch.optim.Adafactor, {})}
#: And those of which it fails for want of a rule for DTensors, though a shard is enough.
FAIL_IN_TORCH: dict[str, tuple[Any, dict[str, Any]]] = {
    "Rprop": (torch.optim.Rprop, {}),
    "SGD fused": (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
}


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.multigpu)])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    started = Ranks(request.param)
    yield started
    started.stop()


# What follows runs on the ranks, up to the tests.


def make_net(device: str, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Rows that do not divide by two, and parameters of one row: the second rank has none."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(16, 33), nn.LayerNorm(33), nn.GELU(), nn.Linear(33, 9), nn.GELU(), nn.Linear(9, 1)
    )
    return net.to(device, dtype)


def shard(net: nn.Sequential, device: str, **kwargs: Any) -> nn.Sequential:
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    for part in (net[0], net[3]):
        fully_shard(part, mesh=mesh, **kwargs)
    return fully_shard(net, mesh=mesh, **kwargs)


def two_groups(net: nn.Module) -> list[dict[str, Any]]:
    params = list(net.parameters())
    return [
        {"params": params[:3], "weight_decay": 0.1},
        {"params": params[3:], "weight_decay": 0.0, "lr": 3e-3},
    ]


def batch(net: nn.Module, step: int) -> torch.Tensor:
    """Of its own for each rank, but the same for all of them under tensor parallelism."""
    param = next(net.parameters())
    is_split = isinstance(net, FSDPModule) and param.device_mesh.mesh_dim_names != ("fsdp", "tp")
    rank = torch.distributed.get_rank() if is_split else 0
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 16, generator=generator).to(param.device, param.dtype)


def steps(
    net: Any,
    optimizer: torch.optim.Optimizer,
    *,
    first_step: int = 0,
    num_steps: int = 6,
    late: bool = False,
    clip: bool = False,
    accumulate: bool = False,
) -> None:
    """Train with an LR schedule.

    Args:
        net: sharded or not.
        optimizer: offloaded or not.
        first_step: seed of the first batch.
        num_steps: how many.
        late: some parameters have no gradient in some steps, and one never has one.
        clip: clip the norm of all gradients.
        accumulate: two batches a step, of which the first one is not reduced.
    """
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    params = list(net.parameters())
    for step in range(first_step, first_step + num_steps):
        if accumulate:
            net.set_requires_gradient_sync(False)
            net(batch(net, 100 + step)).float().square().mean().backward()
            net.set_requires_gradient_sync(True)
        net(batch(net, step)).float().square().mean().backward()
        if late:
            params[4].grad = None
            if step == 0:
                params[0].grad = None
            if step == 3:
                params[1].grad = None
        if clip:
            torch.nn.utils.clip_grad_norm_(params, 0.1)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


Look = list[tuple[torch.Tensor, dict[str, tuple[Any, torch.Tensor]]]]


def look(net: nn.Module, optimizer: torch.optim.Optimizer) -> Look:
    """Copy what this rank has of parameters and state, and how each tensor is placed."""

    def copied(tensor: torch.Tensor) -> tuple[Any, torch.Tensor]:
        if isinstance(tensor, DTensor):
            how = (tensor.placements, tensor.device_mesh, tensor.shape, tensor.stride())
            return how, tensor.to_local().detach().cpu().clone()
        return type(tensor), tensor.detach().cpu().clone()

    return [
        (copied(param)[1], {k: copied(v) for k, v in optimizer.state.get(param, {}).items()})
        for param in net.parameters()
    ]


def assert_same(plain: Look, other: Look) -> None:
    """Parameters, every state tensor and how it is placed: the same bits, dtypes and keys."""
    assert len(plain) == len(other)
    for index, ((param, state), (candidate, found)) in enumerate(zip(plain, other, strict=True)):
        torch.testing.assert_close(candidate, param, rtol=0, atol=0, msg=f"param {index}")
        assert list(state) == list(found), f"param {index}"
        for key, (how, value) in state.items():
            assert found[key][0] == how, f"param {index} state {key}: {found[key][0]}, not {how}"
            torch.testing.assert_close(
                found[key][1], value, rtol=0, atol=0, msg=f"param {index} state {key}"
            )


def assert_on_host(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """State is on the host, in DTensors on the parameter's mesh (I7).

    How they are placed there is compared with plain: some are placed as the gradient was.
    """
    for param in net.parameters():
        for key, value in optimizer.state.get(param, {}).items():
            if value.dim() == 0:
                continue
            assert isinstance(param, DTensor)
            assert isinstance(value, DTensor), key
            assert value.device_mesh == param.device_mesh
            assert value.shape == param.shape
            where = (key, tuple(param.shape), tuple(param.to_local().shape), value.placements)
            assert value.to_local().device.type == "cpu", where
            assert value.to_local().shape == param.to_local().shape
            assert value.to_local().is_pinned() == (
                param.to_local().is_cuda and param.to_local().numel() > 0
            )
    assert offload_stats(optimizer).host_bytes > 0 or not optimizer.state


def train(
    device: str,
    config: OffloadConfig | None,
    case: str,
    *,
    dtype: torch.dtype = torch.float32,
    policy: MixedPrecisionPolicy | None = None,
    parallel: Callable[[nn.Sequential, str], nn.Sequential] | None = None,
    **kwargs: Any,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Shard a net and train it; plain without ``config``."""
    optimizer_class, options = {**CASES, **FAIL, **FAIL_IN_TORCH}[case]
    made = make_net(device, dtype)
    if parallel is not None:
        net = parallel(made, device)
    else:
        net = shard(made, device, **({"mp_policy": policy} if policy else {}))
    groups = two_groups(net)
    if optimizer_class is torch.optim.Muon:
        groups = [{**g, "params": [p for p in g["params"] if p.dim() == 2]} for g in groups]
    elif optimizer_class is torch.optim.Rprop:
        groups = [{k: v for k, v in g.items() if k != "weight_decay"} for g in groups]
    optimizer = optimizer_class(groups, lr=1e-2, **options)
    if config is not None:
        assert offload(optimizer, config) is optimizer
    steps(net, optimizer, **kwargs)
    return net, optimizer


def compare(device: str, case: str, **kwargs: Any) -> None:
    plain = look(*train(device, None, case, **kwargs))
    # A control: were training itself not reproducible, equal bits below would say nothing.
    assert_same(plain, look(*train(device, None, case, **kwargs)))
    for config in (CONFIG, OffloadConfig()):
        net, optimizer = train(device, config, case, **kwargs)
        assert_on_host(net, optimizer)
        assert_same(plain, look(net, optimizer))


def failures(device: str, case: str) -> list[str]:
    """Tell how plain and offloaded fail."""
    found = []
    for config in (None, CONFIG):
        try:
            train(device, config, case)
        except (RuntimeError, NotImplementedError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def local_shards(device: str, case: str) -> None:
    """Offloaded on DTensors against plain on ordinary parameters over the same shards."""
    optimizer_class, options = FAIL_IN_TORCH[case]
    net, optimizer = train(device, CONFIG, case)
    assert_on_host(net, optimizer)

    other = shard(make_net(device), device)
    params = list(other.parameters())
    locals_ = [nn.Parameter(param.to_local().detach()) for param in params]
    groups = [
        {**group, "params": own}
        for group, own in zip(optimizer.param_groups, (locals_[:3], locals_[3:]), strict=True)
    ]
    for group in groups:
        group["lr"] = group.pop("initial_lr")
    plain = optimizer_class(groups, **options)
    schedule = torch.optim.lr_scheduler.LambdaLR(plain, lambda step: 1.0 / (1 + step))
    for step in range(6):
        other(batch(other, step)).square().mean().backward()
        for param, own in zip(params, locals_, strict=True):
            own.grad = param.grad.to_local()
        plain.step()
        schedule.step()
        other.zero_grad()
    for index, (param, own) in enumerate(zip(net.parameters(), locals_, strict=True)):
        assert torch.equal(param.to_local(), own), f"param {index}"
        for key, value in plain.state[own].items():
            found = optimizer.state[param][key]
            found = found.to_local() if isinstance(found, DTensor) else found
            assert torch.equal(found, value.cpu()), f"param {index} state {key}"


def tensor_parallel(_: nn.Sequential, device: str, mesh: DeviceMesh | None = None) -> nn.Sequential:
    """Linear layers cut along their rows and columns, and a bias that both ranks have."""
    mesh = mesh or init_device_mesh(device, (2,))
    torch.manual_seed(0)
    even = nn.Sequential(nn.Linear(16, 34), nn.GELU(), nn.Linear(34, 9)).to(device)
    return parallelize_module(even, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def hybrid(net: nn.Sequential, device: str) -> nn.Sequential:
    """HSDP: each rank has all rows, and gradients are averaged."""
    mesh = init_device_mesh(device, (2, 1), mesh_dim_names=("replicate", "shard"))
    return fully_shard(net, mesh=mesh)


def two_dimensional(net: nn.Sequential, device: str) -> nn.Sequential:
    """Tensor parallelism inside of FSDP2: placements on a mesh of two dimensions."""
    mesh = init_device_mesh(device, (1, 2), mesh_dim_names=("fsdp", "tp"))
    return fully_shard(tensor_parallel(net, device, mesh["tp"]), mesh=mesh["fsdp"])


def sequence_parallel(_: nn.Sequential, device: str) -> nn.Sequential:
    """Replicated parameters whose gradients are sums over the ranks."""
    mesh = init_device_mesh(device, (2,))
    torch.manual_seed(0)
    net = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 34), nn.GELU(), nn.Linear(34, 9))
    plan = {
        "0": SequenceParallel(sequence_dim=0),
        "1": ColwiseParallel(input_layouts=Shard(0)),
        "3": RowwiseParallel(),
    }
    return parallelize_module(net.to(device), mesh, plan)


PARALLEL = {
    "tensor parallel": tensor_parallel,
    "sequence parallel": sequence_parallel,
    "hybrid": hybrid,
    "two-dimensional": two_dimensional,
}


def has_uneven_shards(device: str) -> list[tuple[int, ...]]:
    net = shard(make_net(device), device)
    return [tuple(p.to_local().shape) for p in net.parameters()]


def replaced_params(device: str) -> None:
    """An optimizer that was made before the net is sharded, given the new parameters, as
    frameworks do it."""

    def run(config: OffloadConfig | None) -> Look:
        net = make_net(device)
        optimizer = torch.optim.AdamW(two_groups(net), lr=1e-2)
        if config is not None:
            offload(optimizer, config)
        shard(net, device)
        for group, new in zip(optimizer.param_groups, two_groups(net), strict=True):
            group["params"] = new["params"]
        steps(net, optimizer)
        return look(net, optimizer)

    assert_same(run(None), run(CONFIG))


def converted_between(device: str, case: str) -> None:
    """State moves to the host in the middle of a training, and back."""

    def run(between: bool) -> Look:
        net, optimizer = train(device, None, case, num_steps=2)
        if between:
            offload(optimizer, CONFIG)
            assert_on_host(net, optimizer)
        steps(net, optimizer, first_step=2, num_steps=2)
        if between:
            unoffload(optimizer)
            for param in net.parameters():
                for key, value in optimizer.state[param].items():
                    assert key == "step" or value.to_local().device == param.to_local().device
        steps(net, optimizer, first_step=4, num_steps=2)
        return look(net, optimizer)

    assert_same(run(False), run(True))


def saved_with_torch(device: str, saver: bool, loader: bool) -> None:
    """``torch.save`` on each rank, loaded with ``weights_only``, both ways between plain and
    offloaded."""

    def resume(saved_by: OffloadConfig | None, loaded_by: OffloadConfig | None) -> Look:
        net, optimizer = train(device, saved_by, "AdamW default", num_steps=3)
        buffer = io.BytesIO()
        torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=True)
        other = shard(make_net(device), device)
        other.load_state_dict(loaded["net"])
        resumed = torch.optim.AdamW(two_groups(other), lr=1e-2)
        if loaded_by is not None:
            offload(resumed, loaded_by)
        resumed.load_state_dict(loaded["optimizer"])
        steps(other, resumed, first_step=3, num_steps=3)
        if loaded_by is not None:
            assert_on_host(other, resumed)
        return look(other, resumed)

    plain = resume(None, None)
    assert_same(plain, resume(CONFIG if saver else None, CONFIG if loader else None))


def mixed_with_plain_tensors(device: str) -> None:
    """Sharded and ordinary parameters in one optimizer."""

    def run(config: OffloadConfig | None) -> tuple[Look, torch.Tensor, Mapping[str, Any]]:
        net = shard(make_net(device), device)
        scale = nn.Parameter(torch.ones(3, device=device))
        optimizer = torch.optim.AdamW([*two_groups(net), {"params": [scale]}], lr=1e-2)
        if config is not None:
            offload(optimizer, config)
        for step in range(4):
            loss = net(batch(net, step)).square().mean()
            loss.backward()
            scale.grad = torch.full_like(scale, 0.1 * (step + 1))
            optimizer.step()
            optimizer.zero_grad()
        values = {key: value.cpu().clone() for key, value in optimizer.state[scale].items()}
        return look(net, optimizer), scale.detach().cpu().clone(), values

    plain, other = run(None), run(CONFIG)
    assert_same(plain[0], other[0])
    assert torch.equal(plain[1], other[1])
    assert list(plain[2]) == list(other[2])
    assert all(torch.equal(value, other[2][key]) for key, value in plain[2].items())


# The tests.


@pytest.mark.parametrize("case", CASES)
def test_same_bits_as_plain(ranks, case):
    ranks(compare, ranks.device, case)


@pytest.mark.parametrize("case", FAIL)
def test_fails_where_torch_fails(ranks, case):
    found = ranks(failures, ranks.device, case)
    if not any(found):  # this torch can do it
        ranks(compare, ranks.device, case)
        return
    for plain, other in found:
        assert plain.partition(":")[0] == other.partition(":")[0], (plain, other)


@pytest.mark.parametrize("case", FAIL_IN_TORCH)
def test_shards_are_enough_where_torch_has_no_rule(ranks, case):
    for failed in ranks(failures, ranks.device, case):
        assert len(failed) == 1, failed
    ranks(local_shards, ranks.device, case)


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("option", ["late", "clip", "accumulate"])
def test_with(ranks, flavour, option):
    ranks(compare, ranks.device, f"AdamW {flavour}", **{option: True})


def test_late_gradients_with_momentum(ranks):
    ranks(compare, ranks.device, "SGD momentum", late=True)


def test_mixed_precision(ranks):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ranks(compare, ranks.device, "AdamW default", policy=policy)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_bf16_parameters(ranks, flavour):
    ranks(compare, ranks.device, f"AdamW {flavour}", dtype=torch.bfloat16)


def test_one_rank_may_hold_no_rows(ranks):
    """That the cases above include such parameters."""
    first, second = ranks(has_uneven_shards, ranks.device)
    assert first[0] == (17, 16)
    assert second[0] == (16, 16)
    assert first[-2] == (1, 9)
    assert second[-2] == (0, 9)


@pytest.mark.parametrize("case", ["AdamW default", "AdamW for-loop", "AdamW fused", "SGD momentum"])
@pytest.mark.parametrize("parallel", PARALLEL)
def test_other_placements(ranks, case, parallel):
    ranks(compare, ranks.device, case, parallel=PARALLEL[parallel])


def test_parameters_replaced_after_the_conversion(ranks):
    ranks(replaced_params, ranks.device)


@pytest.mark.parametrize("case", ["AdamW default", "AdamW fused", "Adagrad"])
def test_converted_and_back_between_steps(ranks, case):
    ranks(converted_between, ranks.device, case)


@pytest.mark.parametrize("saver", [False, True], ids=["from plain", "from offloaded"])
@pytest.mark.parametrize("loader", [False, True], ids=["to plain", "to offloaded"])
def test_saved_with_torch(ranks, saver, loader):
    ranks(saved_with_torch, ranks.device, saver, loader)


def test_ordinary_parameters_beside_sharded_ones(ranks):
    ranks(mixed_with_plain_tensors, ranks.device)
