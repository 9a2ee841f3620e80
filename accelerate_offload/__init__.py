"""Optimizer-state offload for Accelerate, switched on by configuration.

One environment variable is behind every way in, ``ACCELERATE_OFFLOAD_OPTIMIZER=true``::

    accelerate launch --offload_optimizer train.py        # an unmodified script
    accelerate launch -m accelerate_offload train.py      # the same, without touching the launcher
    OffloadOptimizerPlugin(chunk_size="256MiB")           # in code, before prepare()

``Accelerator.prepare`` then returns an ``OffloadedOptimizer``, an ``AcceleratedOptimizer`` whose
state lives in host memory. Importing this package installs the hooks that make it so, and imports
neither torch nor accelerate: it may run in the middle of their own imports.
"""

from typing import TYPE_CHECKING, Any

from _torch_offload_autoload import ACCELERATE_HOOKS, watch

if TYPE_CHECKING:
    from .optimizer import OffloadedOptimizer
    from .plugin import OffloadOptimizerPlugin

__all__ = ["OffloadOptimizerPlugin", "OffloadedOptimizer"]

watch(ACCELERATE_HOOKS)  # whatever TORCH_OFFLOAD_AUTOLOAD says: this import is the explicit way


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name == "OffloadedOptimizer":
        from .optimizer import OffloadedOptimizer

        return OffloadedOptimizer
    if name == "OffloadOptimizerPlugin":
        from .plugin import OffloadOptimizerPlugin

        return OffloadOptimizerPlugin
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the lazy names too."""
    return sorted({*globals(), *__all__})
