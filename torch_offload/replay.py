"""Tells whether an update that raised had changed anything: it is run again up to its first change.

Version counters do not tell: torch's fused kernels, and those of foreach on a GPU, do not advance
them. Nothing is recorded while steps go well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .distributed import local


def raises_before_any_change(
    update: Callable[[], object], error: BaseException, tensors: Iterable[torch.Tensor]
) -> bool:
    """Run ``update`` again, and stop it before it changes one of ``tensors``.

    Args:
        update: what raised. It must not communicate: other ranks do not run theirs again.
        error: what it raised.
        tensors: what it may change.

    Returns:
        Whether it raises the same kind of error before any change. Not so for what comes from
        outside, such as Ctrl-C: that may have come at any time.
    """
    try:
        with _NoChange(tensors):
            update()
    except (_Change, Exception) as again:
        return type(again) is type(error)
    return False


class _Change(BaseException):
    """Not an ``Exception``, which the optimizer might catch."""


class _NoChange(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations that write into the given tensors."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = {_address(tensor) for tensor in tensors if local(tensor).numel()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {**dict(zip(_names(func), args, strict=False)), **(kwargs or {})}
        for argument in func._schema.arguments:
            if argument.is_write:
                for value in tree_leaves(given.get(argument.name)):
                    if isinstance(value, torch.Tensor) and _address(value) in self._kept:
                        raise _Change
        return func(*args, **(kwargs or {}))


def _names(func: Any) -> list[str]:
    return [argument.name for argument in func._schema.arguments]


def _address(tensor: torch.Tensor) -> int:
    return local(tensor).untyped_storage().data_ptr()
