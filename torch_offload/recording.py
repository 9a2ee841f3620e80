"""A timeline: when copies, updates and whatever else the user marks ran on the device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .streams import caller_stream

Stamp = tuple[float, "torch.Event | None"]


class Timeline:
    """Intervals by lane: ``"h2d"``, ``"step"`` (updates), ``"d2h"``, and lanes of the user's.

    Recording costs two events an interval, and waits for nothing.

    Args:
        devices: what is recorded.
    """

    def __init__(self, devices: list[torch.device]) -> None:
        self._begin = {device: _stamp(device) for device in devices}
        self._spans: list[tuple[str, torch.device, Stamp, Stamp]] = []

    @contextmanager
    def span(self, lane: str, device: torch.device | None = None) -> Iterator[None]:
        """Record what is issued inside of a ``with`` on the current stream.

        Args:
            lane: its name, such as ``"compute"``.
            device: where; the first one by default.
        """
        device = next(iter(self._begin)) if device is None else device
        if device not in self._begin:  # new since the start
            self._begin[device] = _stamp(device)
        begin = _stamp(device)
        try:
            yield
        finally:
            self._spans.append((lane, device, begin, _stamp(device)))

    def lanes(self) -> dict[str, list[tuple[float, float]]]:
        """Return start and end of each interval by lane, in seconds from the start.

        Blocks until the device has come so far.
        """
        found: dict[str, list[tuple[float, float]]] = {}
        for lane, device, begin, end in self._spans:
            start = self._begin[device]
            found.setdefault(lane, []).append((_seconds(start, begin), _seconds(start, end)))
        return {lane: sorted(intervals) for lane, intervals in found.items()}


def _stamp(device: torch.device) -> Stamp:
    stream = caller_stream(device)
    event = None
    if stream is not None:
        event = stream.record_event(torch.Event(device, enable_timing=True))
    return time.perf_counter(), event


def _seconds(start: Stamp, end: Stamp) -> float:
    if start[1] is None or end[1] is None:
        return end[0] - start[0]
    end[1].synchronize()
    return start[1].elapsed_time(end[1]) / 1000.0
