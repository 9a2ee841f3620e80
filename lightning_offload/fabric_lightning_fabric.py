"""The strategies for Fabric of `lightning_fabric`."""

from lightning_fabric.strategies.ddp import DDPStrategy
from lightning_fabric.strategies.model_parallel import ModelParallelStrategy
from lightning_fabric.strategies.single_device import SingleDeviceStrategy

from .fabric import FabricDDP, FabricFSDP, FabricSingleDevice


class OffloadOptimizerFabricDDPStrategy(FabricDDP, DDPStrategy):
    """See `FabricDDP`, which says what the arguments are."""


class OffloadOptimizerFabricFSDPStrategy(FabricFSDP, ModelParallelStrategy):
    """See `FabricFSDP`, which says what the arguments are."""


class OffloadOptimizerFabricStrategy(FabricSingleDevice, SingleDeviceStrategy):
    """Trains on one device with optimizer state in host memory; with several as the DDP strategy.

    Arguments are the fields of `torch_offload.OffloadConfig`; ``overlap="auto"``, the default, is
    ``"step"``.
    """

    parallel_class = OffloadOptimizerFabricDDPStrategy
