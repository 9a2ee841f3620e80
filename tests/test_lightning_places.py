"""Checkpoints and loops of Lightning: the bits of plain, with each overlap.

Each test is named after a place where Lightning reads or writes parameters, state or gradients.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import lightning_cases as cases
import pytest
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.tuner import Tuner
from lightning_place_cases import (
    OVERLAPS,
    SaveFirstEpoch,
    assert_same_with_and_without,
    fit,
    ours,
    subclass,
)

from torch_offload import is_offloaded, offload_stats

pytestmark = cases.QUIET


@pytest.fixture(params=OVERLAPS)
def overlap(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


class Early(pl.Callback):
    """Notes after each batch how many chunks were early."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if is_offloaded(trainer.optimizers[0]):
            self.counts.append(offload_stats(trainer.optimizers[0]).num_early_chunks)


def test_each_overlap_does_what_it_says(overlap: str) -> None:
    """Or the tests below would not test it."""
    early = Early()
    assert_same_with_and_without(lambda strategy: fit(strategy, callbacks=[early]), overlap)
    assert (early.counts[-1] > 0) == (overlap == "backward")


# Checkpoints


def test_save_weights_only(overlap: str, tmp_path: Path) -> None:
    saved = []
    for name, strategy in (("plain", "auto"), ("ours", ours(overlap))):
        callback = pl.callbacks.ModelCheckpoint(
            tmp_path / name, filename="{step}", every_n_train_steps=1, save_weights_only=True
        )
        fit(strategy, enable_checkpointing=True, callbacks=[callback])
        (path,) = (tmp_path / name).iterdir()
        saved.append(torch.load(path, weights_only=True))
    assert "optimizer_states" not in saved[1]
    cases.assert_same(saved[0]["state_dict"], saved[1]["state_dict"])


@pytest.mark.parametrize("io", ["plain", "async"])
def test_model_checkpoint_and_async_checkpoint_io(overlap: str, tmp_path: Path, io: str) -> None:
    """A save that goes on in a thread holds the values of its step."""
    if io == "async" and "clone" not in inspect.getsource(inspect.getmodule(AsyncCheckpointIO)):
        pytest.skip("this Lightning saves tensors while training changes them, plain or not")
    for name, strategy in (("plain", "auto"), ("ours", ours(overlap))):
        callback = pl.callbacks.ModelCheckpoint(
            tmp_path / name, filename="{step}", every_n_train_steps=1, save_top_k=-1
        )
        plugins = [AsyncCheckpointIO()] if io == "async" else None
        fit(strategy, enable_checkpointing=True, callbacks=[callback], plugins=plugins)
    names = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert len(names) == 9
    for name in names:
        plain, found = (torch.load(tmp_path / side / name) for side in ("plain", "ours"))
        for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step"):
            cases.assert_same(plain[key], found[key], f"{name} {key}")


@pytest.mark.parametrize("resumed_with", ["auto", *OVERLAPS])
def test_a_switch_in_the_middle_of_a_project(
    overlap: str, tmp_path: Path, resumed_with: str
) -> None:
    """Plain to offloaded, offloaded to plain ("auto"), one overlap to another."""
    path = tmp_path / "x.ckpt"
    whole = fit("auto")
    for first, second in ((ours(overlap), resumed_with), ("auto", overlap)):
        fit(first, callbacks=[SaveFirstEpoch(path)])
        strategy = second if second == "auto" else ours(second)
        resumed = fit(strategy, ckpt_path=path)
        cases.assert_same(cases.training_state(whole), cases.training_state(resumed))


def test_a_resume_fills_the_state_that_is_there(overlap: str, tmp_path: Path) -> None:
    """The same Trainer and optimizer: moments keep their memory when a checkpoint is loaded."""
    path = tmp_path / "x.ckpt"
    net = cases.make_net()
    optimizer = cases.make_optimizer(net)
    module = cases.make_module(pl, net, optimizer=lambda _: optimizer)
    trainer = fit(ours(overlap), 1, module=module)
    trainer.save_checkpoint(path)
    before = {key: id(value) for key, value in moments(optimizer).items()}
    pointers = {key: value.data_ptr() for key, value in moments(optimizer).items()}
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, cases.make_loader(), ckpt_path=path)
    assert {key: id(value) for key, value in moments(optimizer).items()} == before
    assert {key: value.data_ptr() for key, value in moments(optimizer).items()} == pointers
    cases.assert_same(cases.training_state(fit("auto", 2)), cases.training_state(trainer))


