"""Layout: which parameter's state lives where on the host.

Vocabulary: a *home* is the place of one parameter's state: a range of bytes in the block of a
chunk, and the CPU tensors over it that ``optimizer.state[p]`` shows.

Parameters are held weakly: frameworks replace them after the conversion, and a reference kept here
would keep the old weights in memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from .chunk import Chunk, Shard, TensorSpec, plan_chunks
from .host import Block, HostStore


@dataclass(eq=False, slots=True)
class HostedChunk:
    """A planned chunk and the host memory that owns its bytes. ``index`` is its rank in age."""

    index: int
    chunk: Chunk
    block: Block


@dataclass(eq=False, slots=True)
class Home:
    """The place of one parameter's state.

    Attributes:
        param: the parameter, weakly.
        hosted: the chunk that it is part of.
        shard: its byte range and tensors in that chunk.
        views: state key to CPU tensor, each with a storage of its own.
    """

    param: weakref.ref[torch.Tensor]
    hosted: HostedChunk
    shard: Shard
    views: dict[str, torch.Tensor] = field(default_factory=dict)


class Layout:
    """The homes of all parameters of one optimizer.

    Args:
        chunk_bytes: upper bound of a chunk.
        store_for: the host store of a device.
    """

    def __init__(self, chunk_bytes: int, store_for: Callable[[torch.device], HostStore]) -> None:
        self._chunk_bytes = chunk_bytes
        self._store_for = store_for
        self._homes: dict[int, Home] = {}
        self._next_index = 0

    def __len__(self) -> int:
        return len(self._homes)

    def home(self, param: torch.Tensor) -> Home | None:
        """Return the place of ``param``'s state, or ``None`` if it has none on its device yet."""
        home = self._homes.get(id(param))
        # An id may be used again after its parameter died, and model.to() moves a parameter.
        if home is None or home.param() is not param or home.hosted.chunk.device != param.device:
            return None
        return home

    def add(self, states: Sequence[tuple[torch.Tensor, Sequence[TensorSpec]]]) -> None:
        """Give each parameter a home for the tensors named, in new chunks, in this order.

        Raises:
            MemoryError: the host has not enough memory. Nothing has changed.
        """
        chunks = plan_chunks([(param.device, specs) for param, specs in states], self._chunk_bytes)
        blocks: dict[int, Block] = {}
        for device in {chunk.device for chunk in chunks}:
            members = [i for i, chunk in enumerate(chunks) if chunk.device == device]
            sizes = [chunks[i].num_bytes for i in members]
            blocks.update(zip(members, self._store_for(device).allocate(sizes), strict=True))
        for position, chunk in enumerate(chunks):
            hosted = HostedChunk(self._next_index, chunk, blocks[position])
            self._next_index += 1
            for shard in chunk.shards:
                param = states[shard.param][0]
                home = Home(weakref.ref(param), hosted, shard)
                for spec, offset in zip(shard.tensors, shard.offsets, strict=True):
                    home.views[spec.key] = hosted.block.tensor(spec, offset)
                self._homes[id(param)] = home

    def keep_only(self, params: Iterable[torch.Tensor]) -> None:
        """Forget every parameter but these. A chunk without parameters gives its memory back."""
        kept = {id(param) for param in params}
        self._homes = {
            key: home
            for key, home in self._homes.items()
            if key in kept and home.param() is not None
        }
