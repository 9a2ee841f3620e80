"""What stands in for the user's objects in a step: an optimizer, and parameters.

The user's class is stepped on an object that holds some of the groups' parameters, so neither the
user's own groups nor hooks are touched.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

#: All wrappers that torch puts around a step, to fire hooks, run this code.
_HOOKED = Optimizer.profile_hook_step(lambda self: None).__code__
_GLOBAL_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")


def step_detached(
    plain_class: type[Optimizer],
    attributes: Mapping[str, Any],
    groups: list[dict[str, Any]],
    state: defaultdict[Any, Any],
) -> Optimizer:
    """Run one step of ``plain_class`` on the given groups and state, without any user hook.

    Args:
        plain_class: the user's optimizer class.
        attributes: the optimizer's other attributes.
        groups: parameter groups with their hyper-parameters; changed in place by the step.
        state: filled and changed in place.

    Returns:
        The stand-in that was stepped; its attributes may have changed.
    """
    stand_in = bare(plain_class, attributes, groups, state)
    spare_stand_ins()
    undecorated(plain_class)(stand_in)
    return stand_in


def bare(
    plain_class: type[Optimizer],
    attributes: Mapping[str, Any],
    groups: list[dict[str, Any]],
    state: defaultdict[Any, Any],
) -> Optimizer:
    """Make an optimizer of these parts, without hooks and without its constructor."""
    made = object.__new__(plain_class)
    made.__dict__.update(attributes)
    # A class that calls its parent's step() gets there by torch's decorator, which fires hooks:
    # it finds none here, and those for all optimizers know a stand-in by these.
    made.__dict__.update(
        param_groups=groups,
        state=state,
        _optimizer_step_pre_hooks=_NoHooks(),
        _optimizer_step_post_hooks=OrderedDict(),
    )
    return made


def undecorated(plain_class: type[Optimizer]) -> Any:
    """Return the class's ``step`` below torch's decorator, which would fire user step hooks."""
    step: Any = plain_class.step
    while getattr(step, "__code__", None) is _HOOKED:
        step = step.__wrapped__
    return step


class _NoHooks(OrderedDict[Any, Any]):
    """The step pre-hooks of a stand-in. It has one of ours at most."""


class _SparesStandIns:
    """A hook that a user registered for all optimizers; stand-ins are none of theirs."""

    def __init__(self, hook: Any) -> None:
        self.__wrapped__ = hook

    def __call__(self, optimizer: Any, *args: Any) -> Any:
        if isinstance(optimizer.__dict__.get("_optimizer_step_pre_hooks"), _NoHooks):
            return None
        return self.__wrapped__(optimizer, *args)


def spare_stand_ins() -> None:
    """Keep hooks that users registered for all optimizers from stand-ins, for good.

    Nothing is taken away meanwhile: other threads may step other optimizers.
    """
    for name in _GLOBAL_HOOKS:
        hooks: dict[Any, Any] = getattr(torch_optimizer, name, {})
        for key, hook in list(hooks.items()):
            if not isinstance(hook, _SparesStandIns) and hooks.get(key) is hook:
                hooks[key] = _SparesStandIns(hook)


@contextmanager
def outside_autograd() -> Iterator[None]:
    """Run without autograd, and not as inference either."""
    # Lightning validates under inference mode; state born there could never be updated again.
    with torch.inference_mode(False), torch.no_grad():
        yield


def default_device_cpu() -> AbstractContextManager[Any]:
    """Make new tensors on the CPU, whatever the user's default device is."""
    # As a context, a device costs a detour for every operation.
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


def uncompiled() -> AbstractContextManager[Any]:
    """Run what was compiled as it was written: compiling it for tiny shapes would take long, and
    count against the limit after which torch compiles it no more."""
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def newcomer(param: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Make a parameter of one element without state, to be stepped with another and dropped.

    Where one parameter of a list has no state yet, some classes take another path for the whole
    list (SGD with momentum and foreach), which differs in the last bit. New parameters are stepped
    in chunks of their own, so one stands in for them in the others.

    Args:
        param: the other one; has a gradient.
        part: what of it is stepped.
    """
    made = like(param, part.detach().new_zeros([1] * part.dim()))
    made.__dict__.update(param.__dict__)
    grad, own = param.grad, torch.zeros_like(made, requires_grad=False)
    assert grad is not None
    made.grad = own if grad.layout is torch.strided else own.to_sparse(grad.sparse_dim())
    return made


def bystander(param: torch.Tensor) -> torch.Tensor:
    """Make an empty parameter without gradient, to stand in a group that sits this step out."""
    return torch.nn.Parameter(
        torch.empty(0, dtype=param.dtype, device=param.device), requires_grad=param.requires_grad
    )


def like(param: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Make a parameter of the class of ``param`` over ``values``.

    Classes that are made of other tensors, and with them DTensor, bring their own: those of the
    values stay.
    """
    kind = type(param)
    if kind is torch.Tensor or hasattr(param, "__tensor_flatten__"):
        kind = torch.nn.Parameter
    if hasattr(values, "__tensor_flatten__"):
        return torch.nn.Parameter(values, requires_grad=param.requires_grad)
    with torch._C.DisableTorchFunctionSubclass():
        made: torch.Tensor = torch.Tensor._make_subclass(kind, values.detach(), param.requires_grad)
    return made
