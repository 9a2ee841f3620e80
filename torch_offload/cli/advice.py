"""Which settings to use, and how they are written for each front end. Pure arithmetic and text.

A *choice* is a way of training with its forecast. What fits is tried in the order of its time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..config import OffloadConfig, format_size
from .forecast import MODES, Forecast, Settings, Speed, Workload, offloaded, plain

#: Of the GPU's memory, what a forecast of allocated bytes may fill: the rest is for the driver and
#: for what the allocator holds in reserve.
USABLE_SHARE = 0.9
#: Exposed time that is worth no GPU memory.
_NEGLIGIBLE = 0.02
_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One way of training. Without `settings` nothing is offloaded.

    Attributes:
        fits: on the GPU, and on the host; ``None`` where the memory is not known.
        reason: why it cannot be used, where it cannot.
    """

    settings: Settings | None
    forecast: Forecast
    fits: bool | None
    reason: str = ""

    @property
    def name(self) -> str:
        """What the table calls it."""
        if self.settings is None:
            return "no offload"
        budget = self.settings.resident_bytes
        return self.settings.overlap + (f", {format_size(budget)} stay" if budget else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Memory that there is: of one GPU, and of the host. ``None``: not known."""

    gpu_bytes: int | None
    host_bytes: int | None


def choices(
    workload: Workload,
    speed: Speed,
    limits: Limits,
    *,
    chunk_bytes: int,
    num_slots: int,
    clips: bool,
) -> list[Choice]:
    """Return every way of training: none, each mode, and each with state that stays on the GPU
    where there is room and something to gain."""
    result = [_judged(None, plain(workload, speed), limits)]
    for mode in MODES:
        settings = Settings(overlap=mode, chunk_bytes=chunk_bytes, num_slots=num_slots)
        reason = ""
        if mode == "backward" and clips:
            reason = "clipping needs all gradients before the first update"
        choice = _judged(settings, offloaded(workload, speed, settings), limits, reason)
        result.append(choice)
        budget = _budget(workload, speed, choice, limits)
        if budget:
            more = Settings(
                overlap=mode, chunk_bytes=chunk_bytes, num_slots=num_slots, resident_bytes=budget
            )
            result.append(_judged(more, offloaded(workload, speed, more), limits))
    return result


def recommend(candidates: Sequence[Choice]) -> Choice | None:
    """Return the fastest that fits, or may fit; of equally fast ones the one with less memory.

    ``None``: none fits. The plain optimizer wins wherever it fits.
    """
    usable = [choice for choice in candidates if choice.fits is not False and not choice.reason]
    if not usable:
        return None
    if usable[0].settings is None and usable[0].fits:
        return usable[0]
    offloading = [choice for choice in usable if choice.settings is not None]
    if not offloading:
        return usable[0]
    least = min(choice.forecast.step_s for choice in offloading)
    near = [c for c in offloading if c.forecast.step_s <= least * (1 + _NEGLIGIBLE / 2)]
    return min(near, key=lambda choice: choice.forecast.needed_bytes)


def best_offload(candidates: Sequence[Choice]) -> Choice | None:
    """Return the recommendation among those that offload."""
    return recommend([choice for choice in candidates if choice.settings is not None])


def config_of(settings: Settings) -> OffloadConfig:
    """Return the settings as the library takes them."""
    return OffloadConfig(
        chunk_size=settings.chunk_bytes,
        num_slots=settings.num_slots,
        overlap=settings.overlap,
        gpu_budget=settings.resident_bytes,
    )


def python_code(settings: Settings) -> str:
    """Return lines for a plain loop, in which `optimizer` and `model` exist."""
    arguments = ", ".join(f"{name}={value!r}" for name, value in _changed(settings).items())
    model = "" if settings.overlap == "step" else ", model=model"
    return (
        "from torch_offload import OffloadConfig, offload\n\n"
        f"offload(optimizer, OffloadConfig({arguments}){model})"
    )


def lightning_code(settings: Settings, num_gpus: int, is_sharded: bool) -> str:
    """Return lines for Lightning's Trainer."""
    kind = "" if num_gpus == 1 else "FSDP" if is_sharded else "DDP"
    name = f"OffloadOptimizer{kind}Strategy"
    arguments = ", ".join(f"{name}={value!r}" for name, value in _changed(settings).items())
    shards = '# configure_model calls fully_shard(..., mesh=self.device_mesh["data_parallel"])\n'
    return (
        "from lightning.pytorch import Trainer\n"
        f"from lightning_offload import {name}\n\n"
        f"{shards if is_sharded else ''}"
        f"trainer = Trainer(strategy={name}({arguments}), devices={num_gpus})"
    )


def accelerate_command(settings: Settings, num_gpus: int, is_sharded: bool) -> str:
    """Return the command line for a script ``train.py``."""
    flags = "".join(f" --offload_{name} {value}" for name, value in _changed(settings).items())
    several = ""
    if num_gpus > 1:
        several = f" --num_processes {num_gpus}"
        several += " --use_fsdp --fsdp_version 2" if is_sharded else " --multi_gpu"
    return f"accelerate launch{several} --offload_optimizer{flags} train.py"


def _changed(settings: Settings) -> dict[str, str | int]:
    """Return the fields as a user writes them: those that differ from the defaults, and overlap,
    whose default is another one in each front end, and may choose what was not computed here."""
    config, default = config_of(settings), OffloadConfig()
    fields: dict[str, str | int] = {"overlap": settings.overlap}
    if config.chunk_size != default.chunk_size:
        fields["chunk_size"] = format_size(config.chunk_bytes)
    if config.num_slots != default.num_slots:
        fields["num_slots"] = config.num_slots
    if settings.resident_bytes:
        fields["gpu_budget"] = format_size(settings.resident_bytes)
    return fields


def _judged(
    settings: Settings | None, forecast: Forecast, limits: Limits, reason: str = ""
) -> Choice:
    fits: bool | None = None
    if limits.gpu_bytes is not None:
        fits = forecast.needed_bytes <= USABLE_SHARE * limits.gpu_bytes
    if limits.host_bytes is not None and forecast.host_bytes > limits.host_bytes:
        fits = False
    return Choice(settings=settings, forecast=forecast, fits=fits, reason=reason)


def _budget(workload: Workload, speed: Speed, choice: Choice, limits: Limits) -> int:
    """Return whole GiB of state to keep: so many that copies hardly show, or what fits."""
    forecast = choice.forecast
    if choice.reason or choice.settings is None or limits.gpu_bytes is None or not choice.fits:
        return 0
    if forecast.exposed_s <= _NEGLIGIBLE * forecast.step_s:
        return 0
    room = int(USABLE_SHARE * limits.gpu_bytes) - forecast.needed_bytes
    room = min(room, workload.state_bytes)
    visible_s = forecast.exposed_s - _NEGLIGIBLE * (forecast.step_s - forecast.exposed_s)
    wanted = int(visible_s * speed.link_bytes_per_s)
    budget = min(-(-wanted // _GIB) * _GIB, room // _GIB * _GIB)
    return max(budget, 0)
