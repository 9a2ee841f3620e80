"""Layout: which parameter's state lives where on the host.

Vocabulary: a *home* is the place of one parameter's state: a range of bytes in the block of a
chunk, and the CPU tensors over it that ``optimizer.state[p]`` shows.

Parameters are known by ``id`` and not held: frameworks replace them after the conversion, and a
reference kept here would keep the old weights in memory. A weak one would not, but tensors with one
cannot be swapped (``torch.utils.swap_tensors``). Should another parameter get the id of one that
died, it gets that one's place, which nobody needs any more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .chunk import Chunk, Part, Place, TensorSpec, cut_parts, in_whole_vectors, plan_chunks
from .distributed import local, wrapped
from .host import Block, HostStore
from .residency import Budget


def _num_references(values: Mapping[str, object], key: str) -> int:
    return sys.getrefcount(values[key])


#: To what only a dict holds; it depends on the version of Python.
_ALONE = _num_references({"": object()}, "")


@dataclass(eq=False, slots=True)
class HostedChunk:
    """A planned chunk and the memory that owns its bytes between steps.

    Attributes:
        index: its rank in age.
        chunk: its size, and who is in it.
        block: its host memory; ``None`` where it stays on the device.
    """

    index: int
    chunk: Chunk
    block: Block | None

    def tensor(self, spec: TensorSpec, offset: int) -> torch.Tensor:
        """Return one tensor of it, with a storage of its own."""
        if self.block is not None:
            return self.block.tensor(spec, offset)
        device = self.chunk.device
        return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device)


@dataclass(eq=False, slots=True)
class Home:
    """The place of one parameter's state.

    Attributes:
        hosted: the chunk that it is part of.
        place: its byte range and tensors in that chunk.
        parts: how it is cut to be updated; empty where it is updated as a whole.
        suits_fused: whether they are exact for torch's fused kernels, too.
        views: state key to the tensor that ``optimizer.state`` shows, with a storage of its own. A
            DTensor for a DTensor, with its local tensor on the host.
    """

    hosted: HostedChunk
    place: Place
    parts: tuple[Part, ...] = ()
    suits_fused: bool = False
    views: dict[str, torch.Tensor] = field(init=False, default_factory=dict)
    _where: dict[str, tuple[TensorSpec, int]] = field(init=False)
    #: What each view was when it was made: dtype, shape, strides and address.
    _facts: dict[str, tuple[Any, ...]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        tensors = zip(self.place.tensors, self.place.offsets, strict=True)
        self._where = {spec.key: (spec, offset) for spec, offset in tensors}
        for key in self._where:
            self._renew(key)

    @property
    def is_resident(self) -> bool:
        """Whether it is on the device."""
        return self.hosted.block is None

    def local(self, key: str) -> torch.Tensor:
        """Return the tensor over this memory."""
        return local(self.views[key])

    def holds(self, key: str, value: Any) -> bool:
        """Whether ``value`` is this place's tensor, and still over this place's memory.

        ``tensor.data = ...`` and ``share_memory_()`` put other memory under the same object.
        """
        return value is self.views[key] and _facts_of(local(value)) == self._facts[key]

    def fits(self, wanted: Iterable[TensorSpec]) -> bool:
        """Whether tensors with these specs can be copied here without losing anything."""
        own = {spec.key: spec for spec in self.place.tensors}
        wanted = list(wanted)
        return own.keys() == {spec.key for spec in wanted} and all(
            own[spec.key].same_kind(spec) for spec in wanted
        )

    def is_lent(self, state: Mapping[str, Any], coming: Mapping[str, Any]) -> bool:
        """Whether somebody keeps a tensor of here that would be written over.

        Args:
            state: the parameter's entry of ``optimizer.state``.
            coming: what is about to be put here.
        """
        return any(
            coming.get(key) is not self.views[key]
            and _num_references(self.views, key) > _ALONE + (state.get(key) is self.views[key])
            for key in self.views
        )

    def receive(self, key: str, source: torch.Tensor) -> torch.Tensor:
        """Copy ``source`` here and return the tensor that shows it. Blocks until it is done."""
        if not self.holds(key, self.views[key]):
            self._renew(key)
        self.local(key).copy_(local(source).detach())
        return self.views[key]

    def on_device(self, part: Part | None, slot: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Return the local state tensors, or that part of them, in a slot that was filled.

        Args:
            part: the part that is updated; ``None`` for the whole parameter.
            slot: uint8, on the device; ``None`` where they stay there.
        """
        if slot is None:
            return {key: self.local(key) for key in self.views}
        place = self.place if part is None else self.place.packed(part)
        return {
            spec.key: slot.view(spec.dtype).as_strided(
                spec.shape, spec.stride, offset // spec.dtype.itemsize
            )
            for spec, offset in zip(place.tensors, place.offsets, strict=True)
        }

    def slot_bytes(self, part: Part | None) -> int:
        """Return how large a slot must be."""
        return self.hosted.chunk.num_bytes if part is None else self.place.packed(part).stop

    def _renew(self, key: str) -> None:
        spec, offset = self._where[key]
        made = self.hosted.tensor(spec, offset)
        self.views[key] = wrapped(made, spec.wrapping)
        self._facts[key] = _facts_of(made)


