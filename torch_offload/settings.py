"""Settings: tells, cheaply and at every step, whether groups have some that no trial has seen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

#: No settings, or what LR schedulers note down.
_OTHERS = frozenset({"params", "param_names", "initial_lr"})


class Settings:
    """Kinds of settings: which keys there are, and what is None, true, false, zero or negative.

    Args:
        groups: parameter groups, or their settings alone.
    """

    def __init__(self, groups: Iterable[Mapping[str, Any]]) -> None:
        self._keys: set[frozenset[str]] = set()
        self._kinds: dict[str, set[Any]] = {}
        for group in groups:
            self._keys.add(frozenset(group) - _OTHERS)
            for key, value in group.items():
                self._kinds.setdefault(key, set()).add(_kind(value))

    def has_others(self, groups: Iterable[Mapping[str, Any]]) -> bool:
        """Whether one of the groups has a key less or more, or a value of another kind.

        Costs a few microseconds a group. Learning rates become and stop to be zero as they like: a
        trial has them both ways.
        """
        kinds = self._kinds
        for group in groups:
            if frozenset(group) - _OTHERS not in self._keys:
                return True
            for key, value in group.items():
                if key != "lr" and key not in _OTHERS and _kind(value) not in kinds[key]:
                    return True
        return False

    def joined(self, other: Settings) -> Settings:
        """Return what the two have seen, for one who tried both."""
        made = Settings(())
        made._keys = self._keys | other._keys
        made._kinds = {
            key: self._kinds.get(key, set()) | other._kinds.get(key, set())
            for key in self._kinds.keys() | other._kinds.keys()
        }
        return made


def _kind(value: Any) -> Any:
    kind = type(value)
    if kind is float or kind is int:
        return "positive" if value > 0 else "negative" if value < 0 else "zero"
    if value is None or kind is bool:
        return value
    if isinstance(value, (float, int)):
        return _kind(float(value))
    return torch.Tensor if isinstance(value, torch.Tensor) else kind
