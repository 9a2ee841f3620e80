"""Which of torch's functions tell what a tensor is, and not what is in it.

``__torch_function__`` is called for both alike, with the function that was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

_READABLE = """
    _backward_hooks _grad _grad_fn _post_accumulate_grad_hooks _version device dtype grad grad_dtype
    grad_fn itemsize layout name names nbytes ndim output_nr requires_grad retains_grad shape
"""
_WRITABLE = "_backward_hooks _grad _post_accumulate_grad_hooks grad grad_dtype requires_grad"
_METHODS = """
    __dir__ __len__ _is_view dense_dim dim dim_order element_size get_device
    has_names is_complex is_conj is_contiguous is_floating_point is_inference is_neg is_signed
    ndimension nelement numel register_hook register_post_accumulate_grad_hook requires_grad_
    retain_grad size sparse_dim storage_offset stride
"""
_FUNCTIONS = "is_complex is_conj is_floating_point is_neg numel"


def _functions() -> Iterator[Callable[..., Any]]:
    owner: Any = torch.Tensor
    flags = [name for name in dir(owner) if name.startswith("is_")]
    for name in [*_READABLE.split(), *flags]:
        attribute: Any = getattr(owner, name, None)
        if hasattr(attribute, "__set__"):  # of the flags, those that are no methods
            yield attribute.__get__
    for name in _WRITABLE.split():
        yield getattr(owner, name).__set__
        yield getattr(owner, name).__delete__
    yield from (getattr(owner, name) for name in _METHODS.split() if hasattr(owner, name))
    yield from (getattr(torch, name) for name in _FUNCTIONS.split())


#: Shape, strides, dtype, device, flags, hooks, and the gradient's place: none touches a value.
METADATA: frozenset[Callable[..., Any]] = frozenset(_functions())
