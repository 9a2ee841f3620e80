"""Copies, compares and searches what an optimizer keeps: attributes, settings, entries of state."""

from __future__ import annotations

import functools
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import gcd
from typing import Any

import torch

_CONTAINERS = (list, tuple, set, frozenset, dict, deque)
_COPIED = frozenset({list, set, dict, OrderedDict, defaultdict, deque})
#: Values without parts of their own that could change or lead somewhere.
_ATOMS = (
    type(None), bool, int, float, complex, str, bytes, type, types.BuiltinFunctionType,
    types.ModuleType, torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip

#: Up to how many units of memory it is found out which of them each of several tensors takes.
_MAX_MARKS = 2**24


def snapshot(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copy what a step may change in place, so that every part of a step starts from the same.

    Containers are copied at any depth. Tensors inside of them, and objects of other classes, are
    shared: a class whose step changes those is refused.

    Args:
        values: an optimizer's attributes, or what a group says besides its parameters.
    """
    return {
        key: value.detach().clone()
        if isinstance(value, torch.Tensor)
        else rebuilt(value, lambda leaf: leaf)
        for key, value in values.items()
    }


def rebuilt(
    value: Any, leaf: Callable[[Any], Any], memo: dict[int, tuple[Any, Any]] | None = None
) -> Any:
    """Copy containers at any depth, with each value in them that is none passed through ``leaf``.

    Args:
        value: anything.
        leaf: called with what is no container and no constant.
        memo: what was copied so far; an object that occurs twice stays one.
    """
    if isinstance(value, _ATOMS):
        return value
    memo = {} if memo is None else memo
    if id(value) in memo:
        return memo[id(value)][1]
    kind = type(value)
    made: Any
    if kind in (dict, OrderedDict, defaultdict):
        made = defaultdict(value.default_factory) if kind is defaultdict else kind()
        memo[id(value)] = (value, made)
        for key, item in value.items():
            made[rebuilt(key, leaf, memo)] = rebuilt(item, leaf, memo)
    elif kind is list or kind is deque:
        made = deque(maxlen=value.maxlen) if kind is deque else []
        memo[id(value)] = (value, made)
        made.extend(rebuilt(item, leaf, memo) for item in value)
    elif kind is set:
        made = {rebuilt(item, leaf, memo) for item in value}
    elif isinstance(value, (tuple, frozenset)):
        items = [rebuilt(item, leaf, memo) for item in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            made = value
        else:  # a named tuple takes its items one by one
            made = kind(*items) if hasattr(value, "_fields") else kind(items)
    else:
        made = leaf(value)
    memo[id(value)] = (value, made)  # the value too, or its id might be taken again
    return made


def is_unchanged(before: Any, after: Any) -> bool:
    """Whether a container holds what it held, at any depth. Compares no tensor's values."""
    if before is after:
        return True
    if type(before) is not type(after) or isinstance(before, torch.Tensor):
        return False
    if isinstance(before, (list, tuple, deque)):
        return len(before) == len(after) and all(map(is_unchanged, before, after))
    if isinstance(before, dict):
        return list(before) == list(after) and all(
            is_unchanged(item, after[key]) for key, item in before.items()
        )
    return bool(before == after) if isinstance(before, (*_ATOMS, set, frozenset)) else False


def put_back(target: Any, value: Any) -> bool:
    """Give a container of the user's what a copy of it became. Returns whether it is one."""
    if type(target) is not type(value) or isinstance(target, (tuple, frozenset)):
        return False
    if isinstance(target, (list, deque)):
        target.clear()
        target.extend(value)
    elif isinstance(target, (dict, set)):
        target.clear()
        target.update(value)
    else:
        return False
    return True


def is_container(value: Any) -> bool:
    """Whether :func:`snapshot` copies a value, or nothing in it can change."""
    return type(value) in _COPIED or isinstance(value, (*_ATOMS, tuple, frozenset))


def same(a: Any, b: Any) -> bool:
    """Whether two values are the same, tensors in every bit. Never raises."""
    try:
        return _same(a, b)
    except Exception:
        return False


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape or a.layout != b.layout:
            return False
        if a.layout is not torch.strided:
            return _same(a.to_dense(), b.to_dense())
        if a.is_floating_point() and a.element_size() == 1:
            a, b = a.view(torch.uint8), b.view(torch.uint8)  # such have next to no operations
        # NaN is a value like any other here.
        return torch.equal(a, b) or torch.equal(a.nan_to_num(), b.nan_to_num())
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple, deque)) and isinstance(b, (list, tuple, deque)):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(fingerprint(a) == fingerprint(b))


