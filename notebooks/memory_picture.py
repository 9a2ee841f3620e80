"""What memory is used for while a model trains, by kind, and its picture.

Vocabulary: a *point* is a moment of a training step, between two layers of the model or at the end
of the step. On a GPU the sum at a point is the most that torch's allocator gave out since the point
before it. On a CPU nothing measures that, and the bytes of tensors are added up: activations are
then the tensors that autograd keeps for backward.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from live_gradients import LiveGradients, live_gradients
from torch_offload import is_offloaded, offload_stats

KINDS = ("parameters", "gradients", "optimizer state", "activations, other")
_COLORS = ("#4477aa", "#ccbb44", "#ee6677", "#bbbbbb")


class Memory:
    """The points of a run. `steps` has, for each step, the bytes of each of `KINDS` by point."""

    def __init__(self, params: list[nn.Parameter], optimizer: Any, grads: LiveGradients) -> None:
        self.optimizer, self.grads = optimizer, grads
        self.device = params[0].device
        self.kept = _Kept(params)
        self.steps: list[list[tuple[int, int, int, int]]] = []
        self._params_bytes = sum(p.nbytes for p in params)
        self._points: list[tuple[int, int]] = []  # live gradients, all

    @property
    def peak_bytes(self) -> int:
        """The most of all kinds together at any point."""
        return max(sum(point) for points in self.steps for point in points)

    def point(self) -> None:
        """Note a point."""
        grads_bytes = self.grads.live_bytes
        if self.device.type == "cuda":
            total = torch.cuda.max_memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            total = self._params_bytes + grads_bytes + self.kept.num_bytes
        self._points.append((grads_bytes, total))

    def end_step(self) -> None:
        """Note the last point of a step, and what its state occupied on the device."""
        before = self.steps[-1][-1][2] if self.steps else 0
        self.point()
        during, at_end = self._state_bytes(before)
        states = [during] * (len(self._points) - 1) + [at_end]
        rows = []
        for (grads_bytes, total), state_bytes in zip(self._points, states, strict=True):
            if self.device.type != "cuda":
                total += state_bytes
            other = max(total - self._params_bytes - grads_bytes - state_bytes, 0)
            rows.append((self._params_bytes, grads_bytes, state_bytes, other))
        self.steps.append(rows)
        self._points = []

    def _state_bytes(self, before: int) -> tuple[int, int]:
        """Return the bytes on the device before the update, and in it."""
        if is_offloaded(self.optimizer):
            stats = offload_stats(self.optimizer)
            slots = stats.resident_bytes + stats.staging_bytes
            return (slots if stats.num_early_chunks else stats.resident_bytes), slots
        tensors = (v for state in self.optimizer.state.values() for v in state.values())
        size = sum(v.nbytes for v in tensors if isinstance(v, Tensor) and v.device == self.device)
        return before, size


@contextmanager
def watching(model: nn.Module, layers: Iterable[nn.Module], optimizer: Any) -> Iterator[Memory]:
    """Note a point before and after each layer, in forward and in backward.

    Args:
        model: on one device.
        layers: modules of it that return one tensor.
        optimizer: plain or offloaded, or a framework's wrapper. Call ``end_step()`` of what this
            yields after each of its steps.
    """
    params = list(model.parameters())
    with ExitStack() as stack:
        memory = Memory(params, optimizer, stack.enter_context(live_gradients(params)))

        def after(module: nn.Module, inputs: Any, output: Tensor) -> None:
            memory.point()
            if output.requires_grad:
                output.register_hook(lambda grad: memory.point())

        for layer in layers:
            stack.callback(layer.register_forward_hook(after).remove)
        if memory.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(memory.device)
        else:
            stack.enter_context(
                torch.autograd.graph.saved_tensors_hooks(memory.kept.pack, lambda held: held.tensor)
            )
        try:
            yield memory
        finally:
            memory.optimizer = None  # or what was noted would keep it, and its state


def draw(axes: Any, memory: Memory, title: str) -> None:
    """Draw the points as a stack of kinds over the steps.

    Args:
        axes: matplotlib's.
        memory: a run's.
        title: the line above it.
    """
    x, points = [0.0], [memory.steps[0][0]]
    for number, step in enumerate(memory.steps):
        x += [number + (index + 1) / len(step) for index in range(len(step))]
        points += step
    unit, name = (2**30, "GiB") if memory.peak_bytes >= 2**26 else (1e6, "MB")
    rows = [[num_bytes / unit for num_bytes in kind] for kind in zip(*points, strict=True)]
    # A point is about what was before it.
    axes.stackplot(x, rows, labels=KINDS, colors=_COLORS, step="pre")
    axes.margins(x=0)
    axes.set_xlabel("steps")
    axes.set_ylabel(name)
    axes.set_title(f"{title}: peak {memory.peak_bytes / unit:.3g} {name}")


class _Held:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _Kept:
    """Bytes of the storages that autograd keeps, those of parameters excepted."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self._excepted = {p.untyped_storage().data_ptr() for p in params}
        self._users: Counter[tuple[int, int]] = Counter()

    @property
    def num_bytes(self) -> int:
        return sum(size for (_, size), users in self._users.items() if users)

    def pack(self, tensor: Tensor) -> _Held:
        storage = tensor.untyped_storage()
        held = _Held(tensor.detach())
        if storage.data_ptr() not in self._excepted:
            key = storage.data_ptr(), storage.nbytes()
            self._users[key] += 1
            weakref.finalize(held, self._users.subtract, [key])
        return held
