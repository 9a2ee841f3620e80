"""Steps the shards of one chunk with the user's own optimizer class.

The class's ``step`` runs on a stand-in optimizer that holds these shards, their state on the device
and the hyper-parameters of this step, so the user's own groups and hooks are never touched by it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import _foreach_supported_types

from .distributed import is_distributed, local, wrapped, wrapping
from .placement import travels
from .replay import raises_before_any_change
from .shard import Shard
from .standin import bystander, newcomer, step_detached
from .values import is_unchanged, put_back, snapshot

#: What a stand-in has of its own.
_STAND_IN_ATTRIBUTES = frozenset(
    {"param_groups", "state", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"}
)


class Stepper:
    """Updates chunks during one step.

    Counters in groups and attributes advance once a step: each chunk starts from the values that
    the step started with, and what they became is kept for :meth:`finish`.

    Args:
        plain_class: the user's optimizer class.
        attributes: the optimizer's attributes but its groups and state.
        groups: its parameter groups; changed by :meth:`finish` alone.
        own_tensors: copy those on a device that attributes and groups hold, since updates read them
            later than this.
    """

    def __init__(
        self,
        plain_class: type[torch.optim.Optimizer],
        attributes: dict[str, Any],
        groups: Sequence[dict[str, Any]],
        own_tensors: bool = False,
    ) -> None:
        self._plain_class = plain_class
        copied = _own if own_tensors else dict
        self.attributes: dict[str, Any] = copied(attributes)
        self._groups = groups
        self._values = [copied(hyper_parameters(group)) for group in groups]
        #: Only torch's own classes are known to step each group by itself.
        self._apart = plain_class.__module__.startswith("torch.optim.")
        self._bystanders: dict[int, list[torch.Tensor]] = {}
        self._names = {
            id(param): name
            for group in groups
            if "param_names" in group
            for param, name in zip(group["params"], group["param_names"], strict=True)
        }
        self._newcomers: set[tuple[int, torch.device, torch.dtype]] = set()
        #: What does not travel of the state of a parameter that is updated in parts, as it was.
        self._residents: dict[int, dict[str, Any]] = {}
        #: State of such a parameter that appeared in this step: its id and the key to all of it.
        self._grown: dict[tuple[int, str], torch.Tensor] = {}
        #: What group values and attributes became: group index (or None) to (before, after).
        self._changes: dict[int | None, tuple[dict[str, Any], dict[str, Any]]] = {}
        #: Groups of which a parameter took part.
        self._active: set[int] = set()
        #: The parameters of the chunks that were updated or begun, in order.
        self.started: list[torch.Tensor] = []
        self.num_chunks = 0
        self._is_changing = False

    def expect(self, shards: Sequence[Shard]) -> None:
        """Step a small new parameter with those of ``shards`` that have state, where others get
        theirs in this step. Not to be done where it would draw random numbers."""
        self._newcomers = {_kind(shard) for shard in shards if not shard.state}

    def has_changed_anything(self) -> bool:
        """Whether a parameter, or state that lives outside the chunks, may not be what it was."""
        return self.num_chunks > 0 or self._is_changing

    def update(self, shards: Sequence[Shard], slot: torch.Tensor | None) -> None:
        """Update parameters and the state in ``slot``, in place, on the current stream.

        Args:
            shards: those of one chunk, all with state.
            slot: uint8, on the parameters' device, filled with what travels; ``None`` where nothing
                does.
        """
        on_device = [shard.views(slot) for shard in shards]
        states: list[dict[str, Any]] = [
            {key: views.get(key, value) for key, value in self._state(shard).items()}
            for shard, views in zip(shards, on_device, strict=True)
        ]
        states = [state or {} for state in self._step(shards, states)]
        for shard, views, state in zip(shards, on_device, states, strict=True):
            if shard.is_first:
                for key in shard.state.keys() - state.keys():
                    del shard.state[key]
            for key, value in state.items():
                view = views.get(key)
                if value is view:
                    continue
                if view is not None and isinstance(value, torch.Tensor) and _same_kind(value, view):
                    view.copy_(value)  # the optimizer made a new tensor
                elif shard.part is not None or shard.unwraps:
                    self._keep(shard, key, value)
                else:
                    shard.state[key] = value  # one that does not fit moves to the host next time

    def create(self, shards: Sequence[Shard]) -> list[dict[str, Any] | None]:
        """Update shards that have no state yet, and return the state that each got, if any."""
        return self._step(shards, [None for _ in shards])

    def finish(self) -> None:
        """Write counters that advanced back to the optimizer's groups and attributes.

        Groups of which no parameter took part are visited here, since a plain step visits them
        too; never with a parameter of the user's.
        """
        idle = [index for index in range(len(self._groups)) if index not in self._changes]
        if idle:
            self._run([], [], defaultdict(dict), idle)
        for where, (before, after) in self._changes.items():
            target = self.attributes if where is None else self._groups[where]
            given = self.attributes if where is None else self._values[where]
            for key in before.keys() - after.keys() - _STAND_IN_ATTRIBUTES:
                target.pop(key, None)
            for key, value in after.items():
                if key not in before or value is not before[key]:
                    target[key] = value
                elif isinstance(value, torch.Tensor):
                    if value._version:
                        given[key].copy_(value)
                elif not is_unchanged(given[key], value) and not put_back(given[key], value):
                    target[key] = value

    def _state(self, shard: Shard) -> dict[str, Any]:
        """Return the parameter's state as it is, or as it was before its first part was updated."""
        if shard.part is None:
            return shard.state
        if shard.is_first:
            residents = {
                key: None if travels(key, value) else value for key, value in shard.state.items()
            }
            self._residents[id(shard.param)] = snapshot(residents)
            return shard.state
        return snapshot(self._residents[id(shard.param)])

    def _keep(self, shard: Shard, key: str, value: Any) -> None:
        """Store what a stand-in's update put under ``key`` in the state of the whole parameter."""
        same_shape = isinstance(value, torch.Tensor) and (
            value.shape == shard.of(shard.param).shape
        )
        if not travels(key, value) or (shard.part is None and not same_shape):
            if shard.is_first:
                shard.state[key] = value
            return
        name = (id(shard.param), key)
        if not same_shape or not (shard.is_first or name in self._grown):
            raise RuntimeError(
                f"{self._plain_class.__name__} put a tensor of shape {tuple(value.shape)} into "
                f"state {key!r} of one part of a parameter of shape {tuple(shard.param.shape)}, "
                "and not into that of each. Use a chunk_size that is not smaller than its state."
            )
        if shard.is_first:
            full = torch.empty_like(local(shard.param), dtype=value.dtype, requires_grad=False)
            self._grown[name] = wrapped(full, wrapping(shard.param))
            shard.state[key] = self._grown[name]  # moves to the host next time
        shard.of(self._grown[name]).copy_(value)

    def _step(
        self, shards: Sequence[Shard], states: Sequence[dict[str, Any] | None]
    ) -> list[dict[str, Any] | None]:
        """Step the shards with these states; ``None`` where the optimizer is to make one."""
        members: dict[int, list[torch.Tensor]] = {}
        state: defaultdict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
        stand_ins = [shard.stand_in() for shard in shards]
        sources: dict[int, list[torch.Tensor]] = {}
        for shard, stand_in, values in zip(shards, stand_ins, states, strict=True):
            members.setdefault(shard.group, []).append(stand_in)
            sources.setdefault(shard.group, []).append(shard.param)
            if values is not None:
                state[stand_in] = values
        self.started.extend(shard.param for shard in shards if shard.is_first)
        for kind in {_kind(shard) for shard in shards if shard.state} & self._newcomers:
            shard = next(shard for shard in shards if _kind(shard) == kind)
            members[shard.group].append(newcomer(shard.param, shard.of(shard.param)))
            sources[shard.group].append(shard.param)
        groups = [self._group(index, own, sources[index]) for index, own in members.items()]
        given = {stand_in: dict(values) for stand_in, values in state.items()}
        self._is_changing = True
        try:
            self._run(list(members), groups, state)
        except Exception as error:
            # Operations on DTensors may communicate, and the other ranks do not run theirs again.
            if not (self.num_chunks or any(is_distributed(stand_in) for stand_in in stand_ins)):
                self._is_changing = not raises_before_any_change(
                    lambda: self._run(list(members), groups, defaultdict(dict, given)),
                    error,
                    _tensors(stand_ins, given),
                )
            raise
        for shard, stand_in in zip(shards, stand_ins, strict=True):
            shard.give_back(stand_in)
            if shard.unwraps:  # what autograd saved of it is stale now
                torch.autograd.graph.increment_version(shard.param)
        self.num_chunks += 1
        return [state.get(stand_in) for stand_in in stand_ins]

    def _run(
        self,
        indices: Sequence[int],
        groups: Sequence[dict[str, Any]],
        state: defaultdict[torch.Tensor, dict[str, Any]],
        idle: Sequence[int] = (),
    ) -> None:
        """Step a stand-in with these groups, and note what became of their values.

        A class from elsewhere may look at other groups than a parameter's own, so it is given
        all of them in order, those of no parameter here with one that has no gradient.
        """
        self._active.update(indices)
        given = dict(zip(indices, groups, strict=True))
        others = idle if self._apart else range(len(self._groups))
        given.update({index: self._idle(index) for index in others if index not in given})
        order = sorted(given)
        before = [snapshot(_settings(given[index])) for index in order]
        stepped = [{**given[i], **values} for i, values in zip(order, before, strict=True)]
        attributes = snapshot(self.attributes)
        stand_in = step_detached(self._plain_class, attributes, stepped, state)
        if stand_in.__dict__["state"] is not state:  # the class made a new one
            renewed = dict(stand_in.__dict__["state"])
            state.clear()
            state.update(renewed)
        for index, values, group in zip(order, before, stepped, strict=True):
            if index in indices or index not in self._active:
                self._changes[index] = (values, _settings(group))
        after = {k: v for k, v in stand_in.__dict__.items() if k not in _STAND_IN_ATTRIBUTES}
        self._changes[None] = (attributes, after)

    def _idle(self, index: int) -> dict[str, Any]:
        """Return a group of which no parameter takes part, with one that has no gradient."""
        sources = self._groups[index]["params"][:1]
        if index not in self._bystanders:
            self._bystanders[index] = [bystander(param) for param in sources]
        return self._group(index, self._bystanders[index], sources)

    def _group(
        self, index: int, params: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> dict[str, Any]:
        """Return a group with stand-ins for some of its parameters, under their names if any."""
        group = {**self._values[index], "params": list(params)}
        if "param_names" in self._groups[index]:
            group["param_names"] = [self._names[id(param)] for param in sources]
        return group


def hyper_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a group says besides its parameters, with the flavour that torch would choose.

    torch takes the for-loop by default for a whole group if any of its parameters with a gradient
    is on the CPU or of a class of its own. A chunk is part of a group, and its own choice could
    differ from that in the last bit.
    """
    values = _settings(group)
    if values.get("foreach", False) is None and not values.get("fused"):
        active = [param for param in group["params"] if param.grad is not None]
        same_device = len({param.device.type for param in active}) <= 1
        if not same_device or any(type(p) not in _foreach_supported_types for p in active):
            values["foreach"] = False
    return values


def _own(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value.detach().clone()
        if isinstance(value, torch.Tensor) and value.device.type != "cpu"
        else value
        for key, value in values.items()
    }


def newcomers_matter(plain_class: type[torch.optim.Optimizer]) -> bool:
    """Whether parameters without state may change how others of their list are stepped.

    Of torch's classes SGD alone takes another path for a list with such.
    """
    return not plain_class.__module__.startswith("torch.optim.") or plain_class is torch.optim.SGD


def _kind(shard: Shard) -> tuple[int, torch.device, torch.dtype]:
    """What torch's multi-tensor code puts into one list."""
    return shard.group, shard.param.device, shard.param.dtype


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a group says besides its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _same_kind(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


def _tensors(
    stand_ins: Sequence[torch.Tensor], state: Mapping[torch.Tensor, Mapping[str, Any]]
) -> list[torch.Tensor]:
    """Return what an update of these may change."""
    values = [value for stand_in in stand_ins for value in state.get(stand_in, {}).values()]
    grads = [stand_in.grad for stand_in in stand_ins]
    return [v for v in (*stand_ins, *grads, *values) if isinstance(v, torch.Tensor)]
