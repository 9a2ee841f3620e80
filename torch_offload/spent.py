"""A spent gradient: what stands in ``param.grad`` once an update during backward has freed it.

It has the shape, strides, dtype and device of the gradient, no memory, and refuses every operation
that needs values. Setting it to zero puts real zeros into ``param.grad``. The gradient of a DTensor
is a DTensor over a spent local tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves

from .distributed import is_distributed, local, wrapped, wrapping
from .metadata import METADATA

_REFUSED = (
    "this gradient was used by the update during backward (overlap='backward') and freed. "
    "Clipping, scaling, editing or reading gradients, and a second backward before step(), need "
    "overlap='step' or overlap='forward'. To accumulate gradients, enter "
    "last_microbatch(optimizer) around the last micro-batch. Call zero_grad() before the next "
    "backward."
)
_LOST = (
    "this gradient was used by the update during backward (overlap='backward') and freed, and it "
    "is a copy's, or no longer its parameter's: there is nothing that could be set to zero. Set "
    "the parameter's grad to None, as zero_grad(set_to_none=True) does."
)
_aten = torch.ops.aten
_owner: Any = torch.Tensor
_ALLOWED = METADATA | {_owner.zero_, torch.zero_, torch._foreach_zero_, _owner.detach_}


class Owner(Protocol):
    """Who spent a gradient. It must not keep the parameter alive."""

    def find(self, param_id: int) -> torch.Tensor | None:
        """Return the parameter with this ``id``; ``None`` if there is none any more."""

    def refused(self) -> object:
        """Learn that somebody was refused the gradient's values."""


class _Spent:
    """First base of both classes: what Python code that has the object may do with it."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func not in _ALLOWED:
            raise _refusal(args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __repr__(self: Any, *, tensor_contents: Any = None) -> str:
        return f"<spent gradient: shape {tuple(self.shape)}, {self.dtype}, {self.device}>"

    def __format__(self, spec: str) -> str:
        if spec:
            raise _refusal((self,), None)
        return repr(self)

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = _make(self, 0, _Nobody())
        return memo[id(self)]


class _SpentTensor(_Spent, torch.Tensor):  # type: ignore[misc]
    """One without a DTensor around it: here arrives what torch does by itself, as in backward."""

    _param_id: int
    _owner: Owner

    @staticmethod
    def __new__(cls, like: torch.Tensor, param_id: int, owner: Owner) -> _SpentTensor:
        made: _SpentTensor = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        made._param_id, made._owner = param_id, owner
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is _aten.zero_.default:
            args[0]._put_zeros()
            return args[0]
        if func is _aten._foreach_zero_.default:
            real = [tensor for tensor in args[0] if not is_spent(tensor)]
            if real:
                torch._foreach_zero_(real)
            for tensor in args[0]:
                if is_spent(tensor):
                    tensor._put_zeros()
            return None
        raise _refusal(args, kwargs)

    def _put_zeros(self) -> None:
        param = self._owner.find(self._param_id)
        if param is None or param.grad is None or local(param.grad) is not self:
            raise RuntimeError(_LOST)
        zeros = torch.empty_strided(
            self.shape, self.stride(), dtype=self.dtype, device=self.device
        ).zero_()
        param.grad = wrapped(zeros, wrapping(param.grad))


@cache
def _distributed_class(own: type) -> Any:
    """The class of a spent DTensor. Its operations end at the local tensor, which refuses them."""
    metaclass: Any = type(own)
    return metaclass("_SpentDTensor", (_Spent, own), {"__slots__": ()})


class _Nobody:
    """The owner of copies."""

    def find(self, param_id: int) -> None:
        return None

    def refused(self) -> None:
        pass


def _refusal(args: Any, kwargs: Any) -> RuntimeError:
    """Tell the owners that somebody wanted a gradient that is not there any more."""
    for value in tree_leaves((args, kwargs)):
        if isinstance(value, _Spent):
            tensor: Any = local(value)  # type: ignore[arg-type]
            tensor._owner.refused()
    return RuntimeError(_REFUSED)


def _make(grad: torch.Tensor, param_id: int, owner: Owner) -> torch.Tensor:
    made: torch.Tensor = _SpentTensor(local(grad), param_id, owner)
    if is_distributed(grad):
        made = wrapped(made, wrapping(grad))
        kind: Any = type(made)
        made.__class__ = _distributed_class(kind)
    return made


def spend(param: torch.Tensor, owner: Owner) -> None:
    """Put a spent gradient into ``param.grad``; the memory of the gradient is free for others.

    Reading what it is (shape, strides, dtype, device, flags), ``repr``, ``deepcopy`` of the
    parameter, ``zero_grad()`` in all its forms, ``param.grad = None`` and ``del`` work. All else
    raises a ``RuntimeError`` that tells what to use instead: clipping, GradScaler's unscaling,
    edits in place, foreach calls, and the accumulation of another gradient by a backward.

    Args:
        param: has a gradient, dense, plain or a DTensor. Nothing here keeps the parameter alive.
        owner: asked for the parameter when the gradient is set to zero; kept as long as the
            gradient. (A weak reference to the parameter would not do: ``torch.utils.swap_tensors``
            refuses tensors that have one.)

    Raises:
        ValueError: the parameter has no gradient.
    """
    if param.grad is None:
        raise ValueError(f"a parameter of shape {tuple(param.shape)} has no gradient to spend.")
    param.grad = _make(param.grad, id(param), owner)


def is_spent(tensor: object) -> bool:
    """Return whether ``tensor`` is a spent gradient, plain or a DTensor. Reads nothing of it."""
    return isinstance(tensor, _Spent)
