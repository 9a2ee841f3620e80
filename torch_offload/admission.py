"""Which optimizers can be converted: what their class, settings and holdings must look like."""

from __future__ import annotations

import inspect
from typing import Any

from torch.optim import Optimizer

from .holdings import ADVICE, Refused, check_holdings
from .independence import check_independent
from .refusals import check_duplicates, check_memory, check_not_fake, check_step_attribute
from .standin import undecorated
from .traits import Traits
from .trial import own_attributes
from .values import fields


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
    check_layout(optimizer)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    check_not_fake(params)
    for param in params:
        check_memory(param)
    check_arguments(name, type(optimizer))
    attributes = own_attributes(optimizer)
    check_holdings(name, attributes, optimizer.param_groups)
    if not params:
        raise ValueError(f"{name} has no parameters. Give it parameters before offload().")
    for index, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise NotImplementedError(
                f"{name} has differentiable=True in group {index}: its state is part of a graph "
                "and cannot leave the device. Use differentiable=False."
            )
    check_duplicates(optimizer.param_groups)
    check_step_attribute(optimizer, "offload()")
    return check_independent(type(optimizer), attributes, optimizer.param_groups, optimizer.state)


def check_layout(optimizer: Any) -> None:
    """Refuse an optimizer that keeps its groups, state or attributes elsewhere than torch does."""
    name = type(optimizer).__name__
    for key in ("param_groups", "state"):
        if key not in optimizer.__dict__:
            raise NotImplementedError(
                f"{name} has no {key!r} of its own, but takes it from elsewhere, as wrappers of "
                "optimizers do. Give offload() the optimizer inside, or train without offload."
            )
    slots = [key for key in fields(optimizer) if key not in optimizer.__dict__]
    if slots:
        raise NotImplementedError(
            f"{name} keeps {slots[0]!r} in __slots__, where a copy for a chunk would not have it. "
            "Train it without offload, or use an ordinary attribute."
        )


def check_arguments(name: str, plain_class: type[Optimizer]) -> None:
    """Refuse a ``step`` that cannot be called without arguments, or that unscales gradients."""
    parameters = inspect.signature(undecorated(plain_class)).parameters
    if "grad_scaler" in parameters:
        raise Refused(
            f"{name}.step has an argument 'grad_scaler', by which torch.amp.GradScaler hands "
            "itself over to it; offload calls it without. Take the argument (and "
            "_step_supports_amp_scaling) out of the class, so that GradScaler unscales the "
            "gradients before the step, or train it without offload."
        )
    for p in list(parameters.values())[1:]:
        if p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            continue
        if "closure" in p.name:
            raise Refused(
                f"{name}.step needs a closure, which it may evaluate several times in one step; "
                f"offload updates the parameters once, chunk by chunk. {ADVICE}"
            )
        raise Refused(
            f"{name}.step needs an argument {p.name!r}; offload calls it without any. {ADVICE}"
        )
