"""The strategy for Fabric of `lightning.fabric`."""

from lightning.fabric.strategies.single_device import SingleDeviceStrategy

from .mixins import FabricOffloadMixin


class OffloadOptimizerFabricStrategy(FabricOffloadMixin, SingleDeviceStrategy):
    """Trains on one device with optimizer state in host memory.

    Arguments are the fields of `torch_offload.OffloadConfig`.
    """
