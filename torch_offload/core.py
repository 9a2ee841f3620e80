"""OffloadCore: everything an offloaded optimizer has besides what torch gave it.

It belongs to one optimizer, which it holds weakly, and keeps no reference to parameter groups,
group dicts or ``optimizer.state``: torch and the frameworks replace those.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import replace
from typing import Any

import torch

from .chunk import TensorSpec, split_runs
from .config import OffloadConfig
from .distributed import local, storage, wrapped, wrapping
from .failure import UNFINISHED, Refusal, half_way
from .forks import keep_in_children
from .host import HostStore
from .layout import Home, Layout
from .notices import Notices
from .pipeline import Born, Creation, Pipeline, Traffic, Update
from .placement import traveling, travels
from .probe import StateProbe
from .refusals import (
    check_duplicates,
    check_not_capturing,
    check_order,
    check_overlap,
    check_parameter,
)
from .shard import Shard, by_chunk, runs, shards_of
from .stats import OffloadStats, StepClock
from .stepper import Stepper
from .traits import Traits

#: Attributes of an optimizer that a stand-in does not share with it.
_OWN_ATTRIBUTES = frozenset({"state", "param_groups", "step", "_offload_core"})


class OffloadCore:
    """Steps one optimizer with its state on the host.

    Args:
        optimizer: the converted optimizer.
        plain_class: its class before the conversion.
        config: the user's choices.
        traits: what a trial of the class found out.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        plain_class: type[torch.optim.Optimizer],
        config: OffloadConfig,
        traits: Traits,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.plain_class = plain_class
        self.config = config
        self.traits = traits
        self._refusal: Refusal | None = None
        #: Whether a step began to update and has neither ended nor left a refusal.
        self._is_adrift = False
        #: The instance attribute ``step`` that an LR scheduler had set before the conversion.
        self.scheduler_step: Any = None
        #: The step pre-hook that notices a bypass, and how many steps of ours are running.
        self.guard: Any = None
        self.entered = 0
        self.num_loads = 0
        self._pipelines: dict[torch.device, Pipeline] = {}
        self._stores: dict[torch.device, HostStore] = {}
        # A bound method would be a cycle: host memory would wait for the garbage collector.
        own = weakref.proxy(self)
        self._layout = Layout(
            config.chunk_bytes, traits.elementwise, lambda device: own._store_for(device)
        )
        self.probe = StateProbe(plain_class)
        self._clock: StepClock | None = None
        self._traffic = Traffic()
        self._num_chunks = 0
        self._notices = Notices(plain_class.__name__)
        keep_in_children(self)  # it has events

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The converted optimizer itself, also when a framework's wrapper was asked."""
        optimizer = self._optimizer()
        assert optimizer is not None, "the optimizer died before its core"
        return optimizer

    @property
    def state(self) -> MutableMapping[torch.Tensor, dict[str, Any]]:
        """``optimizer.state`` as torch stores it, without waiting for copies."""
        state: MutableMapping[torch.Tensor, dict[str, Any]] = self.optimizer.__dict__["state"]
        return state

    def synchronize(self) -> None:
        """Block the CPU until the host state is that of the last step (I4)."""
        for pipeline in self._pipelines.values():
            pipeline.synchronize()

    def adopt(
        self,
        states: Mapping[torch.Tensor, dict[str, Any]],
        specs: Mapping[torch.Tensor, tuple[TensorSpec, ...]] | None = None,
    ) -> None:
        """Move state tensors that somebody made elsewhere to the host, in place in ``states``.

        Args:
            states: parameter to its state, not empty; what travels becomes a host tensor.
            specs: dtypes and shapes to store it in; those it has, by default.

        Raises:
            MemoryError: the host has not enough memory. Nothing has changed.
        """
        self.synchronize()
        if specs is None:
            specs = {param: traveling(state) for param, state in states.items()}
        strangers = [(p, wanted) for p, wanted in specs.items() if not self._fits(p, wanted)]
        if strangers:
            self._layout.add(strangers)
        moves: list[tuple[dict[str, Any], Home, str, torch.Tensor]] = []
        for param, state in states.items():
            home = self._layout.home(param)
            assert home is not None
            moves += [
                (state, home, key, state[key])
                for key in home.views
                if not home.holds(key, state[key])
            ]
        # A source may be another parameter's place, when somebody exchanged states.
        owned = self.storages()
        # Cloned where they are found, so that an interruption leaves each state its own values.
        for state, _, key, source in moves:
            if storage(source) in owned:
                state[key] = wrapped(local(source).clone(), wrapping(source))
        for state, home, key, _ in moves:
            state[key] = home.receive(key, state[key])

    def reserve(self) -> list[tuple[dict[str, Any], torch.Tensor, Home | None]]:
        """Give every parameter that will get state a home.

        Returns:
            For each: its group, the parameter, its home; ``None`` where only the first update can
            tell what state there will be.

        Raises:
            MemoryError: the host has not enough memory. Nothing has changed.
        """
        groups = self.optimizer.param_groups
        params = [(index, param) for index, group in enumerate(groups) for param in group["params"]]
        self._plan(list(groups), params)
        return [
            (groups[index], param, self._layout.home(param))
            for index, param in params
            if param.requires_grad
        ]

    def step(self) -> None:
        """Update every parameter that has a gradient. Returns before the device is done.

        Raises:
            RuntimeError: an earlier step failed half-way and no checkpoint was loaded since.
        """
        if self.failure is not None:
            raise RuntimeError(self.failure.reason)
        optimizer = self.optimizer
        check_duplicates(optimizer.param_groups)
        shards = self._collect(optimizer.param_groups)
        for device in {shard.param.device for shard in shards}:
            self._store_for(device)
        check_order(self.traits, shards, self._pipelines)
        stepper = Stepper(
            self.plain_class,
            self._attributes(),
            optimizer.param_groups,
            shards,
            has_newcomers=not self.traits.random,
        )
        self._clock = StepClock(self._pipelines)
        self._traffic = Traffic()
        for device in self._pipelines:
            check_not_capturing(device)
        try:
            self._is_adrift = True
            for device, pipeline in self._pipelines.items():
                born, known = by_chunk(shards, device)
                pipeline.create([self._creation(stepper, chunk) for chunk in born], self._traffic)
                pipeline.update([_update(stepper, chunk) for chunk in known], self._traffic)
            stepper.finish()
            optimizer.__dict__.update(stepper.attributes)
            self.failure = None
        except BaseException as error:
            self._after_failure(stepper, error)
            raise
        self._clock.stop()
        self._num_chunks = stepper.num_chunks
        staging = self._traffic.staging_bytes
        self._notices.after_step(shards, self._layout, staging, self.config.chunk_bytes)

    def stats(self) -> OffloadStats:
        """Return the figures of the last step. Waits for its end."""
        return OffloadStats(
            h2d_bytes=self._traffic.h2d_bytes,
            d2h_bytes=self._traffic.d2h_bytes,
            step_s=self._clock.seconds() if self._clock else 0.0,
            num_chunks=self._num_chunks,
            num_slots=self._traffic.num_slots,
            staging_bytes=self._traffic.staging_bytes,
            host_bytes=sum(store.num_bytes for store in self._stores.values()),
            pinned_bytes=sum(store.pinned_bytes for store in self._stores.values()),
            setup_s=sum(store.setup_s for store in self._stores.values()),
        )

    @property
    def failure(self) -> Refusal | None:
        """Why no further step is allowed; a checkpoint clears it."""
        if self._is_adrift:
            self.fail(UNFINISHED)
        return self._refusal

    @failure.setter
    def failure(self, refusal: Refusal | None) -> None:
        self._refusal = refusal
        self._is_adrift = False

    def fail(self, reason: str) -> None:
        """Refuse further steps until a checkpoint is loaded."""
        self.failure = Refusal(reason, self._views())

    def warn_if_torn(self) -> None:
        """Warn whoever saves the state of a step that stopped half-way."""
        if self.failure is not None:
            text = f"this state is not that of a whole step: {self.failure.reason}"
            warnings.warn(text, stacklevel=3)

    def storages(self) -> set[int]:
        """Return the addresses of the storages that make up the host state."""
        return {storage(view) for view in self._views()}

    def _views(self) -> Iterator[torch.Tensor]:
        for home in self._layout:
            yield from (view for view in home.views.values() if local(view).numel())

    def _collect(self, groups: Iterable[Mapping[str, Any]]) -> list[Shard]:
        """Find the parameters that take part, and give every one that needs it a home."""
        params = [(index, param) for index, group in enumerate(groups) for param in group["params"]]
        for _, param in params:
            check_parameter(param, self.traits.sparse)
        self._plan(list(groups), params)
        state = self.state
        active = [(index, param) for index, param in params if param.grad is not None]
        foreign = {
            param: state[param]
            for _, param in active
            if state.get(param) and not self._is_home(param, state[param])
        }
        if foreign:
            # One that rests in this step may be in the place that another one goes back to.
            self.adopt(
                {p: state[p] for _, p in params if state.get(p) and not self._is_home(p, state[p])}
            )
        found = []
        for index, param in active:
            # get, not indexing: an empty entry would stand in checkpoints if the step failed.
            known = state.get(param) or {}
            home = self._layout.home(param)
            fused = bool(self.optimizer.param_groups[index].get("fused"))
            found += shards_of(index, param, home, known, self.traits.elementwise, fused)
        return found

    def _creation(self, stepper: Stepper, shards: list[Shard]) -> Creation:
        def apply() -> list[Born]:
            states = stepper.create(shards)
            specs = [
                tuple(shard.whole(spec) for spec in traveling(state or {}))
                for shard, state in zip(shards, states, strict=True)
            ]
            strangers = [
                (shard.param, wanted)
                for shard, wanted in zip(shards, specs, strict=True)
                if not self._fits(shard.param, wanted)
            ]
            if strangers:
                self._layout.add(strangers)
            born: list[Born] = []
            for shard, state in zip(shards, states, strict=True):
                home = self._layout.home(shard.param)
                assert home is not None
                if state is not None:
                    born += [
                        (local(state[key]), local(shard.of(view)))
                        for key, view in home.views.items()
                    ]
                    if shard.is_first:
                        self.state[shard.param] = {**state, **home.views}
            return born

        return Creation(apply)

    def _plan(
        self, groups: list[Mapping[str, Any]], params: list[tuple[int, torch.Tensor]]
    ) -> None:
        """Give a home to every parameter that will have state and has none that fits."""
        state = self.state
        self.probe.attributes = self._attributes()
        missing: list[tuple[torch.Tensor, tuple[TensorSpec, ...]]] = []
        unknown: list[torch.Tensor] = []
        num_wanted = 0
        for index, param in params:
            if not param.requires_grad and param.grad is None:
                continue  # frozen: no state, so no host memory
            num_wanted += 1
            if state.get(param):
                if self._layout.home(param) is None:
                    missing.append((param, traveling(state[param])))
            elif param.grad is not None or self._layout.home(param) is None:
                specs = self._probed(groups[index], param)
                if specs is None:
                    unknown.append(param)
                elif not self._fits(param, specs):
                    missing.append((param, specs))
        if missing or len(self._layout) > num_wanted:
            self._layout.keep_only(param for _, param in params)
        for param in unknown:
            self._layout.forget(param)
        if missing:
            check_overlap([param for _, param in params])
            self._layout.add(missing)

    def _probed(
        self, group: Mapping[str, Any], param: torch.Tensor
    ) -> tuple[TensorSpec, ...] | None:
        """Tell what state ``param`` will have; ``None`` where only its first update can tell."""
        own = wrapping(param)
        if own is None:
            return self.probe.specs(group, param)
        if not self.traits.elementwise:
            return None  # a step on meta tensors would communicate
        specs = self.probe.specs(group, local(param))
        shape = tuple(local(param).shape)
        return specs and tuple(
            replace(spec, wrapping=own) if spec.shape == shape else spec for spec in specs
        )

    def _attributes(self) -> dict[str, Any]:
        """Everything that a stand-in shares with the optimizer, GradScaler's tensors included."""
        return {k: v for k, v in self.optimizer.__dict__.items() if k not in _OWN_ATTRIBUTES}

    def _fits(self, param: torch.Tensor, wanted: tuple[TensorSpec, ...]) -> bool:
        home = self._layout.home(param)
        return home is not None and home.fits(wanted)

    def _is_home(self, param: torch.Tensor, state: Mapping[str, Any]) -> bool:
        home = self._layout.home(param)
        if home is None:
            return False
        return home.views.keys() <= state.keys() and all(
            home.holds(key, value) if key in home.views else not travels(key, value)
            for key, value in state.items()
        )

    def _store_for(self, device: torch.device) -> HostStore:
        if device not in self._stores:
            pipeline = self._pipelines[device] = Pipeline(
                device, self.config.num_slots, self._notices
            )
            self._stores[device] = HostStore(
                device, self.config.pin_memory, before_release=pipeline.synchronize
            )
        return self._stores[device]

    def _after_failure(self, stepper: Stepper, error: BaseException) -> None:
        changed = stepper.has_changed_anything()
        if changed:
            # First of all: whatever happens below, this state is not that of a whole step.
            self.fail(half_way(error, self.optimizer.param_groups, stepper.started))
        for device in self._pipelines:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
        if not changed:
            self.failure = None


def _update(stepper: Stepper, shards: list[Shard]) -> Update:
    home = shards[0].home
    assert home is not None, "a parameter with state has a home"
    block = home.hosted.block
    return Update(
        block=block.bytes,
        runs=split_runs(runs(shards), block.seams),
        slot_bytes=max(home.slot_bytes(shard.part) for shard in shards),
        apply=lambda slot: stepper.update(shards, slot),
    )
