"""The planner: gives every parameter's state a home, and brings back what went elsewhere."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from .chunk import TensorSpec
from .distributed import local, storage, wrapped, wrapping
from .layout import Home, Layout
from .placement import traveling, travels
from .refusals import check_gradient, check_overlap, check_parameter
from .residency import Budget, what_is_free
from .shard import Shard, shards_of

if TYPE_CHECKING:
    from .core import OffloadCore


class Planner:
    """Decides where the state of one optimizer's parameters lives.

    Args:
        core: that of the optimizer; a weak proxy.
        layout: where homes are kept.
    """

    def __init__(self, core: OffloadCore, layout: Layout) -> None:
        self._core = core
        self.layout = layout
        #: Where the parameters were in memory when it was last seen that none overlap.
        self._places: list[tuple[int, int]] = []
        self._num_sorted = 0

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
        self._core.synchronize()
        if specs is None:
            specs = {param: traveling(state) for param, state in states.items()}
        for param, state in states.items():
            home = self.layout.home(param)
            if home is not None and home.is_lent(self._core.state.get(param, {}), state):
                self.layout.forget(param)
        strangers = [(p, wanted) for p, wanted in specs.items() if not self.fits(p, wanted)]
        if strangers:
            self.layout.add(strangers)
        moves: list[tuple[dict[str, Any], Home, str, torch.Tensor]] = []
        for param, state in states.items():
            home = self.layout.home(param)
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
        groups = self._core.optimizer.param_groups
        params = [(index, param) for index, group in enumerate(groups) for param in group["params"]]
        self._plan(list(groups), params)
        return [
            (groups[index], param, self.layout.home(param))
            for index, param in params
            if param.requires_grad
        ]

    def storages(self) -> set[int]:
        """Return the addresses of the storages that make up the host state."""
        return {storage(view) for view in self.views()}

    def views(self) -> Iterator[torch.Tensor]:
        """Go through the tensors that make up the host state."""
        for home in self.layout:
            yield from (view for view in home.views.values() if local(view).numel())

    def keep_what_fits(self, device: torch.device) -> None:
        """Let chunks stay on ``device`` as far as the steps so far left memory there free."""
        free, total = torch.accelerator.get_memory_info(device)
        reserved = torch.accelerator.memory_reserved(device)
        peak = torch.accelerator.max_memory_reserved(device)
        left = what_is_free(total, total - free - reserved, peak)
        chunks: dict[int, list[torch.Tensor]] = {}
        for param, state in self._core.state.items():
            home = self.layout.home(param) if isinstance(param, torch.Tensor) else None
            if home is not None and param.device == device and self.is_home(param, state):
                chunks.setdefault(home.hosted.index, []).append(param)
        order = sorted(chunks)
        sizes = [
            sum(spec.num_bytes for param in chunks[index] for spec in self._specs(param))
            for index in order
        ]
        budget = replace(self.layout.budget, is_auto=False, num_bytes=left)
        params = [p for at in budget.choose(sizes) for p in chunks[order[at]]]
        self._core.synchronize()
        for param in params:
            values = dict(self._core.state[param])
            try:
                self.layout.add([(param, self._specs(param))], Budget(share=1.0))
            except torch.OutOfMemoryError:  # scattered memory; the step that decides this is done
                break
            home = self.layout.home(param)
            assert home is not None
            values.update({key: home.receive(key, values[key]) for key in home.views})
            self._core.state[param] = values
        self._core.notices.kept(device, self.layout.num_bytes(device, resident=True), left)

    def _specs(self, param: torch.Tensor) -> tuple[TensorSpec, ...]:
        home = self.layout.home(param)
        return () if home is None else home.place.tensors

    def sort_state(self) -> None:
        """Have the entries of new state in the order that they have in plain torch."""
        state = self._core.state
        new = {id(param) for param in list(state)[self._num_sorted :]}
        if new:
            for group in self._core.optimizer.param_groups:
                for param in group["params"]:
                    if id(param) in new and param in state:
                        state[param] = state.pop(param)
        self._num_sorted = len(state)

    def collect(
        self, groups: Iterable[Mapping[str, Any]], done: Collection[int] = ()
    ) -> list[Shard]:
        """Find what takes part in a step, and give every parameter that needs it a home.

        Args:
            groups: the optimizer's parameter groups.
            done: the ids of parameters that were updated already.

        Raises:
            RuntimeError: a gradient was used by an earlier step.
        """
        params = [(index, param) for index, group in enumerate(groups) for param in group["params"]]
        for _, param in params:
            check_parameter(param, self._core.traits.sparse)
        self._plan(list(groups), params)
        state = self._core.state
        active = [(i, p) for i, p in params if p.grad is not None and id(p) not in done]
        for _, param in active:
            check_gradient(param)
        foreign = {
            param: state[param]
            for _, param in active
            if state.get(param) and not self.is_home(param, state[param])
        }
        if foreign:
            # One that rests in this step may be in the place that another one goes back to.
            self.adopt(
                {p: state[p] for _, p in params if state.get(p) and not self.is_home(p, state[p])}
            )
        found = []
        for index, param in active:
            # get, not indexing: an empty entry would stand in checkpoints if the step failed.
            known = state.get(param) or {}
            home = self.layout.home(param)
            fused = bool(self._core.optimizer.param_groups[index].get("fused"))
            found += shards_of(index, param, home, known, self._core.traits.elementwise, fused)
        return found

    def _plan(
        self, groups: list[Mapping[str, Any]], params: list[tuple[int, torch.Tensor]]
    ) -> None:
        """Give a home to every parameter that will have state and has none that fits."""
        state = self._core.state
        self._core.probe.attributes = self._core.attributes()
        missing: list[tuple[torch.Tensor, tuple[TensorSpec, ...]]] = []
        unknown: list[torch.Tensor] = []
        num_wanted = 0
        for index, param in params:
            if not param.requires_grad and param.grad is None:
                continue  # frozen: no state, so no host memory
            num_wanted += 1
            if state.get(param):
                if self.layout.home(param) is None:
                    missing.append((param, traveling(state[param])))
            elif param.grad is not None or self.layout.home(param) is None:
                specs = self._probed(groups[index], param)
                if specs is None:
                    unknown.append(param)
                elif not self.fits(param, specs) or self._home_is_lent(param):
                    missing.append((param, specs))
        if missing or len(self.layout) > num_wanted:
            self.layout.keep_only(param for _, param in params)
        for param in unknown:
            self.layout.forget(param)
        places = [(id(param), local(param).data_ptr()) for _, param in params]
        if places != self._places:
            check_overlap([param for _, param in params])
            self._places = places
        if missing:
            overlap = self._core.overlap
            # What is updated at the same time travels together.
            if overlap is not None and not self._core.traits.random:
                missing.sort(key=lambda item: overlap.position(item[0]))
            self.layout.add(missing)

    def expected_bytes(self) -> int:
        """Return the bytes of state that travels, of parameters that have it or will."""
        self._core.probe.attributes = self._core.attributes()
        state, total = self._core.state, 0
        for group in self._core.optimizer.param_groups:
            for param in group["params"]:
                known = state.get(param)
                if known or param.requires_grad:
                    specs = traveling(known) if known else self._probed(group, param)
                    total += sum(spec.num_bytes for spec in specs or ())
        return total

    def _probed(
        self, group: Mapping[str, Any], param: torch.Tensor
    ) -> tuple[TensorSpec, ...] | None:
        """Tell what state ``param`` will have; ``None`` where only its first update can tell."""
        own = wrapping(param)
        if own is None:
            return self._core.probe.specs(group, param)
        if not self._core.traits.elementwise:
            return None  # a step on meta tensors would communicate
        specs = self._core.probe.specs(group, local(param))
        shape = tuple(local(param).shape)
        return specs and tuple(
            replace(spec, wrapping=own) if spec.shape == shape else spec for spec in specs
        )

    def fits(self, param: torch.Tensor, wanted: tuple[TensorSpec, ...]) -> bool:
        """Whether ``param`` has a home for tensors like these."""
        home = self.layout.home(param)
        return home is not None and home.fits(wanted)

    def _home_is_lent(self, param: torch.Tensor) -> bool:
        home = self.layout.home(param)
        return home is not None and home.is_lent({}, {})

    def is_home(self, param: torch.Tensor, state: Mapping[str, Any]) -> bool:
        """Whether all of this state is where the parameter's home is."""
        home = self.layout.home(param)
        if home is None:
            return False
        return home.views.keys() <= state.keys() and all(
            home.holds(key, value) if key in home.views else not travels(key, value)
            for key, value in state.items()
        )
