"""offload(): converts a torch optimizer in place. The public functions of the package.

The object stays the same; its class becomes a subclass of its own class, as ``fully_shard`` does to
modules. So ``isinstance(optimizer, AdamW)``, LR schedulers, step hooks, ``GradScaler`` and the
wrappers of Lightning and Accelerate go on working.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, replace
from typing import Any, TypeVar, cast

import torch

from .admission import check_optimizer
from .config import OffloadConfig
from .conversion import Offloaded, convert, restore, scheduled_step
from .core import OffloadCore
from .dcp import install
from .distributed import local, wrapped, wrapping
from .placement import travels
from .recording import Timeline
from .refusals import check_step_attribute
from .spent import is_spent
from .standin import outside_autograd
from .stats import OffloadStats

O = TypeVar("O")  # noqa: E741

#: Packages whose wrapper classes keep the user's optimizer in ``.optimizer``.
_WRAPPER_PACKAGES = frozenset(
    {"accelerate", "accelerate_offload", "lightning", "pytorch_lightning", "lightning_fabric"}
)


def offload(
    optimizer: O, config: OffloadConfig | None = None, model: torch.nn.Module | None = None
) -> O:
    """Convert ``optimizer`` in place so that its state lives in host memory, and return it.

    State that it already has moves to the host now; otherwise host memory is allocated by the
    first ``step()``. Parameters, gradients and the update stay on the parameters' device, and the
    numbers are bit for bit those of the plain optimizer.

    Args:
        optimizer: an optimizer that updates each parameter by itself, in any flavour (for-loop,
            foreach, fused), or Lightning's, Fabric's or Accelerate's wrapper of one. It is tried
            out on tiny CPU copies.
        config: sizes; ``OffloadConfig()`` by default. An optimizer that is already offloaded stays
            as it is when ``config`` is ``None`` or the one that it has.
        model: see :func:`attach_model`.

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
        if model is not None:
            attach_model(optimizer, model)
        return optimizer
    traits = check_optimizer(plain)
    install(_find_core)
    convert(plain, OffloadConfig() if config is None else config, traits)
    _recapture_step(optimizer)
    if model is not None:
        attach_model(optimizer, model)
    return optimizer


def attach_model(optimizer: object, model: torch.nn.Module) -> None:
    """Say whose parameters ``optimizer`` updates, in the form that is called in training.

    Args:
        optimizer: an offloaded optimizer, or a framework's wrapper of one.
        model: the outermost module (DDP, a compiled module). It is held weakly.

    Raises:
        ValueError: ``optimizer`` is not offloaded.
    """
    _core(_unwrap(optimizer)).attach(model)


def set_overlap(optimizer: object, overlap: str) -> None:
    """Let later steps update their chunks at another time. State stays where it is.

    Args:
        optimizer: an offloaded optimizer, or a framework's wrapper of one, between two steps.
        overlap: as in :class:`OffloadConfig`.

    Raises:
        ValueError: ``optimizer`` is not offloaded, or there is no such overlap.
        RuntimeError: ``backward()`` has updated parameters, and ``step()`` was not called yet.
    """
    core = _core(_unwrap(optimizer))
    config = replace(core.config, overlap=overlap)
    if config != core.config:
        core.check_between_steps("set_overlap() was called")
        core.set_overlap(config)


def expected_state_bytes(optimizer: object) -> int:
    """Return the bytes of state that travel, as they are or as the first update will make them.

    Of DTensors it counts the local tensors; what only the first update can tell counts as 0.

    Raises:
        ValueError: ``optimizer`` is not offloaded.
    """
    with outside_autograd():
        return _core(_unwrap(optimizer)).planner.expected_bytes()


