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
from .placement import travels
from .probe import snapshot, step_detached

_PLAIN_CLASSES = (torch.Tensor, torch.nn.Parameter)
#: What a stand-in has of its own.
_STAND_IN_ATTRIBUTES = frozenset(
    {"param_groups", "state", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"}
)


@dataclass(slots=True)
class Item:
    """One parameter that takes part in this step.

    Attributes:
        group: index of its parameter group.
        param: the user's parameter; has a gradient.
        home: where its state lives on the host; ``None`` where only its first update can tell how
            much that is.
        state: its entry of ``optimizer.state``; empty before its first update.
    """

    group: int
    param: torch.Tensor
    home: Home | None
    state: dict[str, Any]


class Stepper:
    """Updates chunks during one step.

    Counters in groups and attributes advance once a step: each chunk starts from the values that
    the step started with, and what they became is kept for :meth:`finish`.

    Args:
        plain_class: the user's optimizer class.
        attributes: the optimizer's attributes but its groups and state.
        groups: its parameter groups; changed by :meth:`finish` alone.
        items: all the parameters that take part in this step.
    """

    def __init__(
        self,
        plain_class: type[torch.optim.Optimizer],
        attributes: dict[str, Any],
        groups: Sequence[dict[str, Any]],
        items: Sequence[Item],
    ) -> None:
        self._plain_class = plain_class
        self.attributes = attributes
        self._groups = groups
        self._values = [hyper_parameters(group) for group in groups]
        self._newcomers = {_kind(item) for item in items if not item.state}
        #: What group values and attributes became: group index (or None) to (before, after).
        self._changes: dict[int | None, tuple[dict[str, Any], dict[str, Any]]] = {}
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
        on_device = [_device_views(_home(item), buffer) for item in items]
        states: list[dict[str, Any]] = [
            {key: views.get(key, value) for key, value in item.state.items()}
            for item, views in zip(items, on_device, strict=True)
        ]
        self._step(items, states)
        for item, views, state in zip(items, on_device, states, strict=True):
            for key in item.state.keys() - state.keys():
                del item.state[key]
            for key, value in state.items():
                view = views.get(key)
                if value is view:
                    continue
                if view is not None and isinstance(value, torch.Tensor) and _same_kind(value, view):
                    view.copy_(value)  # the optimizer made a new tensor
                else:
                    item.state[key] = value  # one that does not fit moves to the host next time

    def create(self, items: Sequence[Item]) -> list[dict[str, Any] | None]:
        """Update parameters that have no state yet, and return the state that each got, if any."""
        return self._step(items, [None for _ in items])

    def finish(self) -> None:
        """Write counters that advanced back to the optimizer's groups and attributes.

        Groups of which no parameter took part are stepped here, since a plain step visits them
        too.
        """
        idle = [index for index in range(len(self._groups)) if index not in self._changes]
        if idle:
            groups = [{**self._values[index], "params": []} for index in idle]
            for index, group in zip(idle, groups, strict=True):
                group["params"] = list(self._groups[index]["params"])
            self._run(idle, groups, defaultdict(dict))
        for where, (before, after) in self._changes.items():
            target = self.attributes if where is None else self._groups[where]
            given = self.attributes if where is None else self._values[where]
            for key, value in after.items():
                if key not in before or value is not before[key]:
                    target[key] = value
                elif isinstance(value, torch.Tensor):
                    if value._version:
                        given[key].copy_(value)
                elif type(value) in (list, dict, set) and value != given[key]:
                    target[key] = value

    def _step(
        self, items: Sequence[Item], states: Sequence[dict[str, Any] | None]
    ) -> list[dict[str, Any] | None]:
        """Step the items with these states; ``None`` where the optimizer is to make one."""
        members: dict[int, list[torch.Tensor]] = {}
        state: defaultdict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
        shards = [_shard(item.param) for item in items]
        for item, shard, values in zip(items, shards, states, strict=True):
            members.setdefault(item.group, []).append(shard)
            if values is not None:
                state[shard] = values
        self.started.extend(item.param for item in items)
        # A chunk's moments change in the slot alone until it is copied out.
        self._versions = [
            (tensor, tensor._version)
            for item in items
            for tensor in (item.param, *_resident(item.state))
        ]
        for kind in {_kind(item) for item in items if item.state} & self._newcomers:
            members[kind[0]].append(_newcomer(next(i for i in items if _kind(i) == kind)))
        groups = [{**self._values[index], "params": own} for index, own in members.items()]
        self._run(list(members), groups, state)
        self.num_chunks += 1
        return [state.get(shard) for shard in shards]

    def _run(
        self,
        indices: Sequence[int],
        groups: Sequence[dict[str, Any]],
        state: defaultdict[torch.Tensor, dict[str, Any]],
    ) -> None:
        """Step a stand-in with these groups, and note what became of their values."""
        before = [snapshot({k: v for k, v in group.items() if k != "params"}) for group in groups]
        stepped = [
            {**values, "params": group["params"]}
            for values, group in zip(before, groups, strict=True)
        ]
        attributes = snapshot(self.attributes)
        stand_in = step_detached(self._plain_class, attributes, stepped, state)
        for index, values, group in zip(indices, before, stepped, strict=True):
            after = {key: value for key, value in group.items() if key != "params"}
            self._changes[index] = (values, after)
        after = {k: v for k, v in stand_in.__dict__.items() if k not in _STAND_IN_ATTRIBUTES}
        self._changes[None] = (attributes, after)


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
    born: dict[tuple[int, int], list[Item]] = {}
    known: dict[tuple[int, int], list[Item]] = {}
    for item in items:
        if item.param.device == device:
            # Nobody knows how large the state of one without a home will be: a chunk of its own.
            index = (1, len(born)) if item.home is None else (0, item.home.hosted.index)
            (known if item.state else born).setdefault(index, []).append(item)
    return [born[index] for index in sorted(born)], [known[index] for index in sorted(known)]


def runs(items: Iterable[Item]) -> tuple[tuple[int, int], ...]:
    """Return the ranges of bytes of their chunk that travel when these parameters are updated."""
    shards = [_home(item).shard for item in items]
    return merge_runs(sorted((shard.start, shard.stop) for shard in shards))


def _kind(item: Item) -> tuple[int, torch.device, torch.dtype]:
    """What torch's multi-tensor code puts into one list."""
    return item.group, item.param.device, item.param.dtype


def _newcomer(item: Item) -> torch.Tensor:
    """Make a parameter of one element without state, to be stepped with ``item`` and dropped.

    Where one parameter of a list has no state yet, some classes take another path for the whole
    list (SGD with momentum and foreach), which differs in the last bit. New parameters are stepped
    in chunks of their own, so one stands in for them in the others.
    """
    newcomer = torch.nn.Parameter(item.param.new_zeros([1] * item.param.dim()))
    grad = torch.zeros_like(newcomer)
    assert item.param.grad is not None
    if item.param.grad.layout is not torch.strided:
        grad = grad.to_sparse(item.param.grad.sparse_dim())
    newcomer.grad = grad
    return newcomer


def _home(item: Item) -> Home:
    assert item.home is not None, "a parameter with state has a home"
    return item.home


def _same_kind(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


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
