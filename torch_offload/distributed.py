"""DTensor: the local tensor under one, and a DTensor over other memory. Others pass through.

FSDP2 and tensor parallelism make parameters, gradients and state DTensors. What is stored and
copied here is always the local tensor; what ``optimizer.state`` shows is a DTensor on the same mesh
over host memory. (``DTensor.from_local`` would move that to the mesh's device.)
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch

#: Most tensors, which are asked after often.
_ORDINARY = frozenset({torch.Tensor, torch.nn.Parameter})


def is_distributed(tensor: object) -> bool:
    """Whether ``tensor`` is a DTensor. Imports nothing: without the module there is none."""
    if type(tensor) in _ORDINARY:
        return False
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that holds the bytes: a DTensor's local one, or ``tensor`` itself."""
    if type(tensor) in _ORDINARY or not is_distributed(tensor):
        return tensor
    return tensor._local_tensor  # type: ignore[attr-defined, no-any-return]


def wrapping(tensor: torch.Tensor) -> Any:
    """Return what makes a local tensor a DTensor like ``tensor``: mesh, placements and global
    shape. ``None`` for a tensor that is none."""
    return tensor._spec if is_distributed(tensor) else None  # type: ignore[attr-defined]


def wrapped(tensor: torch.Tensor, wrapping: Any) -> torch.Tensor:
    """Return a DTensor over ``tensor``, on whatever device that is, or ``tensor`` itself.

    Args:
        tensor: a local tensor.
        wrapping: what :func:`wrapping` returned for a DTensor of the same local shape.
    """
    if wrapping is None:
        return tensor
    if wrapping.tensor_meta.dtype != tensor.dtype:
        meta = wrapping.tensor_meta._replace(dtype=tensor.dtype)
        wrapping = replace(wrapping, tensor_meta=meta)
    module: Any = sys.modules["torch.distributed.tensor"]
    made: torch.Tensor = module.DTensor(tensor, wrapping, requires_grad=False)
    return made


def same_place(a: Any, b: Any) -> bool:
    """Whether two results of :func:`wrapping` distribute a tensor in the same way."""
    if a is None or b is None:
        return a is b
    return bool(a.mesh == b.mesh and a.placements == b.placements and a.shape == b.shape)


def is_partial(wrapping: Any) -> bool:
    """Whether the local tensors must be summed to give the values."""
    return any(placement.is_partial() for placement in wrapping.placements)


def storage(tensor: torch.Tensor) -> int:
    """Return the address of the memory under a tensor, or under the local tensor of a DTensor."""
    return local(tensor).untyped_storage().data_ptr()
