"""Backward overlap: chunks are updated while backward still runs, as their gradients become final.

Vocabulary: a gradient is *final* after as many accumulations as it had at most in a step so far;
so a loop that accumulates over a fixed number of micro-batches need not say anything, and others
enter ``last_microbatch``. A gradient that was used is *spent*: it is freed, and whoever touches it
gets an error.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from .backward_hooks import EndOfTask, ParamOwner, hook_of, remove_all, spend_late
from .obstacles import ddp_of, obstacle
from .run import Run
from .standin import outside_autograd

if TYPE_CHECKING:
    from .core import OffloadCore


_RAISED = (
    "backward() raised after parameters had been updated (overlap='backward'), so what is left of "
    "this step is not what a plain optimizer would do"
)
_INSIDE = (
    "step() was called by a hook, while a backward() ran that had updated parameters already "
    '(overlap=\'backward\'). Call it after backward(), or use overlap="step" or "forward"'
)


class BackwardOverlap:
    """Watches the gradients of one optimizer's parameters, and updates chunks early.

    Args:
        core: that of the optimizer; a weak proxy.
    """

    def __init__(self, core: OffloadCore) -> None:
        self._core = core
        #: Backwards in several threads, or one over several devices, call the hooks side by side.
        self._lock = threading.RLock()
        #: Hooks by the parameter's id; a parameter keeps its own alive, not the optimizer.
        self._hooks: dict[int, torch.utils.hooks.RemovableHandle] = {}
        #: Group and position by the parameter's id.
        self._places: dict[int, tuple[int, int]] = {}
        #: Accumulations per step at most, and in this one; by the parameter's id.
        self._expected: dict[int, int] = {}
        self._seen: dict[int, int] = {}
        #: When the last accumulation of each came, in the step before and in this one.
        self.order: dict[int, int] = {}
        self._positions: dict[int, int] = {}
        self._count = 0
        self._run: Run | None = None
        #: Whether this step's run has begun; None before its first final gradient.
        self._has_begun: bool | None = None
        #: Backwards of this step that have not ended, and those in which updates were made.
        self._tasks: set[int] = set()
        self._updating: set[int] = set()
        #: Whether a backward of this step raised: before any update, so that its accumulations
        #: tell nothing, or after one.
        self._is_spoiled = False
        self._is_torn = False
        self._owner = ParamOwner(weakref.ref(self))
        # Parameters may outlive the optimizer.
        weakref.finalize(self, remove_all, self._hooks).atexit = False
        self._uses_context = False
        self._is_last = False
        self._is_ddp = False
        #: Under DistributedDataParallel: what has a gradient of this rank that is not averaged yet.
        self._local: set[int] = set()

    @contextmanager
    def last_microbatch(self) -> Iterator[None]:
        """Count the accumulations inside only."""
        if not self._uses_context:
            self._uses_context = True
            self._expected, self._seen, self._positions = {}, {}, {}
        before, self._is_last = self._is_last, True
        try:
            yield
        finally:
            self._is_last = before

    def position(self, param: torch.Tensor) -> float:
        """Tell when the gradient of ``param`` becomes final, as far as was seen yet."""
        return (self._positions or self.order).get(id(param), math.inf)

    def watch(self) -> None:
        """See to it that all parameters that may get a gradient have a hook."""
        hook = hook_of(weakref.ref(self))
        self._is_ddp = ddp_of(self._core.model()) is not None
        self._places.clear()
        for number, group in enumerate(self._core.optimizer.param_groups):
            for position, param in enumerate(group["params"]):
                self._places[id(param)] = (number, position)
                handle = self._hooks.get(id(param))
                present = getattr(param, "_post_accumulate_grad_hooks", None) or {}
                if (
                    param.requires_grad
                    and param.is_leaf
                    and (handle is None or handle.id not in present)
                ):
                    self._hooks[id(param)] = param.register_post_accumulate_grad_hook(hook)

    def find(self, param_id: int) -> torch.Tensor | None:
        """Return the parameter with this ``id``, if the optimizer still has it."""
        groups = self._core.optimizer.param_groups
        group, index = self._places.get(param_id, (len(groups), 0))
        params: list[torch.Tensor] = groups[group]["params"] if group < len(groups) else []
        if index < len(params) and id(params[index]) == param_id:
            return params[index]
        moved = (p for group in groups for p in group["params"] if id(p) == param_id)
        return next(moved, None)

    def unwatch(self) -> None:
        """Remove all hooks, and forget what was copied ahead."""
        remove_all(self._hooks)
        self.reset()

    def reset(self) -> None:
        """Forget what was copied ahead, and what was updated early."""
        if self._run is not None:
            self._run.release()
        self._run = None
        self._end_of_step()

    def finish(self) -> None:
        """Give up a step that was begun and that nobody will end."""
        if self.is_midway:
            self.refuse(
                "training ended between backward() and step(), where parameters had been updated "
                "already"
            )
        self.distrust()

    @property
    def has_begun(self) -> bool:
        """Whether this step's run has begun."""
        return bool(self._has_begun)

    @property
    def is_midway(self) -> bool:
        """Whether parameters were updated of which ``step()`` was not called yet."""
        return bool(self._has_begun and self._run is not None and self._run.done)

    def distrust(self) -> None:
        """Copy in again what was copied ahead: somebody looks at the state, and may change it."""
        if not self._has_begun:
            self._run = None

    def before_step(self) -> Run | None:
        """Return this step's run if it has begun.

        Raises:
            RuntimeError: plain torch would have used other gradients or hyper-parameters.
        """
        if self._tasks and not self.is_midway:
            self._spoil()
        run = self._run if self._has_begun else None
        if run is None:
            return None
        run.release()
        problem = run.what_changed()
        if self._tasks:
            is_inside = torch._C._current_graph_task_id() in self._tasks
            problem = _INSIDE if is_inside else _RAISED
        if problem is not None:
            raise self.refuse(problem)
        return run

    def after_step(self) -> None:
        """Learn from this step, and copy the first chunks of the next one in."""
        self._expected = {
            key: max(self._seen.get(key, 0), self._expected.get(key, 0))
            for key in self._seen.keys() | self._expected.keys()
        }
        self.order = self._positions or self.order
        self._end_of_step()
        self.watch()
        self._run = None
        if obstacle(self._core) is None:
            self._follow_ddp()
            try:
                self._run = Run(self._core, self.order, self._owner)
            except torch.OutOfMemoryError:
                # The step is done, and must not look as if it were not. The next one tries again.
                self._core.notices.no_memory_ahead()

    def _follow_ddp(self) -> None:
        """Be told of averaged gradients, where a model is distributed so."""
        ddp = ddp_of(self._core.model())
        if ddp is not None:
            from .ddp import follow

            follow(ddp, self)

    def _end_of_step(self) -> None:
        self._seen, self._positions, self._count = {}, {}, 0
        self._local.clear()
        self._has_begun = None
        self._tasks, self._updating = set(), set()
        self._is_spoiled = self._is_torn = False

    def _spoil(self) -> None:
        """A backward raised before anything was updated: take this step as a whole."""
        self._end_of_step()
        self._has_begun, self._is_spoiled = False, True

    def accumulated(self, param: torch.Tensor) -> None:
        """Note that something was added to the gradient of ``param``; update what is complete."""
        with self._lock:
            self._follow_task()
            if self._is_spoiled:
                return
            if self._is_ddp:
                self._check_not_done(param)
                self._local.add(id(param))
            elif self._is_final(param) and self._is_running():
                self._run_of_now().gradient_is_final(param)

    def averaged(
        self, params: list[torch.Tensor], grads: list[torch.Tensor], wait: Callable[[], object]
    ) -> None:
        """Note that the gradients of some parameters are being averaged over the ranks.

        Args:
            params: those of a bucket.
            grads: what to update them with; stay as they are until the next backward.
            wait: makes the current stream wait for them.
        """
        with self._lock:
            # Of one that has no gradient here, nobody knows yet whether it has one elsewhere.
            here = [(p, g) for p, g in zip(params, grads, strict=True) if id(p) in self._local]
            self._local -= {id(param) for param, _ in here}
            final = [(param, grad) for param, grad in here if self._is_final(param)]
            if final and self._is_running():
                self._run_of_now().gradients_are_averaged(final, wait)

    def _check_not_done(self, param: torch.Tensor) -> None:
        if self._has_begun and self._run is not None and id(param) in self._run.done:
            raise self.refuse(
                "a second backward() came after the update of a parameter and before step(), where "
                "a plain optimizer would not have updated anything yet. Call step() after each "
                "backward(), enter last_microbatch(optimizer) around the last backward() of those "
                'that accumulate, or use overlap="step"'
            )

    def _is_final(self, param: torch.Tensor) -> bool:
        """Count one more accumulation, and tell whether it is the last one of the step."""
        self._check_not_done(param)
        if self._uses_context and not self._is_last:
            return False
        key = id(param)
        self._positions[key] = self._count
        self._count += 1
        self._seen[key] = self._seen.get(key, 0) + 1
        return self._seen[key] >= self._expected.get(key, self._seen[key] + 1)

    def _is_running(self) -> bool:
        """Whether updates are being made in this backward; begin with them if it is time."""
        if self._has_begun is None:
            self._begin()
        if self._has_begun:
            self._updating.add(torch._C._current_graph_task_id())
        return bool(self._has_begun)

    def _run_of_now(self) -> Run:
        assert self._run is not None
        return self._run

    def _begin(self) -> None:
        reason = obstacle(self._core)
        self._has_begun = reason is None
        if reason is not None:
            self._core.notices.not_beside("backward", reason)
            return
        with outside_autograd():
            if self._run is None or not self._run.is_current():
                self._run = None  # its slots are those of the next one
                self._run = Run(self._core, self.order, self._owner)
                self._has_begun = self._run.is_current()  # else state was put elsewhere
            self._run.begin()

    def _follow_task(self) -> None:
        """Be told how this backward ends."""
        task = torch._C._current_graph_task_id()
        if task >= 0 and task not in self._tasks and not self._is_spoiled:
            self._tasks.add(task)
            end = EndOfTask(weakref.ref(self), task)
            torch.autograd.Variable._execution_engine.queue_callback(end)

    def task_ended(self, task: int) -> None:
        """Note that a backward has ended well."""
        with self._lock:
            self._end_task(task)

    def _end_task(self, task: int) -> None:
        self._tasks.discard(task)
        if task not in self._updating:
            return
        # Inside of others, of which a checkpoint with reentrant makes many, nobody must wait.
        if self._run is not None and (len(self._updating) == 1 or self._run.is_complete):
            self._run.wait()
        if self._is_ddp and self._run is not None:
            # DDP puts its own into the parameters' gradients in a callback that comes after this.
            run = weakref.ref(self._run)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: spend_late(run()))

    def task_raised(self, task: int) -> None:
        """Note that a backward has raised. If it had updated anything, ``step()`` will refuse."""
        with self._lock:
            if task in self._tasks:
                self._is_torn = self.is_midway
                if not self._is_torn:
                    self._spoil()

    def refuse(self, problem: str) -> RuntimeError:
        """Let no step be made until a checkpoint is loaded. Returns the error to raise."""
        if self._is_torn:
            problem = _RAISED
        if self._run is not None:
            self._run.release()  # or no checkpoint could be loaded
        reason = f"{problem}. Load a checkpoint of parameters and optimizer to go on."
        self._core.fail(reason)
        return RuntimeError(reason)
