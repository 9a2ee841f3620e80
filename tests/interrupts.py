"""Stops a call in the middle: at any line of the package, or before any operation on tensors."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

import torch_offload

PACKAGE = str(Path(torch_offload.__file__).parent)

#: File, number and function of a line.
Line = tuple[str, int, str]


class Stop(KeyboardInterrupt):
    """What is raised, as Ctrl-C would."""


@dataclass(frozen=True)
class Spot:
    """One of the times that a line is run, counted from 1."""

    line: Line
    occurrence: int


class Lines:
    """As a context: notes the lines of the package that are run, and stops at one.

    Args:
        stop_at: where :class:`Stop` is raised in place of the line; the end of the context catches
            it.

    Attributes:
        spots: what was run, in order.
        stopped: whether the spot was reached. How much memory there is may decide about a few.
    """

    def __init__(self, stop_at: Spot | None = None) -> None:
        self.spots: list[Spot] = []
        self.stopped = False
        self._stop_at = stop_at
        self._counts: Counter[Line] = Counter()
        self._before: Any = None

    def __enter__(self) -> Lines:
        self._before = sys.gettrace()
        sys.settrace(self._anywhere)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        sys.settrace(self._before)
        assert (kind is Stop) == self.stopped, kind
        return self.stopped

    def _anywhere(self, frame: Any, event: str, _: Any) -> Any:
        is_ours = frame.f_code.co_filename.startswith(PACKAGE)
        return self._in_package if is_ours and not _is_final(frame) else None

    def _in_package(self, frame: Any, event: str, _: Any) -> Any:
        if event == "line":
            code = frame.f_code
            line = (code.co_filename.removeprefix(PACKAGE), frame.f_lineno, code.co_name)
            self._counts[line] += 1
            self.spots.append(Spot(line, self._counts[line]))
            if self.spots[-1] == self._stop_at:
                self.stopped = True
                raise Stop(line)
        return self._in_package


def _is_final(frame: Any) -> bool:
    """Whether it runs for an object that dies: what is raised there, Python drops."""
    for _ in range(4):  # ours are not deeper
        code = frame.f_code
        if code.co_name == "__del__" or Path(code.co_filename).name == "weakref.py":
            return True
        frame = frame.f_back
        if frame is None:
            return False
    return False


def picked(spots: Sequence[Spot]) -> list[Spot]:
    """The first and the last time that each line is run."""
    last = {spot.line: spot.occurrence for spot in spots}
    return [spot for spot in spots if spot.occurrence in (1, last[spot.line])]


class Operations(TorchDispatchMode):
    """Counts the operations on tensors (copies, views and allocations too), and raises in place
    of one.

    Args:
        number: which one, from 1; 0 for none.
        error: what to raise.
    """

    def __init__(self, number: int = 0, error: BaseException | None = None) -> None:
        super().__init__()
        self.count = 0
        self._number = number
        self._error = error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten":
            self.count += 1
            if self.count == self._number:
                assert self._error is not None
                raise self._error
        return func(*args, **(kwargs or {}))
