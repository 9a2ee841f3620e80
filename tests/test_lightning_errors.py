"""Errors and interruptions in a fit: they come out, and the state is that of a step (CPU)."""

from __future__ import annotations

import importlib
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import lightning_cases as cases
import pytest
import torch
from lightning_place_cases import (
    OVERLAPS,
    SaveFirstEpoch,
    fit,
    ours,
    subclass,
)

pytestmark = cases.QUIET


@pytest.fixture(params=OVERLAPS)
def overlap(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


# Interruptions


def interrupted(strategy: Any, where: str, error: BaseException, **options: Any) -> Any:
    """Fit with an error in the second epoch, and return the Trainer and the module."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise error

    def training_step(self: Any, batch: torch.Tensor, batch_index: int) -> Any:
        is_time = self.trainer.current_epoch == 1 and batch_index == 3
        if is_time and where == "training_step":
            raise error
        middle = self.net[:3](batch)
        if is_time and where == "backward":
            middle = Fails.apply(middle)
        return self.net[3:](middle).square().mean()

    module = subclass(training_step=training_step)()
    trainer = cases.make_trainer(pl, strategy, 3, gradient_clip_val=None, **options)
    kind = SystemExit if isinstance(error, KeyboardInterrupt) else type(error)
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(kind) as raised:
            trainer.fit(module, cases.make_loader())
    finally:
        signal.signal(signal.SIGINT, before)
    assert isinstance(error, KeyboardInterrupt) or raised.value is error
    return trainer


@pytest.mark.parametrize("error", [LookupError("the user's own"), KeyboardInterrupt()], ids=repr)
def test_an_interruption_between_steps_leaves_the_state_of_the_last_one(
    overlap: str, error: BaseException, tmp_path: Path
) -> None:
    saved = []
    for name, strategy in (("plain", "auto"), ("ours", ours(overlap))):
        trainer = interrupted(strategy, "training_step", error)
        trainer.save_checkpoint(tmp_path / name)
        saved.append(torch.load(tmp_path / name))
    for key in ("state_dict", "optimizer_states", "global_step"):
        cases.assert_same(saved[0][key], saved[1][key], key)


@pytest.mark.parametrize("error", [LookupError("the user's own"), KeyboardInterrupt()], ids=repr)
def test_an_error_in_the_middle_of_a_backward_comes_out(
    overlap: str, error: BaseException, tmp_path: Path
) -> None:
    """Beside backward the state is not that of a whole step, and who saves it is warned."""
    trainer = interrupted(ours(overlap), "backward", error)
    module = trainer.lightning_module
    assert all(torch.isfinite(param).all() for param in module.cpu().parameters())
    if overlap == "backward":
        with pytest.warns(UserWarning, match="not that of a whole step"):
            trainer.save_checkpoint(tmp_path / "x.ckpt")
    else:
        trainer.save_checkpoint(tmp_path / "x.ckpt")
        plain = interrupted("auto", "backward", error)
        plain.save_checkpoint(tmp_path / "plain.ckpt")
        saved = [torch.load(tmp_path / name) for name in ("plain.ckpt", "x.ckpt")]
        for key in ("state_dict", "optimizer_states"):
            cases.assert_same(saved[0][key], saved[1][key], key)
    # and a checkpoint from before lets the same module train on
    path = tmp_path / "before.ckpt"
    whole = fit("auto", callbacks=[SaveFirstEpoch(path)])
    resumed = fit(ours(overlap), ckpt_path=path)
    cases.assert_same(cases.training_state(whole), cases.training_state(resumed))


@pytest.mark.parametrize("where", ["training_step", "backward"])
@pytest.mark.filterwarnings("ignore:.*was called without a model")
@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available")
def test_on_exception_checkpoint(overlap: str, where: str, tmp_path: Path) -> None:
    if not hasattr(pl.callbacks, "OnExceptionCheckpoint"):
        pytest.skip("this Lightning has no OnExceptionCheckpoint")
    saved = []
    for name, strategy in (("plain", "auto"), ("ours", ours(overlap))):
        callback = pl.callbacks.OnExceptionCheckpoint(tmp_path, filename=name)
        error = LookupError("the user's own")
        if name == "ours" and (overlap, where) == ("backward", "backward"):
            with pytest.warns(UserWarning, match="not that of a whole step"):
                interrupted(strategy, where, error, callbacks=[callback], enable_checkpointing=True)
            assert (tmp_path / "ours.ckpt").exists()
            return
        interrupted(strategy, where, error, callbacks=[callback], enable_checkpointing=True)
        saved.append(torch.load(tmp_path / f"{name}.ckpt"))
    for key in ("state_dict", "optimizer_states", "global_step"):
        cases.assert_same(saved[0][key], saved[1][key], key)


def test_slurm_requeue_saves_in_the_middle_of_a_backward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As its signal handler does, which runs wherever the program is."""
    monkeypatch.setenv("SLURM_NTASKS", "1")
    for key in ("PROCID", "NODEID", "LOCALID", "NTASKS_PER_NODE"):
        monkeypatch.setenv(f"SLURM_{key}", "0")
    environments = importlib.import_module("lightning.fabric.plugins.environments")

    def run(strategy: Any, name: str) -> Any:
        class Save(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
                trainer.save_checkpoint(tmp_path / name)
                return grad

        def training_step(self: Any, batch: torch.Tensor, batch_index: int) -> Any:
            return self.net[3:](Save.apply(self.net[:3](batch))).square().mean()

        trainer = cases.make_trainer(
            pl,
            strategy,
            3,
            gradient_clip_val=None,
            plugins=[environments.SLURMEnvironment(auto_requeue=True)],
        )
        trainer.fit(subclass(training_step=training_step)(), cases.make_loader())
        return trainer

    plain, found = run("auto", "plain"), run(ours("auto"), "ours")
    assert found.strategy._choice.overlap == "forward"
    cases.assert_same(cases.training_state(plain), cases.training_state(found))
    saved = [torch.load(tmp_path / name) for name in ("plain", "ours")]
    for key in ("state_dict", "optimizer_states", "global_step"):
        cases.assert_same(saved[0][key], saved[1][key], key)
