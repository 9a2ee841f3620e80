"""What ``Accelerator`` does besides, where it has prepared offloaded optimizers.

``prepare`` tells the core the model in the form that is called in training (wrapped in DDP,
sharded, compiled). ``backward`` and ``accumulate`` tell which micro-batch is the last. A clipping
that comes too late is explained. ``load_state`` reads optimizer state without a copy on the device,
and maps the file instead of reading a copy into each process.
"""

from __future__ import annotations

import functools
import sys
import weakref
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .optimizer import OffloadedOptimizer

#: The models that each Accelerator returned, in order.
_returned: weakref.WeakKeyDictionary[Any, list[weakref.ref[torch.nn.Module]]] = (
    weakref.WeakKeyDictionary()
)
#: Whether only offloaded optimizers are being loaded: they copy what they are given.
_only_ours: ContextVar[bool] = ContextVar("_only_ours", default=False)


def extend(module: Any) -> None:
    """Wrap the methods of ``Accelerator``, once.

    Args:
        module: ``accelerate.accelerator``, executed to its end.
    """
    cls = module.Accelerator
    if hasattr(cls.prepare, "_is_accelerate_offload"):
        return
    wrappers = {
        "prepare": _preparing,
        "prepare_model": _preparing,
        "prepare_optimizer": _preparing,
        "backward": _backward,
        "accumulate": _accumulate,
        "clip_grad_norm_": _using_gradients,
        "clip_grad_value_": _using_gradients,
        "unscale_gradients": _using_gradients,
        "load_state": _load_state,
    }
    for name, wrap in wrappers.items():
        original = getattr(cls, name, None)
        if original is None:
            continue
        wrapped: Any = functools.wraps(original)(wrap(original))
        wrapped._is_accelerate_offload = True
        setattr(cls, name, wrapped)
    checkpointing = sys.modules["accelerate.checkpointing"]
    checkpointing.load = _load(checkpointing.load)  # type: ignore[attr-defined]


def offloaded(accelerator: Any) -> list[OffloadedOptimizer]:
    """Return the offloaded optimizers that ``accelerator`` has prepared."""
    module = sys.modules.get("accelerate_offload.optimizer")
    if module is None:
        return []
    return [o for o in accelerator._optimizers if is_ours(o)]


def is_ours(optimizer: Any) -> bool:
    """Whether ``prepare`` returned this, with state that is in host memory."""
    module = sys.modules.get("accelerate_offload.optimizer")
    core = sys.modules.get("torch_offload.optimizer")
    return (
        module is not None
        and core is not None
        and isinstance(optimizer, module.OffloadedOptimizer)
        and core.is_offloaded(optimizer)
    )


# --- prepare ------------------------------------------------------------------


def _preparing(original: Callable[..., Any]) -> Callable[..., Any]:
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        several = isinstance(result, (tuple, list))
        _remember(self, result if several else [result])
        for optimizer in offloaded(self):
            optimizer.attach_models(_models_of(self, optimizer))
        return result

    return prepare


def _remember(accelerator: Any, results: Iterable[Any]) -> None:
    references = _returned.setdefault(accelerator, [])
    for model in results:
        if isinstance(model, torch.nn.Module) and all(model is not ref() for ref in references):
            references.append(weakref.ref(model))
    references[:] = [ref for ref in references if ref() is not None]


def _models_of(accelerator: Any, optimizer: Any) -> list[torch.nn.Module]:
    """Return the models that have the parameters: the one that was returned last, for each."""
    wanted = {id(param) for group in optimizer.param_groups for param in group["params"]}
    found: list[torch.nn.Module] = []
    for reference in reversed(_returned.get(accelerator, [])):
        model = reference()
        own = {id(param) for param in model.parameters()} if model is not None else set()
        if model is not None and own & wanted:
            found.append(model)
            wanted -= own
    return found[::-1]


# --- micro-batches and gradients ------------------------------------------------


@contextmanager
def _last_microbatch(accelerator: Any) -> Iterator[None]:
    """Inside, backward makes gradients final, if ``sync_gradients`` says that a step follows."""
    optimizers = offloaded(accelerator) if accelerator.sync_gradients else []
    with ExitStack() as stack:
        for optimizer in optimizers:
            # Imported already if there is one; else it would slow down who offloads nothing.
            from torch_offload import last_microbatch

            stack.enter_context(last_microbatch(optimizer))
        yield


def _backward(original: Callable[..., Any]) -> Callable[..., Any]:
    def backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _last_microbatch(self):
            return original(self, *args, **kwargs)

    return backward


def _accumulate(
    original: Callable[..., AbstractContextManager[Any]],
) -> Callable[..., AbstractContextManager[Any]]:
    @contextmanager
    def accumulate(self: Any, *models: Any) -> Iterator[Any]:
        # Where the script calls loss.backward() itself.
        with original(self, *models) as value, _last_microbatch(self):
            yield value

    return accumulate


def _using_gradients(original: Callable[..., Any]) -> Callable[..., Any]:
    def use(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        except RuntimeError as error:
            if "overlap='backward'" not in str(error) or not offloaded(self):
                raise
            raise RuntimeError(
                f"{original.__name__}() came after gradients had been used by updates beside "
                'backward. overlap="auto" chooses that when the first two steps use none. Set '
                'overlap="forward" or overlap="step": --offload_overlap forward, '
                "ACCELERATE_OFFLOAD_OVERLAP=forward, or overlap: forward in the section "
                "optimizer_offload_config. Load a checkpoint of parameters and optimizer to go on."
            ) from error

    return use


# --- checkpoints ------------------------------------------------------------------


def _load_state(original: Callable[..., Any]) -> Callable[..., Any]:
    def load_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        ours = offloaded(self)
        if ours and kwargs.get("map_location") is None:
            kwargs["map_location"] = "cpu"  # with several processes it is the device by default
        token = _only_ours.set(bool(ours) and len(ours) == len(self._optimizers))
        try:
            return original(self, *args, **kwargs)
        finally:
            _only_ours.reset(token)

    return load_state


def _load(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load(f: Any, *args: Any, **kwargs: Any) -> Any:
        if _only_ours.get() and Path(f).name.startswith("optimizer") and zipfile.is_zipfile(f):
            kwargs.setdefault("mmap", True)
        return original(f, *args, **kwargs)

    return load
