"""The streams of one device, named by job, and the handoff of buffers between them.

Vocabulary: the *caller* is the stream that is current when the optimizer is called. *h2d* carries
copies in, *d2h* carries copies out. Updates run on the caller, or beside backward or forward on
*side*. A *handoff* is what crosses from one stream to
another: taking its value is waiting for it. ``None`` stands for the stream of a device that has
none, where everything happens in order.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

T = TypeVar("T")

#: Device types whose copies can run beside compute.
_ASYNC_DEVICES = frozenset({"cuda", "xpu"})


@dataclass(frozen=True, slots=True)
class CopyStreams:
    """The streams of one device besides the caller's, created once."""

    h2d: torch.Stream | None
    d2h: torch.Stream | None
    side: torch.Stream | None

    @staticmethod
    def create(device: torch.device) -> CopyStreams:
        """Create the streams of ``device``; all are ``None`` where copies are synchronous."""
        if device.type not in _ASYNC_DEVICES:
            return CopyStreams(None, None, None)
        return CopyStreams(torch.Stream(device), torch.Stream(device), torch.Stream(device))


def caller_stream(device: torch.device) -> torch.Stream | None:
    """Return the stream that is current on ``device`` at this moment."""
    if device.type not in _ASYNC_DEVICES:
        return None
    # By its index, which needs no parsing: this is called by each hook.
    return torch.accelerator.current_stream(device.index)


def on(stream: torch.Stream | None) -> AbstractContextManager[object]:
    """Make ``stream`` current inside a ``with``."""
    return nullcontext() if stream is None else stream


class Handoff(Generic[T]):
    """A value that one stream produced and another one consumes, with the event between them.

    Args:
        value: the buffers.
        producer: the stream whose work so far makes them ready.
    """

    __slots__ = ("_event", "_value", "producer")

    def __init__(self, value: T, producer: torch.Stream | None) -> None:
        self._value = value
        self.producer = producer
        self._event = None if producer is None else producer.record_event()

    def take(self, consumer: torch.Stream | None) -> T:
        """Make ``consumer`` wait for the producer, then return the value. The CPU goes on."""
        if self._event is not None and consumer is not None:
            consumer.wait_event(self._event)
        return self._value

    def peek(self) -> T:
        """Return the value without waiting: for what is known of it from the start."""
        return self._value

    def take_on_cpu(self) -> T:
        """Block the CPU until the producer is done, then return the value."""
        if self._event is not None:
            self._event.synchronize()
        return self._value
