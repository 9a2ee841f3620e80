"""Why nothing of a step may be updated before ``step()``: what must be in the user's view of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import _foreach_supported_types

from .distributed import is_distributed

if TYPE_CHECKING:
    from .core import OffloadCore


def obstacle(core: OffloadCore, beside_backward: bool = True) -> str | None:
    """Return why this step must be taken as a whole, or ``None``.

    Args:
        core: that of the optimizer.
        beside_backward: updates would begin before ``step()``; else they would end after it.
    """
    if not beside_backward:
        return _of_late_updates(core)
    if core.failure is not None:
        return "an earlier step failed"
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return "a graph is being captured"
    if core.traits.sparse:
        return "it is an optimizer for sparse gradients"
    if core.traits.random:
        return "it draws random numbers, for one parameter after the other"
    own = core.guard.id if core.guard is not None else None
    hooks = {
        *core.optimizer._optimizer_step_pre_hooks,
        *torch_optimizer._global_optimizer_pre_hooks,
    }
    if hooks - {own}:
        return "step pre-hooks are registered, which expect to run before any update"
    groups = core.optimizer.param_groups
    for index, group in enumerate(groups):
        settings = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        if _is_on_a_device(settings.values()):
            return f"param_groups[{index}] holds a tensor on a device, which may change meanwhile"
        if settings.get("foreach", False) is None and not settings.get("fused"):
            active = [param for param in group["params"] if param.requires_grad]
            types = {param.device.type for param in active}
            supported = {type(param) in _foreach_supported_types for param in active}
            if len(types) > 1 or len(supported) > 1:
                return (
                    f"param_groups[{index}] has parameters of several kinds, and which of them "
                    "have a gradient decides how all are updated; set foreach to True or False"
                )
    if _is_on_a_device(core.attributes().values()):
        return "an attribute of the optimizer holds a tensor on a device"
    params = [param for group in groups for param in group["params"] if param.requires_grad]
    return _of_several_ranks(core, params)


def _of_late_updates(core: OffloadCore) -> str | None:
    """Torch's own classes only read tensors in groups and attributes, so copies will do."""
    if core.plain_class.__module__.startswith("torch.optim."):
        return None
    groups = core.optimizer.param_groups
    settings = [v for g in groups for k, v in g.items() if k not in ("params", "param_names")]
    if _is_on_a_device([*settings, *core.attributes().values()]):
        return "its groups or attributes hold a tensor on a device, which may change meanwhile"
    return None


def _of_several_ranks(core: OffloadCore, params: Iterable[torch.Tensor]) -> str | None:
    distributed = torch.distributed
    model = core.model()
    ddp = ddp_of(model)
    if ddp is not None:
        from .ddp import obstacle_of

        return obstacle_of(ddp)
    if (
        not distributed.is_available()
        or not distributed.is_initialized()
        or distributed.get_world_size() == 1
        or all(is_distributed(param) for param in params)
    ):
        return None
    if model is None:
        return (
            "there are several ranks, and only the model tells how their gradients meet: "
            "call attach_model(optimizer, model)"
        )
    return "there are several ranks, and the model that was attached is no DistributedDataParallel"


def ddp_of(model: torch.nn.Module | None) -> Any:
    """Return the DistributedDataParallel that a model is, compiled or not; else ``None``."""
    model = getattr(model, "_orig_mod", model)
    is_one = torch.distributed.is_available() and isinstance(
        model, torch.nn.parallel.DistributedDataParallel
    )
    return model if is_one else None


def _is_on_a_device(values: Iterable[Any]) -> bool:
    return any(
        isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu"
        for value in values
        for leaf in (value if isinstance(value, (list, tuple)) else [value])
    )
