"""The conversion: gives an optimizer object the class that offloads, and takes it away again.

The new class derives from the object's own, so it stays what it was. Its methods are put in front
of the class's own, except for those that save and load, which are put behind: a class may have such
methods that call the ones of torch, and gets ours.
"""

from __future__ import annotations

import copy
import copyreg
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, MutableMapping
from functools import cache
from typing import Any, cast

import torch
from torch.optim import Optimizer

from .checkpoint import load_state_dict
from .config import OffloadConfig
from .core import OffloadCore
from .dcp import settle
from .standin import outside_autograd
from .traits import Traits


def convert(plain: Any, config: OffloadConfig, traits: Traits) -> None:
    """Give ``plain`` the class that offloads, and move the state that it has to the host.

    Raises:
        NotImplementedError: its class can have no subclass that is made at run time.
        MemoryError: the host has not enough memory. Nothing has changed.
    """
    core = OffloadCore(plain, type(plain), config, traits)
    core.scheduler_step = plain.__dict__.get("step")
    # Copies, so that the optimizer is as it was if this fails or is interrupted.
    existing = {param: dict(state) for param, state in plain.state.items() if state}
    if existing:
        with outside_autograd():
            core.planner.adopt(existing)
    made = _offloaded_class(cast(Any, core.plain_class))
    try:
        plain.__class__ = made
        plain.__dict__["_offload_core"] = core
        core.guard = plain.register_step_pre_hook(_refuse_bypass)
        plain.__dict__.pop("step", None)
        core.state.update(existing)
        if core.overlap is not None:
            core.overlap.watch()
    except BaseException:
        restore(plain, core)
        raise


def restore(plain: Any, core: OffloadCore) -> None:
    """Give the optimizer the class and the ``step`` that it had."""
    plain.__class__ = core.plain_class
    if core.overlap is not None:
        core.overlap.unwatch()
    if core.guard is not None:
        core.guard.remove()
    if core.scheduler_step is not None:
        plain.__dict__["step"] = core.scheduler_step
    plain.__dict__.pop("_offload_core", None)


class Offloaded(Optimizer):
    """Saves and loads host state. The last class before torch's own that a converted one is of."""

    _offload_core: OffloadCore

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a plain torch checkpoint into host memory, in place."""
        self._offload_core.num_loads += 1
        with outside_autograd():
            load_state_dict(self._offload_core, state_dict)

    def state_dict(self) -> dict[str, Any]:
        """Return a plain torch checkpoint. As in torch its tensors are the state itself, so later
        steps change them: deep-copy one that must stay."""
        self._offload_core.warn_if_torn()
        return super().state_dict()


class _Front:
    """What a converted optimizer does in place of its own class.

    These are put into the new class itself, not inherited. Frameworks make proxies whose class
    derives from the optimizer's, so ``self`` may be one: the core knows the optimizer itself.
    """

    _offload_core: OffloadCore

    @property
    def state(self) -> MutableMapping[torch.Tensor, dict[str, Any]]:
        """The optimizer's state: CPU tensors, final. Waits for copies in flight (I4)."""
        core = self._offload_core
        core.synchronize()
        core.distrust()
        return core.state

    @state.setter
    def state(self, value: MutableMapping[torch.Tensor, dict[str, Any]]) -> None:
        core = self._offload_core
        core.synchronize()
        core.optimizer.__dict__["state"] = value

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class was made at run time, so a pickle names the plain one. Its state is on the CPU:
        # offload() what was unpickled, or load a checkpoint, before it steps on a GPU.
        core = self._offload_core
        core.warn_if_torn()
        function, *rest = _plain_twin(core).__reduce_ex__(protocol)
        # copyreg's function for new objects would insist on the object's own class.
        if function is getattr(copyreg, "__newobj__"):  # noqa: B009
            function = core.plain_class.__new__
        return function, *rest

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        core = self._offload_core
        core.check_between_steps("an optimizer was copied")
        clone = memo[id(self)] = copy.deepcopy(_plain_twin(core), memo)
        convert(clone, core.config, core.traits)
        if core.failure is not None:
            cast(Any, clone)._offload_core.fail(core.failure.reason)
        return clone


def _plain_twin(core: OffloadCore) -> Any:
    """Return what the optimizer was before the conversion, over the same groups and host state."""
    core.synchronize()
    twin: Any = object.__new__(core.plain_class)
    twin.__dict__.update(core.optimizer.__dict__)
    del twin.__dict__["_offload_core"]
    twin.__dict__["_optimizer_step_pre_hooks"] = OrderedDict(
        (key, hook)
        for key, hook in twin.__dict__["_optimizer_step_pre_hooks"].items()
        if hook is not _refuse_bypass
    )
    return twin


@cache
def _offloaded_class(plain_class: Any) -> type[Optimizer]:
    # Streams and host memory cannot be traced; torch keeps its own steps from it in the same way.
    step: Any = torch.compiler.disable(_guarded_step)  # type: ignore[no-untyped-call]
    # torch.compile(optimizer.step) of torch 2.10 would follow this and lose the optimizer.
    step.__dict__.pop("_torchdynamo_orig_callable", None)
    step.hooked = True  # or torch would wrap it once more at every load
    step._wrapped_by_lr_sched = True  # or LR schedulers would bind it on the instance
    methods = (types.FunctionType, property)
    namespace = {
        **{key: value for key, value in vars(_Front).items() if isinstance(value, methods)},
        "step": step,
        "__doc__": plain_class.__doc__,
        "__module__": __name__,
        "__slots__": (),  # its objects lie in memory as those of the plain class do
    }
    name = f"Offloaded{plain_class.__name__}"
    bases = (plain_class, Offloaded)
    try:
        made = types.new_class(name, bases, {}, lambda made: made.update(namespace))
    except Exception as error:
        raise NotImplementedError(
            f"{plain_class.__name__} can have no subclass that is made at run time, which is what "
            f"offload() gives its object ({type(error).__name__}: {error}). Train it without "
            "offload, or allow subclasses without arguments."
        ) from error
    return cast(type[Optimizer], made)


def _step(self: Any, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs:
        raise TypeError(
            f"step() of an {type(self).__name__} takes a closure and nothing else, not "
            f"{[*args, *kwargs]}. Train without offload if the step needs it."
        )
    core: OffloadCore = self._offload_core
    core.optimizer.__dict__["_opt_called"] = True  # what LR schedulers look for
    loss, traits = None, core.traits
    if closure is not None:
        if not callable(closure):
            raise TypeError(f"step() takes a closure and nothing else, not {closure!r}.")
        if traits.closure_error is not None:
            raise copy.copy(traits.closure_error)  # each with a traceback of its own
        if traits.takes_closure:
            with torch.enable_grad():
                loss = closure()
    with outside_autograd():
        settle(core)
        core.step()
    return loss


_hooked_step: Any = Optimizer.profile_hook_step(_step)


def _guarded_step(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Update the parameters. A closure is evaluated once, before any chunk."""
    core: OffloadCore | None = getattr(self, "_offload_core", None)
    if core is None:  # bound by somebody before unoffload()
        return type(self).step(self, *args, **kwargs)
    outside = core.entered
    try:
        core.entered = outside + 1
        return _hooked_step(self, *args, **kwargs)
    finally:
        core.entered = outside


def scheduled_step(optimizer: Any) -> Callable[..., Any]:
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
    if isinstance(optimizer, Offloaded) and not optimizer._offload_core.entered:
        raise RuntimeError(
            "a step() that was bound before offload() was called and would go past it. Call "
            "offload() before the optimizer is wrapped, or give it the wrapper."
        )
