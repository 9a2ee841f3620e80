"""Optimizer-state offload for Lightning's Trainer and Fabric: ``strategy="offload_optimizer"``.

The names are registered without any import where the autoload entry point runs; importing this
package registers them where that is switched off. To choose parameters, use the classes::

    Trainer(strategy=OffloadOptimizerStrategy(chunk_size="256MiB"))

or, in a LightningCLI configuration, ``class_path: lightning_offload.OffloadOptimizerStrategy`` with
``init_args``. A class is that of the Lightning package in use (`lightning.pytorch` before
`pytorch_lightning`); `lightning_offload.trainer_pytorch_lightning` and its siblings name one.
"""

from typing import TYPE_CHECKING, Any

from _torch_offload_autoload import LIGHTNING_HOOKS, watch

from .registry import CLASSES, STRATEGY_NAME, public_class

if TYPE_CHECKING:
    from .fabric_lightning import (
        OffloadOptimizerFabricDDPStrategy,
        OffloadOptimizerFabricFSDPStrategy,
        OffloadOptimizerFabricStrategy,
    )
    from .trainer_lightning import (
        OffloadMonitor,
        OffloadOptimizerDDPStrategy,
        OffloadOptimizerFSDPStrategy,
        OffloadOptimizerStrategy,
    )

__all__ = [
    "STRATEGY_NAME",
    "OffloadMonitor",
    "OffloadOptimizerDDPStrategy",
    "OffloadOptimizerFSDPStrategy",
    "OffloadOptimizerFabricDDPStrategy",
    "OffloadOptimizerFabricFSDPStrategy",
    "OffloadOptimizerFabricStrategy",
    "OffloadOptimizerStrategy",
]

watch(LIGHTNING_HOOKS)


def __getattr__(name: str) -> Any:
    # on access: it imports Lightning, and which one is in use is not known before
    if name in CLASSES:
        return public_class(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
