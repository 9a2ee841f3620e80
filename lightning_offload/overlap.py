"""When chunks are updated: chosen at the start of a fit, from what the Trainer knows.

Beside backward, parameters are updated before ``step()`` is called; so nothing may read or change
gradients in between. Lightning runs several hooks there: a *reader* is one that somebody has
overridden, or a part of Lightning itself that uses gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

#: Hooks that Lightning calls between the first gradient of a step and its end, or that decide when.
_MODULE_HOOKS = (
    "backward",
    "configure_gradient_clipping",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "optimizer_step",
    "optimizer_zero_grad",
)
_CALLBACK_HOOKS = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
#: Where Lightning defines what these do by default.
_DEFAULTS = ("core.hooks", "core.module", "callbacks.callback")


@dataclass(frozen=True)
class Reader:
    """Who uses gradients before ``step()``.

    Args:
        text: says so.
        is_certain: it does; otherwise it may.
    """

    text: str
    is_certain: bool = False


@dataclass(frozen=True)
class Loop:
    """What Lightning knows of a training loop.

    Args:
        readers: who uses gradients before ``step()``.
        is_manual: the user's code calls ``backward()`` and ``step()``.
        is_compiled: the whole ``training_step`` is, so that no module in it is seen.
    """

    readers: tuple[Reader, ...] = ()
    is_manual: bool = False
    is_compiled: bool = False


@dataclass(frozen=True)
class Choice:
    """An overlap and the reason for it."""

    overlap: str
    reason: str


def choose(wanted: str, loop: Loop) -> Choice:
    """Choose when chunks are updated.

    Args:
        wanted: the user's choice, as in `torch_offload.OffloadConfig`.
        loop: what it is for.

    Raises:
        ValueError: the user's choice would fail, or train on other numbers.
    """
    if wanted != "auto":
        problem = _problem(wanted, loop)
        if problem is not None:
            raise ValueError(
                f'overlap="{wanted}" cannot be used here: {problem}. Use overlap="auto", or "step".'
            )
        return Choice(wanted, "as asked for")
    if loop.is_manual:
        return Choice("step", "manual optimization, which may use gradients at any time")
    if not loop.readers:
        return Choice("backward", "nothing uses gradients between backward and step")
    reason = loop.readers[0].text
    if loop.is_compiled:
        return Choice("step", f"{reason}, and training_step is compiled as a whole")
    return Choice("forward", reason)


def _problem(wanted: str, loop: Loop) -> str | None:
    if wanted == "backward":
        for reader in loop.readers:
            if reader.is_certain:
                return f"{reader.text}, and chunks would be updated before that"
    if wanted == "forward" and loop.is_compiled:
        return "training_step is compiled as a whole, so its modules cannot wait for parameters"
    return None


def look(trainer: Any, module: Any, strategy: Any) -> Loop:
    """Return what a Trainer knows at the start of a fit.

    Args:
        trainer: has its callbacks and its precision plugin.
        module: the LightningModule.
        strategy: the Trainer's.
    """
    return Loop(
        readers=tuple(_readers(trainer, module, strategy)),
        is_manual=not module.automatic_optimization,
        is_compiled=getattr(module, "_compiler_ctx", None) is not None,
    )


def _readers(trainer: Any, module: Any, strategy: Any) -> Iterator[Reader]:
    if trainer.gradient_clip_val:
        yield Reader(f"gradient_clip_val={trainer.gradient_clip_val} clips gradients", True)
    plugin = strategy.precision_plugin
    if getattr(plugin, "scaler", None) is not None:
        yield Reader(f"precision {plugin.precision} unscales gradients", True)
    if getattr(strategy, "_ddp_comm_hook", None) is not None:
        yield Reader("ddp_comm_hook takes the one place for such a hook", True)
    if not _is_lightnings(type(plugin)):
        yield Reader(f"{type(plugin).__name__} may use gradients")
    for name in _MODULE_HOOKS:
        if _is_overridden(module, name):
            yield Reader(f"{type(module).__name__} has a {name} of its own")
    for callback in trainer.callbacks:
        kind = type(callback).__name__
        for name in _CALLBACK_HOOKS:
            if _is_overridden(callback, name):
                yield Reader(f"{kind} has {name}")
        if kind == "BatchSizeFinder":
            yield Reader("BatchSizeFinder goes on after a backward that ran out of memory")
    environment = trainer._accelerator_connector.cluster_environment
    if getattr(environment, "auto_requeue", False):
        yield Reader("SLURM may ask for a checkpoint in the middle of a backward")


def _is_overridden(owner: Any, name: str) -> bool:
    """Whether a hook is not Lightning's own, that of the class or of the object."""
    if name in vars(owner):
        return True
    for base in type(owner).__mro__:
        if name in vars(base):
            return not (_is_lightnings(base) and base.__module__.endswith(_DEFAULTS))
    return False


def _is_lightnings(cls: type[Any]) -> bool:
    return cls.__module__.partition(".")[0] in ("lightning", "pytorch_lightning")
