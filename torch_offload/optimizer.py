"""offload(): converts a torch optimizer in place. The public functions of the package.

The object stays the same; its class becomes a subclass of its own class, as ``fully_shard`` does to
modules. So ``isinstance(optimizer, AdamW)``, LR schedulers, step hooks, ``GradScaler`` and the
wrappers of Lightning and Accelerate go on working.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch.optim import Optimizer

from .checkpoint import load_state_dict
from .config import OffloadConfig
from .core import OffloadCore
from .dcp import install, settle
from .distributed import local, wrapped, wrapping
from .independence import Traits
from .placement import travels
from .refusals import check_optimizer, check_step_attribute
from .stats import OffloadStats

O = TypeVar("O")  # noqa: E741

#: Packages whose wrapper classes keep the user's optimizer in ``.optimizer``.
_WRAPPER_PACKAGES = frozenset(
    {"accelerate", "accelerate_offload", "lightning", "pytorch_lightning", "lightning_fabric"}
)


def offload(optimizer: O, config: OffloadConfig | None = None) -> O:
    """Convert ``optimizer`` in place so that its state lives in host memory, and return it.

    State that it already has moves to the host now; otherwise host memory is allocated by the
    first ``step()``. Parameters, gradients and the update stay on the parameters' device, and the
    numbers are bit for bit those of the plain optimizer.

    Args:
        optimizer: an optimizer of ``torch.optim`` but LBFGS, in any flavour (for-loop, foreach,
            fused), or Lightning's, Fabric's or Accelerate's wrapper of one. That it updates each
            parameter by itself is tried out on tiny CPU copies.
        config: sizes; ``OffloadConfig()`` by default. An optimizer that is already offloaded stays
            as it is when ``config`` is ``None`` or the one that it has.

    Raises:
        TypeError: ``optimizer`` is not an optimizer.
        ValueError: it has no parameters, or is already offloaded with another config.
        NotImplementedError: its class or one of its settings is not supported.
        MemoryError: it has state and the host has not enough memory for it.
    """
    plain = _unwrap(optimizer)
    if config is not None and type(config) is not OffloadConfig:  # a front end's subclass
        config = OffloadConfig(**{f.name: getattr(config, f.name) for f in fields(OffloadConfig)})
    if is_offloaded(plain):
        present = _core(plain).config
        if config is not None and config != present:
            raise ValueError(
                f"{type(plain).__name__} is already offloaded with {present}; asked for {config}. "
                "Call unoffload() first to change it."
            )
        return optimizer
    traits = check_optimizer(plain)
    install(_find_core)
    _convert(plain, OffloadConfig() if config is None else config, traits)
    _recapture_step(optimizer)
    return optimizer


def _convert(plain: Any, config: OffloadConfig, traits: Traits) -> None:
    core = OffloadCore(plain, type(plain), config, traits)
    core.scheduler_step = plain.__dict__.get("step")
    # Copies, so that the optimizer is as it was if this fails or is interrupted.
    existing = {param: dict(state) for param, state in plain.state.items() if state}
    if existing:
        with _outside_autograd():
            core.adopt(existing)
    made = _offloaded_class(cast(Any, core.plain_class))
    try:
        plain.__class__ = made
        plain.__dict__["_offload_core"] = core
        core.guard = plain.register_step_pre_hook(_refuse_bypass)
        plain.__dict__.pop("step", None)
        core.state.update(existing)
    except BaseException:
        _restore(plain, core)
        raise


def _restore(plain: Any, core: OffloadCore) -> None:
    """Give the optimizer the class and the ``step`` that it had."""
    plain.__class__ = core.plain_class
    if core.guard is not None:
        core.guard.remove()
    if core.scheduler_step is not None:
        plain.__dict__["step"] = core.scheduler_step
    plain.__dict__.pop("_offload_core", None)


def unoffload(optimizer: O) -> O:
    """Undo :func:`offload`: move the state to the parameters' devices and restore the class.

    The numbers do not change, and schedulers and hooks keep working. Host memory is given back.

    Raises:
        ValueError: ``optimizer`` is not offloaded.
    """
    plain = _unwrap(optimizer)
    core = _core(plain)
    check_step_attribute(plain, "unoffload()")
    core.warn_if_torn()
    core.synchronize()
    with _outside_autograd():
        moved = {
            param: {
                key: _on_device(value, param.device) if travels(key, value) else value
                for key, value in values.items()
            }
            for param, values in core.state.items()
            if isinstance(param, torch.Tensor)
        }
    core.state.update(moved)
    # A scheduler that was built meanwhile found a step that was marked, and looks for the mark.
    core.scheduler_step = core.scheduler_step or _scheduled_step(plain)
    _restore(plain, core)
    _recapture_step(optimizer)
    return optimizer


def is_offloaded(optimizer: object) -> bool:
    """Whether :func:`offload` converted ``optimizer`` (or the one that it wraps)."""
    return isinstance(_unwrap(optimizer), OffloadedOptimizer)


def synchronize(optimizer: object) -> None:
    """Block the CPU until the host state of ``optimizer`` is that of its last step.

    Reading ``optimizer.state`` or ``state_dict()`` does this by itself; only code that kept state
    tensors from before a step needs it.

    Raises:
        ValueError: ``optimizer`` is not offloaded.
    """
    _core(_unwrap(optimizer)).synchronize()


def offload_stats(optimizer: object) -> OffloadStats:
    """Return bytes and seconds of the last step. Waits for the end of that step.

    Raises:
        ValueError: ``optimizer`` is not offloaded.
    """
    return _core(_unwrap(optimizer)).stats()


class OffloadedOptimizer:
    """What the class of a converted optimizer has in front of its own class.

    Frameworks make proxies whose class derives from the optimizer's, so ``self`` may be one: the
    core knows the optimizer itself.
    """

    _offload_core: OffloadCore

    @property
    def state(self) -> MutableMapping[torch.Tensor, dict[str, Any]]:
        """The optimizer's state: CPU tensors, final. Waits for copies in flight (I4)."""
        core = self._offload_core
        core.synchronize()
        return core.state

    @state.setter
    def state(self, value: MutableMapping[torch.Tensor, dict[str, Any]]) -> None:
        core = self._offload_core
        core.synchronize()
        core.optimizer.__dict__["state"] = value

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a plain torch checkpoint into host memory, in place."""
        with _outside_autograd():
            load_state_dict(self._offload_core, state_dict)

    def state_dict(self) -> dict[str, Any]:
        """Return a plain torch checkpoint. As in torch its tensors are the state itself, so later
        steps and loads change them: deep-copy one that must stay."""
        self._offload_core.warn_if_torn()
        return cast(dict[str, Any], super().state_dict())  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class was made at run time, so a pickle names the plain one. Its state is on the CPU:
        # offload() what was unpickled, or load a checkpoint, before it steps on a GPU.
        core = self._offload_core
        core.warn_if_torn()
        return object.__new__, (core.plain_class,), cast(Any, core.optimizer).__getstate__()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        core = self._offload_core
        clone = object.__new__(core.plain_class)
        memo[id(self)] = clone
        clone.__setstate__(copy.deepcopy(cast(Any, core.optimizer).__getstate__(), memo))
        _convert(clone, core.config, core.traits)
        if core.failure is not None:
            _core(clone).fail(core.failure)
        return clone


def _step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
    core: OffloadCore = self._offload_core
    core.optimizer.__dict__["_opt_called"] = True  # what LR schedulers look for
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    with _outside_autograd():
        settle(core)
        core.step()
    return loss


_hooked_step: Any = Optimizer.profile_hook_step(_step)


def _guarded_step(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Update the parameters. A closure is evaluated once, before any chunk."""
    core: OffloadCore | None = getattr(self, "_offload_core", None)
    if core is None:  # bound by somebody before unoffload()
        return type(self).step(self, *args, **kwargs)
    core.entered += 1
    try:
        return _hooked_step(self, *args, **kwargs)
    finally:
        core.entered -= 1


