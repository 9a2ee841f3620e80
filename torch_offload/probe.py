"""Finds out what state a parameter will get, by stepping a tiny CPU copy of the optimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from .chunk import TensorSpec
from .placement import dense_stride, travels

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
        groups: parameter groups with their hyper-parameters.
        state: filled and changed in place.

    Returns:
        The stand-in optimizer that was stepped; its attributes may have changed.
    """
    stand_in = object.__new__(plain_class)
    stand_in.__dict__.update(attributes)
    stand_in.param_groups = groups
    stand_in.state = state
    undecorated(plain_class)(stand_in)
    return stand_in


def undecorated(plain_class: type[torch.optim.Optimizer]) -> Any:
    """Return the class's ``step`` below torch's decorator, which would fire user step hooks."""
    step: Any = plain_class.step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step


class StateProbe:
    """Tells which state tensors of a parameter will travel, before they exist.

    Args:
        plain_class: the user's optimizer class.
        attributes: the optimizer's attributes but its groups and state.
    """

    def __init__(
        self, plain_class: type[torch.optim.Optimizer], attributes: Mapping[str, Any]
    ) -> None:
        self._plain_class = plain_class
        self._attributes = {k: v for k, v in attributes.items() if k not in _SCALER_ATTRIBUTES}
        self._known: dict[tuple[int, torch.dtype, int], tuple[tuple[str, torch.dtype], ...]] = {}

    def specs(self, group: Mapping[str, Any], param: torch.Tensor) -> tuple[TensorSpec, ...]:
        """Return the traveling state tensors that ``param`` gets at its first update.

        Args:
            group: the parameter's group.
            param: any shape, dtype and device; not touched.
        """
        kind = (id(group), param.dtype, param.dim())
        if kind not in self._known:
            self._known[kind] = self._probe(group, param)
        shape, stride = tuple(param.shape), dense_stride(param)
        return tuple(TensorSpec(key, shape, stride, dtype) for key, dtype in self._known[kind])

    def _probe(
        self, group: Mapping[str, Any], param: torch.Tensor
    ) -> tuple[tuple[str, torch.dtype], ...]:
        tiny = torch.nn.Parameter(torch.zeros([1] * param.dim(), dtype=param.dtype, device="cpu"))
        tiny.grad = torch.zeros_like(tiny)
        clone = {key: _on_cpu(value) for key, value in group.items() if key != "params"}
        clone.update({key: value for key, value in _CPU_FLAVOUR.items() if key in clone})
        clone["params"] = [tiny]
        state: defaultdict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
        with torch.device("cpu"):  # whatever the user's default is
            step_detached(self._plain_class, self._attributes, [clone], state)
        found = []
        for key, value in state[tiny].items():
            if travels(key, value):
                assert value.shape == tiny.shape, (
                    f"state {key!r} does not have its parameter's shape"
                )
                found.append((key, value.dtype))
        return tuple(found)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, (tuple, list)):
        return type(value)(_on_cpu(item) for item in value)
    return value
