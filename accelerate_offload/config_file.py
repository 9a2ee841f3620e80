"""The section ``optimizer_offload_config`` of Accelerate's configuration file.

::

    optimizer_offload_config:
      offload_optimizer: true       # the default for a section that has anything in it
      chunk_size: 512MiB            # any field of OffloadConfig
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from . import environment

SECTION = "optimizer_offload_config"
_SWITCH = "offload_optimizer"


@dataclass
class _Section:
    """Where ``ClusterConfig`` gets its new field from."""

    optimizer_offload_config: dict[str, Any] | None = None


def extend(module: Any) -> None:
    """Let ``ClusterConfig`` of Accelerate take the section and keep it.

    Args:
        module: ``accelerate.commands.config.config_args``.
    """
    cluster = module.ClusterConfig
    if SECTION in cluster.__dataclass_fields__:  # ours, or a section that Accelerate has by now
        return
    original = cluster.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        section = kwargs.pop(SECTION, None) or {}
        _check(section)
        original(self, *args, **kwargs)
        setattr(self, SECTION, section)

    cluster.__dataclass_fields__[SECTION] = _Section.__dataclass_fields__[SECTION]
    cluster.__init__ = __init__


def read(config: Any) -> tuple[bool, dict[str, Any]]:
    """Return whether a loaded configuration switches offload on, and its fields.

    Args:
        config: an instance of Accelerate's ``ClusterConfig``, or None for no file.
    """
    section = getattr(config, SECTION, None) or {}
    values = {field: value for field, value in section.items() if field != _SWITCH}
    # `chunk_size:` with nothing behind it means the default.
    given = {field: value for field, value in values.items() if value not in (None, "")}
    return section.get(_SWITCH, bool(values)), given


def _check(section: Any) -> None:
    if not isinstance(section, dict):
        raise ValueError(f"{SECTION} must be a section of `field: value` lines, not {section!r}.")
    for key, value in section.items():
        label = f"{SECTION}: {key}"
        if key == _SWITCH:
            if not isinstance(value, bool):
                raise ValueError(f"{label}={value!r} is not a truth value. Use true or false.")
        elif key not in environment.defaults():
            raise ValueError(
                f"{label}={value!r} is no option of optimizer offload. Use "
                f"{', '.join([_SWITCH, *environment.defaults()])}."
            )
        else:
            environment.check(key, value, label)
