"""One step of which chunks are updated early: what is copied ahead, what is done, what is left."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import optimizer as torch_optimizer

from .distributed import local
from .expected import ExpectedChunk, expected_shards, newcomers_of, views_of
from .flow import Flow
from .shard import Shard, by_chunk
from .spent import Owner, is_spent, spend
from .standin import outside_autograd
from .stepper import Stepper
from .streams import Handoff, caller_stream
from .tasks import update_of
from .values import same, snapshot
from .waiting import hold, release
from .work import Traffic

if TYPE_CHECKING:
    from .core import OffloadCore

#: Chunks whose gradients are kept while the device may still read them.
NUM_HELD = 2
#: Attributes that change with every step and say nothing about the update.
_NOT_COMPARED = frozenset({"_opt_called", "_step_count"})


class Run:
    """The chunks of one step that can be updated early, in the order in which they are expected.

    Made after the step before, so that the first ones are copied in while forward runs.

    Args:
        core: that of the optimizer; a weak proxy.
        order: the parameters' ids and when their gradients became final.
        owner: of the gradients that will be spent; ``None`` if none will be.
    """

    def __init__(
        self, core: OffloadCore, order: Mapping[int, int], owner: Owner | None = None
    ) -> None:
        self._core = core
        self._owner: Any = owner
        self.traffic = Traffic()
        self.flows: dict[torch.device, Flow] = {}
        self.stepper: Stepper | None = None
        self._chunks: list[ExpectedChunk] = []
        #: The chunks that wait for a parameter's gradient, by its id.
        self._waiting: dict[int, list[ExpectedChunk]] = {}
        #: The ids of parameters that were updated.
        self.done: set[int] = set()
        self._held: deque[tuple[list[torch.Tensor], Handoff[None], list[Any]]] = deque()
        self._before: list[Any] = []
        self._global_hooks: set[int] = set()
        self._newcomers = newcomers_of(core)
        self._kernels = _kernels_of(core)
        #: Memory and version of parameters after their update.
        self._after: dict[int, tuple[int, int]] = {}
        self._forbidden: list[torch.Tensor] = []
        self._ticket = _Forbidden(owner)
        #: Gradients that are not in the parameters, by their ids, and whose those are.
        self._given: dict[int, torch.Tensor] = {}
        self._late: list[torch.Tensor] = []
        shards = expected_shards(core, order)
        for device in dict.fromkeys(shard.param.device for shard in shards):
            _, known = by_chunk(shards, device)
            known.sort(key=lambda chunk: max(order[id(shard.param)] for shard in chunk))
            work = [update_of(chunk) for chunk in known]
            flow = self.flows[device] = core.pipelines[device].flow_beside(work, self.traffic)
            flow.expect(work)
            self._chunks += [
                ExpectedChunk(flow, number, chunk, {id(s.param) for s in chunk}, views_of(chunk))
                for number, chunk in enumerate(known)
            ]
        for chunk in self._chunks:
            for key in chunk.missing:
                self._waiting.setdefault(key, []).append(chunk)
        for flow in self.flows.values():
            flow.pause()

    @property
    def is_complete(self) -> bool:
        """Whether everything that can be updated early was."""
        return len(self.done) == len(self._waiting)

    def is_current(self) -> bool:
        """Whether all is where it was when the run was made, and nobody wrote to it since."""
        core = self._core
        group_of = _groups_of(core)
        shards = [shard for chunk in self._chunks for shard in chunk.shards if shard.is_first]
        return (
            self._newcomers == newcomers_of(core)
            and self._kernels == _kernels_of(core)
            and all(
                group_of.get(id(shard.param)) == shard.group
                and core.state.get(shard.param) is shard.state
                and core.planner.is_home(shard.param, shard.state)
                for shard in shards
            )
            and all(chunk.is_untouched() for chunk in self._chunks)
        )

    def release(self) -> None:
        """Let parameters that were updated be used again."""
        for param in self._forbidden:
            release(param)
        self._forbidden.clear()

    def begin(self) -> None:
        """Take the hyper-parameters as they are now."""
        self._global_hooks = set(torch_optimizer._global_optimizer_pre_hooks)
        self.stepper = self._core.new_stepper()
        self._before = self._settings()

    def gradient_is_final(self, param: torch.Tensor) -> None:
        """Update the chunks that were waiting for this gradient only."""
        assert self.stepper is not None
        for chunk in self._waiting.get(id(param), ()):
            chunk.missing.discard(id(param))
            chunk.streams.setdefault(caller_stream(param.device))
            if (
                not chunk.missing
                and chunk.is_untouched()
                and all(shard.is_as_planned() for shard in chunk.shards)
            ):
                try:
                    with outside_autograd():
                        self._update(chunk)
                except BaseException as error:
                    self._core.after_failure(self.stepper, error)
                    raise

    def gradients_are_averaged(
        self,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        wait: Callable[[], object],
    ) -> None:
        """Update the chunks that were waiting for these parameters only, with these gradients."""
        for device in {param.device for param, _ in pairs}:
            if device in self.flows:
                self.flows[device].run(wait)
        self._given.update({id(param): grad for param, grad in pairs})
        for param, _ in pairs:
            self.gradient_is_final(param)

    def spend_late(self) -> None:
        """Take away the gradients of which the memory is not ours."""
        for param in self._late:
            grad = param.grad
            if grad is not None and not is_spent(grad):
                spend(param, self._owner)
        self._late.clear()

    def finish(self, device: torch.device, chunks: Sequence[list[Shard]]) -> None:
        """Update what is left, now that all gradients are there; first what was copied ahead."""
        assert self.stepper is not None
        flow, rest = self.flows.get(device), list(chunks)
        if flow is not None:
            flow.wait_for(caller_stream(device))
            planned = {_members(chunk.shards): chunk for chunk in self._chunks}
            rest = []
            for shards in chunks:
                chunk = planned.get(_members(shards))
                if chunk is not None and chunk.flow is flow and chunk.is_loaded():
                    flow.update(chunk.number, partial(self.stepper.update, shards))
                else:
                    rest.append(shards)
            flow.updates_so_far().take(caller_stream(device))
        work = [update_of(shards, self.stepper) for shards in rest]
        self._core.pipelines[device].update(work, self.traffic)

    def wait(self) -> None:
        """Let the callers' streams wait for every update so far, and free the gradients."""
        for device, flow in self.flows.items():
            flow.updates_so_far().take(caller_stream(device))
        while self._held:
            self._let_go()

    def _let_go(self) -> None:
        """Free the gradients of the chunk that was updated first of those that are held."""
        _, updated, streams = self._held[0]
        for stream in streams:
            updated.take(stream)  # I5
        self._held.popleft()

    def end(self) -> None:
        """After the last update: see to the slots, and that everything is read in its turn."""
        self.wait()
        for flow in self.flows.values():
            flow.pause()

    def what_changed(self) -> str | None:
        """Say what is not as it was at the first update."""
        now = self._settings()
        for index, (old, new) in enumerate(zip(self._before, now, strict=False)):
            for key in {**old, **new}:
                if key not in old or key not in new or not same(old[key], new[key]):
                    where = f"param_groups[{index - 2}][{key!r}]" if index > 1 else f"{key!r}"
                    return (
                        f"{where} changed from {old.get(key)!r} to {new.get(key)!r} after the "
                        "first parameters were updated in backward(). Set it before backward(), "
                        'or use overlap="step"'
                    )
        if len(self._before) != len(now):
            return "a parameter group was added between backward() and step()"
        if set(torch_optimizer._global_optimizer_pre_hooks) != self._global_hooks:
            return "a step pre-hook of all optimizers came between backward() and step()"
        group_of = _groups_of(self._core)
        for chunk in self._chunks:
            used = [shard for shard in chunk.shards if id(shard.param) in self.done]
            is_same = not used or chunk.is_untouched()
            for shard in used:
                param = shard.param
                if not (
                    is_same
                    and self._after[id(param)] == _memory(param)
                    and group_of.get(id(param)) == shard.group
                    and self._core.state.get(param) is shard.state
                ):
                    return (
                        f"a parameter of shape {tuple(param.shape)}, its state or its group was "
                        "changed between backward() and step(), when it had been updated already"
                    )
                if not is_spent(param.grad):
                    what = "taken away" if param.grad is None else "replaced"
                    return (
                        f"the gradient of a parameter of shape {tuple(param.shape)} was {what} "
                        "between backward() and step(), when it had been used already"
                    )
        return None

    def _settings(self) -> list[Any]:
        return self.settings_of(self._core, list(self.flows))

    @staticmethod
    def settings_of(core: OffloadCore, devices: Sequence[torch.device]) -> list[Any]:
        """Return a copy of what an update depends on besides parameters, gradients and state."""
        attributes = {k: v for k, v in core.attributes().items() if k not in _NOT_COMPARED}
        groups = core.optimizer.param_groups
        values = [
            {k: v for k, v in g.items() if k not in ("params", "param_names")} for g in groups
        ]
        types = sorted({device.type for device in devices})
        autocast = {  # of which element-wise operations know nothing
            f"autocast on {kind}": (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in types
            if not core.traits.elementwise
        }
        return [autocast, snapshot(attributes), *(snapshot(v) for v in values)]

    def _update(self, chunk: ExpectedChunk) -> None:
        assert self.stepper is not None
        for stream in chunk.streams:
            chunk.flow.wait_for(stream)
        with self._gradients_in_place(chunk):
            chunk.flow.update(chunk.number, partial(self.stepper.update, chunk.shards))
        spent: list[torch.Tensor] = []
        params = list({id(shard.param): shard.param for shard in chunk.shards}.values())
        # Whoever saved one must not read it.
        torch.autograd.graph.increment_version([local(param) for param in params])
        for param in params:
            key = id(param)
            if any(other.missing for other in self._waiting[key]):
                continue
            grad = param.grad
            if grad is None:  # somebody's hook took it away, so it was not updated
                continue
            self.done.add(key)
            self._after[key] = _memory(param)
            if key in self._given:
                self._late.append(param)
            elif not is_spent(grad):
                spent.append(grad)
                spend(param, self._owner)
            if self._owner is not None:
                hold(param, self._ticket)  # last: each look at it is a call from here on
                self._forbidden.append(param)
        self._held.append((spent, chunk.flow.updates_so_far(), list(chunk.streams)))
        while len(self._held) > NUM_HELD:
            self._let_go()

    @contextmanager
    def _gradients_in_place(self, chunk: ExpectedChunk) -> Iterator[None]:
        """Let parameters have the gradients that were given for them."""
        params = {id(s.param): s.param for s in chunk.shards if id(s.param) in self._given}
        own = {key: param.grad for key, param in params.items()}
        try:
            for key, param in params.items():
                param.grad = self._given[key].view_as(param)
            yield
        finally:
            for key, param in params.items():
                param.grad = own[key]


class _Forbidden:
    """What parameters wait for that nobody may use before ``step()``. All of a step have the same
    one. It raises once, so that a checkpoint can be loaded where the optimizer is gone."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._has_raised = False

    def wait(self) -> None:
        if not self._has_raised:
            self._has_raised = True
            raise self._owner.used()


def _kernels_of(core: OffloadCore) -> list[bool]:
    """Tell which groups have fused kernels: those decide where a parameter can be cut."""
    return [bool(group.get("fused")) for group in core.optimizer.param_groups]


def _groups_of(core: OffloadCore) -> dict[int, int]:
    """Return the index of each parameter's group, by the parameter's id."""
    groups = core.optimizer.param_groups
    return {id(p): index for index, group in enumerate(groups) for p in group["params"]}


def _memory(param: torch.Tensor) -> tuple[int, int]:
    own = local(param)
    return own._version, own.data_ptr()


def _members(shards: Sequence[Shard]) -> tuple[Any, ...]:
    return tuple((id(shard.param), shard.part) for shard in shards)
