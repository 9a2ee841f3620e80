"""The strategies for the Trainer of `pytorch_lightning`, and its callback."""

from pytorch_lightning.callbacks import Callback
from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy

from .monitor import MonitorMixin
from .trainer_devices import TrainerDDP, TrainerFSDP, TrainerSingleDevice


class OffloadOptimizerDDPStrategy(TrainerDDP, DDPStrategy):
    """See `TrainerDDP`, which says what the arguments are."""


class OffloadOptimizerFSDPStrategy(TrainerFSDP, ModelParallelStrategy):
    """See `TrainerFSDP`, which says what the arguments are."""


class OffloadOptimizerStrategy(TrainerSingleDevice, SingleDeviceStrategy):
    """Trains on one device with optimizer state in host memory; with several as the DDP strategy.

    Arguments are the fields of `torch_offload.OffloadConfig`; ``overlap`` is ``"auto"`` by default.
    """

    parallel_class = OffloadOptimizerDDPStrategy


class OffloadMonitor(MonitorMixin, Callback):
    """See `MonitorMixin`, which says what the arguments are."""
