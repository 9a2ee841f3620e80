"""What ranks train in ``test_multigpu.py``: a net under DDP or FSDP2, with and without offload.

A *case* is everything that plain and offloaded training have in common. Nothing here waits for the
device between steps: losses stay on it, and batches are made beforehand.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from torch_offload import OffloadConfig, offload, offload_stats

STEPS = 8
LEARNING_RATES = (1e-2, 3e-3)


@dataclass(frozen=True)
class Case:
    """How a net is trained, plain or not.

    Attributes:
        kind: "DDP", "FSDP2", or "one" for a single process.
        device: its type.
        dtype: of the parameters.
        count: micro-batches of a step.
    """

    kind: str
    device: str
    dtype: torch.dtype = torch.float32
    count: int = 1

    @property
    def width(self) -> int:
        """Copies take a while on a GPU."""
        return 768 if self.device == "cuda" else 32


class Net(nn.Module):
    """Six layers, and a last one of three rows, which most ranks have nothing of."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(width, width) for _ in range(6)])
        self.last = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.last(x)


def make_net(case: Case) -> Net:
    """The same values on every rank."""
    torch.manual_seed(0)
    return Net(case.width).to(case.device, case.dtype)


def wrap(case: Case, net: Net) -> nn.Module:
    """Distribute a net."""
    if case.kind == "one":
        return net
    if case.kind == "DDP":
        layer_mb = case.dtype.itemsize * case.width**2 / 2**20
        # Small buckets, so that there are several; a layer does not fit into one evenly.
        return DistributedDataParallel(net, bucket_cap_mb=1.5 * layer_mb)
    mesh = init_device_mesh(case.device, (dist.get_world_size(),))
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def make_optimizer(net: nn.Module) -> torch.optim.AdamW:
    """Two groups that differ."""
    params = list(net.parameters())
    groups = [{"params": params[:5]}, {"params": params[5:], "weight_decay": 0.1}]
    return torch.optim.AdamW(groups, fused=True)


def config_of(case: Case, overlap: str) -> OffloadConfig:
    """Return a config that makes several chunks, also of a shard."""
    ranks = dist.get_world_size() if case.kind == "FSDP2" else 1
    layer_bytes = 2 * case.dtype.itemsize * case.width**2 // ranks
    return OffloadConfig(chunk_size=layer_bytes * 5 // 4, overlap=overlap)


def new(case: Case, overlap: str | None) -> tuple[nn.Module, Optimizer]:
    """Return a model and its optimizer; plain without ``overlap``."""
    model = wrap(case, make_net(case))
    optimizer = make_optimizer(model)
    if overlap is not None:
        offload(optimizer, config_of(case, overlap), model=model)
    return model, optimizer


class Outcome(NamedTuple):
    """What a training came to on this rank, on the CPU, and how much was updated early."""

    losses: list[float]
    params: list[torch.Tensor]
    state: list[dict[str, torch.Tensor]]
    early: list[int]
    num_chunks: int


def steps(
    case: Case,
    model: Any,
    optimizer: Optimizer,
    *,
    first_step: int = 0,
    num_steps: int = STEPS,
    noted: list[int] | None = None,
) -> Outcome:
    """Train, each rank with batches of its own.

    Args:
        case: what is trained.
        model: wrapped.
        optimizer: offloaded or not.
        first_step: which step comes first: it chooses batches and learning rates.
        num_steps: how many.
        noted: one number, set to that of the step that runs.
    """
    rank = dist.get_rank() if dist.is_initialized() and case.kind != "one" else 0
    batches = [
        torch.randn(
            8, case.width, generator=torch.Generator().manual_seed(1000 * rank + 10 * step + number)
        ).to(case.device, case.dtype)
        for step in range(first_step, first_step + num_steps)
        for number in range(case.count)
    ]
    core = getattr(optimizer, "_offload_core", None)
    losses, early = [], []
    for step in range(first_step, first_step + num_steps):
        if noted is not None:
            noted[:] = [step]
        for group, lr in zip(optimizer.param_groups, LEARNING_RATES, strict=True):
            group["lr"] = lr * 0.9**step
        for number in range(case.count):
            is_last = number == case.count - 1
            if case.kind == "FSDP2":
                model.set_requires_gradient_sync(is_last)
            with model.no_sync() if case.kind == "DDP" and not is_last else nullcontext():
                loss = model(batches[len(losses)]).float().square().mean()
                loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        if core is not None:
            early.append(core._num_early)  # offload_stats() would wait for the step
    return Outcome(
        losses=torch.stack(losses).tolist(),
        params=[copied(param) for param in model.parameters()],
        state=[
            {key: copied(value) for key, value in optimizer.state[param].items()}
            for param in model.parameters()
        ],
        early=early,
        num_chunks=0 if core is None else offload_stats(optimizer).num_chunks,
    )


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a tensor, on the CPU."""
    own = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return own.detach().cpu().clone()


def assert_same(expected: Outcome, found: Outcome, what: str) -> None:
    """Losses, parameters, moments and ``step``: the same bits, shapes, dtypes and keys."""
    assert found.losses == expected.losses, f"{what}: losses"
    for index, (a, b) in enumerate(zip(expected.params, found.params, strict=True)):
        assert same_bits(a, b), f"{what}: param {index}"
    for index, (one, two) in enumerate(zip(expected.state, found.state, strict=True)):
        assert list(one) == list(two) == ["step", "exp_avg", "exp_avg_sq"], what
        for key, a in one.items():
            assert same_bits(a, two[key]), f"{what}: param {index} {key}"


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Unlike ``torch.equal``, which takes zeros of both signs for the same."""
    alike = a.dtype == b.dtype and a.shape == b.shape
    return alike and torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (a, b)))


_plain: dict[Case, Outcome] = {}


def plain(case: Case) -> Outcome:
    """Return the plain training, made twice: the control comes first."""
    if case not in _plain:
        expected = steps(case, *new(case, None))
        assert_same(expected, steps(case, *new(case, None)), "the control")
        assert expected.losses[0] != expected.losses[-1]
        _plain[case] = expected
    return _plain[case]
