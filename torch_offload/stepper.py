"""Steps the shards of one chunk with the user's own optimizer class.

A *shard* stands in for the user's parameter: it shares its memory and its gradient. The class's
``step`` runs on a stand-in optimizer that holds these shards, their state on the device and the
hyper-parameters of this step, so the user's own groups and hooks are never touched by it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .layout import Home
from .pipeline import Born
from .placement import travels
from .probe import step_detached


@dataclass(frozen=True, slots=True)
class Item:
    """One parameter that takes part in this step.

    Attributes:
        group: index of its parameter group.
        param: the user's parameter; has a gradient.
        home: where its state lives on the host.
        state: its entry of ``optimizer.state``; empty before its first update.
    """

    group: int
    param: torch.Tensor
    home: Home
    state: dict[str, Any]


class Stepper:
    """Updates chunks during one step.

    Args:
        plain_class: the user's optimizer class.
        attributes: the optimizer's attributes but its groups and state; kept up to date.
        groups: hyper-parameters of every group, without ``params``.
    """

    def __init__(
        self,
        plain_class: type[torch.optim.Optimizer],
        attributes: dict[str, Any],
        groups: Sequence[Mapping[str, Any]],
    ) -> None:
        self._plain_class = plain_class
        self._groups = groups
        self.attributes = attributes
        self.started: list[torch.Tensor] = []
        self.num_chunks = 0

    def update(self, items: Sequence[Item], buffer: torch.Tensor) -> None:
        """Update parameters and the state in ``buffer``, in place, on the current stream.

        Args:
            items: parameters of one chunk, all with state.
            buffer: uint8, laid out like the chunk, on the parameters' device.
        """
        on_device = [_device_views(item.home, buffer) for item in items]
        states = [
            {key: views.get(key, value) for key, value in item.state.items()}
            for item, views in zip(items, on_device, strict=True)
        ]
        self._step(items, states)
        for item, views, state in zip(items, on_device, states, strict=True):
            for key, value in state.items():
                if key not in views:
                    item.state[key] = value
                elif value is not views[key]:
                    views[key].copy_(value)  # the optimizer made a new tensor

    def create(self, items: Sequence[Item]) -> list[Born]:
        """Update parameters that have no state yet, and enter their new state.

        ``item.state`` shows the host tensors from here on; their values are still to be copied.

        Returns:
            The new tensors on the device, with their places on the host.
        """
        states: list[dict[str, Any]] = [{} for _ in items]
        self._step(items, states)
        born: list[Born] = []
        for item, state in zip(items, states, strict=True):
            found = {key for key, value in state.items() if travels(value)}
            assert found == item.home.views.keys(), f"planned {item.home.views.keys()}, got {found}"
            for key, value in state.items():
                home = item.home.views.get(key)
                if home is not None:
                    born.append((value, home))
                item.state[key] = value if home is None else home
        return born

    def _step(self, items: Sequence[Item], states: Sequence[dict[str, Any]]) -> None:
        members: dict[int, list[torch.Tensor]] = {}
        state: defaultdict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
        for item, values in zip(items, states, strict=True):
            shard = _shard(item.param)
            members.setdefault(item.group, []).append(shard)
            state[shard] = values
        groups = [{**self._groups[index], "params": shards} for index, shards in members.items()]
        self.started.extend(item.param for item in items)
        stand_in = step_detached(self._plain_class, self.attributes, groups, state)
        self.attributes.update(
            {
                key: value
                for key, value in stand_in.__dict__.items()
                if key not in ("param_groups", "state")
            }
        )
        self.num_chunks += 1


def _shard(param: torch.Tensor) -> torch.Tensor:
    shard = torch.nn.Parameter(param.detach(), requires_grad=param.requires_grad)
    grad = param.grad
    if grad is not None and grad.dtype != param.dtype:
        shard.grad_dtype = grad.dtype
    shard.grad = grad
    return shard


def _device_views(home: Home, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        spec.key: buffer.view(spec.dtype).as_strided(
            spec.shape, spec.stride, offset // spec.dtype.itemsize
        )
        for spec, offset in zip(home.shard.tensors, home.shard.offsets, strict=True)
    }
