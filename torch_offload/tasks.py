"""From the shards of a chunk to the work of a pipeline: its update, or the making of its state."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from .chunk import split_runs
from .distributed import local
from .placement import traveling
from .shard import Shard, runs
from .stepper import Stepper
from .work import Born, Creation, Update

if TYPE_CHECKING:
    from .core import OffloadCore


def update_of(shards: list[Shard], stepper: Stepper | None = None) -> Update:
    """Describe the update of one chunk, all with state; without a stepper it is given later."""
    home = shards[0].home
    assert home is not None, "a parameter with state has a home"
    block = home.hosted.block
    return Update(
        block=None if block is None else block.bytes,
        runs=split_runs(runs(shards), block.seams if block is not None else ()),
        slot_bytes=max(home.slot_bytes(shard.part) for shard in shards) if block else 0,
        apply=None if stepper is None else partial(stepper.update, shards),
    )


def creation_of(core: OffloadCore, shards: list[Shard], stepper: Stepper) -> Creation:
    """Describe the first update of one chunk, all without state: it makes that."""

    def apply() -> list[Born]:
        states = stepper.create(shards)
        specs = [
            tuple(shard.whole(spec) for spec in traveling(state or {}))
            for shard, state in zip(shards, states, strict=True)
        ]
        strangers = [
            (shard.param, wanted)
            for shard, wanted in zip(shards, specs, strict=True)
            if not core.planner.fits(shard.param, wanted)
        ]
        if strangers:
            core.planner.layout.add(strangers)
        born: list[Born] = []
        for shard, state in zip(shards, states, strict=True):
            home = core.planner.layout.home(shard.param)
            assert home is not None
            if state is not None:
                born += [
                    (local(state[key]), local(shard.of(view))) for key, view in home.views.items()
                ]
                if shard.is_first:
                    core.state[shard.param] = {**state, **home.views}
        return born

    return Creation(apply)
