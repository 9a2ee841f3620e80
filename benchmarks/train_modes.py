"""The modes that bench_train.py compares: when state is updated, what stays, and clipping."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from record import Record
from torch_offload import OffloadConfig

OVERLAPS = ("step", "backward", "forward")
_BUDGET = re.compile(r"\d+(\.\d+)?(%|[kmgt]i?b)|auto", re.IGNORECASE)


class UnsupportedError(Exception):
    """The library has no such mode, yet."""


@dataclass(frozen=True, kw_only=True)
class Mode:
    """How one row of the table is trained. Without `overlap` nothing is offloaded."""

    name: str
    overlap: str | None
    budget: str | None = None
    clip: bool = False
    control: bool = False

    @property
    def reference(self) -> str:
        """The mode of plain AdamW that has the same bits."""
        return "none+clip" if self.clip else "none"

    @property
    def label(self) -> str:
        """Name to print."""
        return f"{self.name} (control)" if self.control else self.name


def parse_mode(text: str) -> Mode:
    """Read a mode such as ``forward+clip+50%``.

    Raises:
        ValueError: it is none.
    """
    remedy = "Use none, step, backward or forward, then +clip and +50% or +8GiB where wanted."
    overlap, *rest = text.split("+")
    if overlap not in ("none", *OVERLAPS):
        raise ValueError(f"modes={text!r} begins with no mode. {remedy}")
    budgets = [part for part in rest if part != "clip"]
    for budget in budgets:
        if not _BUDGET.fullmatch(budget):
            raise ValueError(f"modes={text!r} has {budget!r}, which is no budget. {remedy}")
    if len(budgets) > 1 or rest.count("clip") > 1:
        raise ValueError(f"modes={text!r} says the same thing twice. {remedy}")
    if budgets and overlap == "none":
        raise ValueError(f"modes={text!r} has a budget, but offloads nothing. Leave +{budgets[0]}.")
    name = "+".join([overlap, *(["clip"] if "clip" in rest else []), *budgets])
    return Mode(
        name=name,
        overlap=None if overlap == "none" else overlap,
        budget=budgets[0] if budgets else None,
        clip="clip" in rest,
    )


def with_control(modes: Sequence[Mode]) -> list[Mode]:
    """Return the modes with a second run of the first plain one before all others."""
    plain = next((mode for mode in modes if mode.overlap is None), None)
    if plain is None:
        return list(modes)
    return [Mode(name=plain.name, overlap=None, clip=plain.clip, control=True), *modes]


def make_config(mode: Mode, sizes: Record, config_class: type = OffloadConfig) -> Any:
    """Return the config of a mode that offloads. Only what differs from the defaults is given.

    Raises:
        UnsupportedError: the library's config has no such field.
    """
    known = {field.name: field.default for field in fields(config_class)}
    wanted = {"overlap": mode.overlap, "gpu_budget": mode.budget}
    defaults = {"overlap": known.get("overlap", "step"), "gpu_budget": None}
    changed = {name: value for name, value in wanted.items() if value != defaults[name]}
    for name, value in changed.items():
        if name not in known:
            raise UnsupportedError(f"OffloadConfig has no field {name!r}, wanted as {value!r}.")
    return config_class(**sizes, **changed)
