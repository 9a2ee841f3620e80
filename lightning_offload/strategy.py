"""What all strategies share: configuration, and the conversion of the user's optimizers.

All the offloading is in the converted optimizer, whose ``state_dict()`` waits for copies in flight
and whose ``load_state_dict()`` fills host memory: saving needs nothing from a strategy. It converts
the optimizer, tells it of the model, and keeps Lightning from moving the state to the GPU.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer

from torch_offload import OffloadConfig, attach_model, is_offloaded, offload, set_overlap

from .overlap import Choice
from .registry import STRATEGY_NAME
from .summary import summary

# Mixed into the strategies of either mirror; for the type checker it could be any class.
Strategy: Any = object

#: Versions of Lightning, without the last number, that the tests pass with.
TESTED = ("2.5", "2.6")
_warned: set[str] = set()
#: Optimizers that strategies have converted; one of the user's own keeps its config.
_converted: WeakSet[Optimizer] = WeakSet()


class OffloadMixin(Strategy):  # type: ignore[misc]
    """Configuration of a strategy, and the conversion of optimizers.

    Attributes:
        offload_config: what the user chose.
    """

    strategy_name = STRATEGY_NAME
    offload_config: OffloadConfig

    def _configure(self, config: OffloadConfig) -> None:
        """Keep the user's choices; constructors call it."""
        self.offload_config = config
        self._said: set[str] = set()
        _warn_if_untested(type(self))

    def _offload(self, optimizer: Optimizer, choice: Choice, model: torch.nn.Module | None) -> None:
        """Convert the user's optimizer in place, and say once what that means.

        Args:
            optimizer: plain, or converted earlier: by a fit, or by the user, whose config it keeps.
            choice: when chunks are updated.
            model: what is called in training, DistributedDataParallel included.
        """
        name = type(optimizer).__name__.removeprefix("Offloaded")
        config = replace(self.offload_config, overlap=choice.overlap)
        if not is_offloaded(optimizer):
            offload(optimizer, config)
            _converted.add(optimizer)
        elif optimizer in _converted:
            set_overlap(optimizer, choice.overlap)
            offload(optimizer, config)  # refuses other sizes than those that it has
        if model is not None:
            attach_model(optimizer, model)
        if optimizer in _converted:
            self._say(summary(optimizer, name, self.root_device, config, choice.reason))

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            rank_zero_info(f"{STRATEGY_NAME}: {text}")


def _warn_if_untested(cls: type[Any]) -> None:
    """Warn once of a Lightning that nobody has tried this with."""
    packages = [base.__module__.partition(".")[0] for base in cls.__mro__]
    package = next(
        p for p in packages if p in ("lightning", "pytorch_lightning", "lightning_fabric")
    )
    version = str(getattr(sys.modules[package], "__version__", "unknown"))
    if ".".join(version.split(".")[:2]) not in TESTED and package not in _warned:
        _warned.add(package)
        rank_zero_warn(
            f"{STRATEGY_NAME} was tested with {package} {' and '.join(TESTED)}, not with {version}."
        )
