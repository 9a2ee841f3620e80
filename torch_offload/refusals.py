"""What cannot be offloaded, each with the message that says why and what to do instead."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.nn.parameter import is_lazy

from .distributed import local
from .shard import Shard, by_chunk
from .spent import is_spent
from .traits import Traits
from .values import overlap


def check_step_attribute(optimizer: Any, function: str) -> None:
    """Refuse an instance attribute ``step`` that no LR scheduler made: it would be bypassed."""
    step = optimizer.__dict__.get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        raise ValueError(
            f"the step method of this {type(optimizer).__name__} was replaced by {step!r}, and "
            f"would go on calling what it wraps. Call {function} before whatever replaced it."
        )


def check_duplicates(groups: Iterable[dict[str, Any]]) -> None:
    """Refuse a parameter that is listed twice, in one group or in two, as torch does, and one
    without a name among others that have one."""
    seen: set[int] = set()
    num_listed = 0
    for index, group in enumerate(groups):
        num_listed += len(group["params"])
        seen.update(map(id, group["params"]))
        if len(seen) < num_listed:
            raise ValueError(
                f"parameter group {index} lists a parameter twice, or one that an earlier group "
                "lists. List each parameter once."
            )
        names = group.get("param_names")
        if names is not None and len(names) != len(group["params"]):
            raise ValueError(
                f"parameter group {index} has {len(names)} names in 'param_names' for "
                f"{len(group['params'])} parameters. Name each, in the same order."
            )


def check_memory(param: torch.Tensor) -> None:
    """Refuse a parameter that has no ordinary memory to be updated in."""
    if is_lazy(param):
        raise NotImplementedError(
            "a parameter is not initialized yet, as those of lazy modules are before their first "
            "forward. Run the model once, with a dummy batch, before offload()."
        )
    if getattr(param, "_fsdp_flattened", False) or getattr(param, "_is_flat_param", False):
        raise NotImplementedError(
            "a parameter belongs to FullyShardedDataParallel (FSDP1), which puts other memory "
            "under it in every forward. Use FSDP2 (torch.distributed.fsdp.fully_shard); with "
            'Lightning, strategy="offload_optimizer_fsdp".'
        )
    own = local(param)
    if own.layout is not torch.strided:
        raise NotImplementedError(
            f"a parameter of layout {own.layout} (shape {tuple(param.shape)}) cannot be offloaded. "
            "Use a dense one (to_dense()), or the plain optimizer with it."
        )
    if own.requires_grad and own.is_inference():
        raise NotImplementedError(
            f"a parameter (shape {tuple(param.shape)}) was made under torch.inference_mode(), and "
            "can be updated nowhere else. Make the model outside of it."
        )


def check_not_fake(params: Sequence[torch.Tensor]) -> None:
    """Refuse parameters of a mode in which tensors have no values, or to be called in it."""
    if detect_fake_mode(list(params)) is not None:
        raise NotImplementedError(
            "under FakeTensorMode tensors have no memory that could be moved. Use the plain "
            "optimizer there, or call offload() outside of it with real parameters."
        )


def check_parameter(param: torch.Tensor, takes_sparse: bool) -> None:
    """Refuse tensor subclasses that wrap other tensors, but for DTensor, and gradients of the wrong
    layout."""
    check_memory(param)
    if param.is_meta and param.requires_grad:
        raise NotImplementedError(
            f"a parameter on the meta device (shape {tuple(param.shape)}) has no values to update. "
            "Give the model memory (to_empty()) before the first step, or use the plain optimizer."
        )
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


def check_gradient(param: torch.Tensor) -> None:
    """Refuse a gradient that an earlier step has used and freed."""
    if param.grad is not None and is_spent(param.grad):
        raise RuntimeError(
            f"a parameter of shape {tuple(param.shape)} still has the gradient that an earlier "
            "step used during backward. Call zero_grad() between step() and the next backward()."
        )


def check_overlap(params: Sequence[torch.Tensor]) -> None:
    """Refuse two parameters over the same memory: the order of their updates would depend on
    where a chunk ends."""
    found = overlap([local(param) for param in params])
    if found is not None:
        a, b = (tuple(params[index].shape) for index in found)
        raise NotImplementedError(
            f"two parameters (shapes {a} and {b}) share memory. Tie the parameter itself "
            "(module_b.weight = module_a.weight) and give it to the optimizer once."
        )


def check_order(traits: Traits, shards: Sequence[Shard], devices: Iterable[torch.device]) -> None:
    """Refuse a step that would draw random numbers for parameters in another order than plain.

    Args:
        traits: of the optimizer.
        shards: all that take part, in the order of their parameters.
        devices: in the order in which theirs are updated.
    """
    if not traits.random:
        return
    updated: list[Shard] = []
    for device in devices:
        born, known = by_chunk(shards, device)
        updated += (shard for chunk in born for shard in chunk)
        if traits.redraws:
            updated += (shard for chunk in known for shard in chunk)
    positions = {id(shard): position for position, shard in enumerate(shards)}
    order = [positions[id(shard)] for shard in updated]
    if order != sorted(order):
        raise NotImplementedError(
            "this optimizer draws random numbers for one parameter after the other, and "
            "parameters without state would be updated here before others that come first. Give "
            "all parameters a gradient from the first step on (zeros, if need be), add new ones "
            "last, or train without offload."
        )


def check_not_capturing(device: torch.device) -> None:
    """Refuse a step inside a CUDA graph: a replay would copy without anybody waiting for it."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise NotImplementedError(
            "an offloaded optimizer cannot step inside a CUDA graph capture. Capture forward and "
            "backward, and step outside of the graph."
        )
