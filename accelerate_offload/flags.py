"""Command-line flags for the fields of ``OffloadConfig``, shared by the launcher and the shim.

``--offload_<field>`` for each field that the class has, so that a new field has its flag at once.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable
from typing import Any

from torch_offload import OffloadConfig

from . import environment


def flag(field: str) -> str:
    """Return the command-line flag of ``field``."""
    return f"--offload_{field}"


def add_fields(group: Any, dest_prefix: str = "", *, twins: bool = False) -> None:
    """Add a flag for every field of ``OffloadConfig``, except for names that are taken.

    Args:
        group: an ``argparse`` parser or group.
        dest_prefix: the value of field ``f`` is put, as text, into ``<dest_prefix>f``.
        twins: add the spelling with ``-`` as well, for a parser that does not do so by itself.
    """
    for field in environment.defaults():
        add(
            group,
            *[flag(field), flag(field).replace("_", "-")][: 1 + twins],
            dest=dest_prefix + field,
            metavar=field.upper(),
            default=None,
            type=_checked(field),
            help=_help(field),
        )


def add(group: Any, *names: str, **options: Any) -> bool:
    """Add one flag, and return True; return False if somebody has a flag of that name."""
    try:
        group.add_argument(*names, **options)
    except argparse.ArgumentError:
        return False
    return True


def _checked(field: str) -> Callable[[str], str]:
    """Return the ``type`` of a flag: it says what is wrong with a value and keeps it as text."""

    def text(value: str) -> str:
        try:
            OffloadConfig.from_text({field: value})
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return value

    return text


def _help(field: str) -> str:
    """Return the first sentence on ``field`` in the docstring of ``OffloadConfig``."""
    doc = inspect.getdoc(OffloadConfig) or ""
    match = re.search(rf"^ +{field}: (.*?\.)(\s|$)", doc, re.MULTILINE | re.DOTALL)
    text = " ".join(match.group(1).split()) if match else f"{field} of OffloadConfig."
    text = f"{text[:1].upper()}{text[1:]} Default: {environment.defaults()[field]}."
    return text.replace("``", "").replace("%", "%%")
