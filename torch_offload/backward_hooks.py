"""What torch calls or keeps for updates beside backward, while it may outlive them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from .run import Run

if TYPE_CHECKING:
    from .backward import BackwardOverlap


class EndOfTask:
    """A callback of the autograd engine. A backward that raises drops it without a call."""

    def __init__(self, reference: weakref.ref[BackwardOverlap], task: int) -> None:
        self._reference = reference
        self._task = task

    def __call__(self) -> None:
        """Tell that the backward has ended well."""
        overlap = self._reference()
        if overlap is not None:
            overlap.task_ended(self._task)

    def __del__(self) -> None:
        overlap = self._reference()
        if overlap is not None:
            overlap.task_raised(self._task)


class ParamOwner:
    """Of spent gradients, which may outlive the optimizer."""

    def __init__(self, reference: weakref.ref[BackwardOverlap]) -> None:
        self._reference = reference

    def find(self, param_id: int) -> torch.Tensor | None:
        """Return the parameter with this ``id``, if there is one."""
        overlap = self._reference()
        return None if overlap is None else overlap.find(param_id)

    def used(self) -> RuntimeError:
        """Return the error for who uses a parameter that was updated already."""
        text = (
            "a parameter was used between its update in backward() and step(), where a plain "
            "optimizer would not have updated it yet. "
        )
        overlap = self._reference()
        if overlap is None:
            return RuntimeError(
                f"{text}Its optimizer is gone: this is raised once. Load a checkpoint of the "
                "parameters to go on."
            )
        return overlap.refuse(
            f"{text}Call step() before the next forward, enter last_microbatch(optimizer) around "
            'the last backward() of those that accumulate, or use overlap="step"'
        )

    def refused(self) -> None:
        """Learn that somebody was refused a spent gradient."""
        overlap = self._reference()
        if overlap is not None and overlap.has_begun:
            overlap.refuse(
                "gradients were asked for between backward() and step(), where parameters had been "
                "updated with them already"
            )


def remove_all(hooks: dict[int, torch.utils.hooks.RemovableHandle]) -> None:
    """Remove these hooks, and forget them."""
    for handle in hooks.values():
        handle.remove()
    hooks.clear()


def spend_late(run: Run | None) -> None:
    """Take away what a run could not take before, if it lives."""
    if run is not None:
        run.spend_late()


def hook_of(reference: weakref.ref[BackwardOverlap]) -> Callable[[torch.Tensor], None]:
    """Return the hook that a parameter calls when something was added to its gradient."""

    def accumulated(param: torch.Tensor) -> None:
        overlap = reference()
        if overlap is not None:
            overlap.accumulated(param)

    return accumulated
