"""What ``test_multigpu.py`` lets the ranks do, beyond training: slow stages, checkpoints, memory.

A *case* is described in ``multi_training.py``. Everything is compared with plain training there,
after a control.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import test_races_gpu
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from multi_training import (
    STEPS,
    Case,
    Outcome,
    assert_same,
    config_of,
    make_net,
    make_optimizer,
    new,
    plain,
    steps,
    wrap,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from torch_offload import attach_model, offload, offload_stats
from torch_offload.host import HostStore

#: A checkpoint is made after so many of the steps.
STEPS_SAVED = 3
#: Longer than a step and its set-up take.
LATE_S = 0.7


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


def compare_late(case: Case, overlap: str) -> None:
    """The last rank begins late: others take host memory while their collectives wait for it."""
    expected = plain(case)
    model, optimizer = new(case, overlap)
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(LATE_S)
    assert_same(expected, steps(case, model, optimizer), overlap)


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