def _scheduled_step(optimizer: Any) -> Callable[..., Any]:
    """Return a ``step`` as an LR scheduler leaves it on an optimizer; it holds it weakly, too."""
    reference = weakref.ref(optimizer)

    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer = reference()
        assert optimizer is not None
        optimizer._opt_called = True
        return type(optimizer).step(optimizer, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return step


def _refuse_bypass(optimizer: Any, *_: Any) -> None:
    """As a step pre-hook: notice a ``step`` of the plain class that was bound before offload()."""
    if is_offloaded(optimizer) and not _core(optimizer).entered:
        raise RuntimeError(
            "a step() that was bound before offload() was called and would go past it. Call "
            "offload() before the optimizer is wrapped, or give it the wrapper."
        )


def _on_device(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    return wrapped(local(value).to(device, copy=True), wrapping(value))


@contextmanager
def _outside_autograd() -> Iterator[None]:
    # Lightning validates under inference mode; state born there could never be updated again.
    with torch.inference_mode(False), torch.no_grad():
        yield


@cache
def _offloaded_class(plain_class: Any) -> type[Optimizer]:
    # Streams and host memory cannot be traced; torch keeps its own steps from it in the same way.
    step: Any = torch.compiler.disable(_guarded_step)  # type: ignore[no-untyped-call]
    step.hooked = True  # or torch would wrap it once more at every load
    step._wrapped_by_lr_sched = True  # or LR schedulers would bind it on the instance
    namespace = {"step": step, "__doc__": plain_class.__doc__}
    made = type(f"Offloaded{plain_class.__name__}", (OffloadedOptimizer, plain_class), namespace)
    return cast(type[Optimizer], made)


def _layers(optimizer: object) -> list[Any]:
    """Return the optimizer with the frameworks' wrappers around it, the outermost first."""
    layers: list[Any] = [optimizer]
    while type(layers[-1]).__module__.partition(".")[0] in _WRAPPER_PACKAGES:
        inner = getattr(layers[-1], "optimizer", None)
        if inner is None:  # Lightning's stand-in for an optimizer that a module does not have
            break
        layers.append(inner)
    return layers


def _unwrap(optimizer: object) -> Any:
    """Return the torch optimizer inside a framework's wrapper."""
    return _layers(optimizer)[-1]


def _recapture_step(optimizer: object) -> None:
    """Let wrappers that kept the optimizer's bound ``step`` when they were built take it anew.

    Accelerate's does under a gradient scaler, and calls that one. It recaptures on unpickling.
    """
    for wrapper in _layers(optimizer)[:-1]:
        if "_optimizer_original_step_method" in wrapper.__dict__:
            wrapper.__setstate__({})


def _find_core(optimizer: object) -> OffloadCore | None:
    plain = _unwrap(optimizer)
    return _core(plain) if is_offloaded(plain) else None


def _core(plain: Any) -> OffloadCore:
    if not is_offloaded(plain):
        raise ValueError(f"{type(plain).__name__} is not offloaded. Call offload(optimizer) first.")
    return cast(OffloadCore, plain._offload_core)
