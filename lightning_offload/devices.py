"""One device, several under DDP, several under FSDP2: what a strategy does for each.

Each mixin stands in front of Lightning's strategy for the same. Those for one device are built
before anybody knows how many there are, as a name carries no parameters; with several, or several
nodes, the object becomes one for DDP, as ``strategy="auto"`` would choose.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch

from torch_offload import OffloadConfig

from .strategy import OffloadMixin

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]
#: What Lightning gives to a strategy before it tells the devices.
_GIVEN = ("_accelerator", "_checkpoint_io", "_precision_plugin", "_precision")


class SingleDeviceMixin(OffloadMixin):
    """Trains on one device; with several it becomes the strategy for DDP.

    Args:
        chunk_size: bytes of optimizer state that travel together, an int or ``"512MiB"``.
        num_slots: device buffers of one chunk each, at least 2.
        overlap: when chunks are updated: ``"step"``, ``"backward"``, ``"forward"`` or ``"auto"``.
        gpu_budget: state that stays on the device: bytes, ``"8GiB"``, ``"50%"`` or ``"auto"``.
        pin_memory: keep host state in page-locked memory.

    Raises:
        ValueError: a value is out of range.
    """

    #: What it becomes.
    parallel_class: ClassVar[type[Any]]

    def __init__(
        self,
        *,
        chunk_size: int | str = OffloadConfig.chunk_size,
        num_slots: int = OffloadConfig.num_slots,
        overlap: str = "auto",
        gpu_budget: int | str = OffloadConfig.gpu_budget,
        pin_memory: bool = OffloadConfig.pin_memory,
    ) -> None:
        super().__init__()
        self._configure(
            OffloadConfig(
                chunk_size=chunk_size,
                num_slots=num_slots,
                overlap=overlap,
                gpu_budget=gpu_budget,
                pin_memory=pin_memory,
            )
        )
        self._environment: Any = None
        self._devices: list[torch.device] = []

    @property
    def cluster_environment(self) -> Any:
        """None but while a Trainer or Fabric is being built, which gives one for DDP."""
        return self._environment

    @cluster_environment.setter
    def cluster_environment(self, environment: Any) -> None:
        self._environment = environment

    @property
    def parallel_devices(self) -> None:
        """Always None, so that every Trainer or Fabric assigns the devices that it resolved.

        Lightning builds a strategy that is given by name without a device, and a single-device
        strategy would stay on the CPU.
        """
        return None

    @parallel_devices.setter
    def parallel_devices(self, devices: Sequence[torch.device]) -> None:
        self._devices = list(devices)
        self._root_device = self._devices[0]

    @property
    def num_nodes(self) -> int:
        """Always 1."""
        return 1

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        # Lightning assigns it after the devices, and asks for what only DDP has after it.
        environment, self._environment = self._environment, None
        if num_nodes > 1 or len(self._devices) > 1:
            self._become_parallel(self._devices, num_nodes, environment)

    _num_nodes = num_nodes  # the name that Fabric assigns to

    def _become_parallel(
        self, devices: list[torch.device], num_nodes: int, environment: Any
    ) -> None:
        # As Lightning does where no strategy is asked for: a prompt cannot start itself again.
        start_method = "fork" if hasattr(sys, "ps1") else "popen"
        made = self.parallel_class(start_method=start_method, **vars(self.offload_config))
        given = {key: value for key, value in vars(self).items() if key in _GIVEN}
        self.__class__ = self.parallel_class
        self.__dict__ = {**vars(made), **given}
        self.parallel_devices = devices
        self.cluster_environment = environment
        self._num_nodes = num_nodes


class ParallelMixin(OffloadMixin):
    """Trains on several devices, which other strategies of Lightning join."""

    def _make(self, config: dict[str, Any], **arguments: Any) -> None:
        """Build the strategy behind with ``arguments``, and keep the user's choices."""
        super().__init__(**arguments)
        self._configure(OffloadConfig(**config))


class FSDPMixin(ParallelMixin):
    """FSDP2: all devices shard, unless the sizes say something else."""

    num_nodes: int
    num_processes: int
    _data_parallel_size: Any
    _tensor_parallel_size: Any

    def setup_environment(self) -> None:
        """Let the data-parallel dimension have what tensor parallelism leaves.

        Lightning's "auto" gives all devices of a node to tensor parallelism.
        """
        if self._data_parallel_size == "auto" and self._tensor_parallel_size != "auto":
            num_devices = self.num_nodes * self.num_processes
            self._data_parallel_size = num_devices // self._tensor_parallel_size
        super().setup_environment()
