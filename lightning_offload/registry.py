"""The strategies' names and their four homes: Lightning ships two packages twice, sharing nothing.

A *mirror* is one of the four. This module imports neither torch nor Lightning, since it runs while
a mirror is being imported. What is registered is a factory, so that a strategy's module is
imported only when its name is used.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

STRATEGY_NAME = "offload_optimizer"
#: The same for ``fabric run --strategy``, which refuses every name that contains "offload".
ALIAS = "optstate_host"


@dataclass(frozen=True)
class Kind:
    """One way to train, with a name of its own.

    Args:
        suffix: what is put behind `STRATEGY_NAME` and `ALIAS`.
        short: the part of the class's name that is its own.
        description: for the registry.
        arguments: of the class, as its name says.
    """

    suffix: str
    short: str
    description: str
    arguments: tuple[tuple[str, Any], ...] = ()


_HOST = "optimizer state in host memory, streamed through the GPU"
KINDS = (
    Kind("", "", f"One device (DDP on several): {_HOST}"),
    Kind("_ddp", "DDP", f"DDP: {_HOST}"),
    Kind(
        "_ddp_find_unused_parameters_true",
        "DDP",
        f"DDP that looks for unused parameters: {_HOST}",
        (("find_unused_parameters", True),),
    ),
    Kind("_ddp_spawn", "DDP", f"DDP, spawned: {_HOST}", (("start_method", "spawn"),)),
    Kind("_fsdp", "FSDP", f"FSDP2: {_HOST}"),
)


@dataclass(frozen=True)
class Mirror:
    """One package whose strategies are its own, and the module of ours that extends them.

    Args:
        package: what a user imports.
        registry: the registry's name in ``<package>.strategies``.
        module: where our classes are.
        prefix: what their names have in common.
    """

    package: str
    registry: str
    module: str
    prefix: str

    def load(self, class_name: str) -> type[Any]:
        """Import and return a class of this mirror."""
        cls: type[Any] = getattr(importlib.import_module(self.module), class_name)
        return cls

    def build(self, kind: Kind, **arguments: Any) -> Any:
        """Return a new strategy with these arguments of its class."""
        return self.load(f"{self.prefix}{kind.short}Strategy")(**dict(kind.arguments), **arguments)

    def factories(self) -> Iterator[tuple[str, Any, str]]:
        """Go through all names, each with what builds its strategy and a description."""
        for kind in KINDS:
            for name in (STRATEGY_NAME, ALIAS):
                yield f"{name}{kind.suffix}", partial(self.build, kind), kind.description


_TRAINER, _FABRIC = "OffloadOptimizer", "OffloadOptimizerFabric"
MIRRORS = tuple(
    Mirror(package, registry, f"lightning_offload.{module}", prefix)
    for package, registry, module, prefix in (
        ("lightning.pytorch", "StrategyRegistry", "trainer_lightning", _TRAINER),
        ("pytorch_lightning", "StrategyRegistry", "trainer_pytorch_lightning", _TRAINER),
        ("lightning.fabric", "STRATEGY_REGISTRY", "fabric_lightning", _FABRIC),
        ("lightning_fabric", "STRATEGY_REGISTRY", "fabric_lightning_fabric", _FABRIC),
    )
)
#: The classes that the package hands out, each with the prefix of the mirrors that have it.
CLASSES = {
    f"{prefix}{short}Strategy": prefix
    for prefix in (_TRAINER, _FABRIC)
    for short in ("", "DDP", "FSDP")
} | {"OffloadMonitor": _TRAINER}


def on_strategies(strategies: ModuleType) -> None:
    """Register all names in a mirror's ``strategies`` module. Idempotent.

    Raises:
        ValueError: the module is not the ``strategies`` of a known mirror.
    """
    for mirror in MIRRORS:
        if strategies.__name__ == f"{mirror.package}.strategies":
            registry = getattr(strategies, mirror.registry)
            for name, factory, description in mirror.factories():
                if name not in registry:
                    registry.register(name, factory, description=description)
            return
    raise ValueError(f"{strategies.__name__} is not the strategies module of a Lightning package.")


def public_class(class_name: str) -> type[Any]:
    """Return the class of the mirror in use: one that is imported, else one that is installed.

    Args:
        class_name: one of `CLASSES`.

    Raises:
        ImportError: no Lightning is installed.
    """
    mirrors = [mirror for mirror in MIRRORS if mirror.prefix == CLASSES[class_name]]
    for mirror in mirrors:
        if mirror.package in sys.modules:
            return mirror.load(class_name)
    for mirror in mirrors:
        if importlib.util.find_spec(mirror.package.partition(".")[0]):
            return mirror.load(class_name)
    raise ImportError(
        f"lightning_offload.{class_name} needs one of "
        f"{', '.join(mirror.package for mirror in mirrors)}. "
        "Install one: pip install 'torch-offload[lightning]'."
    )
