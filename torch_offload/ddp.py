"""DistributedDataParallel: gradients are final once their bucket has been averaged over the ranks.

A communication hook sees that. It averages as torch does without one, bit for bit. The buckets are
DDP's own, and their memory is not freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel


class Listener(Protocol):
    """Who wants to know of averaged gradients."""

    def averaged(
        self, params: list[torch.Tensor], grads: list[torch.Tensor], wait: Callable[[], object]
    ) -> None:
        """Learn that a bucket is being averaged.

        Args:
            params: whose gradients are in it.
            grads: views of the bucket.
            wait: makes the current stream wait for the end.
        """


def obstacle_of(model: DistributedDataParallel) -> str | None:
    """Return why the buckets of a model cannot be followed, or ``None``."""
    if getattr(model, "_comm_hooks", None) and model not in _listeners:
        return "DistributedDataParallel has a communication hook already, and takes only one"
    if getattr(model, "mixed_precision", None) is not None:
        return "DistributedDataParallel has a mixed precision of its own"
    ranks = torch.distributed.get_world_size(model.process_group)
    if model.gradient_as_bucket_view and ranks & (ranks - 1):
        return (
            f"gradients are views of buckets and there are {ranks} ranks, no power of two: "
            "DistributedDataParallel then divides in a way that a hook cannot repeat bit for bit"
        )
    return None


#: Who follows a model; not kept in it, so that it can be pickled.
_listeners: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[Listener]] = (
    weakref.WeakKeyDictionary()
)


class _State:
    """What torch gives to the hook. A copy of the model has an empty one."""

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        self.model = weakref.ref(model) if model is not None else None

    def __reduce__(self) -> Any:
        return _State, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> _State:
        return _State()


def follow(model: DistributedDataParallel, listener: Listener) -> None:
    """Tell ``listener`` of each bucket from now on; it is held weakly.

    A model takes one hook for good, so a later listener takes the place of the one before.
    """
    is_new = model not in _listeners
    _listeners[model] = weakref.ref(listener)
    if is_new:
        model.register_comm_hook(_State(model), _average)


def _average(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    model: Any = state.model() if state.model is not None else None
    if not getattr(model, "_divide_by_initial_world_size", True):
        raise RuntimeError(
            "join(divide_by_initial_world_size=False) divides gradients by the ranks that are "
            "left, which updates beside backward cannot follow. Use the default, or "
            'overlap="step".'
        )
    group = model.process_group if model is not None else None
    buffer = bucket.buffer()
    buffer.mul_(1.0 / torch.distributed.get_world_size(group))
    work = torch.distributed.all_reduce(buffer, group=group, async_op=True)
    reference = _listeners.get(model) if model is not None else None
    listener = reference() if reference is not None else None
    if listener is not None:
        listener.averaged(bucket.parameters(), bucket.gradients(), work.wait)
    future: torch.futures.Future[Any] = work.get_future()
    return future.then(lambda done: done.value()[0])


_average.__annotations__.clear()  # torch compares them with classes, and these are text
