"""Counters: numbers that go on by one in each step. A trial moves them far ahead.

What a class does after thousands of steps, as the end of a warm-up, is seen so in a few.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

#: How far. More than any warm-up that is counted in steps is likely to take.
_DISTANCE = 10_000
_MAX_DEPTH = 4
_MIN_STRIDES = 2

#: Containers, by name, with the keys to look at.
Roots = Mapping[Hashable, tuple[Any, Iterable[Any]]]


@dataclass(slots=True)
class _Course:
    """How a number went so far."""

    value: float
    stride: float = 0.0
    num_strides: int = 0
    is_even: bool = True


@dataclass(slots=True)
class _Place:
    """Where a number is kept."""

    name: tuple[Hashable, ...]
    container: Any
    key: Any
    value: Any

    def advance(self, distance: float) -> None:
        if isinstance(self.value, torch.Tensor):
            with torch.no_grad():
                self.value.add_(int(distance))
        else:
            self.container[self.key] = self.value + type(self.value)(distance)


class Counters:
    """Watches the numbers in some containers."""

    def __init__(self) -> None:
        self._courses: dict[tuple[Hashable, ...], _Course] = {}

    def look(self, roots: Roots, is_step: bool = True) -> None:
        """Look at all numbers, before or after each step.

        Args:
            roots: what to look at.
            is_step: whether a step was made since; else somebody else changed them.
        """
        for place in _places(roots):
            value = float(place.value)
            course = self._courses.setdefault(place.name, _Course(value))
            stride, course.value = value - course.value, value
            if is_step and stride:
                course.is_even &= abs(stride) == 1 and course.stride in (0, stride)
                course.stride = stride
                course.num_strides += 1

    def advance(self, roots: Roots) -> None:
        """Move all counters far ahead. What went on only once may be a flag."""
        moved: set[int] = set()
        for place in list(_places(roots)):
            course = self._courses.get(place.name)
            if course is None or not course.is_even or course.num_strides < _MIN_STRIDES:
                continue
            if isinstance(place.value, torch.Tensor):
                if id(place.value) in moved:
                    continue
                moved.add(id(place.value))
            place.advance(course.stride * _DISTANCE)


def _places(roots: Roots) -> Iterator[_Place]:
    for name, (root, keys) in roots.items():
        yield from _inside((name,), root, [(key, root[key]) for key in keys])


def _inside(
    name: tuple[Hashable, ...], container: Any, items: Iterable[tuple[Any, Any]]
) -> Iterator[_Place]:
    for key, value in items:
        where = (*name, key)
        if isinstance(value, (dict, list)):
            if len(where) <= _MAX_DEPTH:
                own = value.items() if isinstance(value, dict) else enumerate(value)
                yield from _inside(where, value, list(own))
        elif _is_number(value):
            yield _Place(where, container, key, value)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and not value.is_complex()
    return type(value) is float or (type(value) is int and abs(value) < 2**53)
