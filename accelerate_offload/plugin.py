"""OffloadOptimizerPlugin: optimizer offload for people who write code instead of launching it."""

from __future__ import annotations

import inspect
from typing import Any

from torch_offload import OffloadConfig

from . import environment, report


class OffloadOptimizerPlugin(OffloadConfig):
    """Switch optimizer offload on for every ``prepare()`` that follows, as an object in code.

    It has the fields of ``OffloadConfig``, with ``overlap="auto"`` by default. As with Accelerate's
    own plugins the object sets the environment, ``ACCELERATE_OFFLOAD_OPTIMIZER=true`` and one
    variable for each field; a field that is not given comes from its variable if there is one.
    Build it before or after ``Accelerator()``, before ``prepare()``::

        accelerator = Accelerator()
        OffloadOptimizerPlugin(chunk_size="256MiB")
        model, optimizer = accelerator.prepare(model, optimizer)

    ``ACCELERATE_OFFLOAD_OPTIMIZER=false`` in the environment is stronger.

    Raises:
        ValueError: a field is out of range, or a variable is wrong.
        TypeError: there is no such field.
    """

    def __init__(self, **given: Any) -> None:
        fields = environment.defaults()
        config = environment.config_from_environment()
        super().__init__(**{**{field: getattr(config, field) for field in fields}, **given})
        if environment.refused():
            report.switched_off("OffloadOptimizerPlugin")
        environment.export({field: getattr(self, field) for field in fields})


_signature = inspect.signature(OffloadConfig)
OffloadOptimizerPlugin.__signature__ = _signature.replace(  # type: ignore[attr-defined]
    parameters=[
        parameter.replace(default=environment.defaults()[name])
        for name, parameter in _signature.parameters.items()
    ]
)
