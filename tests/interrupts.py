"""Stops a call in the middle: at any line of the package, or before any operation on tensors."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

import torch_offload

PACKAGE = str(Path(torch_offload.__file__).parent)

#: File, number and function of a line.
Line = tuple[str, int, str]


class Stop(KeyboardInterrupt):
    """What is raised, as Ctrl-C would."""


class Lines:
    """As a context: notes the lines of the package that are run, and stops at one.

    Args:
        stop_at: the number of the line in whose place :class:`Stop` is raised, from 1; the end of
            the context catches it. 0 for none.
    """

    def __init__(self, stop_at: int = 0) -> None:
        self.lines: list[Line] = []
        self._stop_at = stop_at
        self._before: Any = None

    def __enter__(self) -> Lines:
        self._before = sys.gettrace()
        sys.settrace(self._anywhere)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        sys.settrace(self._before)
        assert (kind is Stop) == bool(self._stop_at), f"{len(self.lines)} lines, {kind}"
        return kind is Stop

    def _anywhere(self, frame: Any, event: str, _: Any) -> Any:
        return self._in_package if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _in_package(self, frame: Any, event: str, _: Any) -> Any:
        if event == "line":
            code = frame.f_code
            self.lines.append((Path(code.co_filename).name, frame.f_lineno, code.co_name))
            if len(self.lines) == self._stop_at:
                raise Stop(self.lines[-1])
        return self._in_package


def picked(lines: Sequence[Line]) -> list[int]:
    """Numbers of the first and the last time that each line is run."""
    first: dict[Line, int] = {}
    last: dict[Line, int] = {}
    for number, line in enumerate(lines, 1):
        first.setdefault(line, number)
        last[line] = number
    return sorted({*first.values(), *last.values()})


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
