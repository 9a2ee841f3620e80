"""The strategy's name and its four homes: Lightning ships two packages twice, sharing nothing.

A *mirror* is one of the four. This module imports neither torch nor Lightning, since it runs while
a mirror is being imported. What is registered is a factory, so that the strategy's module is
imported only when the name is used.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

STRATEGY_NAME = "offload_optimizer"


@dataclass(frozen=True)
class Mirror:
    """One package whose strategies are its own, and the class of ours that extends them.

    Args:
        package: what a user imports.
        registry: the registry's name in ``<package>.strategies``.
        module: where our class is.
        class_name: its name.
    """

    package: str
    registry: str
    module: str
    class_name: str

    def load(self) -> type[Any]:
        """Import and return the strategy class of this mirror."""
        cls: type[Any] = getattr(importlib.import_module(self.module), self.class_name)
        return cls

    def build(self, **config: Any) -> Any:
        """Return a new strategy; ``config`` holds fields of `torch_offload.OffloadConfig`."""
        return self.load()(**config)


MIRRORS = tuple(
    Mirror(package, registry, f"lightning_offload.{module}", class_name)
    for package, registry, module, class_name in (
        ("lightning.pytorch", "StrategyRegistry", "trainer_lightning", "OffloadOptimizerStrategy"),
        (
            "pytorch_lightning",
            "StrategyRegistry",
            "trainer_pytorch_lightning",
            "OffloadOptimizerStrategy",
        ),
        (
            "lightning.fabric",
            "STRATEGY_REGISTRY",
            "fabric_lightning",
            "OffloadOptimizerFabricStrategy",
        ),
        (
            "lightning_fabric",
            "STRATEGY_REGISTRY",
            "fabric_lightning_fabric",
            "OffloadOptimizerFabricStrategy",
        ),
    )
)


def on_strategies(strategies: ModuleType) -> None:
    """Register ``"offload_optimizer"`` in a mirror's ``strategies`` module. Idempotent.

    Raises:
        ValueError: the module is not the ``strategies`` of a known mirror.
    """
    for mirror in MIRRORS:
        if strategies.__name__ == f"{mirror.package}.strategies":
            registry = getattr(strategies, mirror.registry)
            if STRATEGY_NAME not in registry:
                registry.register(
                    STRATEGY_NAME,
                    mirror.build,
                    description="Keeps optimizer state in host memory, streamed through the GPU",
                )
            return
    raise ValueError(f"{strategies.__name__} is not the strategies module of a Lightning package.")


def strategy_class(class_name: str) -> type[Any]:
    """Return the class of the mirror in use: one that is imported, else one that is installed.

    Args:
        class_name: ``"OffloadOptimizerStrategy"`` or ``"OffloadOptimizerFabricStrategy"``.

    Raises:
        ImportError: no Lightning is installed.
    """
    mirrors = [mirror for mirror in MIRRORS if mirror.class_name == class_name]
    for mirror in mirrors:
        if mirror.package in sys.modules:
            return mirror.load()
    for mirror in mirrors:
        if importlib.util.find_spec(mirror.package.partition(".")[0]):
            return mirror.load()
    raise ImportError(
        f"lightning_offload.{class_name} needs one of "
        f"{', '.join(mirror.package for mirror in mirrors)}. "
        "Install one: pip install 'torch-offload[lightning]'."
    )
