"""The `torch.backends` entry point: `import torch` calls `install`, which watches for imports.

Vocabulary: a *target* is a third party's module that gets extended; a *hook* is a function of ours,
written ``"module:function"``, that is imported and called with the target once the target's code
has run. Nothing of torch, Lightning, Accelerate or this project is imported before a target is.

``TORCH_OFFLOAD_AUTOLOAD=0`` switches the entry point off; ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` is
torch's own switch for every entry point of the group.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

LIGHTNING_HOOKS = {
    "lightning.pytorch.strategies": "lightning_offload.registry:on_strategies",
    "pytorch_lightning.strategies": "lightning_offload.registry:on_strategies",
    "lightning.fabric.strategies": "lightning_offload.registry:on_strategies",
    "lightning_fabric.strategies": "lightning_offload.registry:on_strategies",
}
ACCELERATE_HOOKS = {
    "accelerate.optimizer": "accelerate_offload.hooks:on_optimizer",
    "accelerate.launchers": "accelerate_offload.hooks:on_accelerator",
    "transformers.trainer": "accelerate_offload.hooks:on_trainer",
    "accelerate.commands.launch": "accelerate_offload.hooks:on_launch",
    "accelerate.commands.config.config_args": "accelerate_offload.hooks:on_config_args",
}
_OFF = frozenset({"0", "false", "no", "off"})


def install() -> None:
    """Watch every target, unless ``TORCH_OFFLOAD_AUTOLOAD`` says 0. Idempotent; never raises.

    An exception here would make `import torch` fail for everybody, so that whatever goes wrong is
    logged instead.
    """
    try:
        if os.environ.get("TORCH_OFFLOAD_AUTOLOAD", "1").strip().lower() not in _OFF:
            watch({**LIGHTNING_HOOKS, **ACCELERATE_HOOKS})
    except Exception as error:
        _log(f"autoload is off: {type(error).__name__}: {error}")


def watch(hooks: Mapping[str, str]) -> None:
    """Call each hook with its target whenever the target's code has run (a reload runs it again).

    A target that is imported already gets its hook now. A target that is watched already keeps
    its first hook. A hook that fails is logged and leaves the target as its authors wrote it.

    Args:
        hooks: target module name to ``"module:function"``.
    """
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    for target, hook in hooks.items():
        if target not in _finder.hooks:
            _finder.hooks[target] = hook
            if target in sys.modules:
                _run(hook, sys.modules[target])


class _Finder:
    """Finds the targets through the finders behind it and gives their specs a `_HookedLoader`."""

    def __init__(self) -> None:
        self.hooks: dict[str, str] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        hook = self.hooks.get(name)
        if hook is None:
            return None
        # Those in front of us have been asked already. Asking only those behind keeps no state
        # between calls, so that threads, and others' finders of this kind, cannot disturb it.
        finders = iter(sys.meta_path)
        for finder in finders:
            if finder is self:
                break
        for finder in finders:
            find_spec = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find_spec(name, path, target) if find_spec else None
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _HookedLoader(spec.loader, hook)  # type: ignore[assignment]
                return spec
        return None


class _HookedLoader:
    """Stands in for a target's loader until its code runs, then gives way and calls the hook."""

    def __init__(self, loader: Any, hook: str) -> None:
        self._loader = loader
        self._hook = hook

    def __getattr__(self, name: str) -> Any:
        # copy and pickle look attributes up before __init__ has run
        if name.startswith("__") or name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        # a module may have put another object in its place while it ran
        _run(self._hook, sys.modules.get(module.__name__, module))


def _run(hook: str, target: ModuleType) -> None:
    module, _, function = hook.partition(":")
    try:
        getattr(importlib.import_module(module), function)(target)
    except Exception as error:
        name = getattr(target, "__name__", target)
        _log(f"{name} is not extended: {hook} raised {type(error).__name__}: {error}")


def _log(message: str) -> None:
    # not `warnings`: under `-W error` that would raise in the middle of somebody else's import
    import logging

    logging.getLogger("torch_offload").warning("torch-offload: %s", message)


_finder = _Finder()
