"""Moments: what there is after a step of tiny copies, and what differs in two of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .blueprint import Sample
from .placement import travels
from .values import same


@dataclass(slots=True)
class Moment:
    """What there is after a step, copied: one entry per parameter, per group, and attributes."""

    values: list[torch.Tensor]
    grads: list[torch.Tensor | None]
    marks: list[dict[str, Any]]
    states: list[dict[str, Any]]
    groups: list[dict[str, Any]]
    attributes: dict[str, Any]


def difference(one: Moment, other: Moment) -> str | None:
    """Say what differs in two moments, or return None."""
    for index, value in enumerate(one.values):
        which = f"a parameter of shape {tuple(value.shape)} (number {index})"
        if not same(value, other.values[index]):
            return which
        if list(one.states[index]) != list(other.states[index]):
            return f"the keys of the state of {which}"
        if not same(one.states[index], other.states[index]):
            return f"the state of {which}"
        if not same(one.grads[index], other.grads[index]):
            return f"the gradient of {which}"
        if not same(one.marks[index], other.marks[index]):
            return f"an attribute of {which}"
    for first, second in zip(one.groups, other.groups, strict=True):
        for key in {**first, **second}:
            if key not in first or key not in second or not same(first[key], second[key]):
                return f"{key!r} of its parameter group"
    for key in {**one.attributes, **other.attributes}:
        a, b = one.attributes, other.attributes
        if key not in a or key not in b or not same(a[key], b[key]):
            return f"its attribute {key!r}"
    return None


def same_in_pieces(
    samples: Sequence[Sample], whole: Moment, parts: Moment, num_pieces: Sequence[int]
) -> bool:
    """Whether the pieces of each sample, one after the other in ``parts``, make up the whole.

    Those of odd sizes may be rounded in another way.
    """
    if not same(whole.groups, parts.groups) or not same(whole.attributes, parts.attributes):
        return False
    position = 0
    for sample, count in zip(samples, num_pieces, strict=True):
        own = slice(position, position + count)
        position = own.stop
        agree = _close if sample.is_odd else same

        def joined(pieces: Sequence[Any], dim: int = sample.dim, count: int = count) -> Any:
            return pieces[0] if count == 1 or pieces[0] is None else torch.cat(list(pieces), dim)

        if not agree(whole.values[sample.index], joined(parts.values[own])):
            return False
        if not agree(whole.grads[sample.index], joined(parts.grads[own])):
            return False
        state, states = whole.states[sample.index], parts.states[own]
        if any(list(entry) != list(state) for entry in states):
            return False
        for key, value in state.items():
            pieces = [entry[key] for entry in states]
            if travels(key, value):
                if value.shape != sample.shape or not agree(value, joined(pieces)):
                    return False
            elif not all(same(value, piece) for piece in pieces):
                return False
    return True


def _close(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Whether two tensors are the same but for rounding."""
    if a is None or b is None:
        return a is b
    if a.dtype != b.dtype or a.shape != b.shape or not (a.is_floating_point() or a.is_complex()):
        return same(a, b)
    rtol = max(4 * torch.finfo(a.dtype).eps, 1e-5)
    largest = float(a.abs().nan_to_num(0, 0).max()) if a.numel() else 0.0
    return torch.allclose(a, b, rtol=rtol, atol=0.1 * rtol * largest, equal_nan=True)
