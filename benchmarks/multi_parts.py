"""What bench_multi.py runs on all ranks at once: the link, the optimizer's step, training steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from bench_step import Case
from bench_train import Training, measure_mode
from measuring import free, link_samples, memory, reset_peak, synchronize, timed
from multi_ranks import Here
from record import Record, environment
from schemes import Ours, Resident
from torch_offload import OffloadConfig, offload_stats
from torch_offload.memory import available_host_bytes
from train_modes import Mode
from train_plan import Batch, Plan

LINK_KINDS = ("h2d", "d2h", "duplex")
WARM_UP_STEPS = 2  # the first is reported by itself
_GIB = 2**30
#: What is left free for everything else while memory is being touched, for each rank.
_RESERVE_BYTES = 4 * _GIB
_PATIENCE_S = 5.0


def about(here: Here) -> Record:
    """Return GPU, driver and versions."""
    return environment(here.device)


def grow(here: Here, wanted_bytes: int) -> int | None:
    """Touch host memory until so much of it is available, free it, and return what is.

    A virtual machine may get its memory when it is first used, and says that it has less before.

    Args:
        here: this rank.
        wanted_bytes: of all ranks together.
    """
    pieces: list[torch.Tensor] = []
    began = time.monotonic()
    while (room := available_host_bytes()) is not None:
        taken = here.num_ranks * len(pieces) * _GIB  # the others are about as far
        if room + taken >= wanted_bytes:
            break
        if room > here.num_ranks * _RESERVE_BYTES:
            pieces.append(torch.empty(_GIB, dtype=torch.uint8).fill_(1))
            began = time.monotonic()
        elif time.monotonic() > began + _PATIENCE_S:
            break
        else:
            time.sleep(0.1)
    here.barrier()
    pieces.clear()
    here.barrier()
    return available_host_bytes()


def probe_alone(here: Here, rank: int) -> Record:
    """Measure the link of one rank while the others wait."""
    here.barrier()
    samples = link_samples(here.device, LINK_KINDS) if here.rank == rank else {}
    free(here.device)
    here.barrier()
    return samples


def probe_together(here: Here) -> Record:
    """Measure the links of all ranks, each sample at the same time."""
    samples = link_samples(here.device, LINK_KINDS, before=here.barrier)
    free(here.device)
    return samples


def step(
    here: Here, num_params: int, hidden: int, config: OffloadConfig | None, steps: int
) -> Record:
    """Time AdamW's step, on all ranks at once; with resident state without ``config``."""
    device = here.device
    free(device)
    case = Case(num_params, hidden, device)
    case.draw(seed=here.rank)
    reset_peak(device)
    here.barrier()
    scheme = Resident(case.params) if config is None else Ours(case.params, config)
    first_step_s = timed(device, scheme.step)
    first = memory(device)
    for _ in range(WARM_UP_STEPS - 1):
        scheme.step()
    synchronize(device)
    reset_peak(device)
    step_s = []
    for _ in range(steps):
        synchronize(device)
        here.barrier()
        step_s.append(timed(device, scheme.step))
    steady = memory(device)
    stats = None if config is None else asdict(offload_stats(scheme.optimizer))
    return {
        "num_params": case.num_params,
        "step_s": step_s,
        "median_step_s": statistics.median(step_s),
        "first_step_s": first_step_s,
        "first_step_peak_allocated_bytes": first["peak_allocated_bytes"],
        "peak_allocated_bytes": steady["peak_allocated_bytes"],
        "peak_reserved_bytes": steady["peak_reserved_bytes"],
        "host_bytes": stats["host_bytes"] if stats else 0,
        "setup_s": stats["setup_s"] if stats else 0.0,
        "travelling_bytes": stats["h2d_bytes"] if stats else 0,
        "stats": stats,
        "params_checksum": case.checksum(),
    }


@dataclass(frozen=True, kw_only=True)
class RankPlan(Plan):
    """The plan of one rank: the same model, other tokens."""

    rank: int

    def batches(self, tokens: int, device: torch.device) -> list[Batch]:
        """Draw this rank's batches."""
        own = replace(self, seed=self.seed + 1_000_003 * self.rank)
        return Plan.batches(own, tokens, device)

    def least_bytes(self, mode: Mode, tokens: int) -> int:
        """Return 0: ranks that left out a size one by one would wait for each other."""
        return 0


def ddp(model: nn.Module) -> nn.Module:
    """Wrap in DistributedDataParallel, with its defaults."""
    return DistributedDataParallel(model)


def fsdp2(model: nn.Module) -> nn.Module:
    """Shard each layer and what is left: parameters are gathered in bf16, gradients reduced in
    fp32."""
    device = next(model.parameters()).device.type
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers: Any = model.layers
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {"DDP": ddp, "FSDP2": fsdp2}


def train(here: Here, plan: Plan, kind: str, mode: Mode) -> Record:
    """Time training steps under one mode, with the first number of tokens of the plan.

    Raises:
        RuntimeError: it did not work on this rank.
    """
    fields = {name: getattr(plan, name) for name in plan.__dataclass_fields__}
    own = RankPlan(**fields, rank=here.rank)
    make = partial(Training, wrap=WRAPS[kind])
    result = measure_mode(own, mode, here.device, here.hashed, lambda text: None, make)
    (point,) = result.pop("points")
    if point["outcome"] != "ok":
        raise RuntimeError(f"{point['outcome']}: {point['reason']}")
    return result | point
