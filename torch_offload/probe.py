"""Tells what state a parameter will get, by stepping a stand-in for it on the meta device.

Its shapes and dtypes are exact, and no memory is needed. Here is also what a setting becomes for
such a step, or for one on a CPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from .chunk import TensorSpec
from .placement import traveling
from .random_state import random_state_kept
from .standin import default_device_cpu, like, step_detached, uncompiled
from .values import rebuilt, snapshot

#: Flavours whose kernels need an accelerator or a graph. None changes which state there is.
_CPU_FLAVOUR = {"fused": False, "foreach": False, "capturable": False}
_SIMPLE = (type(None), bool, int, float, str, torch.dtype)
#: What GradScaler lends a fused optimizer for one step.
_SCALER_ATTRIBUTES = frozenset({"grad_scale", "found_inf"})


def tiny_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's hyper-parameters for a step on the CPU, in containers of their own."""
    values = {
        key: rebuilt(value, _on_cpu)
        for key, value in group.items()
        if key not in ("params", "param_names")
    }
    values.update({key: value for key, value in _CPU_FLAVOUR.items() if key in values})
    return values


def simple_attributes(param: torch.Tensor) -> dict[str, Any]:
    """Return the attributes of a parameter that a tiny copy can have, too."""
    return {k: v for k, v in param.__dict__.items() if isinstance(v, _SIMPLE)}


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
        marks = (type(param), *simple_attributes(param).items())
        kind = (
            settings,
            marks,
            tuple(param.shape),
            param.stride(),
            param.dtype,
            param.requires_grad,
        )
        if kind not in self._known:
            self._known[kind] = self._probe(group, param)
        return self._known[kind]

    def first_state(
        self, group: Mapping[str, Any], param: torch.Tensor, values: torch.Tensor, decay: bool
    ) -> dict[str, Any]:
        """Return the state that a parameter with these values gets by a step with zero gradients.

        Args:
            group: the parameter's group.
            param: what it stands in for; not touched.
            values: a plain tensor on its device; changed.
            decay: whether weights decay.

        Returns:
            Empty where the class cannot be stepped so.
        """
        stand_in = like(param, values)
        stand_in.__dict__.update(param.__dict__)
        stand_in.grad = torch.zeros_like(values)
        settings = snapshot({key: value for key, value in group.items() if key != "params"})
        if not decay and isinstance(settings.get("weight_decay"), (int, float)):
            settings["weight_decay"] = 0.0
        groups = [{**settings, "params": [stand_in]}]
        state: defaultdict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
        others = [] if values.device.type == "cpu" else [values.device]
        try:
            with (
                random_state_kept(),
                torch.random.fork_rng(others, device_type=values.device.type),
            ):
                attributes = snapshot(shareable(self.attributes))
                step_detached(self._plain_class, attributes, groups, state)
        except Exception:  # one for sparse gradients; torch's hidden step fails as well
            return {}
        return state[stand_in]

    def _probe(
        self, group: Mapping[str, Any], param: torch.Tensor
    ) -> tuple[TensorSpec, ...] | None:
        meta = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device="meta")
        stand_in = like(param, meta)
        stand_in.__dict__.update(simple_attributes(param))
        stand_in.grad = torch.empty_like(stand_in, requires_grad=False)
        values = {**tiny_group(group), "params": [stand_in]}
        state: defaultdict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
        failed = False
        try:
            with default_device_cpu(), uncompiled(), random_state_kept():
                step_detached(
                    self._plain_class, snapshot(shareable(self.attributes)), [values], state
                )
        except Exception:  # no values to compute with; what state there is was made before
            failed = True
        found = traveling(state[stand_in])
        return None if failed and not found else found


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
