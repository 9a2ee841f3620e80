"""Steps the shards of one chunk with the user's own optimizer class.

A *shard* stands in for the user's parameter: it shares its memory and its gradient. The class's
``step`` runs on a stand-in optimizer that holds these shards, their state on the device and the
hyper-parameters of this step, so the user's own groups and hooks are never touched by it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .chunk import merge_runs
from .layout import Home
from .pipeline import Born
from .placement import travels
from .probe import step_detached

_PLAIN_CLASSES = (torch.Tensor, torch.nn.Parameter)


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
        #: The parameters of the chunks that were updated or begun, in order.
        self.started: list[torch.Tensor] = []
        self.num_chunks = 0
        self._versions: list[tuple[torch.Tensor, int]] = []

    def has_changed_anything(self) -> bool:
        """Whether a parameter, or state that lives outside the chunks, is not what it was."""
        return self.num_chunks > 0 or any(
            tensor._version != version for tensor, version in self._versions
        )

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
            found = {key for key, value in state.items() if travels(key, value)}
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
        # A chunk's moments change in the slot alone until it is copied out.
        self._versions = [
            (tensor, tensor._version)
            for item in items
            for tensor in (item.param, *_resident(item.state))
        ]
        stand_in = step_detached(self._plain_class, self.attributes, groups, state)
        self.attributes.update(
            {
                key: value
                for key, value in stand_in.__dict__.items()
                if key not in ("param_groups", "state")
            }
        )
        self.num_chunks += 1


def hyper_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a group says besides its parameters, with the flavour that torch would choose.

    torch takes the for-loop by default for a whole group if any of its parameters with a gradient
    is on the CPU or of a class of its own. A chunk is part of a group, and its own choice could
    differ from that in the last bit.
    """
    values = {key: value for key, value in group.items() if key != "params"}
    if values.get("foreach", False) is None and not values.get("fused"):
        active = [param for param in group["params"] if param.grad is not None]
        same_device = len({param.device.type for param in active}) <= 1
        if not same_device or any(type(p) not in _PLAIN_CLASSES for p in active):
            values["foreach"] = False
    return values


def by_chunk(
    items: Iterable[Item], device: torch.device
) -> tuple[list[list[Item]], list[list[Item]]]:
    """Sort one device's parameters by chunk: those without state, and those with."""
    born: dict[int, list[Item]] = {}
    known: dict[int, list[Item]] = {}
    for item in items:
        hosted = item.home.hosted
        if hosted.chunk.device == device:
            (known if item.state else born).setdefault(hosted.index, []).append(item)
    return [born[index] for index in sorted(born)], [known[index] for index in sorted(known)]


def runs(items: Iterable[Item]) -> tuple[tuple[int, int], ...]:
    """Return the ranges of bytes of their chunk that travel when these parameters are updated."""
    return merge_runs(sorted((item.home.shard.start, item.home.shard.stop) for item in items))


def _resident(state: Mapping[str, Any]) -> list[torch.Tensor]:
    return [
        value
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and not travels(key, value) and not value.is_inference()
    ]


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
