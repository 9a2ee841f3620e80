"""What the four strategies share: configuration, device, and where optimizers are converted.

All the offloading is in the converted optimizer, whose ``state_dict()`` waits for copies in flight
and whose ``load_state_dict()`` fills host memory: saving needs nothing from a strategy. It converts
the optimizer, and keeps Lightning from moving the state to the GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.optim import Optimizer

from torch_offload import OffloadConfig, is_offloaded, offload, synchronize

from .registry import STRATEGY_NAME

# Mixed into the SingleDeviceStrategy of either mirror; for the type checker it could be any class.
_Strategy: Any = object


class OffloadMixin(_Strategy):  # type: ignore[misc]
    """Configuration and device of a strategy for one device.

    Args:
        chunk_size: bytes of optimizer state that travel together, an int or ``"512MiB"``.
        num_slots: device buffers of one chunk each, at least 2.
        overlap: when chunks are updated: ``"step"``, ``"backward"``, ``"forward"`` or ``"auto"``.
        gpu_budget: state that stays on the device: bytes, ``"8GiB"``, ``"50%"`` or ``"auto"``.
        pin_memory: keep host state in page-locked memory.

    Raises:
        ValueError: a value is out of range, or the Trainer or Fabric has several devices or nodes.
    """

    strategy_name = STRATEGY_NAME

    def __init__(
        self,
        *,
        chunk_size: int | str = OffloadConfig.chunk_size,
        num_slots: int = OffloadConfig.num_slots,
        overlap: str = OffloadConfig.overlap,
        gpu_budget: int | str = OffloadConfig.gpu_budget,
        pin_memory: bool = OffloadConfig.pin_memory,
    ) -> None:
        super().__init__()
        self.offload_config = OffloadConfig(
            chunk_size=chunk_size,
            num_slots=num_slots,
            overlap=overlap,
            gpu_budget=gpu_budget,
            pin_memory=pin_memory,
        )
        self._announced = False

    @property
    def parallel_devices(self) -> None:
        """Always None, so that every Trainer or Fabric assigns the devices that it resolved.

        Lightning builds a strategy that is given by name without a device, and a single-device
        strategy would stay on the CPU.
        """
        return None

    @parallel_devices.setter
    def parallel_devices(self, devices: Sequence[torch.device]) -> None:
        if len(devices) != 1:
            raise ValueError(
                f'strategy="{STRATEGY_NAME}" got {len(devices)} devices '
                f"({', '.join(map(str, devices))}). It trains on one device; several are not "
                "supported yet. Use devices=1, or devices=[1] for the GPU with index 1."
            )
        self._root_device = devices[0]

    @property
    def num_nodes(self) -> int:
        """Always 1."""
        return 1

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        if num_nodes != 1:
            raise ValueError(
                f'strategy="{STRATEGY_NAME}" got num_nodes={num_nodes}. It trains on one device; '
                "several are not supported yet. Use num_nodes=1."
            )

    _num_nodes = num_nodes  # the name that Fabric assigns to

    def _offload(self, optimizer: Optimizer, model: torch.nn.Module | None = None) -> None:
        """Convert the user's optimizer in place, and say so the first time."""
        name = type(optimizer).__name__.removeprefix("Offloaded")
        offload(optimizer, self.offload_config, model=model)
        if not self._announced:
            self._announced = True
            rank_zero_info(
                f"{STRATEGY_NAME}: the state of {name} lives in host memory "
                f"(device {self.root_device}, {self.offload_config})"
            )


class TrainerOffloadMixin(OffloadMixin):
    """What a Trainer's strategy does around optimizers."""

    model: Any

    def setup(self, trainer: Any) -> None:
        """Do what a single-device strategy does, but leave optimizer state where it is.

        Lightning's method ends by moving the state of every optimizer to the root device.
        """
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        self.model = self._setup_model(self.model)
        if trainer.state.fn == "fit":
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    @property
    def optimizers(self) -> list[Optimizer]:
        """The user's optimizers, converted. Lightning and callbacks assign them several times."""
        return super().optimizers  # type: ignore[no-any-return]

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        for optimizer in optimizers:
            # Lightning puts a mock in the place of an optimizer that a module does not have.
            if type(optimizer).__name__ != "_MockOptimizer":
                self._offload(optimizer, self.model)
        # After the conversion: Lightning's proxies derive from the optimizer's class.
        super(TrainerOffloadMixin, type(self)).optimizers.__set__(self, optimizers)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load into host memory. Lightning's method moves the loaded state to the root device."""
        states = checkpoint["optimizer_states"]
        for optimizer, state in zip(self.optimizers, states, strict=False):
            optimizer.load_state_dict(state)

    def teardown(self) -> None:
        """Wait for copies in flight before the model leaves the GPU."""
        for optimizer in self.optimizers:
            if is_offloaded(optimizer):
                synchronize(optimizer)
        super().teardown()


class FabricOffloadMixin(OffloadMixin):
    """What a Fabric's strategy does around optimizers."""

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Convert the optimizer in place and return it."""
        optimizer = super().setup_optimizer(optimizer)
        self._offload(optimizer)
        return optimizer
