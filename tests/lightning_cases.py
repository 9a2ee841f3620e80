"""What the Lightning tests share: a small model, one way to fit it, and exact comparison.

Functions take the package under test (``lightning.pytorch`` or ``pytorch_lightning``), since the
two share no class.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from small_net import make_batches, make_net, make_optimizer
from torch import nn
from torch.utils.data import DataLoader

ROOT = Path(__file__).resolve().parents[1]
TRAINERS = ("lightning.pytorch", "pytorch_lightning")
FABRICS = ("lightning.fabric", "lightning_fabric")
#: Small enough that the model of `make_net` is several chunks.
CHUNK = 4096


#: For ``pytestmark``: what Lightning says about these tests' data, and torch about Lightning.
QUIET = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in (
        ".*does not have many workers.*",  # the data are in memory
        ".*LeafSpec.*is deprecated.*",  # Lightning 2.6 asks torch 2.13 an old question
        "GPU available but not used.*",  # tests of the CPU path on a machine with a GPU
    )
]


def make_deep_net() -> nn.Module:
    """Return a net whose state (33 MiB in float32) counts, in parameters of 2 MiB of state each."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(16, 512)]
    for _ in range(16):
        layers += [nn.LayerNorm(512), nn.GELU(), nn.Linear(512, 512)]
    return nn.Sequential(*layers, nn.Linear(512, 1))


def make_loader() -> DataLoader[torch.Tensor]:
    """Return a loader of `make_batches`, in order."""
    return DataLoader(make_batches(), batch_size=None)  # type: ignore[arg-type]


def make_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Return a schedule that changes the rate at every step."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))


def make_module(
    pl: Any, net: nn.Module | None = None, optimizer: Callable[[nn.Module], Any] | None = None
) -> Any:
    """Return a LightningModule of the package ``pl``, with a schedule on its optimizer."""

    class Module(pl.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net() if net is None else net

        def training_step(self, batch: torch.Tensor, batch_index: int) -> torch.Tensor:
            return self.net(batch.to(self.net[0].weight.dtype)).square().mean()

        def configure_optimizers(self) -> Any:
            built = (optimizer or make_optimizer)(self.net)
            if not isinstance(built, torch.optim.Optimizer):
                return built
            scheduler = {"scheduler": make_scheduler(built), "interval": "step"}
            return {"optimizer": built, "lr_scheduler": scheduler}

    return Module()


def make_trainer(pl: Any, strategy: Any, max_epochs: int = 1, **options: Any) -> Any:
    """Return a quiet Trainer that clips, and accumulates two batches; ``options`` override."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": max_epochs,
        "gradient_clip_val": 0.05,
        "accumulate_grad_batches": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(strategy=strategy, **(defaults | options))


def fit(
    pl: Any,
    strategy: Any,
    max_epochs: int,
    *,
    module: Any = None,
    ckpt_path: Path | None = None,
    **options: Any,
) -> Any:
    """Fit `make_module` (or ``module``) and return the Trainer. An epoch is three steps."""
    trainer = make_trainer(pl, strategy, max_epochs, **options)
    module = make_module(pl) if module is None else module
    trainer.fit(module, make_loader(), ckpt_path=ckpt_path)
    return trainer


def training_state(trainer: Any) -> dict[str, Any]:
    """Return parameters, moments, `step`, hyper-parameters and schedule of a fitted Trainer."""
    return {
        "params": dict(trainer.lightning_module.named_parameters()),
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "schedulers": [c.scheduler.state_dict() for c in trainer.lr_scheduler_configs],
    }


def start_fabric(
    package: Any,
    strategy: Any,
    *,
    net: nn.Module | None = None,
    jointly: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Return what a user's script has after `setup`: Fabric, module, optimizer and schedule.

    The schedule is built first, as in many scripts: it holds the optimizer before the conversion.
    """
    defaults: dict[str, Any] = {"accelerator": "cpu", "devices": 1}
    fabric = package.Fabric(strategy=strategy, **(defaults | options))
    if fabric.world_size > 1 and os.environ.get("LT_CLI_USED") != "1":
        fabric.launch()
    net = make_net() if net is None else net
    user_optimizer = make_optimizer(net)
    schedule = make_scheduler(user_optimizer)
    if jointly:
        module, optimizer = fabric.setup(net, user_optimizer)
    else:
        module, optimizer = fabric.setup_module(net), fabric.setup_optimizers(user_optimizer)
    return {
        "fabric": fabric,
        "module": module,
        "optimizer": optimizer,
        "user_optimizer": user_optimizer,
        "schedule": schedule,
    }


def train_fabric(run: dict[str, Any], num_steps: int, first: int = 0) -> dict[str, Any]:
    """Train with clipping and two batches a step, from step ``first`` of the same data."""
    fabric, module, optimizer = run["fabric"], run["module"], run["optimizer"]
    batches = make_batches(2 * (first + num_steps))[2 * first :]
    for index, batch in enumerate(batches):
        fabric.backward(module(fabric.to_device(batch)).square().mean())
        if index % 2:
            fabric.clip_gradients(module, optimizer, max_norm=0.05)
            optimizer.step()
            optimizer.zero_grad()
            run["schedule"].step()
    return run


def fabric_state(run: dict[str, Any]) -> dict[str, Any]:
    """Return parameters, moments, `step`, hyper-parameters and schedule of a Fabric run."""
    return {
        "params": dict(run["module"].named_parameters()),
        "optimizer": run["optimizer"].state_dict(),
        "schedule": run["schedule"].state_dict(),
    }


def assert_same(left: Any, right: Any, path: str = "") -> None:
    """Fail unless both hold the same keys, dtypes and bits. Devices may differ."""
    if isinstance(left, torch.Tensor):
        assert isinstance(right, torch.Tensor), path
        assert left.dtype == right.dtype, path
        assert torch.equal(left.detach().cpu(), right.detach().cpu()), path
    elif isinstance(left, Mapping):
        assert isinstance(right, Mapping), path
        assert left.keys() == right.keys(), path
        for key in left:
            assert_same(left[key], right[key], f"{path}.{key}")
    elif isinstance(left, Sequence) and not isinstance(left, str):
        assert len(left) == len(right), path
        for index, pair in enumerate(zip(left, right, strict=True)):
            assert_same(*pair, f"{path}[{index}]")
    elif not callable(left):
        assert left == right, path


def run_python(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a fresh interpreter that sees this repository, and its entry points, first.

    Variables that steer the autoload or Lightning are taken out of the environment unless given.
    """
    steering = ("TORCH_OFFLOAD", "TORCH_DEVICE_BACKEND", "PL_", "LT_")
    base = {k: v for k, v in os.environ.items() if not k.startswith(steering)}
    path = os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "tests"), base.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, *argv],
        env={**base, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", **env},
        capture_output=True,
        text=True,
        timeout=240,
    )


def succeed(*argv: str, **env: str) -> str:
    """Run `run_python` and return its stdout; fail with all of its output if it fails."""
    done = run_python(*argv, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