def fingerprint(value: Any, depth: int = 8) -> Any:
    """Return something that is equal for two values exactly if nothing in them differs.

    Args:
        value: anything; objects are looked into.
        depth: how deep.
    """
    if isinstance(value, float):
        return value.hex()  # NaN is equal to itself so
    if isinstance(value, _ATOMS):
        return value
    if isinstance(value, torch.Tensor):
        numbers = value.detach().cpu().tolist() if value.layout is torch.strided else id(value)
        return str(value.dtype), tuple(value.shape), repr(numbers)
    if isinstance(value, types.FunctionType):
        return id(value), [fingerprint(item, depth - 1) for item in _cells(value)]
    if depth <= 0 or isinstance(value, torch.nn.Module):
        return id(value)
    if isinstance(value, Mapping):
        return type(value), [
            (fingerprint(k, depth - 1), fingerprint(v, depth - 1)) for k, v in value.items()
        ]
    if isinstance(value, (set, frozenset)):
        return type(value), sorted(repr(fingerprint(item, depth - 1)) for item in value)
    if isinstance(value, _CONTAINERS):
        return type(value), [fingerprint(item, depth - 1) for item in value]
    own = fields(value)
    if own:
        return type(value), fingerprint(own, depth - 1)
    try:
        parts = value.__reduce_ex__(4)  # what a pickle would hold: numpy, iterators, generators
    except Exception:
        return id(value)
    return fingerprint(parts, depth - 1) if isinstance(parts, tuple) else parts


def inside(value: Any, depth: int = 8, seen: set[int] | None = None) -> Iterator[Any]:
    """Yield a value and all that it leads to: items, fields, and what a function holds on to."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    yield value
    if depth == 0 or isinstance(value, (*_ATOMS, torch.Tensor, torch.nn.Module)):
        return
    if isinstance(value, torch.optim.Optimizer):
        return
    seen.add(id(value))
    parts: list[Any] = []
    if isinstance(value, Mapping):
        parts = [*value.keys(), *value.values()]
    elif isinstance(value, _CONTAINERS):
        parts = list(value)
    elif isinstance(value, types.FunctionType):
        parts = [*_cells(value), *(value.__defaults__ or ())]
    elif isinstance(value, types.MethodType):
        parts = [value.__self__, value.__func__]
    elif isinstance(value, functools.partial):
        parts = [value.func, value.args, value.keywords]
    elif isinstance(value, weakref.ReferenceType):
        parts = [value()]
    else:
        parts = list(fields(value).values())
    for part in parts:
        yield from inside(part, depth - 1, seen)


def _cells(function: types.FunctionType) -> list[Any]:
    """What a function holds on to from around it."""
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    return found


def overlap(tensors: Sequence[torch.Tensor]) -> tuple[int, int] | None:
    """Return the positions of two tensors that have memory in common, if there are any.

    Tensors that lie in between each other, as columns of a matrix do, have none.
    """
    spans: list[tuple[str, int, int, int]] = []
    for index, tensor in enumerate(tensors):
        if tensor.layout is torch.strided and tensor.numel() and not tensor.is_meta:
            sizes = zip(tensor.shape, tensor.stride(), strict=True)
            reach = sum((length - 1) * stride for length, stride in sizes)
            start = tensor.data_ptr()
            stop = start + (reach + 1) * tensor.element_size()
            spans.append((str(tensor.device), start, stop, index))
    spans.sort()
    first = 0
    while first < len(spans):
        device, _, end, _ = spans[first]
        last = first + 1
        while last < len(spans) and spans[last][0] == device and spans[last][1] < end:
            end = max(end, spans[last][2])
            last += 1
        if last - first > 1:
            near = [(index, tensors[index]) for _, _, _, index in spans[first:last]]
            found = _meeting(near, spans[first][1], end)
            if found is not None:
                return found
        first = last
    return None


def _meeting(
    near: Sequence[tuple[int, torch.Tensor]], start: int, end: int
) -> tuple[int, int] | None:
    """Find two of some tensors, which lie between two addresses, that have an element in common."""
    offsets = [tensor.data_ptr() - start for _, tensor in near]
    unit = gcd(*offsets, *(tensor.element_size() for _, tensor in near))
    if (end - start) // unit > _MAX_MARKS:
        return near[0][0], near[1][0]  # perhaps
    marks = torch.zeros((end - start) // unit, dtype=torch.int32, device="cpu")
    for number, ((index, tensor), offset) in enumerate(zip(near, offsets, strict=True), 1):
        width = tensor.element_size() // unit
        own = marks.as_strided(
            (*tensor.shape, width),
            (*(stride * width for stride in tensor.stride()), 1),
            offset // unit,
        )
        earlier = int(own.max())
        if earlier:
            return near[earlier - 1][0], index
        own.fill_(number)
    return None


def fields(value: Any) -> dict[str, Any]:
    """What an object keeps in its attributes and slots."""
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return found
