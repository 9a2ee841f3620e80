"""What the tests of places in Lightning share: fits without clipping, with and without offload."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import lightning_cases as cases

from lightning_offload import OffloadOptimizerStrategy
from torch_offload import is_offloaded

OVERLAPS = ("step", "backward", "forward")


def ours(overlap: str) -> Any:
    return OffloadOptimizerStrategy(chunk_size=cases.CHUNK, overlap=overlap)


def fit(strategy: Any, max_epochs: int = 3, **options: Any) -> Any:
    """Fit without clipping, two batches a step."""
    return cases.fit(pl, strategy, max_epochs, **({"gradient_clip_val": None} | options))


def assert_same_with_and_without(run: Callable[[Any], Any], overlap: str) -> Any:
    plain = run("auto")
    trainer = run(ours(overlap))
    assert all(map(is_offloaded, trainer.optimizers))
    cases.assert_same(cases.training_state(plain), cases.training_state(trainer))
    return trainer


def subclass(**methods: Any) -> Any:
    return type("Net", (type(cases.make_module(pl)),), methods)


class SaveFirstEpoch(pl.Callback):
    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self._path)
