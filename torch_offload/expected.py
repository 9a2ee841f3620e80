"""What of the next step can be updated early: as soon as its gradients are final."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from .distributed import is_distributed, local
from .flow import Flow
from .shard import Shard, shards_of
from .stepper import newcomers_matter

if TYPE_CHECKING:
    from .core import OffloadCore


@dataclass(eq=False, slots=True)
class ExpectedChunk:
    """What is updated at once, when the gradients of all its parameters are final."""

    flow: Flow
    number: int
    shards: list[Shard]
    missing: set[int]
    #: The local tensors that hold its state on the host, and their versions.
    views: list[torch.Tensor]
    versions: list[int] = field(init=False)
    #: Those on which its gradients became final, in order; each may have some of their memory.
    streams: dict[torch.Stream | None, None] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.versions = self.versions_now()

    def versions_now(self) -> list[int]:
        """Tell whether somebody wrote to the state, but for the pipeline."""
        return [view._version for view in self.views]

    def is_untouched(self) -> bool:
        """Whether nobody wrote to the state since it may have been copied in."""
        return self.versions_now() == self.versions

    def is_loaded(self) -> bool:
        """Whether its state was copied in, and is still what is on the host."""
        return self.flow.is_loaded(self.number) and self.is_untouched()


def newcomers_of(core: OffloadCore) -> set[tuple[int, torch.device, torch.dtype]]:
    """Return the lists of parameters in which one without state may change how others are stepped:
    group, device and dtype."""
    if not newcomers_matter(core.plain_class):
        return set()
    return {
        (index, param.device, param.dtype)
        for index, group in enumerate(core.optimizer.param_groups)
        for param in group["params"]
        if (param.requires_grad or param.grad is not None) and not core.state.get(param)
    }


def expected_shards(core: OffloadCore, order: Mapping[int, int]) -> list[Shard]:
    """Return what of the next step can be updated as soon as its gradients are final.

    Not parameters without state, nor those that step in one list with such (it may matter), nor
    DTensors that are not stepped by their local tensors: all ranks must step them in one order.
    Whether the state is still where its home is :meth:`Run.is_current` tells.
    """
    found: list[Shard] = []
    newcomers = newcomers_of(core)
    for index, group in enumerate(core.optimizer.param_groups):
        for param in group["params"]:
            state = core.state.get(param)
            home = core.planner.layout.home(param)
            if (
                id(param) in order
                and param.requires_grad
                and state
                and home is not None
                and (index, param.device, param.dtype) not in newcomers
            ):
                fused = bool(group.get("fused"))
                found += shards_of(index, param, home, state, core.traits.elementwise, fused)
    return [shard for shard in found if shard.unwraps or not is_distributed(shard.param)]


def views_of(shards: Sequence[Shard]) -> list[torch.Tensor]:
    """Return the local tensors that hold the state of these on the host."""
    homes = [shard.home for shard in shards]
    views = [home.views.values() for home in homes if home is not None and not home.is_resident]
    return [local(view) for values in views for view in values]
