"""What an optimizer may hold on to, and the refusal of what a chunk's stand-in could not have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .distributed import local
from .placement import travels
from .random_state import is_generator
from .values import fingerprint, inside, is_container, overlap, put_back, rebuilt

ADVICE = "Train it without offload, or use an optimizer that updates each parameter by itself."


class Refused(NotImplementedError):
    """The optimizer cannot be offloaded, for the reason that the message gives."""


def check_holdings(
    name: str,
    attributes: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
) -> None:
    """Refuse attributes and settings that a stand-in cannot share or copy.

    Args:
        name: of the optimizer's class.
        attributes: the optimizer's attributes but groups, state and hooks.
        groups: its parameter groups.

    Raises:
        Refused: one of them leads to tensors, modules, an optimizer, a random
            generator, or to ids of parameters.
    """
    params = [param for group in groups for param in group["params"]]
    numbers = {id(param) for param in params} | {local(param).data_ptr() for param in params} - {0}
    for key, value in attributes.items():
        what = _unshareable(name, value, groups, numbers)
        if what:
            raise Refused(
                f"{name} keeps {what} in its attribute {key!r}, outside of optimizer.state and "
                f"param_groups, where offload cannot follow. {_remedy(what, key)}"
            )
    for index, group in enumerate(groups):
        for key, value in group.items():
            if key not in ("params", "param_names"):
                what = _unshareable(name, value, groups, numbers)
                if what and not (isinstance(value, torch.Tensor) and value.numel() == 1):
                    raise Refused(
                        f"{name} keeps {what} in {key!r} of parameter group {index}, where "
                        f"offload cannot follow. {_remedy(what, key)}"
                    )


def _unshareable(
    name: str, value: Any, groups: Sequence[Mapping[str, Any]], numbers: frozenset[int] | set[int]
) -> str | None:
    for part in inside(value):
        if isinstance(part, torch.optim.Optimizer):
            kind = type(part).__name__
            itself = kind == name and part.__dict__.get("param_groups") is groups
            return "itself" if itself else f"another optimizer ({kind})"
        if isinstance(part, torch.nn.Module):
            return f"a module ({type(part).__name__})"
        if isinstance(part, torch.Tensor) and part.dim() > 0:
            return "tensors"
        if is_generator(part):
            return f"a random generator of its own ({type(part).__name__})"
        if type(part) is int and part in numbers:
            return "addresses of parameters (id() or data_ptr())"
    return None


def _remedy(what: str, key: str) -> str:
    if what.startswith("another"):
        return f"Give offload() that one instead, before it is wrapped (here: optimizer.{key})."
    return ADVICE


def check_state(
    name: str, state: Mapping[Any, Any], params: Sequence[torch.Tensor], known_only: bool
) -> None:
    """Refuse state that could not be moved to the host and back without a difference.

    Args:
        name: of the optimizer's class.
        state: ``optimizer.state``.
        params: all parameters, with their gradients.
        known_only: whether a tensor that is none of ``params`` may be a key.

    Raises:
        Refused: a key is no parameter, an entry is no dict, tensors are nested in it,
            or share memory with each other, with parameters or with gradients.
    """
    known = {id(param) for param in params}
    named: list[tuple[str, torch.Tensor]] = []
    for param, entry in state.items():
        if not isinstance(param, torch.Tensor) or (known_only and id(param) not in known):
            if isinstance(entry, Mapping) and not entry:
                continue
            what = repr(param) if not isinstance(param, torch.Tensor) else "a tensor"
            raise Refused(
                f"{name} keeps state under {what}, which is no parameter; offload moves the state "
                f"of parameters only. {ADVICE}"
            )
        if not isinstance(entry, Mapping):
            raise Refused(
                f"{name} keeps a {type(entry).__name__} as the state of a parameter, not a dict. "
                f"{ADVICE}"
            )
        for key, value in entry.items():
            if isinstance(value, torch.Tensor) and hasattr(local(value), "__tensor_flatten__"):
                raise Refused(
                    f"{name} keeps {key!r} in a {type(value).__name__}, a tensor made of other "
                    f"tensors, which cannot be copied to the host as it is. {ADVICE}"
                )
            if travels(key, value):
                named.append((f"{key!r} of its state", value))
            elif not isinstance(value, torch.Tensor):
                _check_nested(name, key, value)
    named += [("a parameter", param) for param in params]
    named += [("a gradient", param.grad) for param in params if param.grad is not None]
    found = overlap([local(tensor) for _, tensor in named])
    if found is not None and any(named[i][0].startswith("'") for i in found):
        a, b = (named[index][0] for index in sorted(found))
        raise Refused(
            f"{name} keeps {a} in the same memory as {b}; on the host they would be two. {ADVICE}"
        )


def _check_nested(name: str, key: str, value: Any) -> None:
    for part in inside(value):
        if isinstance(part, torch.Tensor) and part.dim() > 0:
            raise Refused(
                f"{name} keeps tensors inside of a {type(value).__name__} in {key!r} of its state, "
                f"where offload does not look. {ADVICE}"
            )
        if is_generator(part):
            raise Refused(
                f"{name} keeps a random generator of its own ({type(part).__name__}) in {key!r} of "
                f"its state. {ADVICE}"
            )


class Steadies:
    """What stand-ins share with each other as it is, so that a step must not change it.

    Args:
        values: attributes and settings, with their names. Containers in them are copied for a
            stand-in, and so are tensors at the top.
    """

    def __init__(self, values: Iterable[tuple[str, Any]]) -> None:
        self._seen = [
            (key, part, fingerprint(part))
            for key, value in values
            for part in inside(value)
            if not (is_container(part) or (part is value and isinstance(part, torch.Tensor)))
        ]

    def changed(self) -> str | None:
        """Return the name of a value in which something changed meanwhile."""
        return next((k for k, part, before in self._seen if fingerprint(part) != before), None)


@contextmanager
def class_values_kept(name: str, plain_class: type) -> Iterator[None]:
    """Refuse a class that changes values of its own, which all of its objects share.

    Raises:
        Refused: it did inside of the block. The values are as they were.
    """
    kept = [
        (kind, key, value, rebuilt(value, lambda leaf: leaf), fingerprint(value))
        for kind in plain_class.__mro__
        if kind.__module__.partition(".")[0] not in _STABLE_PACKAGES
        for key, value in vars(kind).items()
        if not key.startswith(("__", "_abc_")) and not callable(value) and _is_data(value)
    ]
    changed = None
    try:
        yield
    finally:
        for kind, key, value, before, mark in kept:
            if fingerprint(kind.__dict__.get(key)) != mark:
                changed = key
                put_back(value, before)
                setattr(kind, key, value)
    if changed is not None:
        raise Refused(
            f"{name} changes its class's own {changed!r} in a step; offload steps several objects "
            f"of the class, one after the other. {ADVICE}"
        )


_STABLE_PACKAGES = frozenset({"torch", "builtins", "abc", "typing"})


def _is_data(value: Any) -> bool:
    return not hasattr(value, "__get__") and not hasattr(value, "__set__")