@contextmanager
def timeline(optimizer: object) -> Iterator[Timeline]:
    """Record when copies and updates run.

    ``with timeline(optimizer) as recorded:`` around a step or more, then ``recorded.lanes()``:
    start and end of each copy and update. ``with recorded.span("compute"):`` adds whatever is
    issued inside of it. Before the first step there is nothing to record.

    Raises:
        ValueError: ``optimizer`` is not offloaded.
    """
    core = _core(_unwrap(optimizer))
    recorded = Timeline([*core.pipelines] or [torch.device("cpu")])
    pipelines = list(core.pipelines.values())
    try:
        for pipeline in pipelines:
            pipeline.timeline = recorded
        yield recorded
    finally:
        for pipeline in pipelines:
            pipeline.timeline = None


class Prefetch:
    """The first chunks of a step, on their way to the device.

    Args:
        core: that of the optimizer.
    """

    def __init__(self, core: OffloadCore) -> None:
        self._core = weakref.ref(core)
        run = core.prefetch()
        self._run = weakref.ref(run) if run is not None else None

    def cancel(self) -> None:
        """Give the device memory back, unless the step has begun."""
        core, run = self._core(), self._run() if self._run is not None else None
        if core is not None and run is not None:
            core.cancel_prefetch(run)


def prefetch(optimizer: object) -> Prefetch:
    """Copy the first chunks of the next step to the device now: its slots' worth, while backward
    runs, say. The slots stay allocated from then on.

    State that is read or changed meanwhile is noticed. With ``overlap="backward"`` this is done
    anyway, and with ``"forward"`` it has no effect, nor before the first step.

    Returns:
        What can be cancelled.

    Raises:
        ValueError: ``optimizer`` is not offloaded.
    """
    with outside_autograd():
        return Prefetch(_core(_unwrap(optimizer)))


def last_microbatch(optimizer: object) -> AbstractContextManager[None]:
    """Say which backward makes the gradients of a step final, where several accumulate.

    ``with last_microbatch(optimizer): loss.backward()``. With ``overlap="backward"`` chunks are
    updated inside of it only. A loop that never uses it may accumulate over a fixed number of
    micro-batches: after the first step that number is known. In other modes it does nothing.

    Raises:
        ValueError: ``optimizer`` is not offloaded.
    """
    overlap = _core(_unwrap(optimizer)).overlap
    return nullcontext() if overlap is None else overlap.last_microbatch()


def finish(optimizer: object) -> None:
    """After training, or when it was interrupted: leave model and state as others expect them.

    Waits for all updates and copies, and gives the slots back. Gradients that updates beside
    backward have used become ``None``, so that the model can be moved. A step that ``backward()``
    has begun and that will not be ended is given up: the parameters can be used, and further steps
    are refused until a checkpoint is loaded. Otherwise training can go on at any time.

    Raises:
        ValueError: ``optimizer`` is not offloaded.
    """
    core = _core(_unwrap(optimizer))
    if core.overlap is not None:
        core.overlap.finish()
    core.distrust()
    core.synchronize()
    for pipeline in core.pipelines.values():
        pipeline.give_up_slots()
    for group in core.optimizer.param_groups:
        for param in group["params"]:
            if is_spent(param.grad):
                param.grad = None


def unoffload(optimizer: O) -> O:
    """Undo :func:`offload`: move the state to the parameters' devices and restore the class.

    The numbers do not change, and schedulers and hooks keep working. Host memory is given back.

    Raises:
        ValueError: ``optimizer`` is not offloaded.
    """
    plain = _unwrap(optimizer)
    core = _core(plain)
    check_step_attribute(plain, "unoffload()")
    core.check_between_steps("unoffload() was called")
    core.warn_if_torn()
    core.synchronize()
    with outside_autograd():
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
    core.scheduler_step = core.scheduler_step or scheduled_step(plain)
    restore(plain, core)
    _recapture_step(optimizer)
    return optimizer


def is_offloaded(optimizer: object) -> bool:
    """Whether :func:`offload` converted ``optimizer`` (or the one that it wraps)."""
    return isinstance(_unwrap(optimizer), Offloaded)


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


def _on_device(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    return wrapped(local(value).to(device, copy=True), wrapping(value))