def moments(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{index}.{key}": value
        for index, state in enumerate(optimizer.state.values())
        for key, value in state.items()
        if key != "step"
    }


# Loops


def test_fit_after_validate_and_test_after_fit(overlap: str) -> None:
    def run(strategy: Any) -> Any:
        module = cases.make_module(pl)
        module.validation_step = module.test_step = lambda batch, batch_idx: module.net(batch).sum()
        trainer = cases.make_trainer(pl, strategy, 2, gradient_clip_val=None)
        trainer.validate(module, cases.make_loader(), verbose=False)
        trainer.fit(module, cases.make_loader(), cases.make_loader())
        trainer.test(module, cases.make_loader(), verbose=False)
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module, cases.make_loader(), cases.make_loader())
        return trainer

    assert_same_with_and_without(run, overlap)


def test_validation_in_the_middle_of_an_accumulation(overlap: str) -> None:
    """Lightning takes pending gradients away there; and it runs in inference mode."""

    def run(strategy: Any) -> Any:
        module = cases.make_module(pl)
        module.validation_step = lambda batch, batch_idx: module.net(batch).mean()
        options = {"val_check_interval": 3, "num_sanity_val_steps": 1, "gradient_clip_val": None}
        trainer = cases.make_trainer(pl, strategy, 3, **options)
        trainer.fit(module, cases.make_loader(), cases.make_loader())
        return trainer

    assert_same_with_and_without(run, overlap)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.filterwarnings("ignore:.*training_step.* returned .*None.*")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("skipped", [3, 4])
def test_training_step_returning_none(overlap: str, accumulate: int, skipped: int) -> None:
    def training_step(self: Any, batch: torch.Tensor, batch_index: int) -> Any:
        return None if batch_index == skipped else self.net(batch).square().mean()

    def run(strategy: Any) -> Any:
        module = subclass(training_step=training_step)()
        return fit(strategy, module=module, accumulate_grad_batches=accumulate)

    assert_same_with_and_without(run, overlap)


def test_the_learning_rate_finder(overlap: str, tmp_path: Path) -> None:
    """It trains, then restores a checkpoint whose optimizer has no state yet."""

    def run(strategy: Any) -> Any:
        module = cases.make_module(
            pl, optimizer=lambda net: [torch.optim.AdamW(net.parameters(), lr=module.lr)]
        )
        module.lr = 1e-3
        options = {"default_root_dir": tmp_path, "gradient_clip_val": None}
        trainer = cases.make_trainer(pl, strategy, 2, **options)
        Tuner(trainer).lr_find(module, cases.make_loader(), num_training=4, update_attr=False)
        trainer.fit(module, cases.make_loader())
        return trainer

    assert_same_with_and_without(run, overlap)


class _Data(pl.LightningDataModule):
    """Batches of a size that a callback may change."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 2

    def train_dataloader(self) -> Any:
        rows = torch.cat(cases.make_batches(4))
        return torch.utils.data.DataLoader(rows, batch_size=self.batch_size)


@pytest.mark.parametrize("fails_in", ["forward", "backward"])
@pytest.mark.parametrize("wanted", ["auto", "step", "forward"])
def test_the_batch_size_finder(
    wanted: str, tmp_path: Path, fails_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on after a batch that did not fit into memory, even in the middle of a backward."""

    class OutOfMemory(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.size = len(x)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            if ctx.size > 8:
                raise RuntimeError("CUDA out of memory.")
            return grad

    def training_step(self: Any, batch: torch.Tensor, batch_index: int) -> Any:
        if fails_in == "forward" and len(batch) > 8:
            raise RuntimeError("CUDA out of memory.")
        middle = OutOfMemory.apply(self.net[:3](batch))
        return self.net[3:](middle).square().mean()

    def run(strategy: Any) -> Any:
        module = subclass(training_step=training_step)()
        finder = pl.callbacks.BatchSizeFinder(steps_per_trial=2, init_val=2, max_trials=5)
        data = _Data()
        options = {"default_root_dir": tmp_path, "gradient_clip_val": None}
        trainer = cases.make_trainer(
            pl, strategy, 2, callbacks=[finder], accumulate_grad_batches=1, **options
        )
        trainer.fit(module, datamodule=data)
        assert data.batch_size == 8
        return trainer

    trainer = assert_same_with_and_without(run, wanted)
    assert trainer.strategy._choice.overlap == ("forward" if wanted == "auto" else wanted)
