"""What this machine is: GPUs, NUMA nodes, free host memory, how fast memory is pinned; the probe.

A *probe* is all of it in one record, which is written as JSON and read again for a plan.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from ..host import HostStore
from ..memory import available_host_bytes
from ..numa import node_of
from .link import SIZES, SPAN_BYTES, Sample, measure_all, synchronize

#: State that is pinned to time it.
PINNED_BYTES = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuInfo:
    """One visible GPU. `numa_node` is ``None`` where there is one node, or it is not known."""

    index: int
    name: str
    memory_bytes: int
    free_bytes: int
    numa_node: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinning:
    """Seconds to take and page-lock host memory, by this library and by torch."""

    num_bytes: int
    ours_s: float
    torch_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What was found."""

    gpus: tuple[GpuInfo, ...]
    host_bytes: int | None
    samples: tuple[Sample, ...]
    pinning: Pinning | None
    torch: str
    date: str

    def link_bytes_per_s(self, num_gpus: int) -> float | None:
        """Return bytes a second each way and GPU, both directions and so many GPUs at once.

        ``None``: that was not measured. The slowest GPU counts.
        """
        found = [s for s in self.samples if s.way == "duplex" and len(s.devices) == num_gpus]
        largest = max((s.copy_bytes for s in found), default=0)
        return min((s.median for s in found if s.copy_bytes == largest), default=None)

    def to_json(self) -> str:
        """Return the record as text."""
        return json.dumps({"probe": 1, **asdict(self)}, indent=1) + "\n"


def gpus() -> list[torch.device]:
    """Return the visible GPUs."""
    return [torch.device("cuda", i) for i in range(torch.cuda.device_count())]


def gpu_info(device: torch.device) -> GpuInfo:
    """Describe one GPU."""
    free_bytes, memory_bytes = torch.cuda.mem_get_info(device)
    return GpuInfo(
        index=device.index or 0,
        name=torch.cuda.get_device_name(device),
        memory_bytes=memory_bytes,
        free_bytes=free_bytes,
        numa_node=node_of(device),
    )


def run_probe(
    *,
    sizes: tuple[int, ...] = SIZES,
    repeats: int = 5,
    tick: Callable[[str], None] = lambda _: None,
) -> Probe:
    """Look at this machine. Without a GPU there is no link to measure.

    Raises:
        MemoryError: host memory is too short for the copies.
    """
    devices = gpus()
    free = available_host_bytes()
    span = SPAN_BYTES
    if free is not None and devices:
        # A quarter of what is free: a probe must not push anybody out.
        span = min(span, free // (8 * len(devices)))
        sizes = tuple(size for size in sizes if size <= span)
        if not sizes:
            raise MemoryError(
                f"{free:,} bytes of host memory are free, too few to measure copies in. "
                "Give the job more memory."
            )
    samples = measure_all(devices, sizes=sizes, repeats=repeats, span_bytes=span, tick=tick)
    pinning = None
    if devices:
        tick("pinning")
        pinning = time_pinning(devices[0], min(PINNED_BYTES, span))
    return Probe(
        gpus=tuple(gpu_info(device) for device in devices),
        host_bytes=free,
        samples=tuple(samples),
        pinning=pinning,
        torch=torch.__version__,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def time_pinning(device: torch.device, num_bytes: int) -> Pinning:
    """Take so many bytes of pinned memory for a device, as state does, and as torch does."""
    store = HostStore(device, True, lambda: synchronize(device))
    blocks = store.allocate([num_bytes // 4] * 4)
    ours_s = store.setup_s
    del blocks
    began = time.perf_counter()
    torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type != "cpu")
    return Pinning(num_bytes=num_bytes, ours_s=ours_s, torch_s=time.perf_counter() - began)


def read_probe(path: Path) -> Probe:
    """Read what :meth:`Probe.to_json` wrote.

    Raises:
        ValueError: it is no such file.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return _probe_of(record)
    except OSError as error:
        raise ValueError(f"probe={str(path)!r} cannot be read: {error}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"probe={str(path)!r} is not what `torch-offload probe --json` writes: {error!r}. "
            "Write it anew."
        ) from error


def _probe_of(record: Mapping[str, Any]) -> Probe:
    if record["probe"] != 1:
        raise ValueError(f"probe has version {record['probe']!r}")
    pinning = record["pinning"]
    return Probe(
        gpus=tuple(GpuInfo(**gpu) for gpu in record["gpus"]),
        host_bytes=record["host_bytes"],
        samples=tuple(
            Sample(
                devices=tuple(sample["devices"]),
                way=sample["way"],
                copy_bytes=sample["copy_bytes"],
                bytes_per_s=tuple(sample["bytes_per_s"]),
            )
            for sample in record["samples"]
        ),
        pinning=None if pinning is None else Pinning(**pinning),
        torch=record["torch"],
        date=record["date"],
    )
