"""Watches the operations of a step: in which do several parameters meet, and which reduce one.

Numbers alone do not tell: clipping to a norm sleeps below its threshold, and a stack of equal
shapes may have the bits of single ones on a CPU and others on a GPU.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_NOBODY: frozenset[int] = frozenset()
#: What a new tensor made like another one takes over is its shape.
_BY_SHAPE = ("empty", "zeros", "ones", "full", "new_", "rand")

_GET_SHAPE: Any = torch.Tensor.shape.__get__  # type: ignore[attr-defined]
_FUNCTIONS = (types.FunctionType, types.MethodType)
_SIZES = frozenset({"shape", "size", "numel", "__len__"})


class Dataflow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is active, follows which memory holds something that was computed from what.

    Attributes:
        meeting: an operation in which several parameters met.
        reduction: an operation that made fewer elements of more.
        exchange: an operation that talked to other processes.
        size: what asked how large a parameter is whose state existed already.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.meeting: str | None = None
        self.reduction: str | None = None
        self.exchange: str | None = None
        self.size: str | None = None
        self._sizes = _Sizes(self)
        self._owners: dict[int, frozenset[int]] = {}
        #: Memory that was given back could be taken again by something else.
        self._kept: list[torch.UntypedStorage] = []

    def __enter__(self) -> Dataflow:
        self._profile = sys.getprofile()
        # One that is written in C, as cProfile's, could not be put back.
        self._profiles = isinstance(self._profile, (type(None), *_FUNCTIONS))
        if self._profiles:
            sys.setprofile(self._on_call)
        super().__enter__()  # type: ignore[no-untyped-call]
        self._sizes.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._sizes.__exit__(*error)  # type: ignore[no-untyped-call]
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self._profiles:
            sys.setprofile(self._profile)

    def _on_call(self, frame: types.FrameType, event: str, _: Any) -> None:
        """Notice what was compiled to be given several parameters, though it runs uncompiled."""
        if event != "call" or frame.f_code.co_name != "compile_wrapper":
            return
        arguments, named = frame.f_locals.get("args", ()), frame.f_locals.get("kwargs", {})
        given = [*arguments, *named.values()]
        owners = [self._owners.get(_key(t), _NOBODY) for t in _tensors(given) if _is_real(t)]
        whole = any(isinstance(value, torch.optim.Optimizer) for value in given)
        if whole or len(_NOBODY.union(*owners)) > 1:
            self.meeting = self.meeting or "compiled function"

    def own(self, index: int, values: Sequence[Any]) -> None:
        """Say what belongs to one parameter: its values, its gradient and its state."""
        for value in values:
            if _is_real(value):
                self._own(value, frozenset({index}))

    def forget_sizes(self) -> None:
        """Forget who asked for a size. Whoever makes state does, and what it makes is compared."""
        self.size = None

    def asked_for_size(self, tensor: Any, function: str) -> None:
        """Notice that somebody asked how large a tensor is."""
        if _is_real(tensor) and tensor.numel() > 1 and self._owners.get(_key(tensor)):
            self.size = self.size or function

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name.startswith(("c10d", "_c10d")):
            self.exchange = name
        values = [*args, *(kwargs or {}).values()]
        if name.startswith(("aten::_foreach_", "aten::_fused_")):
            lists = [v for v in values if isinstance(v, (list, tuple)) and _has_tensors(v)]
            shared = [v for v in values if isinstance(v, torch.Tensor)]
            made = result if isinstance(result, (list, tuple)) else ()
            for index in range(max((len(v) for v in lists), default=0)):
                row = [v[index] for v in lists if index < len(v)]
                outputs = [made[index]] if index < len(made) else []
                self._note(name, [*row, *shared], outputs, row)
        else:
            inputs = list(_tensors(values))
            changed = [
                tensor
                for argument, value in zip(func._schema.arguments, args, strict=False)
                if argument.alias_info is not None and argument.alias_info.is_write
                for tensor in _tensors([value])
            ]
            if not name.removeprefix("aten::").startswith(_BY_SHAPE):
                self._note(name, inputs, list(_tensors([result])), changed)
        return result

    def _note(
        self,
        name: str,
        inputs: Sequence[Any],
        outputs: Sequence[torch.Tensor],
        changed: Sequence[Any],
    ) -> None:
        owners = {_key(t): self._owners.get(_key(t), _NOBODY) for t in inputs if _is_real(t)}
        met = _NOBODY.union(*owners.values())
        if len(met) > 1:
            self.meeting = self.meeting or name
        if not met:
            return
        largest = max(t.numel() for t in inputs if _is_real(t) and owners[_key(t)])
        new = [t for t in outputs if _is_real(t) and _key(t) not in owners]
        if largest > 1 and ((not outputs and not changed) or any(t.numel() < largest for t in new)):
            self.reduction = name
        for tensor in (*new, *changed):
            if _is_real(tensor):
                self._own(tensor, met)

    def _own(self, tensor: torch.Tensor, owners: frozenset[int]) -> None:
        if tensor.layout is not torch.strided:
            return
        self._owners[_key(tensor)] = self._owners.get(_key(tensor), _NOBODY) | owners
        self._kept.append(tensor.untyped_storage())


class _Sizes(TorchFunctionMode):
    """Tells a dataflow of each call that asks for the size of a tensor."""

    def __init__(self, flow: Dataflow) -> None:
        super().__init__()
        self._flow = flow

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = "shape" if func == _GET_SHAPE else getattr(func, "__name__", "")
        if name in _SIZES and args:
            self._flow.asked_for_size(args[0], name)
        return func(*args, **(kwargs or {}))


def _is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _has_tensors(values: Sequence[Any]) -> bool:
    return any(isinstance(value, torch.Tensor) for value in values)


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif isinstance(value, Mapping):
            yield from _tensors(list(value.values()))
