"""What transformers' Trainer does besides: it resumes without a copy of the state on the device.

With several processes Trainer reads the optimizer's whole state onto each device before anybody
sees it. For an offloaded optimizer the file is mapped on the host instead, and read into host
memory.
"""

from __future__ import annotations

import functools
import sys
import zipfile
from typing import Any

from .accelerator import is_ours


def extend(module: Any) -> None:
    """Wrap two methods of ``Trainer``, once.

    Args:
        module: ``transformers.trainer``, executed to its end.
    """
    cls = module.Trainer
    load, log = cls._load_optimizer_and_scheduler, cls.log
    if hasattr(load, "_is_accelerate_offload"):
        return

    @functools.wraps(load)
    def _load_optimizer_and_scheduler(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_ours(self.optimizer):
            return load(self, *args, **kwargs)
        real = module.torch
        module.torch = _OnHost(real)
        try:
            return load(self, *args, **kwargs)
        finally:
            module.torch = real

    @functools.wraps(log)
    def _log(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = sys.modules.get("accelerate_offload.callback")
        if own is not None:
            # Trackers come before the user's callbacks, and would miss what ours adds.
            self.callback_handler.callbacks.sort(
                key=lambda callback: not isinstance(callback, own.OffloadCallback)
            )
        return log(self, *args, **kwargs)

    _load_optimizer_and_scheduler._is_accelerate_offload = True  # type: ignore[attr-defined]
    cls._load_optimizer_and_scheduler = _load_optimizer_and_scheduler
    cls.log = _log


class _OnHost:
    """Stands in for ``torch`` in Trainer's module: what has a place to go to is left on the host.

    Args:
        torch: the real one.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def load(self, f: Any, map_location: Any = None, **kwargs: Any) -> Any:
        """Load as ``torch.load`` does."""
        if map_location is not None:
            map_location = "cpu"
            if zipfile.is_zipfile(f):
                kwargs.setdefault("mmap", True)
        return self._torch.load(f, map_location=map_location, **kwargs)
