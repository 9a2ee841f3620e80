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
    if getattr(model, "_comm_hooks", None) and not hasattr(model, _FOLLOWED):
        return "DistributedDataParallel has a communication hook already, and takes only one"
    if getattr(model, "mixed_precision", None) is not None:
        return "DistributedDataParallel has a mixed precision of its own"
    return None


_FOLLOWED = "_torch_offload_listener"


def follow(model: DistributedDataParallel, listener: Listener) -> None:
    """Tell ``listener`` of each bucket from now on; it is held weakly.

    A model takes one hook for good, so a later listener takes the place of the one before.
    """
    is_new = not hasattr(model, _FOLLOWED)
    setattr(model, _FOLLOWED, weakref.ref(listener))
    if is_new:
        model.register_comm_hook(weakref.ref(model), _average)


def _average(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    model = state()
    group = model.process_group
    buffer = bucket.buffer()
    buffer.mul_(1.0 / torch.distributed.get_world_size(group))
    work = torch.distributed.all_reduce(buffer, group=group, async_op=True)
    listener = getattr(model, _FOLLOWED)()
    if listener is not None:
        listener.averaged(bucket.parameters(), bucket.gradients(), work.wait)
    future: torch.futures.Future[Any] = work.get_future()
    return future.then(lambda done: done.value()[0])


_average.__annotations__.clear()  # torch compares them with classes, and these are text
