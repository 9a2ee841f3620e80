"""Updates beside backward and forward on two processes: DDP and FSDP2, bit for bit, and losses."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.nn.parallel import DistributedDataParallel

from torch_offload import OffloadConfig, last_microbatch, offload, offload_stats
from torch_offload.waiting import is_held

MODES = ["backward", "forward"]
STEPS = 8


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.multigpu)])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    started = Ranks(request.param)
    yield started
    started.stop()


# What follows runs on the ranks, up to the tests.


class Net(nn.Module):
    """``rare`` is used by rank 1 alone, and only in some steps, if anybody wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)])
        self.rare = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, rare: bool = False) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.rare(x) if rare else x


def wrap(kind: str, device: str, dtype: torch.dtype, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    net = Net().to(device, dtype)
    if not kwargs.get("find_unused_parameters"):
        net.rare.requires_grad_(False)
    if kind == "DDP":
        # Small buckets, so that there are several.
        return DistributedDataParallel(net, bucket_cap_mb=0.002, **kwargs)
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    for layer in net.layers:
        fully_shard(layer, mesh=mesh, **kwargs)
    return fully_shard(net, mesh=mesh, **kwargs)


def train(
    kind: str,
    device: str,
    overlap: str | None,
    *,
    dtype: torch.dtype = torch.float32,
    count: int = 1,
    context: bool = False,
    clip: bool = False,
    hook: str | None = None,
    optimizer_class: Any = torch.optim.AdamW,
    settings: dict[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Train and return losses, values, state, and how many chunks were early."""
    model = wrap(kind, device, dtype, **kwargs)
    rank = torch.distributed.get_rank()
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = optimizer_class(params, lr=1e-2, **(settings or {}))
    if overlap is not None:
        config = OffloadConfig(chunk_size=2_000, overlap=overlap)
        offload(optimizer, config, model=model)
    if hook == "user":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        model.register_comm_hook(None, allreduce_hook)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    losses, early = [], []
    for step in range(STEPS):
        for number in range(count):
            is_last = number == count - 1
            generator = torch.Generator().manual_seed(1000 * rank + 10 * step + number)
            data = torch.randn(4, 16, generator=generator).to(device, dtype)
            rare = bool(kwargs.get("find_unused_parameters")) and rank == 1 and step % 3 == 2
            sync: Any = nullcontext()
            if not is_last and kind == "DDP":
                sync = model.no_sync()
            elif kind == "FSDP2":
                model.set_requires_gradient_sync(is_last)
            last = last_microbatch(optimizer) if context and is_last and overlap else nullcontext()
            with sync, last:
                loss = model(data, rare=rare).float().square().mean()
                loss.backward()
            losses.append(loss.item())
        if clip:
            nn.utils.clip_grad_norm_(params, 0.05)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if overlap is not None:
            early.append(offload_stats(optimizer).num_early_chunks)

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        own = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        return own.detach().cpu().clone()

    return {
        "losses": losses,
        "params": [whole(param) for param in params],
        "state": [
            {key: whole(value) for key, value in optimizer.state[param].items()}
            for param in params
            if param in optimizer.state
        ],
        "early": early,
    }


USES: dict[str, Any] = {
    "to_local": lambda p: p.to_local().clone(),
    "_local_tensor": lambda p: p._local_tensor.clone(),
    "full_tensor": lambda p: p.full_tensor(),
    "redistribute": lambda p: p.redistribute(placements=[Replicate()]),
    "norm": lambda p: p.norm(),
    "foreach norm": lambda p: torch._foreach_norm([p]),
    "data": lambda p: p.data.clone(),
    "detach": lambda p: p.detach().to_local(),
    "deepcopy": copy.deepcopy,
    "save": lambda p: torch.save(p, io.BytesIO()),
    "an edit": lambda p: p.data.mul_(0.5),
    "average": lambda p: torch.zeros_like(p).lerp_(p, 0.1),
}


def stepped(device: str, overlap: str) -> tuple[Any, Any]:
    """A sharded model, and its optimizer after a few steps."""
    model = wrap("FSDP2", device, torch.float32)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    offload(optimizer, OffloadConfig(chunk_size=2_000, overlap=overlap), model=model)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 16, device=device)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def used_after_step(device: str, use: str) -> list[int]:
    """Return which parameters and gradients were used without a wait."""
    _, optimizer = stepped(device, "forward")
    params = optimizer.param_groups[0]["params"]
    grads = [param.grad for param in params]
    assert all(is_held(tensor) for tensor in [*params, *grads])
    assert all(type(param).__name__ == "DTensor" for param in params)
    # Torch cannot copy or save sharded vectors.
    used = [t for t in [*grads, *params] if t.dim() > 1 or use not in ("deepcopy", "save")]
    with torch.no_grad():
        for tensor in used:
            USES[use](tensor)
    return [n for n, tensor in enumerate(used) if is_held(tensor)]


def held_after_a_call_below(device: str) -> list[bool]:
    model, _ = stepped(device, "forward")
    model.layers[2](torch.ones(4, 16, device=device))
    return [is_held(layer.weight) for layer in model.layers]


def read_between(device: str) -> str:
    model, _ = stepped(device, "backward")
    model.zero_grad()
    model(torch.ones(4, 16, device=device)).square().mean().backward()
    try:
        model.layers[5].weight.full_tensor()
    except RuntimeError as error:
        return str(error)
    return "nothing"


# The tests.


def compare(ranks: Ranks, kind: str, overlap: str, **case: Any) -> list[list[int]]:
    plain = ranks(train, kind, ranks.device, None, **case)
    again = ranks(train, kind, ranks.device, None, **case)
    other = ranks(train, kind, ranks.device, overlap, **case)
    for expected, control, found in zip(plain, again, other, strict=True):
        assert control["losses"] == expected["losses"], "the control"
        assert found["losses"] == expected["losses"]
        assert len(found["state"]) == len(expected["state"]) > 0
        for a, b in zip(expected["params"], found["params"], strict=True):
            assert torch.equal(a, b)
        for one, two in zip(expected["state"], found["state"], strict=True):
            assert list(one) == list(two)
            assert all(torch.equal(one[key], two[key]) for key in one)
    return [found["early"] for found in other]


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
@pytest.mark.parametrize("overlap", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [1, 3])
def test_same_bits_as_plain(ranks, kind, overlap, dtype, count):
    for early in compare(ranks, kind, overlap, dtype=dtype, count=count):
        assert all(early[2:]) == (overlap == "backward")


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_the_last_microbatch_is_said(ranks, kind):
    for early in compare(ranks, kind, "backward", count=3, context=True):
        assert all(early[3:])


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_clipping_beside_forward(ranks, kind):
    compare(ranks, kind, "forward", clip=True)


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_the_mode_is_chosen(ranks, kind, clip, count):
    for early in compare(ranks, kind, "auto", clip=clip, count=count):
        assert all(early[3:]) == (not clip)


@pytest.mark.parametrize("use", USES)
def test_sharded_parameters_wait_for_themselves(ranks, use):
    assert ranks(used_after_step, ranks.device, use) == [[], []]


def test_a_sharded_module_below_waits_for_its_parameters(ranks):
    """FSDP2 gathers the memory under them, whichever module is called first."""
    for held in ranks(held_after_a_call_below, ranks.device):
        assert held == [True, True, False, True, True, True]


def test_sharded_parameters_are_forbidden_between_backward_and_step(ranks):
    for said in ranks(read_between, ranks.device):
        assert "was used between its update in backward() and step()" in said


DDP_SETTINGS: dict[str, dict[str, Any]] = {
    "views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "views, static graph": {"gradient_as_bucket_view": True, "static_graph": True},
    "unused": {"find_unused_parameters": True},
    "unused, views": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
}


@pytest.mark.parametrize("overlap", MODES)
@pytest.mark.parametrize("name", DDP_SETTINGS)
@pytest.mark.parametrize("count", [1, 2])
def test_settings_of_ddp(ranks, overlap, name, count):
    if "static_graph" in DDP_SETTINGS[name] and count > 1:
        pytest.skip("torch takes no_sync() with a static graph for an error")
    for early in compare(ranks, "DDP", overlap, count=count, **DDP_SETTINGS[name]):
        assert all(early[3:]) == (overlap == "backward")


def test_a_hook_of_the_user(ranks):
    """DDP takes one only, so steps are taken as a whole."""
    for early in compare(ranks, "DDP", "backward", hook="user"):
        assert not any(early)


@pytest.mark.parametrize("overlap", MODES)
def test_mixed_precision_of_fsdp2(ranks, overlap):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    compare(ranks, "FSDP2", overlap, mp_policy=policy)


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
@pytest.mark.parametrize("overlap", MODES)
@pytest.mark.parametrize(
    ("optimizer_class", "settings"),
    [
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.AdamW, {"foreach": False}),
        (torch.optim.SGD, {"momentum": 0.9}),
    ],
)
def test_other_optimizers(ranks, kind, overlap, optimizer_class, settings):
    if kind == "FSDP2" and optimizer_class is torch.optim.SGD and settings.get("fused"):
        pytest.skip("plain torch refuses it")
    compare(ranks, kind, overlap, optimizer_class=optimizer_class, settings=settings)
