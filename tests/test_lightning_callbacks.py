"""Callbacks and tuners that write parameters, groups or rates: each has the bits of plain (CPU)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import lightning_cases as cases
import pytest
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
)
from lightning.pytorch.tuner import Tuner

from lightning_offload import OffloadOptimizerStrategy
from torch_offload import is_offloaded

pytestmark = cases.QUIET


class UnfreezeLater(BaseFinetuning):
    """Gives the optimizer a new group in the second epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer)


def trainable(net: torch.nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)]


def assert_same_with_and_without(run: Callable[[Any], Any]) -> None:
    plain = run("auto")
    ours = run(OffloadOptimizerStrategy(chunk_size=cases.CHUNK))
    assert is_offloaded(ours.optimizers[0])
    cases.assert_same(cases.training_state(plain), cases.training_state(ours))


def _callback(name: str, **options: Any) -> pl.Callback:
    if not hasattr(pl.callbacks, name):
        pytest.skip(f"this Lightning has no {name}")
    callback: pl.Callback = getattr(pl.callbacks, name)(**options)
    return callback


@pytest.mark.parametrize(
    "options",
    [
        {"callbacks": lambda: [_callback("WeightAveraging", use_buffers=True)]},
        {
            "callbacks": lambda: [GradientAccumulationScheduler({0: 1, 2: 3})],
            "accumulate_grad_batches": 1,
        },
        {"gradient_clip_algorithm": "value"},
        {"gradient_clip_val": None},
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true"},
        {"precision": "64-true"},
    ],
    ids=["average", "accumulation", "clip-value", "no-clip", "bf16-mixed", "bf16", "f64"],
)
def test_options(options: dict[str, Any]) -> None:
    def run(strategy: Any) -> Any:
        callbacks = options.get("callbacks", list)()
        return cases.fit(pl, strategy, 4, **(options | {"callbacks": callbacks}))

    assert_same_with_and_without(run)


def test_stochastic_weight_averaging_replaces_parameters_and_schedule() -> None:
    def run(strategy: Any) -> Any:
        callback = StochasticWeightAveraging(1e-2, swa_epoch_start=0.5)
        module = cases.make_module(pl, optimizer=trainable)
        return cases.fit(pl, strategy, 4, module=module, callbacks=[callback])

    assert_same_with_and_without(run)


def test_a_group_that_is_added_later() -> None:
    def run(strategy: Any) -> Any:
        module = cases.make_module(pl, optimizer=trainable)
        trainer = cases.fit(pl, strategy, 3, module=module, callbacks=[UnfreezeLater()])
        assert len(trainer.optimizers[0].param_groups) == 2
        return trainer

    assert_same_with_and_without(run)


def test_an_optimizer_that_a_callback_assigns() -> None:
    class Replace(pl.Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            if trainer.current_epoch == 1:
                trainer.optimizers = [torch.optim.Adam(module.parameters(), lr=1e-3)]

    def run(strategy: Any) -> Any:
        module = cases.make_module(pl, optimizer=trainable)
        return cases.fit(pl, strategy, 3, module=module, callbacks=[Replace()])

    assert_same_with_and_without(run)


def test_the_learning_rate_finder(tmp_path: Path) -> None:
    """It trains, then restores a checkpoint whose optimizer has no state yet."""

    def run(strategy: Any) -> Any:
        module = cases.make_module(
            pl, optimizer=lambda net: [torch.optim.AdamW(net.parameters(), lr=module.lr)]
        )
        module.lr = 1e-3
        trainer = cases.make_trainer(pl, strategy, 2, default_root_dir=tmp_path)
        Tuner(trainer).lr_find(module, cases.make_loader(), num_training=4, update_attr=False)
        trainer.fit(module, cases.make_loader())
        return trainer

    assert_same_with_and_without(run)


def test_validation_under_inference_mode_between_steps() -> None:
    def run(strategy: Any) -> Any:
        module = cases.make_module(pl)
        module.validation_step = lambda batch, batch_idx: module.net(batch).mean()
        trainer = cases.make_trainer(pl, strategy, 2, val_check_interval=2, num_sanity_val_steps=1)
        trainer.fit(module, cases.make_loader(), cases.make_loader())
        return trainer

    assert_same_with_and_without(run)


def test_an_exception_in_the_users_code_comes_out_and_the_state_can_be_saved(
    tmp_path: Path,
) -> None:
    module = cases.make_module(pl)
    training_step = module.training_step

    def failing(batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == 4:
            raise LookupError("the user's own")
        loss: torch.Tensor = training_step(batch, batch_idx)
        return loss

    module.training_step = failing
    trainer = cases.make_trainer(pl, OffloadOptimizerStrategy(chunk_size=cases.CHUNK), 1)
    with pytest.raises(LookupError, match="the user's own"):
        trainer.fit(module, cases.make_loader())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    (saved,) = torch.load(tmp_path / "x.ckpt", weights_only=True)["optimizer_states"]
    assert {int(state["step"]) for state in saved["state"].values()} == {2}
