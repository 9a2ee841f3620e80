"""What ranks train in ``test_multigpu.py``: a net under DDP or FSDP2, with and without offload.

A *case* is everything that plain and offloaded training have in common. Nothing here waits for the
device between steps: losses stay on it, and batches are made beforehand.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import test_races_gpu
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from torch_offload import OffloadConfig, attach_model, offload, offload_stats
from torch_offload.host import HostStore

STEPS = 8
#: Of these a checkpoint is made after the first ones.
STEPS_SAVED = 3
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
        torch.testing.assert_close(b, a, rtol=0, atol=0, msg=f"{what}: param {index}")
    for index, (one, two) in enumerate(zip(expected.state, found.state, strict=True)):
        assert list(one) == list(two) == ["step", "exp_avg", "exp_avg_sq"], what
        for key, a in one.items():
            torch.testing.assert_close(
                two[key], a, rtol=0, atol=0, msg=f"{what}: param {index} {key}"
            )


_plain: dict[Case, Outcome] = {}


def plain(case: Case) -> Outcome:
    """Return the plain training, made twice: the control comes first."""
    if case not in _plain:
        expected = steps(case, *new(case, None))
        assert_same(expected, steps(case, *new(case, None)), "the control")
        assert expected.losses[0] != expected.losses[-1]
        _plain[case] = expected
    return _plain[case]


def compare(case: Case, overlap: str) -> tuple[list[int], int]:
    """Train offloaded, compare with plain. Returns early chunks a step, and chunks."""
    expected = plain(case)
    found = steps(case, *new(case, overlap))
    assert_same(expected, found, overlap)
    return found.early, found.num_chunks


def compare_slowed(case: Case, overlap: str, stage: str) -> int:
    """The same with one stage slowed on the last rank. Returns how often it was slowed on this."""
    compare(case, overlap)  # the class has been tried out, which must not be slowed
    slept = 0

    def sleep(milliseconds: float) -> None:
        nonlocal slept
        slept += 1
        if case.device == "cuda":
            torch.cuda._sleep(int(milliseconds * 1.7e6))
        else:
            time.sleep(milliseconds / 1000)

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == dist.get_world_size() - 1:
            patch.setattr(test_races_gpu, "sleep", sleep)
            test_races_gpu.slow_down(patch, stage)
        compare(case, overlap)
    return slept


# Checkpoints: made on all ranks, resumed on all of them or in the parent, which has one GPU.


def save(path: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Write a distributed checkpoint."""
    net, state = get_state_dict(model, optimizer)
    dcp.save({"net": net, "optimizer": state}, checkpoint_id=path)


def train_and_save(case: Case, overlap: str | None, path: Path) -> None:
    """Train the first steps and save."""
    model, optimizer = new(case, overlap)
    steps(case, model, optimizer, num_steps=STEPS_SAVED)
    save(path, model, optimizer)


def resume(case: Case, overlap: str | None, path: Path) -> Outcome:
    """Load and train the other steps."""
    model, optimizer = new(case, overlap)
    net, state = get_state_dict(model, optimizer)
    both = {"net": net, "optimizer": state}
    dcp.load(both, checkpoint_id=path)
    set_state_dict(
        model, optimizer, model_state_dict=both["net"], optim_state_dict=both["optimizer"]
    )
    return steps(case, model, optimizer, first_step=STEPS_SAVED, num_steps=STEPS - STEPS_SAVED)


def compare_resumed(case: Case, overlap: str, path: Path, *, resharded: bool) -> None:
    """Resume from the checkpoints of plain and of offloaded, either one with either optimizer.

    Args:
        case: what is trained.
        overlap: of the offloaded ones.
        path: where the checkpoints are.
        resharded: they were made by more or fewer ranks, which had other batches.
    """
    expected = resume(case, None, path / "plain")
    assert_same(expected, resume(case, None, path / "plain"), "the control")
    if not resharded:
        whole = plain(case)
        rest = whole._replace(losses=whole.losses[STEPS_SAVED * case.count :])
        assert_same(rest, expected, "plain, resumed")
    assert_same(expected, resume(case, overlap, path / "plain"), "plain to offloaded")
    assert_same(expected, resume(case, None, path / "offloaded"), "offloaded to plain")
    assert_same(expected, resume(case, overlap, path / "offloaded"), "offloaded")


# Host memory.


def collectives(case: Case) -> int:
    """Return how many collectives this process has issued on the case's devices."""
    group: Any = dist.group.WORLD
    backend = group._get_backend(torch.device(case.device))
    return int(backend._get_sequence_number_for_group())


def when_memory_is_taken(case: Case, overlap: str) -> list[tuple[int, bool]]:
    """Train, and return for each taking of host memory the step, and whether backward ran."""
    taken, step = [], [-1]
    allocate = HostStore.allocate

    def noting(*args: Any, **kwargs: Any) -> Any:
        taken.append((step[0], torch._C._current_graph_task_id() >= 0))
        return allocate(*args, **kwargs)

    expected = plain(case)
    compare(case, overlap)  # the class has been tried out: its tiny copies have stores as well
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostStore, "allocate", noting)
        model, optimizer = new(case, overlap)
        assert_same(expected, steps(case, model, optimizer, noted=step), overlap)
    stats = offload_stats(optimizer)
    assert stats.pinned_bytes == (stats.host_bytes if case.device == "cuda" else 0)
    return taken


def memory_before_the_first_collective(case: Case, overlap: str) -> None:
    """State that is there when the optimizer is converted gets its host memory at once."""
    assert collectives(case) == 0, "this must be the first that these ranks do"

    def run(offloaded: bool) -> Outcome:
        net = make_net(case)
        optimizer = make_optimizer(net)
        alone = Case("one", case.device, case.dtype)
        steps(alone, net, optimizer, num_steps=1)
        before = collectives(case)
        if offloaded:
            offload(optimizer, config_of(case, overlap))
            stats = offload_stats(optimizer)
            state_bytes = 2 * case.dtype.itemsize * sum(p.numel() for p in net.parameters())
            assert stats.host_bytes >= state_bytes
            assert stats.pinned_bytes == (stats.host_bytes if case.device == "cuda" else 0)
        assert collectives(case) == before
        model = wrap(case, net)
        assert collectives(case) > before
        if offloaded:
            attach_model(optimizer, model)
        outcome = steps(case, model, optimizer)
        if offloaded:
            after = offload_stats(optimizer)
            assert (after.host_bytes, after.setup_s) == (stats.host_bytes, stats.setup_s)
        return outcome

    offloaded = run(True)
    expected = run(False)
    assert_same(expected, run(False), "the control")
    assert_same(expected, offloaded, overlap)
