"""A shard: what is stepped at once. It stands in for the user's parameter, or for part of it.

It shares its memory and its gradient. For a DTensor the local tensors are stepped where that gives
the same bits, which it does if the optimizer is element-wise and parameter and gradient are
distributed alike; then there is no dispatch per operation, and large ones can be cut. Else the
stand-in is a DTensor too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from .chunk import Part, Run, TensorSpec, merge_runs
from .distributed import is_distributed, is_partial, local, same_place, wrapped, wrapping
from .layout import Home
from .standin import like


@dataclass(slots=True)
class Shard:
    """A parameter, or part of one, that takes part in this step.

    Attributes:
        group: index of its parameter group.
        param: the user's parameter; has a gradient.
        home: where its state lives on the host; ``None`` where only its first update can tell how
            much that is.
        state: the parameter's entry of ``optimizer.state``; empty before its first update.
        part: the part; ``None`` for the whole parameter.
        unwraps: it is a plain tensor in place of a DTensor.
    """

    group: int
    param: torch.Tensor
    home: Home | None
    state: dict[str, Any]
    part: Part | None = None
    unwraps: bool = False

    @property
    def is_first(self) -> bool:
        """Whether no other part of its parameter comes before it."""
        return self.part is None or self.part.is_first

    @property
    def is_alone(self) -> bool:
        """Whether it is a chunk of its own: a part fills a slot, and operations on DTensors may
        communicate, which all ranks must do in the same order, wherever their chunks end."""
        return self.part is not None or (is_distributed(self.param) and not self.unwraps)

    def is_as_planned(self) -> bool:
        """Whether the gradient that came later is one that this can be stepped with."""
        return not self.unwraps or _lies_like(self.param.grad, wrapping(self.param))

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return its part of a tensor that lies like the parameter, as a view."""
        if self.unwraps:
            tensor = local(tensor)
        return tensor if self.part is None else self.part.of(tensor)

    def stand_in(self) -> torch.Tensor:
        """Return the parameter that is stepped."""
        made = like(self.param, self.of(self.param.detach()))
        made.__dict__ = self.param.__dict__
        grad = self.param.grad
        if grad is not None:
            if grad.dtype != self.param.dtype:
                made.grad_dtype = grad.dtype
            made.grad = self.of(grad)
        return made

    def give_back(self, stand_in: torch.Tensor) -> None:
        """Let the parameter have what a step put into its stand-in's ``data`` and ``grad``.

        What is updated in parts is of a class that puts nothing there.
        """
        if self.part is not None or self.unwraps:
            return
        if stand_in.grad is not self.param.grad:
            self.param.grad = stand_in.grad
        own, made = local(self.param), local(stand_in)
        if made.data_ptr() != own.data_ptr() or made.shape != own.shape:
            self.param.data = stand_in.data

    def views(self, slot: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Return its state in a slot that was filled, as the optimizer is to see it."""
        assert self.home is not None, "a parameter with state has a home"
        found = self.home.on_device(self.part, slot)
        if self.unwraps:
            return found
        specs = {spec.key: spec for spec in self.home.place.tensors}
        return {key: wrapped(value, specs[key].wrapping) for key, value in found.items()}

    def whole(self, spec: TensorSpec) -> TensorSpec:
        """Describe the whole parameter's state tensor of which its own is described by ``spec``."""
        full = local(self.param) if self.unwraps else self.param
        if spec.shape != tuple(self.of(self.param).shape):
            return spec
        return replace(
            spec,
            shape=tuple(local(full).shape),
            wrapping=wrapping(self.param) if self.unwraps else spec.wrapping,
        )


def shards_of(
    group: int,
    param: torch.Tensor,
    home: Home | None,
    state: dict[str, Any],
    elementwise: bool,
    fused: bool,
) -> list[Shard]:
    """Return what is stepped for one parameter: itself, or the parts that its home is cut into."""
    if is_distributed(param) and not (elementwise and _is_local_enough(param, home)):
        return [Shard(group, param, home, state)]
    parts: Iterable[Part | None] = (None,)
    if home is not None and home.parts and cuts_on(param.device):
        # A parameter that was given another shape is torch's to refuse, as a whole.
        shape = tuple(local(param).shape)
        same = all(spec.shape == shape for spec in home.place.tensors)
        if same and (home.suits_fused or not fused):
            parts = home.parts
    unwraps = is_distributed(param)
    return [Shard(group, param, home, state, part, unwraps) for part in parts]


def cuts_on(device: torch.device) -> bool:
    """Whether parts get the bits there that they have when the whole tensor is updated.

    Not on a CPU, and there are no slots to keep small there: torch's CPU kernels may round the last
    elements of a tensor, which do not fill a vector register, in another way than the others.
    """
    return device.type != "cpu"


def by_chunk(
    shards: Iterable[Shard], device: torch.device
) -> tuple[list[list[Shard]], list[list[Shard]]]:
    """Sort one device's shards by chunk: those without state, and those with."""
    born: dict[tuple[int, int, int], list[Shard]] = {}
    known: dict[tuple[int, int, int], list[Shard]] = {}
    for number, shard in enumerate(shards):
        if shard.param.device == device:
            # Nobody knows how large the state of one without a home will be: a chunk of its own.
            has_home = shard.home is not None
            index = (
                0 if has_home else 1,
                shard.home.hosted.index if shard.home is not None else 0,
                number + 1 if shard.is_alone or not has_home else 0,
            )
            (known if shard.state else born).setdefault(index, []).append(shard)
    return [born[index] for index in sorted(born)], [known[index] for index in sorted(known)]


def runs(shards: Iterable[Shard]) -> tuple[Run, ...]:
    """Return what travels when the shards of one chunk are updated."""
    found: list[Run] = []
    for shard in shards:
        assert shard.home is not None, "a parameter with state has a home"
        if not shard.home.is_resident:
            found += shard.home.place.runs(shard.part)
    return merge_runs(sorted(found, key=lambda run: run.host))


def _is_local_enough(param: torch.Tensor, home: Home | None) -> bool:
    """Whether an element-wise update of the local tensors is that of the DTensor."""
    own = wrapping(param)
    return (
        param.dim() > 0  # the state of a scalar does not travel, and stays a DTensor
        and not is_partial(own)
        and _lies_like(param.grad, own)
        and all(
            spec.wrapping is None or same_place(own, spec.wrapping)
            for spec in (home.place.tensors if home is not None else ())
        )
    )


def _lies_like(grad: torch.Tensor | None, own: Any) -> bool:
    """Whether a gradient is distributed like its parameter; one that comes later is taken to be."""
    return grad is None or (
        same_place(own, wrapping(grad)) and not hasattr(local(grad), "__tensor_flatten__")
    )
