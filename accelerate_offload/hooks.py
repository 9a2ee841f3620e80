"""What is changed in modules of Accelerate and transformers, each right after it was executed.

``on_optimizer``: the construction of ``AcceleratedOptimizer`` becomes ours when offload is on.
``on_accelerator``: methods of ``Accelerator`` tell offloaded optimizers what they need to know.
``on_trainer``: the same for transformers' ``Trainer``.
``on_launch``: ``accelerate launch`` gets flags. ``on_config_args``: its YAML gets a section.

The hooks run in the middle of ``import accelerate``, which may itself be in the middle of
``import torch``: this file imports neither, and each hook may run any number of times.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

from . import environment, report


def on_optimizer(module: ModuleType) -> None:
    """Let ``AcceleratedOptimizer(...)`` build an ``OffloadedOptimizer`` when offload is on.

    Accelerate names the class where it builds one, so the class's ``__new__`` is the one place
    that sees them all. Its subclasses (DeepSpeed's and Megatron-LM's wrappers) are left alone.

    Args:
        module: ``accelerate.optimizer``.
    """
    report.arm()
    base = module.AcceleratedOptimizer
    original = base.__new__
    if getattr(original, "_is_accelerate_offload", False):
        return

    def __new__(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # Unpickling calls this without arguments and means the class it names.
        optimizer = args[0] if args else kwargs.get("optimizer")
        if cls is base and optimizer is not None and _wanted(optimizer):
            from .optimizer import OffloadedOptimizer

            cls = OffloadedOptimizer  # a subclass, so Python runs its __init__ next
        elif cls is base and optimizer is not None:
            report.plain()
        if original is object.__new__:
            return original(cls)  # which takes no arguments
        return original(cls, *args, **kwargs)

    __new__._is_accelerate_offload = True  # type: ignore[attr-defined]
    base.__new__ = __new__


def on_accelerator(module: ModuleType) -> None:
    """Let ``Accelerator`` tell the optimizers that it has prepared what they need to know.

    Args:
        module: ``accelerate.launchers``, which is imported after ``accelerate.accelerator``. That
            one may be the module that imports torch, and is not complete then.
    """
    from . import accelerator

    accelerator.extend(sys.modules["accelerate.accelerator"])
    for name in ("notebook_launcher", "debug_launcher"):
        setattr(module, name, _forking(getattr(module, name)))


def _forking(launch: Callable[..., Any]) -> Callable[..., Any]:
    if hasattr(launch, "_is_accelerate_offload"):
        return launch

    @functools.wraps(launch)
    def launcher(*args: Any, **kwargs: Any) -> Any:
        report.this_forks()
        return launch(*args, **kwargs)

    launcher._is_accelerate_offload = True  # type: ignore[attr-defined]
    return launcher


def on_trainer(module: ModuleType) -> None:
    """Let ``Trainer`` resume an offloaded optimizer on the host.

    Args:
        module: ``transformers.trainer``.
    """
    from . import trainer

    trainer.extend(module)


def on_launch(module: ModuleType) -> None:
    """Give ``accelerate launch`` its flags.

    Args:
        module: ``accelerate.commands.launch``.
    """
    from . import launch

    report.this_is_a_launcher()
    launch.extend(module)


def on_config_args(module: ModuleType) -> None:
    """Let Accelerate's configuration file have the section ``optimizer_offload_config``.

    Args:
        module: ``accelerate.commands.config.config_args``.
    """
    from . import config_file

    config_file.extend(module)


def _wanted(optimizer: Any) -> bool:
    if environment.requested():
        return True
    # Offloaded in code: the plain wrapper would copy what state it has to the GPU whole.
    core = sys.modules.get("torch_offload.optimizer")
    if core is not None and core.is_offloaded(optimizer):
        return True
    fields = environment.field_variables()
    if fields and environment.SWITCH not in os.environ:
        warnings.warn(
            f"{', '.join(sorted(fields))} is set, but the optimizer is not offloaded: "
            f"set {environment.SWITCH}=true as well.",
            stacklevel=3,
        )
    return False
