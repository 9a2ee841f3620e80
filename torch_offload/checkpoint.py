"""Loads ordinary torch optimizer checkpoints into host memory, in place.

``torch.optim.Optimizer.load_state_dict`` puts the whole state on the parameters' device before
anybody can object. This follows its contract (pre-hooks see the whole dict, groups are replaced,
the class's ``__setstate__`` migrates old formats, post-hooks run last) with host state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from itertools import chain
from typing import Any

import torch

from .chunk import TensorSpec
from .core import OffloadCore
from .distributed import is_distributed, local, same_place, wrapping
from .placement import dense_stride, traveling, travels


def load_state_dict(core: OffloadCore, state_dict: Mapping[str, Any]) -> None:
    """Load ``state_dict`` as plain torch would, without putting moments on the device.

    Values are copied; the dict given stays the caller's. Dtypes become those of torch's rule:
    floating-point parameters cast their state, ``step`` keeps its dtype and place unless the
    flavour is fused or capturable.

    Host memory is reused, so a ``state_dict()`` taken earlier changes with it, as it does with
    every step: deep-copy one that must stay.

    Raises:
        ValueError: the groups do not match the optimizer's, or a tensor has no values. Nothing has
            changed.
        MemoryError: the host has not enough memory for the state. Nothing has changed.
    """
    optimizer: Any = core.optimizer
    loaded = dict(state_dict)
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        result = hook(optimizer, loaded)
        if result is not None:
            loaded = result

    groups = optimizer.param_groups
    saved_groups = deepcopy(loaded["param_groups"])
    _check_groups(groups, saved_groups)
    param_of = dict(
        zip(
            chain.from_iterable(group["params"] for group in saved_groups),
            chain.from_iterable(group["params"] for group in groups),
            strict=True,
        )
    )
    group_of = {param_id: group for group in saved_groups for param_id in group["params"]}

    state: defaultdict[Any, Any] = defaultdict(dict)
    specs: dict[torch.Tensor, tuple[TensorSpec, ...]] = {}
    for param_id, values in loaded["state"].items():
        if param_id not in param_of:
            state[param_id] = values
            continue
        param = param_of[param_id]
        state[param] = {
            key: _value(param, key, value, group_of[param_id]) for key, value in values.items()
        }
        if values:
            specs[param] = _cast(param, traveling(values))

    # Our own state would bring a torn step back, unless a checkpoint was loaded into it in place.
    before = core.failure
    is_torn = before is not None and any(
        before.is_about(value)
        for values in loaded["state"].values()
        for value in values.values()
        if isinstance(value, torch.Tensor)
    )
    if core.overlap is not None:
        core.overlap.reset()
    core.fail("an earlier load_state_dict() stopped half-way. Load a checkpoint to go on.")
    try:
        core.planner.adopt({param: state[param] for param in specs}, specs)
    except MemoryError:
        core.failure = before
        raise
    new_groups = []
    for group, saved in zip(groups, saved_groups, strict=True):
        saved["params"] = group["params"]
        if "param_names" in group:
            saved.setdefault("param_names", group["param_names"])
        new_groups.append(saved)
    optimizer.__setstate__({"state": state, "param_groups": new_groups})
    core.failure = before if is_torn else None
    for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        hook(optimizer)


def _check_groups(groups: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    if len(groups) != len(saved):
        raise ValueError(
            f"the checkpoint has {len(saved)} parameter groups, the optimizer has {len(groups)}. "
            "Build the optimizer with the groups it was saved with."
        )
    for index, (group, other) in enumerate(zip(groups, saved, strict=True)):
        if len(group["params"]) != len(other["params"]):
            raise ValueError(
                f"parameter group {index} has {len(other['params'])} parameters in the checkpoint "
                f"and {len(group['params'])} in the optimizer. Build the optimizer with the "
                "parameters it was saved with."
            )


def _value(param: torch.Tensor, key: str, value: Any, group: Mapping[str, Any]) -> Any:
    """Return what ``state[param][key]`` becomes; what travels is copied to the host later."""
    if not isinstance(value, torch.Tensor):
        return deepcopy(value)
    if travels(key, value):
        _check_source(param, key, value)
        return value
    if key == "step":
        if group.get("fused") or group.get("capturable"):
            return value.to(dtype=torch.float32, device=param.device, copy=True)
        return value.clone()
    dtype = param.dtype if param.is_floating_point() else value.dtype
    return value.to(dtype=dtype, device=param.device, copy=True)


def _check_source(param: torch.Tensor, key: str, value: torch.Tensor) -> None:
    same_shape = value.shape == param.shape or (
        value.shape == local(param).shape and not is_distributed(value)
    )
    if same_shape and not same_place(wrapping(param), wrapping(value)):
        raise ValueError(
            f"{key!r} in the checkpoint is {_place_of(value)}, its parameter (shape "
            f"{tuple(param.shape)}) is {_place_of(param)}. Load it with "
            "torch.distributed.checkpoint and set_optimizer_state_dict, which distribute it."
        )
    value = local(value)
    if value.layout is not torch.strided or value.is_meta:
        raise ValueError(
            f"{key!r} in the checkpoint (shape {tuple(value.shape)}, device {value.device}, layout "
            f"{value.layout}) has no values that can be copied. Load it with dense, real tensors."
        )


def _cast(param: torch.Tensor, specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """Apply torch's rule for dtypes: state of a floating-point parameter takes its dtype."""
    if param.is_floating_point():
        specs = tuple(replace(spec, dtype=param.dtype) for spec in specs)
    stride, shape = dense_stride(param), tuple(local(param).shape)
    return tuple(replace(spec, stride=stride) if spec.shape == shape else spec for spec in specs)


def _place_of(tensor: torch.Tensor) -> str:
    found = wrapping(tensor)
    if found is None:
        return "a plain tensor"
    return f"a DTensor with placements {found.placements} on {found.mesh}"
