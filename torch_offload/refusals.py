"""What cannot be offloaded, each with the message that says why and what to do instead."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.optim import Optimizer

from .distributed import local
from .independence import Traits, check_independent

#: Where classes may come from. Those of others pass the same trial, but it does not see everything
#: that a class may do yet (DESIGN.md, "Which optimizers").
_PACKAGES = ("torch.optim.",)


def check_optimizer(optimizer: Any) -> Traits:
    """Refuse what :func:`torch_offload.offload` cannot convert.

    Returns:
        What a trial of it found out.

    Raises:
        TypeError: it is no optimizer.
        ValueError: it has no parameters, or its ``step`` was replaced.
        NotImplementedError: its class or one of its settings is not supported.
    """
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"offload() takes a torch.optim.Optimizer, not {name}.")
    if not f"{type(optimizer).__module__}.".startswith(_PACKAGES):
        raise NotImplementedError(
            f"{name} is a class of {type(optimizer).__module__}, and only the optimizers of "
            "torch.optim can be offloaded yet. Use one of them, or train without offload."
        )
    for method in ("load_state_dict", "state_dict"):
        if getattr(type(optimizer), method) is not getattr(Optimizer, method):
            raise NotImplementedError(
                f"{name} has a {method} of its own, which would put its state past the offload. "
                "Train it without offload, or use a class with torch's own."
            )
    if not any(group["params"] for group in optimizer.param_groups):
        raise ValueError(f"{name} has no parameters. Give it parameters before offload().")
    for index, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise NotImplementedError(
                f"{name} has differentiable=True in group {index}: its state is part of a graph "
                "and cannot leave the device. Use differentiable=False."
            )
    check_duplicates(optimizer.param_groups)
    check_step_attribute(optimizer, "offload()")
    attributes = {k: v for k, v in optimizer.__dict__.items() if k not in ("state", "param_groups")}
    return check_independent(type(optimizer), attributes, optimizer.param_groups)


def check_step_attribute(optimizer: Any, function: str) -> None:
    """Refuse an instance attribute ``step`` that no LR scheduler made: it would be bypassed."""
    step = optimizer.__dict__.get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        raise ValueError(
            f"the step method of this {type(optimizer).__name__} was replaced by {step!r}, and "
            f"would go on calling what it wraps. Call {function} before whatever replaced it."
        )


def check_duplicates(groups: Iterable[dict[str, Any]]) -> None:
    """Refuse a parameter that is listed twice, as torch does across groups."""
    for index, group in enumerate(groups):
        if len({id(param) for param in group["params"]}) < len(group["params"]):
            raise ValueError(
                f"parameter group {index} lists a parameter twice. List each parameter once."
            )


def check_parameter(param: torch.Tensor, takes_sparse: bool) -> None:
    """Refuse tensor subclasses that wrap other tensors, but for DTensor, and gradients of the wrong
    layout."""
    is_sparse = param.grad is not None and param.grad.layout is not torch.strided
    if param.grad is not None and is_sparse and not takes_sparse:
        raise NotImplementedError(
            f"a gradient of layout {param.grad.layout} (shape {tuple(param.shape)}) cannot be "
            "offloaded. Use dense gradients (for nn.Embedding: sparse=False)."
        )
    own = local(param)
    if hasattr(own, "__tensor_flatten__"):
        raise NotImplementedError(
            f"a parameter of class {type(own).__name__} (shape {tuple(param.shape)}), a tensor "
            "made of other tensors, cannot be offloaded. Use the plain optimizer with it."
        )


def check_overlap(params: Sequence[torch.Tensor]) -> None:
    """Refuse two parameters over the same memory: the order of their updates would depend on
    where a chunk ends."""
    spans = []
    for param in map(local, params):
        if param.numel():
            reach = sum((n - 1) * step for n, step in zip(param.shape, param.stride(), strict=True))
            start = param.data_ptr()
            stop = start + (reach + 1) * param.element_size()
            spans.append((str(param.device), start, stop, tuple(param.shape)))
    for a, b in pairwise(sorted(spans)):
        if a[0] == b[0] and b[1] < a[2]:
            raise NotImplementedError(
                f"two parameters (shapes {a[3]} and {b[3]}) share memory. Tie the parameter "
                "itself (module_b.weight = module_a.weight) and give it to the optimizer once."
            )


def check_not_capturing(device: torch.device) -> None:
    """Refuse a step inside a CUDA graph: a replay would copy without anybody waiting for it."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise NotImplementedError(
            "an offloaded optimizer cannot step inside a CUDA graph capture. Capture forward and "
            "backward, and step outside of the graph."
        )
