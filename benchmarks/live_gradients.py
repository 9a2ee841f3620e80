"""How many bytes of gradients live at once during a backward that frees them early."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class LiveGradients:
    """Attributes:
    most_bytes: gradients that lived at once, at most; those that an update still reads included.
    all_bytes: what all of them together would need.
    """

    most_bytes: int = 0
    all_bytes: int = 0
    _alive: list[tuple[weakref.ref[Tensor], int]] = field(default_factory=list)

    @property
    def live_bytes(self) -> int:
        """Gradients that live now."""
        self._alive = [(grad, size) for grad, size in self._alive if grad() is not None]
        return sum(size for _, size in self._alive)

    def _note(self, grad: Tensor, num_bytes: int) -> None:
        self._alive.append((weakref.ref(grad), num_bytes))
        self.most_bytes = max(self.most_bytes, self.live_bytes)
        self.all_bytes += num_bytes


@contextmanager
def live_gradients(params: Sequence[Tensor]) -> Iterator[LiveGradients]:
    """Count the gradients of a backward as it goes on. It is slower for that.

    Args:
        params: parameters of a model, of which each gets one gradient.
    """
    found = LiveGradients()

    def accumulated(param: Tensor) -> None:
        grad = param.grad
        assert grad is not None
        num_bytes = getattr(grad, "to_local", lambda: grad)().nbytes  # of a DTensor what is here
        found._note(grad, num_bytes)

    handles = [param.register_post_accumulate_grad_hook(accumulated) for param in params]
    for param, handle in zip(params, handles, strict=True):
        # Before the hook that makes the update, which takes the gradient away. Torch goes by the
        # order in which they came in, so that move_to_end() would do nothing.
        hooks = param._post_accumulate_grad_hooks
        others = {key: hook for key, hook in hooks.items() if key != handle.id}
        hooks.clear()
        hooks.update({handle.id: accumulated, **others})
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
