"""What a plan starts from: the request, and what is given, measured here or assumed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ..config import parse_size
from ..memory import available_host_bytes
from . import hardware, machine
from .advice import Limits
from .forecast import operations
from .link import SIZES, measure_all
from .subject import Subject

#: Planned for where this machine has no GPU and none is named.
_DEFAULT_GPU = "H200"
GIVEN, MEASURED, ASSUMED = "given", "measured here", "assumed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the user asks: the options of `torch-offload plan`, not yet checked."""

    params: float | None = None
    model: str | None = None
    config: Path | None = None
    dtype: str = "float32"
    optimizer: str = "AdamW"
    optimizer_setting: tuple[str, ...] = ()
    tokens: int = 16384
    sequence: int = 4096
    accumulation: int = 1
    recompute: bool = True
    loss_tokens: int | None = None
    clip: bool = False
    num_gpus: int = 1
    sharded: bool = False
    gpu: str | None = None
    gpu_memory: str | None = None
    host_memory: str | None = None
    bandwidth: float | None = None
    probe_file: Path | None = None
    compute_s: float | None = None
    compute_tokens: int | None = None
    chunk_size: str = "512MiB"
    num_slots: int = 3


def gpu_of(request: Request) -> tuple[str, torch.device | None]:
    """Return the name of the GPU that is planned for, and the device where it is one of ours."""
    own = machine.gpus()
    if request.gpu is not None:
        return request.gpu, None
    if own:
        return torch.cuda.get_device_name(own[0]), own[0]
    return _DEFAULT_GPU, None


def link_of(
    request: Request,
    gpu: hardware.Gpu | None,
    own: torch.device | None,
    say: Callable[[str], None],
) -> tuple[float, str]:
    """Return bytes a second each way, and where that is from.

    Raises:
        ValueError: it is neither given nor known.
    """
    if request.bandwidth is not None:
        return request.bandwidth * 1e9, GIVEN
    count = request.num_gpus
    if request.probe_file is not None:
        speed = machine.read_probe(request.probe_file).link_bytes_per_s(count)
        if speed is None:
            raise ValueError(
                f"probe={str(request.probe_file)!r} was not measured with {count} GPUs at once. "
                "Run `torch-offload probe` where so many are visible, or give --bandwidth."
            )
        return speed, "probe"
    devices = machine.gpus()
    if own is not None and len(devices) >= count:
        say("Measuring the link. --bandwidth or --probe spares that.")
        samples = measure_all(devices[:count], sizes=SIZES[-1:], repeats=3)
        wanted = [s.median for s in samples if s.way == "duplex" and len(s.devices) == count]
        return min(wanted), MEASURED
    if count > 1:
        raise ValueError(
            f"num_gpus={count} share the host's memory, so their link must be measured together. "
            "Give --bandwidth (GB/s each way and GPU), or --probe from such a machine."
        )
    if gpu is None:
        raise ValueError("bandwidth is not known for this GPU. Give --bandwidth or --probe.")
    return gpu.likely_link_bytes_per_s, ASSUMED


def compute_of(
    request: Request, subject: Subject, gpu: hardware.Gpu | None, name: str
) -> tuple[float, str]:
    """Return seconds of forward and backward, and where they are from.

    Raises:
        ValueError: they are neither given nor known.
    """
    if request.compute_s is not None:
        measured = request.compute_tokens or request.tokens
        scaled = "" if measured == request.tokens else f" at {measured} tokens"
        return request.compute_s * request.tokens / measured, GIVEN + scaled
    if gpu is None:
        raise ValueError(
            f"gpu={name!r} is not known, so the time of forward and backward is not either. Use "
            f"--gpu with one of {hardware.known()}, or measure it and give --compute-s."
        )
    sequence = min(request.sequence, request.tokens // request.accumulation)
    needed = operations(subject, request.tokens, sequence, request.recompute)
    share = hardware.FLOPS_SHARE
    speed = f"{share:.0%} of {gpu.flops / 1e12:.0f} TFLOP/s, all parameters for each token"
    return needed / (share * gpu.flops), f"{ASSUMED}: {speed}"


def limits_of(
    request: Request, gpu: hardware.Gpu, own: torch.device | None
) -> tuple[Limits, str, str]:
    """Return the memory that there is, and in words that of the GPU and of the host."""
    memory = gpu.memory_bytes
    if request.gpu_memory is not None:
        memory = parse_size(request.gpu_memory, field="gpu_memory")
    elif own is not None:
        memory = machine.gpu_info(own).memory_bytes
    host: int | None = None
    text = "not known: give --host-memory"
    if request.host_memory is not None:
        host = parse_size(request.host_memory, field="host_memory")
        text = f"{host / 2**30:.0f} GiB ({GIVEN})"
    elif own is not None:
        host = available_host_bytes()
        text = text if host is None else f"{host / 2**30:.0f} GiB free ({MEASURED})"
    return Limits(gpu_bytes=memory, host_bytes=host), f"{memory / 2**30:.0f} GiB each", text
