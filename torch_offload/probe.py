"""Runs an optimizer's step on stand-ins: for a chunk, for a tiny CPU copy, or on the meta device.

A *stand-in* is an object of the user's optimizer class that holds given groups and state instead of
the user's. Stepping one on meta tensors of the real shapes tells what state a parameter will get,
in exact shapes and dtypes, without any memory.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from .chunk import TensorSpec
from .placement import traveling

#: Flavours whose kernels need an accelerator or a graph. None changes which state there is.
_CPU_FLAVOUR = {"fused": False, "foreach": False, "capturable": False}
#: What GradScaler lends a fused optimizer for one step.
_SCALER_ATTRIBUTES = frozenset({"grad_scale", "found_inf"})


def step_detached(
    plain_class: type[torch.optim.Optimizer],
    attributes: Mapping[str, Any],
    groups: list[dict[str, Any]],
    state: defaultdict[torch.Tensor, dict[str, Any]],
) -> torch.optim.Optimizer:
    """Run one step of ``plain_class`` on the given groups and state, without any user hook.

    Args:
        plain_class: the user's optimizer class.
        attributes: the optimizer's other attributes.
        groups: parameter groups with their hyper-parameters; changed in place by the step.
        state: filled and changed in place.

    Returns:
        The stand-in that was stepped; its attributes may have changed.
    """
    stand_in = object.__new__(plain_class)
    stand_in.__dict__.update(attributes)
    stand_in.param_groups = groups
    stand_in.state = state
    # A class that calls its parent's step() gets there by torch's decorator, which fires hooks.
    stand_in._optimizer_step_pre_hooks = OrderedDict()
    stand_in._optimizer_step_post_hooks = OrderedDict()
    undecorated(plain_class)(stand_in)
    return stand_in


def undecorated(plain_class: type[torch.optim.Optimizer]) -> Any:
    """Return the class's ``step`` below torch's decorator, which would fire user step hooks."""
    step: Any = plain_class.step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step


def snapshot(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copy what a step may change in place, so that every part of a step starts from the same.

    Args:
        values: an optimizer's attributes, or what a group says besides its parameters.
    """
    return {key: _copied(value) for key, value in values.items()}


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) in (list, dict, set):
        return value.copy()
    return value


def tiny_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's hyper-parameters for a step on the CPU."""
    values = {key: _on_cpu(value) for key, value in group.items() if key != "params"}
    values.update({key: value for key, value in _CPU_FLAVOUR.items() if key in values})
    return values


def shareable(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes without what GradScaler lends for one real step."""
    return {key: value for key, value in attributes.items() if key not in _SCALER_ATTRIBUTES}


class StateProbe:
    """Tells which state tensors of a parameter will travel, before they exist.

    Args:
        plain_class: the user's optimizer class.
    """

    def __init__(self, plain_class: type[torch.optim.Optimizer]) -> None:
        self._plain_class = plain_class
        #: The optimizer's attributes but its groups and state.
        self.attributes: Mapping[str, Any] = {}
        self._known: dict[Any, tuple[TensorSpec, ...] | None] = {}

    def specs(self, group: Mapping[str, Any], param: torch.Tensor) -> tuple[TensorSpec, ...] | None:
        """Return the traveling state tensors that ``param`` gets at its first update.

        Args:
            group: the parameter's group.
            param: any shape, dtype and device; not touched.

        Returns:
            ``None`` where only the first update can tell.
        """
        if param.grad is not None and param.grad.layout is not torch.strided:
            return None
        # Which state there is depends on flags, and on numbers being zero or not.
        settings = tuple(
            (key, value != 0 if isinstance(value, (int, float)) else value)
            for key, value in group.items()
            if value is None or isinstance(value, (bool, int, float, str))
        )
        kind = (settings, tuple(param.shape), param.stride(), param.dtype, param.requires_grad)
        if kind not in self._known:
            self._known[kind] = self._probe(group, param)
        return self._known[kind]

    def first_values(self, group: Mapping[str, Any], param: torch.Tensor) -> dict[str, Any]:
        """Return what state a single zero gets by a step with a zero gradient.

        Args:
            group: the parameter's group.
            param: tells rank, dtype and device; not touched. A 0-dim one counts as a vector.

        Returns:
            Values as the class makes them: dtypes, devices, and tensors of one element. Empty where
            it cannot be stepped so.
        """
        device = param.device
        stand_in = torch.nn.Parameter(
            torch.zeros([1] * max(param.dim(), 1), dtype=param.dtype, device=device)
        )
        stand_in.grad = torch.zeros_like(stand_in)
        values = snapshot({key: value for key, value in group.items() if key != "params"})
        groups = [{**values, "params": [stand_in]}]
        state: defaultdict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
        random = [] if device.type == "cpu" else [device]
        try:
            with torch.random.fork_rng(random, device_type=device.type):
                step_detached(
                    self._plain_class, snapshot(shareable(self.attributes)), groups, state
                )
        except Exception:  # one for sparse gradients; torch's hidden step fails as well
            return {}
        return state[stand_in]

    def _probe(
        self, group: Mapping[str, Any], param: torch.Tensor
    ) -> tuple[TensorSpec, ...] | None:
        stand_in = torch.nn.Parameter(
            torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device="meta"),
            requires_grad=param.requires_grad,
        )
        stand_in.grad = torch.empty_like(stand_in, requires_grad=False)
        values = {**tiny_group(group), "params": [stand_in]}
        state: defaultdict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
        failed = False
        try:
            with torch.device("cpu"):  # whatever the user's default is
                step_detached(
                    self._plain_class, snapshot(shareable(self.attributes)), [values], state
                )
        except Exception:  # no values to compute with; what state there is was made before
            failed = True
        found = traveling(state[stand_in])
        return None if failed and not found else found


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, (tuple, list)):
        return type(value)(_on_cpu(item) for item in value)
    return value
