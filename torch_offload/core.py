"""OffloadCore: everything an offloaded optimizer has besides what torch gave it.

It belongs to one optimizer, which it holds weakly, and keeps no reference to parameter groups,
group dicts or ``optimizer.state``: torch and the frameworks replace those.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, MutableMapping
from dataclasses import replace
from typing import Any

import torch

from .auto import AutoOverlap
from .backward import BackwardOverlap
from .config import OffloadConfig
from .failure import UNFINISHED, Refusal, half_way
from .forks import keep_in_children
from .forward import ForwardOverlap, ForwardRun
from .host import HostStore
from .layout import Layout
from .notices import Notices
from .pipeline import Pipeline
from .planner import Planner
from .probe import StateProbe
from .refusals import (
    check_duplicates,
    check_not_capturing,
    check_order,
)
from .residency import NUM_STEPS_WATCHED
from .run import Run
from .shard import by_chunk
from .stats import OffloadStats, StepClock
from .stepper import Stepper
from .tasks import creation_of, update_of
from .traits import Traits
from .work import Traffic

#: Attributes of an optimizer that a stand-in does not share with it.
_OWN_ATTRIBUTES = frozenset({"state", "param_groups", "step", "_offload_core"})
_OVERLAPS: dict[str, Callable[..., BackwardOverlap | ForwardOverlap]] = {
    "backward": BackwardOverlap,
    "forward": ForwardOverlap,
    "auto": AutoOverlap,
}


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
        self.pipelines: dict[torch.device, Pipeline] = {}
        # Parameters, and state that stays on the device, must not be freed under an update.
        weakref.finalize(optimizer, _synchronize, self.pipelines).atexit = False
        self._stores: dict[torch.device, HostStore] = {}
        # A bound method would be a cycle: host memory would wait for the garbage collector.
        own = weakref.proxy(self)
        self.planner = Planner(
            own,
            Layout(
                config.chunk_bytes,
                traits.elementwise,
                lambda device: own._store_for(device),
                config.budget(),
            ),
        )
        self.probe = StateProbe(plain_class)
        self._clock: StepClock | None = None
        self._traffic = Traffic()
        self._num_chunks = self._num_early = self._num_steps = 0
        self.notices = Notices(plain_class.__name__)
        #: What was copied in for the next step.
        self._ahead: Run | None = None
        self._model: weakref.ref[torch.nn.Module] | None = None
        #: What decides when chunks are updated; ``None``: ``step()`` alone does.
        self.overlap: BackwardOverlap | ForwardOverlap | None = self._new_overlap()
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
        _synchronize(self.pipelines)

    def step(self) -> None:
        """Update every parameter that has a gradient. Returns before the device is done.

        Raises:
            RuntimeError: an earlier step failed half-way and no checkpoint was loaded since.
        """
        if self.failure is not None:
            raise RuntimeError(self.failure.reason)
        optimizer = self.optimizer
        check_duplicates(optimizer.param_groups)
        self._try_new_settings()
        run: Run | ForwardRun | None = self._take_ahead()
        if self.overlap:
            run = self.overlap.before_step()
        shards = self.planner.collect(optimizer.param_groups, run.done if run else frozenset())
        for device in {shard.param.device for shard in shards}:
            self._store_for(device)
        check_order(self.traits, shards, self.pipelines)
        stepper = run.stepper if run is not None and run.stepper else self.new_stepper()
        if not self.traits.random:
            stepper.expect(shards)
        self._clock = StepClock(self.pipelines)
        self._traffic = run.traffic if run is not None else Traffic()
        for device in self.pipelines:
            check_not_capturing(device)
        num_early = stepper.num_chunks
        try:
            self._is_adrift = True
            for device, pipeline in self.pipelines.items():
                born, known = by_chunk(shards, device)
                pipeline.create(
                    [creation_of(self, chunk, stepper) for chunk in born], self._traffic
                )
                if run is None:
                    work = [update_of(chunk, stepper) for chunk in known]
                    pipeline.update(work, self._traffic)
                else:
                    run.finish(device, known)
            if run is not None:
                run.end()
            if self.overlap:
                self.planner.sort_state()
            stepper.finish()
            for key in self.attributes().keys() - stepper.attributes.keys():
                del optimizer.__dict__[key]
            optimizer.__dict__.update(stepper.attributes)
            self.failure = None
        except BaseException as error:
            self.after_failure(stepper, error)
            raise
        self._clock.stop()
        self._num_chunks, self._num_early = stepper.num_chunks, num_early
        staging = self._traffic.staging_bytes
        self.notices.after_step(shards, self.planner.layout, staging, self.config.chunk_bytes)
        self._num_steps += 1
        if self.planner.layout.budget.is_auto and self._num_steps == NUM_STEPS_WATCHED:
            for device in [d for d in self.pipelines if d.type != "cpu"]:
                self.planner.keep_what_fits(device)
        if self.overlap:
            self.overlap.after_step()

    def _try_new_settings(self) -> None:
        """Where groups have settings that no trial has seen, try the class with them.

        Raises:
            NotImplementedError: it cannot be offloaded with them.
        """
        groups, known = self.optimizer.param_groups, self.traits.settings
        if known is None or not known.has_others(groups):
            return
        from .independence import check_independent
        from .trial import own_attributes

        attributes = own_attributes(self.optimizer)
        traits = check_independent(self.plain_class, attributes, groups, self.state)
        if replace(traits, settings=None) != replace(self.traits, settings=None):
            raise NotImplementedError(
                f"{self.plain_class.__name__} is stepped in another way with the settings that its "
                "groups have now. Call unoffload() and offload() again."
            )
        if traits.settings is not None:
            self.traits = replace(traits, settings=known.joined(traits.settings))

    def new_stepper(self, own_tensors: bool = False) -> Stepper:
        """Begin a step with the hyper-parameters as they are now.

        Args:
            own_tensors: those on a device may change before the updates are done.
        """
        groups = self.optimizer.param_groups
        return Stepper(self.plain_class, self.attributes(), groups, own_tensors)

    def model(self) -> torch.nn.Module | None:
        """Return the model that was attached, if it lives."""
        return self._model() if self._model is not None else None

    def attach(self, model: torch.nn.Module) -> None:
        """Know the model whose parameters these are."""
        self._model = weakref.ref(model)
        if self.overlap:
            self.overlap.watch()

    def _new_overlap(self) -> BackwardOverlap | ForwardOverlap | None:
        kind = _OVERLAPS.get(self.config.overlap)
        return kind(weakref.proxy(self)) if kind else None

    def set_overlap(self, config: OffloadConfig) -> None:
        """Go on with a config that differs in its overlap."""
        if self.overlap is not None:
            self.overlap.unwatch()
        self._ahead = None
        for pipeline in self.pipelines.values():
            pipeline.give_up_slots()
        self.config = config
        self.planner.layout.budget = config.budget()
        self.overlap = self._new_overlap()
        if self.overlap is not None:
            self.overlap.watch()

    def prefetch(self) -> Run | None:
        """Copy the first chunks of the next step in. ``None`` where there is no use in it."""
        if self.overlap is None and self.failure is None:
            homes = {id(p): self.planner.layout.home(p) for p in self.state}
            order = {key: home.hosted.index for key, home in homes.items() if home is not None}
            self._ahead = None
            self._ahead = Run(weakref.proxy(self), order)
        return self._ahead

    def _take_ahead(self) -> Run | None:
        """Begin with what was copied in ahead, if nobody wrote to it since."""
        run, self._ahead = self._ahead, None
        if run is None or not run.is_current():
            return None
        run.begin()
        return run

    def cancel_prefetch(self, run: Run) -> None:
        """Free the slots, if the step has not begun."""
        if run is self._ahead:
            self._ahead = None
            for pipeline in self.pipelines.values():
                pipeline.give_up_slots()

    def stats(self) -> OffloadStats:
        """Return the figures of the last step. Waits for its end."""
        return OffloadStats(
            h2d_bytes=self._traffic.h2d_bytes,
            d2h_bytes=self._traffic.d2h_bytes,
            step_s=self._clock.seconds() if self._clock else 0.0,
            num_chunks=self._num_chunks,
            num_early_chunks=self._num_early,
            num_slots=self._traffic.num_slots,
            staging_bytes=self._traffic.staging_bytes,
            host_bytes=sum(store.num_bytes for store in self._stores.values()),
            pinned_bytes=sum(store.pinned_bytes for store in self._stores.values()),
            resident_bytes=sum(self.planner.layout.num_bytes(d, True) for d in self.pipelines),
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
        scalars = [
            value
            for state in self.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor) and not value.dim()
        ]
        self.failure = Refusal(reason, [*self.planner.views(), *scalars])

    def _is_midway(self) -> bool:
        return isinstance(self.overlap, BackwardOverlap) and self.overlap.is_midway

    def distrust(self) -> None:
        """Copy in again what was copied ahead: somebody looks at the state, and may change it."""
        self._ahead = None
        if isinstance(self.overlap, BackwardOverlap):
            self.overlap.distrust()

    def check_between_steps(self, what: str) -> None:
        """Refuse what cannot be done while backward has updated some parameters.

        Raises:
            RuntimeError: it has.
        """
        if self._is_midway():
            raise RuntimeError(f"{what} between backward() and step(): call step() first.")

    def warn_if_torn(self) -> None:
        """Warn whoever saves the state of a step that stopped half-way."""
        if self.failure is None and self._is_midway():
            warnings.warn(
                "this state is that of a step which backward() has begun and step() has not ended",
                stacklevel=3,
            )
        if self.failure is not None:
            text = f"this state is not that of a whole step: {self.failure.reason}"
            warnings.warn(text, stacklevel=3)

    def attributes(self) -> dict[str, Any]:
        """Everything that a stand-in shares with the optimizer, GradScaler's tensors included."""
        return {k: v for k, v in self.optimizer.__dict__.items() if k not in _OWN_ATTRIBUTES}

    def _store_for(self, device: torch.device) -> HostStore:
        if device not in self._stores:
            pipeline = self.pipelines[device] = Pipeline(
                device, self.config.num_slots, self.notices
            )
            self._stores[device] = HostStore(
                device, self.config.pin_memory, before_release=pipeline.synchronize
            )
        return self._stores[device]

    def after_failure(self, stepper: Stepper, error: BaseException) -> None:
        """Refuse further steps, unless nothing was changed."""
        changed = stepper.has_changed_anything()
        if changed:
            # First of all: whatever happens below, this state is not that of a whole step.
            self.fail(half_way(error, self.optimizer.param_groups, stepper.started))
        for device in self.pipelines:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
        if not changed:
            self.failure = None


def _synchronize(pipelines: dict[torch.device, Pipeline]) -> None:
    for pipeline in pipelines.values():
        pipeline.synchronize()
