"""Optimizer-state offload for Accelerate, switched on by configuration.

One environment variable is behind every way in, ``ACCELERATE_OFFLOAD_OPTIMIZER=true``::

    accelerate launch --offload_optimizer train.py        # an unmodified script
    accelerate launch -m accelerate_offload train.py      # the same, without touching the launcher
    OffloadOptimizerPlugin(chunk_size="256MiB")           # in code, before prepare()

``Accelerator.prepare`` then returns an ``OffloadedOptimizer``, an ``AcceleratedOptimizer`` whose
state lives in host memory. ``offload_metrics`` has figures for ``Accelerator.log``, and
``OffloadCallback`` logs them in transformers' Trainer. Importing this package installs the hooks
that make it so, and imports neither torch nor accelerate: it may run in the middle of their own
imports.
"""

import importlib
from typing import TYPE_CHECKING, Any

from _torch_offload_autoload import ACCELERATE_HOOKS, watch

if TYPE_CHECKING:
    from .callback import OffloadCallback
    from .figures import offload_metrics
    from .optimizer import OffloadedOptimizer
    from .plugin import OffloadOptimizerPlugin

__all__ = ["OffloadCallback", "OffloadOptimizerPlugin", "OffloadedOptimizer", "offload_metrics"]

#: Where each public name is defined.
_HOMES = {
    "OffloadCallback": "callback",
    "OffloadOptimizerPlugin": "plugin",
    "OffloadedOptimizer": "optimizer",
    "offload_metrics": "figures",
}

watch(ACCELERATE_HOOKS)  # whatever TORCH_OFFLOAD_AUTOLOAD says: this import is the explicit way


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    """List the lazy names too."""
    return sorted({*globals(), *__all__})
