"""Tries out what a class does around its update: with a closure, and with checkpoints."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from .blueprint import Blueprint
from .holdings import ADVICE, Refused
from .moments import Moment, difference
from .standin import undecorated
from .traits import Traits
from .trial import Tiny, TinyOffloaded, apart
from .values import same

_NUM_CLOSURES = 2
#: Steps before a checkpoint is taken, and after it was loaded.
_NUM_SAVED = 3


def try_closure(
    name: str, blueprint: Blueprint, moments: Sequence[Moment], traits: Traits
) -> Traits:
    """Find out what a class does with a closure.

    Args:
        name: of the class.
        blueprint: what to step.
        moments: what there is after each step of it without a closure.
        traits: what is known about the class so far.

    Returns:
        The traits with what was found. Many classes are never given a closure, so what offload
        cannot do with one is an error of a step that is.

    Raises:
        Refused: it evaluates its closure several times or late, or goes on in another way then.
    """
    named = _closure_argument(blueprint.plain_class)
    if named is None:
        return replace(traits, closure_error=TypeError(f"{name}.step takes no closure."))
    with apart():
        tiny = Tiny(blueprint)
        accumulated = []
        for step in range(_NUM_CLOSURES):
            tiny.give_gradients(step)
            _Closure(tiny)()
            tiny.step()
            accumulated.append(tiny.moment())
    with apart():
        tiny = Tiny(blueprint)
        for step in range(_NUM_CLOSURES):
            tiny.give_gradients(step)
            closure = _Closure(tiny)
            try:
                result = tiny.step(**{named: closure}) if named else tiny.step(closure)
            except Exception as error:
                return replace(traits, closure_error=_closure_error(name, closure, error))
            if step and traits.takes_closure != bool(closure.calls):
                raise Refused(f"{name}.step evaluates its closure in some steps only. {ADVICE}")
            if closure.calls not in ([], [True]):
                raise Refused(
                    f"{name}.step evaluates its closure {len(closure.calls)} times, or after a "
                    "change of the parameters; offload evaluates it once, before the update. "
                    f"{ADVICE}"
                )
            traits = replace(traits, takes_closure=bool(closure.calls))
            expected = accumulated[step] if closure.calls else moments[step]
            found = difference(expected, tiny.moment())
            if not closure.fault and found and found.startswith("the gradient"):
                closure.fault = "changes gradients besides"
            if closure.fault:
                return replace(traits, closure_error=_unsupported(name, closure.fault))
            if found or result is not (closure.loss if closure.calls else None):
                raise Refused(
                    f"{name}.step does something else with a closure than without, or does not "
                    f"return its value. {ADVICE}"
                )
    return traits


class _Closure:
    """Adds the gradients that there are to themselves, and returns a loss with a graph.

    Args:
        tiny: has gradients.

    Attributes:
        calls: for each call, whether the parameters were as they are now.
        fault: what the class does besides calling it.
    """

    def __init__(self, tiny: Tiny) -> None:
        self._params = tiny.flat
        self._values = [param.detach().clone() for param in self._params]
        self._grads = [None if p.grad is None else p.grad.clone() for p in self._params]
        self.calls: list[bool] = []
        self.fault: str | None = None
        self.loss: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            self.fault = "gives it arguments"
        self.calls.append(all(map(same, self._values, [p.detach() for p in self._params])))
        if len(self.calls) == 1 and not all(map(same, self._grads, [p.grad for p in self._params])):
            self.fault = "changes gradients before it"
        with torch.no_grad():
            for param, grad in zip(self._params, self._grads, strict=True):
                if param.grad is None:
                    param.grad = None if grad is None else grad.clone()
                elif grad is not None and grad.layout is not torch.strided:
                    values = grad.values() * 2  # there is no sum of sparse halves
                    param.grad = torch.sparse_coo_tensor(
                        grad.indices(), values, grad.shape, is_coalesced=True
                    )
                else:
                    param.grad.add_(param.grad if grad is None else grad)
        with torch.enable_grad():
            own = [p.abs().sum().to(torch.float32) for p in self._params if p.requires_grad]
            self.loss = torch.stack([*own, torch.ones(())]).sum()
        if self.loss.requires_grad:
            self.loss.register_hook(self._on_backward)
        return self.loss

    def _on_backward(self, _: Any) -> None:
        self.fault = "differentiates its value"


def _closure_argument(plain_class: type[Optimizer]) -> str | None:
    """How a step is given a closure: under this name, as the first argument (""), or not at all."""
    parameters = list(inspect.signature(undecorated(plain_class)).parameters.values())[1:]
    for index, p in enumerate(parameters):
        if p.kind is p.VAR_POSITIONAL or (index == 0 and p.kind is p.POSITIONAL_ONLY):
            return ""
        if "closure" in p.name or p.kind is p.VAR_KEYWORD:
            return "closure" if p.kind is p.VAR_KEYWORD else p.name
    return None


def _closure_error(name: str, closure: _Closure, error: Exception) -> Exception:
    """What a step with a closure is to raise, where that of the class raises ``error``."""
    fault = closure.fault or f"fails with one on a tiny CPU copy ({type(error).__name__}: {error})"
    try:
        alike = copy.copy(error)  # without the frames that it came through
    except Exception:
        return _unsupported(name, fault)
    return _unsupported(name, fault) if closure.calls else alike


def _unsupported(name: str, fault: str) -> Exception:
    return NotImplementedError(
        f"{name}.step {fault} when it is given a closure; offload evaluates it once, before the "
        "update, and returns its value. Evaluate it yourself and call step() without one: "
        "optimizer.zero_grad(); loss = closure(); loss.backward(); optimizer.step()."
    )


def check_saving(name: str, blueprint: Blueprint, traits: Traits) -> None:
    """Refuse a class whose own methods for checkpoints do not call torch's, or give others."""
    kind = blueprint.plain_class
    own = [name for name in _SAVING if getattr(kind, name) is not getattr(Optimizer, name)]
    if not own:
        return
    try:
        fault = _saving_fault(blueprint, traits)
    except Exception as error:
        fault = f"fails on a tiny CPU copy ({type(error).__name__}: {error})"
    if fault:
        raise Refused(f"{name} has a {own[0]} of its own, which {fault}. {ADVICE}")


_SAVING = ("load_state_dict", "state_dict")


def _saving_fault(blueprint: Blueprint, traits: Traits) -> str | None:
    saved = []
    for offloaded in (False, True):
        with apart():
            tiny = TinyOffloaded(blueprint, 1, traits) if offloaded else Tiny(blueprint)
            for step in range(_NUM_SAVED):
                tiny.give_gradients(step)
                tiny.step()
            saved.append(copy.deepcopy(tiny.optimizer.state_dict()))
    if not same(*saved):
        return "saves something else than it does without offload"
    moments = []
    for offloaded in (False, True):
        with apart():
            tiny = TinyOffloaded(blueprint, 1, traits) if offloaded else Tiny(blueprint)
            tiny.optimizer.load_state_dict(copy.deepcopy(saved[0]))
            if offloaded and not tiny.optimizer._offload_core.num_loads:
                return "would put its state past the offload"
            for step in range(_NUM_SAVED, 2 * _NUM_SAVED):
                tiny.give_gradients(step)
                tiny.step()
            moments.append(tiny.moment())
    found = difference(*moments)
    return found and f"loads something else than it does without offload: {found} differs"