def _facts_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr()


class Layout:
    """The homes of all parameters of one optimizer.

    Args:
        chunk_bytes: upper bound of a chunk.
        cuts: whether a parameter with more state than that may be updated in parts.
        store_for: the host store of a device.
        budget: what may stay on a device.
    """

    def __init__(
        self,
        chunk_bytes: int,
        cuts: bool,
        store_for: Callable[[torch.device], HostStore],
        budget: Budget | None = None,
    ) -> None:
        self.budget = budget or Budget()
        self._chunk_bytes = chunk_bytes
        self._cuts = cuts
        self._store_for = store_for
        self._homes: dict[int, Home] = {}
        self._next_index = 0

    def __len__(self) -> int:
        return len(self._homes)

    def __iter__(self) -> Iterator[Home]:
        return iter(self._homes.values())

    def home(self, param: torch.Tensor) -> Home | None:
        """Return the place of ``param``'s state, or ``None`` if it has none on its device yet."""
        home = self._homes.get(id(param))
        # model.to() moves a parameter to another device without making a new one.
        return home if home is not None and home.hosted.chunk.device == param.device else None

    def add(
        self,
        states: Sequence[tuple[torch.Tensor, Sequence[TensorSpec]]],
        budget: Budget | None = None,
    ) -> None:
        """Give each parameter a home for the tensors named, in new chunks, in this order.

        Args:
            states: parameters and what they need room for.
            budget: what of it may stay on a device; that of the layout by default.

        Raises:
            MemoryError: the host has not enough memory. Nothing has changed.
        """
        chunks = plan_chunks([(param.device, specs) for param, specs in states], self._chunk_bytes)
        blocks: dict[int, Block] = {}
        for device in {chunk.device for chunk in chunks}:
            members = [i for i, chunk in enumerate(chunks) if chunk.device == device]
            residents = (budget or self.budget).choose(
                [chunks[i].num_bytes for i in members],
                self.num_bytes(device),
                self.num_bytes(device, resident=True),
            )
            members = [i for at, i in enumerate(members) if at not in set(residents)]
            sizes = [chunks[i].num_bytes for i in members]
            borders = [[o for place in chunks[i].places for o in place.offsets] for i in members]
            allocated = self._store_for(device).allocate(sizes, borders)
            blocks.update(zip(members, allocated, strict=True))
        for position, chunk in enumerate(chunks):
            hosted = HostedChunk(self._next_index, chunk, blocks.get(position))
            self._next_index += 1
            for place in chunk.places:
                param = states[place.param][0]
                shape = tuple(local(param).shape)
                cuts = self._cuts and hosted.block is not None
                parts = cut_parts(place.tensors, shape, self._chunk_bytes) if cuts else ()
                suits = in_whole_vectors(parts, place.tensors)
                self._homes[id(param)] = Home(hosted, place, parts, suits)

    def num_bytes(self, device: torch.device, resident: bool = False) -> int:
        """Count the bytes of state of a device's parameters, or of those that stay there."""
        return sum(
            spec.num_bytes
            for home in self
            if home.hosted.chunk.device == device and (home.is_resident or not resident)
            for spec in home.place.tensors
        )

    def forget(self, param: torch.Tensor) -> None:
        """Take ``param``'s place away."""
        self._homes.pop(id(param), None)

    def keep_only(self, params: Iterable[torch.Tensor]) -> None:
        """Forget every parameter but these. A chunk without parameters gives its memory back."""
        kept = {id(param) for param in params}
        self._homes = {key: home for key, home in self._homes.items() if key in kept}
