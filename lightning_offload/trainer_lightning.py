"""The strategy for the Trainer of `lightning.pytorch`."""

from lightning.pytorch.strategies import SingleDeviceStrategy

from .mixins import TrainerOffloadMixin


class OffloadOptimizerStrategy(TrainerOffloadMixin, SingleDeviceStrategy):
    """Trains on one device with optimizer state in host memory.

    Arguments are the fields of `torch_offload.OffloadConfig`.
    """
