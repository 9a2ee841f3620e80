"""OffloadStats: bytes and seconds of the last step, and the clock that measures it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .streams import caller_stream


@dataclass(frozen=True, kw_only=True)
class OffloadStats:
    """What the last ``step()`` of an offloaded optimizer moved, and what the state occupies.

    All counts are 0 before the first step.

    Attributes:
        h2d_bytes: bytes of state copied from the host to the device.
        d2h_bytes: bytes of state copied from the device to the host.
        step_s: seconds between the start and the end of the step on the caller's stream (device
            time with an accelerator, wall time without).
        num_chunks: chunks that were updated.
        num_early_chunks: how many of them before ``step()`` was called.
        num_slots: chunks that were in flight at once; fewer than the config says where there were
            fewer chunks, or no memory for more.
        staging_bytes: largest number of device bytes that held state during the step.
        host_bytes: bytes of host memory that hold state now, page rounding included.
        pinned_bytes: how many of them are page-locked.
        resident_bytes: bytes of state that stay on the device (``gpu_budget``).
        setup_s: seconds spent so far on allocating, touching and pinning host memory.
    """

    h2d_bytes: int = 0
    d2h_bytes: int = 0
    step_s: float = 0.0
    num_chunks: int = 0
    num_early_chunks: int = 0
    num_slots: int = 0
    staging_bytes: int = 0
    host_bytes: int = 0
    pinned_bytes: int = 0
    resident_bytes: int = 0
    setup_s: float = 0.0


class StepClock:
    """Measures one step on the stream that calls it, without blocking the CPU.

    Args:
        devices: the devices that take part; the longest time counts.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._wall = time.perf_counter()
        self._begin = {device: _timestamp(device) for device in devices}
        self._end: dict[torch.device, torch.Event | None] = {}

    def stop(self) -> None:
        """Mark the end of the step."""
        self._wall = time.perf_counter() - self._wall
        self._end = {device: _timestamp(device) for device in self._begin}

    def seconds(self) -> float:
        """Block until the marked end and return the seconds; 0 when the step did not end."""
        if not self._end:
            return 0.0
        times = []
        for device, end in self._end.items():
            begin = self._begin[device]
            if begin is not None and end is not None:
                end.synchronize()
                times.append(begin.elapsed_time(end) / 1000.0)
        return max(times, default=self._wall)


def _timestamp(device: torch.device) -> torch.Event | None:
    stream = caller_stream(device)
    if stream is None:
        return None
    return stream.record_event(torch.Event(device, enable_timing=True))
