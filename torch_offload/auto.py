"""The mode chosen by itself: the first two steps are watched, and what they do decides.

Nobody touched a gradient or a hyper-parameter between backward and ``step()``, and both steps had
as many backwards: beside backward. Else, as with clipping: beside the next forward, if the model is
known, or in ``step()``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from .backward import BackwardOverlap
from .distributed import is_distributed
from .forward import ForwardOverlap
from .obstacles import obstacle
from .run import Run
from .values import same
from .waiting import hold, is_held, release

if TYPE_CHECKING:
    from .core import OffloadCore


class AutoOverlap(BackwardOverlap):
    """Takes the first two steps as a whole, then goes on beside backward or hands over.

    Args:
        core: that of the optimizer; a weak proxy.
    """

    def __init__(self, core: OffloadCore) -> None:
        super().__init__(core)
        self._is_watching = True
        #: Why not beside backward, as far as was seen.
        self._reason: str | None = None
        self._watched: list[torch.Tensor] = []
        self._settings: list[object] = []
        self._seen_tasks: set[int] = set()
        #: Accumulations in the first step, by the parameter's id.
        self._counts: dict[int, int] | None = None

    def accumulated(self, param: torch.Tensor) -> None:
        """As beside backward; and in the first steps look who uses gradients afterwards."""
        task = torch._C._current_graph_task_id()
        if self._is_watching and task >= 0 and task not in self._seen_tasks:
            self._seen_tasks.add(task)
            # DDP exchanges gradients in a callback, so this comes after it.
            call = _later(weakref.ref(self))
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: engine.queue_callback(call))
        super().accumulated(param)

    def look(self) -> None:
        """Notice from here on who uses a gradient."""
        if not self._is_watching:
            return
        self._settings = Run.settings_of(self._core, [])
        ticket = _Note(weakref.ref(self))
        for group in self._core.optimizer.param_groups:
            for param in group["params"]:
                grad = param.grad
                if grad is None:
                    continue
                if hasattr(grad, "__tensor_flatten__") and not is_distributed(grad):
                    self.note("gradients are made of other tensors: nobody sees who uses them")
                    return
                hold(grad, ticket)
                self._watched.append(grad)

    def note(self, reason: str) -> None:
        """Remember why updates must not be made beside backward."""
        self._reason = self._reason or reason

    def before_step(self) -> Run | None:
        """Return this step's run if it has begun."""
        if self._is_watching:
            for grad in self._watched:
                if is_held(grad):
                    release(grad)
            self._watched.clear()
            now = Run.settings_of(self._core, [])
            if self._settings and not same(self._settings, now):
                self.note("hyper-parameters are set between backward() and step()")
        return super().before_step()

    def after_step(self) -> None:
        """Decide after the second step that had gradients, or as soon as something speaks against
        updates beside backward."""
        if self._is_watching and self._seen_tasks:
            core, counts = self._core, self._counts
            reason = self._reason or obstacle(core) or self._of_counts(counts or {})
            if reason is not None:
                self._is_watching = False
                self._hand_over(reason)
                return
            if counts is None:
                self._counts = dict(self._seen)
                self._seen_tasks.clear()
                self._end_of_step()
                self.watch()
                self._follow_ddp()
                return
            self._is_watching = False
            core.notices.chosen("backward", "nothing uses gradients between backward() and step()")
        super().after_step()

    def _of_counts(self, counts: dict[int, int]) -> str | None:
        """Say whether the two steps differ, as they do where the backward of another loss comes by
        between them."""
        for key in counts.keys() & self._seen.keys():
            if counts[key] != self._seen[key]:
                return (
                    f"a gradient was made by {counts[key]} backwards in the first step and by "
                    f"{self._seen[key]} in the second"
                )
        return None

    def _hand_over(self, reason: str) -> None:
        core = self._core
        self.unwatch()
        if core.model() is None:
            core.overlap = None
            core.notices.chosen("step", f'{reason}; "forward" needs attach_model(optimizer, model)')
            return
        layout = core.planner.layout
        layout.budget = replace(layout.budget, from_end=False)  # for what is chosen from here on
        core.overlap = ForwardOverlap(core)
        core.overlap.watch()
        core.notices.chosen("forward", reason)


class _Note:
    """What watched gradients wait for: nothing. It tells that somebody uses them."""

    def __init__(self, reference: weakref.ref[AutoOverlap]) -> None:
        self._reference = reference

    def wait(self) -> None:
        overlap = self._reference()
        # Inside a backward it is FSDP2 that adds another micro-batch's.
        if overlap is not None and torch._C._current_graph_task_id() < 0:
            overlap.note("gradients are used between backward() and step(), as clipping does")


def _later(reference: weakref.ref[AutoOverlap]) -> Callable[[], None]:
    def look() -> None:
        overlap = reference()
        if overlap is not None:
            overlap.look()

    return look
