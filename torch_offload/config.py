"""OffloadConfig: every choice a user can make, in units, validated where it is made.

Vocabulary: *state* is the optimizer's per-parameter tensors, a *chunk* is the state that travels
together, a *slot* is the device buffer for one chunk in flight.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from .residency import Budget

#: When chunks can be updated.
OVERLAPS = ("step", "backward", "forward", "auto")

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)
#: Fields that are sizes.
_SIZES = frozenset({"chunk_size", "gpu_budget"})
_TRUE = frozenset({"1", "true", "yes", "on", "y", "t"})
_FALSE = frozenset({"0", "false", "no", "off", "n", "f"})


def parse_size(value: int | str, *, field: str) -> int:
    """Return a size in bytes, given as an int or as text such as ``"512MiB"`` or ``"1.5GB"``.

    Args:
        value: the size as the user wrote it.
        field: the name to put in the error.

    Raises:
        ValueError: it is not a size, or not a positive whole number of bytes.
    """
    remedy = 'Give bytes as an int, or text such as "512MiB" or "1GB".'
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f"{field}={value!r} is not a size. {remedy}")
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        unit = match and _UNITS.get(match.group(2).lower())
        if not match or not unit:
            raise ValueError(f"{field}={value!r} is not a size. {remedy}")
        num_bytes = int(min(float(match.group(1)) * unit, 2.0**63))
    else:
        num_bytes = value
    if num_bytes >= 2**63:
        raise ValueError(f"{field}={value!r} is more than any memory holds. {remedy}")
    if num_bytes <= 0:
        raise ValueError(f"{field}={value!r} is {num_bytes} bytes. It must be at least 1. {remedy}")
    return num_bytes


def format_size(num_bytes: int) -> str:
    """Return a size as :func:`parse_size` reads it: in the largest unit that divides it."""
    for unit in ("GiB", "MiB", "KiB"):
        count, rest = divmod(num_bytes, _UNITS[unit.lower()])
        if count and not rest:
            return f"{count}{unit}"
    return str(num_bytes)


def parse_bool(value: bool | str, *, field: str) -> bool:
    """Return a truth value, given as a bool or as text such as ``"true"`` or ``"0"``.

    Raises:
        ValueError: the text is neither a yes nor a no.
    """
    if isinstance(value, bool):
        return value
    text = value.strip().lower() if isinstance(value, str) else None
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError(f"{field}={value!r} is not a truth value. Use true or false.")


def _normal_budget(value: int | str) -> int | str:
    """Return bytes, ``"auto"``, or a share as text such as ``"50%"``."""
    if value == 0 and not isinstance(value, bool):
        return 0
    if isinstance(value, str):
        text = value.strip().lower()
        if text in ("auto", "0"):
            return "auto" if text == "auto" else 0
        if text.endswith("%"):
            try:
                share = float(text[:-1])
            except ValueError:
                share = -1.0
            if not 0 <= share <= 100:
                raise ValueError(
                    f"gpu_budget={value!r} is no share of the state. Use 0% to 100%, a size such "
                    'as "8GiB", or "auto".'
                )
            return f"{share:g}%"
    return parse_size(value, field="gpu_budget")


def _text(size: int | str) -> int | str:
    return format_size(size) if isinstance(size, int) and size else size


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """How optimizer state is offloaded. Every field has a default that was chosen by measurement.

    Args:
        chunk_size: bytes of state in one chunk, an int or text such as ``"512MiB"``. Normalised
            to an int. A parameter with more state than this is updated in parts, if its optimizer
            is element-wise; else it is a larger chunk of its own.
        num_slots: device buffers of one chunk each, at least 2. Three let copy-in, update and
            copy-out of three chunks run at once. GPU memory during a step is at most
            ``num_slots * chunk_size``, plus what parameters that cannot be cut have beyond it.
        overlap: when chunks are updated. ``"step"``: in ``step()``. ``"backward"``: as soon as
            their gradients are final, while backward goes on. Whoever reads or changes gradients
            or hyper-parameters between ``backward()`` and ``step()`` then gets an error.
            ``"forward"``: ``step()`` returns at once, and parameters wait for their own updates
            until the next forward uses them; needs :func:`attach_model`. ``"auto"``: the first two
            steps are watched; ``"backward"`` if nothing uses gradients before ``step()``, else
            ``"forward"`` if the model is known.
        gpu_budget: state that stays on the device and costs no copies: bytes as an int or text, a
            share of the state such as ``"50%"``, or ``"auto"`` for what the first steps leave free.
            The numbers are the same.
        pin_memory: keep host state in page-locked memory. Without it copies are slower and do not
            overlap with anything; the numbers are the same.

    Raises:
        ValueError: a field is out of range. The message names the field, the value and the remedy.
    """

    chunk_size: int | str = "512MiB"
    num_slots: int = 3
    overlap: str = "step"
    gpu_budget: int | str = 0
    pin_memory: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "chunk_size", parse_size(self.chunk_size, field="chunk_size"))
        if isinstance(self.num_slots, bool) or not isinstance(self.num_slots, int):
            raise ValueError(f"num_slots={self.num_slots!r} is not an int. Use 2, 3 or 4.")
        if self.num_slots < 2:
            raise ValueError(
                f"num_slots={self.num_slots} leaves no second buffer to copy into while the first "
                "is updated. Use 2 or more; 3 is the default."
            )
        if self.overlap not in OVERLAPS:
            raise ValueError(
                f"overlap={self.overlap!r} is not known. Use one of {', '.join(OVERLAPS)}."
            )
        object.__setattr__(self, "gpu_budget", _normal_budget(self.gpu_budget))
        if not isinstance(self.pin_memory, bool):
            raise ValueError(f"pin_memory={self.pin_memory!r} is not a bool. Use True or False.")

    def __repr__(self) -> str:
        return (
            f"OffloadConfig(chunk_size={format_size(self.chunk_bytes)!r}, "
            f"num_slots={self.num_slots}, overlap={self.overlap!r}, "
            f"gpu_budget={_text(self.gpu_budget)!r}, pin_memory={self.pin_memory})"
        )

    @property
    def chunk_bytes(self) -> int:
        """``chunk_size`` in bytes."""
        return int(self.chunk_size)

    def budget(self) -> Budget:
        """``gpu_budget`` as what chooses the chunks. Those are preferred whose copies would be
        seen: of the last gradients in backward, and of the first parameters in forward."""
        from_end = self.overlap != "forward"
        if isinstance(self.gpu_budget, int):
            return Budget(num_bytes=self.gpu_budget, from_end=from_end)
        if self.gpu_budget == "auto":
            return Budget(is_auto=True, from_end=from_end)
        return Budget(share=float(self.gpu_budget.rstrip("%")) / 100, from_end=from_end)

    @classmethod
    def from_text(cls, values: Mapping[str, Any]) -> OffloadConfig:
        """Build a config from text, as environment variables and command lines give it.

        Args:
            values: field name to value. Values may be text or already of the field's type; an
                empty text or ``None`` means the default.

        Raises:
            ValueError: an unknown field, or a value that its field does not take.
        """
        known = {field.name for field in fields(cls)}
        parsed: dict[str, Any] = {}
        for name, value in values.items():
            if name not in known:
                raise ValueError(
                    f"OffloadConfig has no field {name!r} (given as {value!r}). "
                    f"Fields: {', '.join(sorted(known))}."
                )
            if value is None or value == "":
                continue
            if name == "num_slots" and isinstance(value, str):
                try:
                    value = int(value)
                except ValueError:
                    raise ValueError(f"num_slots={value!r} is not an int. Use 2, 3 or 4.") from None
            elif name == "pin_memory":
                value = parse_bool(value, field=name)
            elif name in _SIZES and isinstance(value, str) and value.strip().isdigit():
                value = int(value)
            parsed[name] = value
        return cls(**parsed)
