"""What the Accelerate tests share: a clean Accelerate, a small run through it, exact comparison."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from small_net import make_batches, make_net, make_optimizer
from torch import nn

from accelerate_offload import report

SWITCH = "ACCELERATE_OFFLOAD_OPTIMIZER"
#: Small enough that the state of `make_net` is several chunks.
CHUNK_BYTES = 4096

FLAVOURS = {
    "for-loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


@contextmanager
def fresh_accelerate() -> Iterator[None]:
    """Enter with no ``ACCELERATE_*`` variable and no Accelerator; leave everything as it was."""
    before = dict(os.environ)
    for name in before:
        if name.startswith("ACCELERATE_"):
            del os.environ[name]
    report._num_converted = 0
    reset()
    try:
        yield
    finally:
        reset()
        os.environ.clear()
        os.environ.update(before)


def reset() -> None:
    """Forget the Accelerator of this process, so that the next may have other settings."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def switch(on: bool, chunk_bytes: int = CHUNK_BYTES) -> None:
    """Turn offload on, with small chunks, or off."""
    os.environ[SWITCH] = str(on).lower()
    os.environ["ACCELERATE_OFFLOAD_CHUNK_SIZE"] = str(chunk_bytes)


def make_schedule(optimizer: Any) -> torch.optim.lr_scheduler.LRScheduler:
    """Return a schedule that changes the learning rate at every step."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


@dataclass
class Run:
    """One training run: what ``prepare`` returned, and what happened."""

    accelerator: Accelerator
    net: nn.Module
    optimizer: Any
    schedule: Any
    num_done: int = 0

    def train(self, num_steps: int, *, overflow_at: int | None = None, clip: bool = True) -> Run:
        """Take ``num_steps`` optimizer steps, each over all of its micro-batches.

        Args:
            num_steps: of the optimizer; one that the scaler skips counts.
            overflow_at: micro-batch whose loss is infinite, counted from the run's start.
            clip: the gradients' norm.
        """
        num_micro = self.accelerator.gradient_accumulation_steps
        first = self.num_done * num_micro
        batches = make_batches(first + num_steps * num_micro)
        for index, batch in enumerate(batches[first:], first):
            with self.accelerator.accumulate(self.net):
                loss = self.net(batch.to(self.accelerator.device)).float().pow(2).mean()
                if index == overflow_at:
                    loss = loss * float("inf")
                self.accelerator.backward(loss)
                if clip and self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.net.parameters(), 0.05)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
        self.num_done += num_steps
        return self


def start(
    offload: bool,
    *,
    scheduler_first: bool = True,
    accelerator: Mapping[str, Any] | None = None,
    net: nn.Module | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    **options: Any,
) -> Run:
    """Prepare a run the way a script does.

    Args:
        offload: whether the switch is on while ``prepare`` runs.
        scheduler_first: build the LR schedule before ``prepare``, on the bare optimizer, instead
            of after, on the prepared one.
        accelerator: arguments of ``Accelerator``; on the CPU by default.
        net: the model; ``make_net()`` by default.
        chunk_bytes: chunk size.
        options: arguments of AdamW.
    """
    reset()
    switch(offload, chunk_bytes)
    acc = Accelerator(**({"cpu": True} if accelerator is None else accelerator))
    net = make_net() if net is None else net
    optimizer: Any = make_optimizer(net, **options)
    if scheduler_first:
        net, optimizer, schedule = acc.prepare(net, optimizer, make_schedule(optimizer))
    else:
        net, optimizer = acc.prepare(net, optimizer)
        schedule = acc.prepare(make_schedule(optimizer))
    return Run(acc, net, optimizer, schedule)


def assert_same(plain: Run, other: Run) -> None:
    """Parameters, checkpoints and schedules: the same bits, dtypes and keys in order."""
    for (name, p), q in zip(plain.net.named_parameters(), other.net.parameters(), strict=True):
        assert torch.equal(p, q), f"parameter {name}"
    assert_same_tree(plain.optimizer.state_dict(), other.optimizer.state_dict())
    assert_same_tree(plain.schedule.state_dict(), other.schedule.state_dict())


def assert_same_tree(plain: Any, other: Any, where: str = "") -> None:
    """Nested dicts and lists of tensors and values are the same; devices may differ."""
    if isinstance(plain, torch.Tensor):
        assert isinstance(other, torch.Tensor), where
        assert plain.dtype == other.dtype, where
        assert torch.equal(plain.cpu(), other.cpu()), where
    elif isinstance(plain, dict):
        assert list(plain) == list(other), where
        for key in plain:
            assert_same_tree(plain[key], other[key], f"{where}[{key!r}]")
    elif isinstance(plain, (list, tuple)):
        assert len(plain) == len(other), where
        for index, (a, b) in enumerate(zip(plain, other, strict=True)):
            assert_same_tree(a, b, f"{where}[{index}]")
    else:
        assert plain == other, where


def run_python(
    *command: str | Path, cwd: Path, check: bool = True, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run this interpreter in a clean environment, away from the user's own Accelerate settings.

    Args:
        command: what follows ``python`` on the command line.
        cwd: working directory; Accelerate's default configuration file is looked for under it.
        check: fail, and show both streams, if the exit status is not 0.
        env: variables to add.
    """
    clean = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")}
    for name in ("TORCH_DEVICE_BACKEND_AUTOLOAD", "TORCH_OFFLOAD_AUTOLOAD", "RANK"):
        clean.pop(name, None)
    clean.update(HF_HOME=str(cwd / "hf"), OMP_NUM_THREADS="1", **env)
    result = subprocess.run(
        [sys.executable, *map(str, command)], cwd=cwd, env=clean, capture_output=True, text=True
    )
    assert not check or result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result


def accelerate_launch(*args: str | Path) -> Sequence[str | Path]:
    """Return the command of ``accelerate launch`` on one CPU process, for :func:`run_python`."""
    module = "accelerate.commands.accelerate_cli"
    return ["-m", module, "launch", "--cpu", "--num_processes", "1", *args]
