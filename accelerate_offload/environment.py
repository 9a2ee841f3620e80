"""The environment variables that switch optimizer offload on and hold its configuration.

Every way in (launcher flag, YAML section, ``-m`` shim, plugin) only sets these variables;
``Accelerator.prepare`` reads them. The *switch* is ``ACCELERATE_OFFLOAD_OPTIMIZER``; a *field
variable* is ``ACCELERATE_OFFLOAD_<FIELD>``, one for each field of ``OffloadConfig``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_offload import OffloadConfig

PREFIX = "ACCELERATE_OFFLOAD_"
SWITCH = PREFIX + "OPTIMIZER"

#: Defaults that differ from those of ``OffloadConfig``: Accelerate knows the model.
DEFAULTS = {"overlap": "auto"}

_ON = frozenset({"1", "true", "yes", "on", "y", "t"})
_OFF = frozenset({"", "0", "false", "no", "off", "n", "f"})


def requested() -> bool:
    """Whether the switch is on.

    Raises:
        ValueError: the switch is neither a yes nor a no.
    """
    text = os.environ.get(SWITCH, "").strip().lower()
    if text not in _ON | _OFF:
        raise ValueError(
            f"{SWITCH}={os.environ[SWITCH]!r} is not a truth value. Use true or false."
        )
    return text in _ON


def refused() -> bool:
    """Whether the switch is there and says no, which is stronger than whatever code says."""
    return os.environ.get(SWITCH, "").strip() != "" and not requested()


def defaults() -> dict[str, Any]:
    """Return each field of ``OffloadConfig`` with its default here, in order."""
    # Imported here: this module is loaded in the middle of `import accelerate`, and by the shim
    # before a script has had its chance to set what torch reads when it is imported.
    from torch_offload import OffloadConfig

    return {field.name: field.default for field in fields(OffloadConfig)} | DEFAULTS


def variable(field: str) -> str:
    """Return the name of the variable that holds ``field``."""
    return PREFIX + field.upper()


def field_variables() -> dict[str, str]:
    """Return the field variables that are set, switch excluded, as name to value."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(PREFIX) and name != SWITCH
    }


def check(field: str, value: Any, label: str) -> None:
    """Raise unless ``value`` is good for ``field``.

    Args:
        field: name of a field of ``OffloadConfig``.
        value: what the user wrote, text or already of the field's type.
        label: the user's spelling of the field, to begin the message with.

    Raises:
        ValueError: it is not. The message names ``label``, the value and the remedy.
    """
    from torch_offload import OffloadConfig

    try:
        OffloadConfig.from_text({field: value})
    except ValueError as error:
        raise ValueError(f"{label}={value}: {error}") from None


def config_from_environment() -> OffloadConfig:
    """Return the configuration that the field variables describe. The switch plays no part.

    Raises:
        ValueError: a variable with our prefix names no field, or its value is wrong. The message
            names the variable, the value and the remedy.
    """
    from torch_offload import OffloadConfig

    field_of = {variable(field): field for field in defaults()}
    values: dict[str, Any] = dict(DEFAULTS)
    for name, value in field_variables().items():
        if name not in field_of:
            raise ValueError(
                f"{name}={value} sets no option of optimizer offload. Unset it, or use one of: "
                f"{', '.join([SWITCH, *field_of])}."
            )
        check(field_of[name], value, name)
        if value != "":
            values[field_of[name]] = value
    return OffloadConfig.from_text(values)


def export(values: Mapping[str, Any]) -> None:
    """Switch offload on for this process and its children, and set the variables of ``values``.

    A switch that says no stays as it is.

    Args:
        values: field to value. Fields that are not given keep the variable they have.
    """
    if not refused():
        os.environ[SWITCH] = "true"
    for field, value in values.items():
        text = str(value)
        os.environ[variable(field)] = text.lower() if isinstance(value, bool) else text
