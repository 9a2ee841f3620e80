"""Callbacks that write parameters, and ways to drive optimizers: the bits of plain (CPU)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import lightning_cases as cases
import pytest
import torch
from lightning_place_cases import (
    OVERLAPS,
    assert_same_with_and_without,
    fit,
    subclass,
)

pytestmark = cases.QUIET


@pytest.fixture(params=OVERLAPS)
def overlap(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


def _callback(name: str, **options: Any) -> Any:
    if not hasattr(pl.callbacks, name):
        pytest.skip(f"this Lightning has no {name}")
    return getattr(pl.callbacks, name)(**options)


# Callbacks that write parameters, groups or rates


@pytest.mark.parametrize("update", ["average", "ema"])
def test_weight_averaging(overlap: str, update: str) -> None:
    def run(strategy: Any) -> Any:
        if update == "ema":
            callback = _callback("EMAWeightAveraging", decay=0.9)
        else:
            callback = _callback("WeightAveraging", use_buffers=True)
        module = cases.make_module(pl)
        module.validation_step = lambda batch, batch_idx: module.net(batch).mean()
        trainer = cases.make_trainer(pl, strategy, 3, gradient_clip_val=None, callbacks=[callback])
        trainer.fit(module, cases.make_loader(), cases.make_loader())
        return trainer

    assert_same_with_and_without(run, overlap)


def test_stochastic_weight_averaging(overlap: str) -> None:
    def run(strategy: Any) -> Any:
        callback = pl.callbacks.StochasticWeightAveraging(1e-2, swa_epoch_start=0.5)
        module = cases.make_module(
            pl, optimizer=lambda net: [torch.optim.AdamW(net.parameters(), lr=1e-2)]
        )
        return fit(strategy, 4, module=module, callbacks=[callback])

    assert_same_with_and_without(run, overlap)


class UnfreezeLater(pl.callbacks.BaseFinetuning):
    """Gives the optimizer a new group in the second epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer)


def test_base_finetuning(overlap: str) -> None:
    def run(strategy: Any) -> Any:
        module = cases.make_module(
            pl,
            optimizer=lambda net: [
                torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
            ],
        )
        trainer = fit(strategy, 4, module=module, callbacks=[UnfreezeLater()])
        assert len(trainer.optimizers[0].param_groups) == 2
        return trainer

    assert_same_with_and_without(run, overlap)


def test_model_pruning(overlap: str) -> None:
    def run(strategy: Any) -> Any:
        module = cases.make_module(pl)
        pruned = [(module.net[0], "weight"), (module.net[3], "weight")]
        callback = pl.callbacks.ModelPruning(
            "l1_unstructured", parameters_to_prune=pruned, amount=0.2, verbose=0
        )
        return fit(strategy, 4, module=module, callbacks=[callback])

    assert_same_with_and_without(run, overlap)


def test_a_logger_of_the_learning_rate_and_timers(overlap: str, tmp_path: Path) -> None:
    def run(strategy: Any) -> Any:
        callbacks = [pl.callbacks.LearningRateMonitor(), pl.callbacks.Timer()]
        logger = pl.loggers.CSVLogger(tmp_path)
        return fit(strategy, callbacks=callbacks, logger=logger, log_every_n_steps=1)

    assert_same_with_and_without(run, overlap)


# Optimizers


def gan(toggle: bool) -> Any:
    """Two optimizers, stepped by hand: the second one's backward runs through the first's."""

    def init(self: Any) -> None:
        super(type(self), self).__init__()
        self.automatic_optimization = False

    def configure_optimizers(self: Any) -> Any:
        first, second = self.net[:3], self.net[3:]
        return (
            torch.optim.AdamW(first.parameters(), lr=1e-2),
            torch.optim.Adam(second.parameters(), lr=1e-2),
        )

    def training_step(self: Any, batch: torch.Tensor, batch_index: int) -> None:
        made, judge = self.optimizers()
        for optimizer, sign in ((judge, 1.0), (made, -1.0)):
            if toggle:
                self.toggle_optimizer(optimizer)
            loss = sign * self.net(batch).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.05, "norm")
            optimizer.step()
            if toggle:
                self.untoggle_optimizer(optimizer)

    return subclass(
        __init__=init, configure_optimizers=configure_optimizers, training_step=training_step
    )()


@pytest.mark.parametrize("toggle", [False, True])
@pytest.mark.parametrize("wanted", ["auto", "step", "forward"])
def test_two_optimizers_by_hand_and_toggle_optimizer(wanted: str, toggle: bool) -> None:
    def run(strategy: Any) -> Any:
        return fit(strategy, module=gan(toggle), accumulate_grad_batches=1)

    trainer = assert_same_with_and_without(run, wanted)
    assert len(trainer.optimizers) == 2


@pytest.mark.parametrize("wanted", ["auto", "step", "forward"])
@pytest.mark.parametrize("flavour", [{}, {"foreach": True}], ids=str)
@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
def test_a_gradient_scaler_that_skips_steps(wanted: str, flavour: dict[str, bool]) -> None:
    scales: list[float] = []

    def training_step(self: Any, batch: torch.Tensor, batch_index: int) -> Any:
        scale = 1e30 if batch_index == 2 else 1.0
        return self.net(batch.float()).float().square().mean() * scale * scale

    def run(strategy: Any) -> Any:
        module = subclass(training_step=training_step)()
        module.configure_optimizers = lambda: cases.make_optimizer(module.net, **flavour)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=99)
        plugin = pl.plugins.precision.MixedPrecision("16-mixed", "cpu", scaler=scaler)
        trainer = fit(strategy, module=module, plugins=[plugin], accumulate_grad_batches=1)
        scales.append(scaler.get_scale())
        return trainer

    trainer = assert_same_with_and_without(run, wanted)
    assert trainer.strategy._choice.overlap == ("forward" if wanted == "auto" else wanted)
    assert scales[0] == scales[1] == 2.0**5
    steps = {int(s["step"]) for s in trainer.optimizers[0].state.values()}
    assert steps == {15}  # of 18: one in each epoch was skipped, and the scale was halved


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "wanted"),
    [
        *[("module", wanted) for wanted in ("auto", "step", "backward")],
        *[("submodule", wanted) for wanted in ("auto", *OVERLAPS)],
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_torch_compile(wanted: str, what: str) -> None:
    def run(strategy: Any) -> Any:
        module = cases.make_module(pl)
        if what == "module":
            module = torch.compile(module, backend="aot_eager")
        else:
            module.net[3] = torch.compile(module.net[3], backend="aot_eager")
        torch._dynamo.reset()
        return fit(strategy, module=module)

    assert_same_with_and_without(run, wanted)
