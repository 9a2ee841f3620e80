"""THE thing that decides which state travels and which stays where the optimizer put it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .chunk import TensorSpec
from .distributed import local, wrapping


def travels(key: str, value: Any) -> bool:
    """Whether one value of ``optimizer.state[p]`` lives on the host between steps.

    Tensors with at least one dimension do. 0-dim tensors stay: ``step`` is on the CPU for the
    for-loop and foreach flavours and on the GPU for ``fused`` and ``capturable``, whose kernels
    require it there, and neither costs memory worth a copy. ``step`` stays in any shape, since
    torch never gives it its parameter's dtype.
    """
    return isinstance(value, torch.Tensor) and value.dim() > 0 and key != "step"


def traveling(state: Mapping[str, Any]) -> tuple[TensorSpec, ...]:
    """Describe the tensors of one parameter's state that travel, in the order of its keys.

    Strides are those of ``torch.empty_like``: kept where the tensor is dense, else contiguous.

    Raises:
        NotImplementedError: one of them is made of other tensors, as quantised state is.
    """
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and hasattr(local(value), "__tensor_flatten__"):
            raise NotImplementedError(
                f"this optimizer keeps {key!r} in a {type(value).__name__}, a tensor made of other "
                "tensors, which cannot be copied to the host as it is. Train it without offload, "
                "or use an optimizer with plain tensors."
            )
    return tuple(
        TensorSpec(
            key, tuple(local(value).shape), dense_stride(value), value.dtype, wrapping(value)
        )
        for key, value in state.items()
        if travels(key, value)
    )


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides that a new tensor made like ``tensor`` gets, without making one on its device.

    Of a DTensor, those of the local tensor.
    """
    return torch.empty_like(local(tensor), device="meta", requires_grad=False).stride()
