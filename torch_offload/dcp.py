"""Lets torch.distributed.checkpoint ask for state that does not exist yet, without a hidden step.

``get_optimizer_state_dict`` and ``set_optimizer_state_dict`` want every state tensor to be there,
so that a checkpoint can be loaded into it. For an optimizer that has not stepped, torch makes them
by a real ``step()`` with zero gradients and a learning rate of 0: hooks fire, ``step`` becomes 1,
and the first real update is too small. An offloaded optimizer shows a *template* while such a call
runs: the tensors that its class would make, in its own host memory. Afterwards it has no state, as
before, and what was loaded meanwhile is state like any other.

Three private functions of torch are replaced for that, once in a process; for other optimizers they
do what they did. A torch that does not have them as expected keeps its own behaviour.
"""

from __future__ import annotations

import importlib
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

import torch

from .core import OffloadCore
from .distributed import local
from .values import same, snapshot

_MODULE = "torch.distributed.checkpoint.state_dict"
#: The functions that read or load the state of several optimizers, and the one that steps.
_READERS = ("_get_optim_state_dict", "_load_optim_state_dict")
_HIDDEN_STEP = "_init_optim_state"
#: The argument that holds the optimizers.
_ARGUMENT = {**dict.fromkeys(_READERS, "optimizers"), _HIDDEN_STEP: "optim"}

FindCore = Callable[[object], OffloadCore | None]


@dataclass(frozen=True, slots=True)
class _Template:
    """State that was shown for one parameter, and the versions of its tensors at that time."""

    values: dict[str, Any]
    versions: list[int]


#: Per optimizer what was shown, until its next step. Parameters are known by their id and device.
_shown: weakref.WeakKeyDictionary[OffloadCore, dict[Any, _Template]] = weakref.WeakKeyDictionary()
#: Those that show a template at this moment.
_showing: set[OffloadCore | None] = set()


@cache
def install(find_core: FindCore) -> bool:
    """Replace torch's functions. Returns whether this torch has them as expected.

    Args:
        find_core: tells the core of an optimizer or of a framework's wrapper of it; ``None`` for
            one that is not offloaded.
    """
    if not torch.distributed.is_available():
        return False
    try:
        module = importlib.import_module(_MODULE)
        found = {name: getattr(module, name) for name in _ARGUMENT}
        signatures = {name: inspect.signature(function) for name, function in found.items()}
    except Exception:
        return False
    if any(_ARGUMENT[name] not in signatures[name].parameters for name in found):
        return False

    def replaced(name: str) -> Callable[..., Any]:
        @wraps(found[name])
        def call(*args: Any, **kwargs: Any) -> Any:
            given = signatures[name].bind(*args, **kwargs).arguments[_ARGUMENT[name]]
            if name == _HIDDEN_STEP:
                # Others import this function: for them it makes the step that they ask for.
                return None if find_core(given) in _showing else found[name](*args, **kwargs)
            with ExitStack() as stack:
                for core in filter(None, map(find_core, given)):
                    stack.enter_context(_template_shown(core))
                return found[name](*args, **kwargs)

        return call

    for name in found:
        setattr(module, name, replaced(name))
    return True


def settle(core: OffloadCore) -> None:
    """Before a step: keep what was loaded into a template in place and not set afterwards.

    In plain torch the tensors that ``get_optimizer_state_dict`` returns are the state, so that
    loading into them is enough.
    """
    shown = _shown.pop(core, None)
    if not shown or core.state:
        return
    for group in core.optimizer.param_groups:
        for param in group["params"]:
            template = shown.get(_key(param))
            if template is not None and _versions(template.values) != template.versions:
                core.state[param] = template.values


@contextmanager
def _template_shown(core: OffloadCore) -> Iterator[None]:
    """Let ``core`` have a template for its state inside a ``with``, if it has none.

    Not if there are gradients: torch makes no hidden step then. Nor where only a step can tell what
    state there will be: torch's own is as good as any.
    """
    params = [param for group in core.optimizer.param_groups for param in group["params"]]
    if core.state or any(param.grad is not None for param in params):
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        templates = _templates(core)
    if templates is None:
        yield
        return
    entries = {
        param: templates[_key(param)].values
        for param in params
        if _key(param) in templates and templates[_key(param)].values
    }
    core.state.update(entries)
    _showing.add(core)
    try:
        yield
    finally:
        _showing.discard(core)
        state = core.state  # after a load it is another one
        for param, values in entries.items():
            if state.get(param) is values:
                del state[param]


def _templates(core: OffloadCore) -> dict[Any, _Template] | None:
    """Make the templates, or find those that were shown before: they may hold loaded values.

    ``None`` where they cannot be made.
    """
    shown = _shown.setdefault(core, {})
    found: dict[Any, Mapping[str, Any] | None] = {}
    for group, param, home in core.planner.reserve():
        template = shown.get(_key(param))
        views = {} if home is None else home.views
        if template is not None and all(
            template.values.get(key) is view for key, view in views.items()
        ):
            continue
        first = None
        if home is not None or param.dim() == 0:  # whose state needs no home
            first = _first_state(core, group, param, views, found)
        if first is None or (home is None and not first):
            return None
        values = _placed(param, views, first)
        shown[_key(param)] = _Template(values, _versions(values))
    return shown


def _first_state(
    core: OffloadCore,
    group: Mapping[str, Any],
    param: torch.Tensor,
    views: Mapping[str, torch.Tensor],
    found: dict[Any, Mapping[str, Any] | None],
) -> Mapping[str, Any] | None:
    """Return what ``param`` has before its first step, as far as a step with zero gradients tells.

    Where that is the same for whatever values, tensors have one element, and ``found`` keeps them.
    Else they have all, as for a copy of the parameters. Without weight decay, which would leave a
    trace in moments; with it, where there is other state then.
    """
    for decay in (False, True):
        kind = (id(group), type(param), param.dim(), param.dtype, param.device, decay)
        if kind not in found:
            shape = [1] * max(param.dim(), 1)
            zero, one = (
                core.probe.first_state(group, param, local(param).new_full(shape, value), decay)
                for value in (0.0, 1.0)
            )
            is_constant = same(zero, one) and not core.traits.random
            found[kind] = zero if is_constant else None
        state = found[kind]
        if state is None or not _is_for(state, param, views):
            values = local(param).detach().clone()
            values = values.reshape(values.shape or (1,))
            state = core.probe.first_state(group, param, values, decay)
        if _is_for(state, param, views):
            return state
    return None


def _is_for(
    state: Mapping[str, Any], param: torch.Tensor, views: Mapping[str, torch.Tensor]
) -> bool:
    keys = {k for k, v in state.items() if isinstance(v, torch.Tensor) and v.dim()}
    return param.dim() == 0 or keys == views.keys()


def _placed(
    param: torch.Tensor, views: Mapping[str, torch.Tensor], first: Mapping[str, Any]
) -> dict[str, Any]:
    """Return this state in the parameter's home.

    No step was made, so ``step`` is 0. Where nothing but ``step`` and what starts as a constant or
    as a copy of the parameter matters, that is the state of a new start.
    """
    made: dict[str, Any] = {}
    for key, value in first.items():
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            made.update(snapshot({key: value}))
            if key == "step":
                made[key] *= 0
        elif key in views:
            view = local(views[key])
            if value.numel() == 1:
                view.fill_(value.flatten()[0])
            else:
                view.copy_(value)
            made[key] = views[key]
        else:  # of a 0-dim parameter, whose state does not travel
            made[key] = torch.full_like(param, value.item(), dtype=value.dtype, requires_grad=False)
    return made


def _key(param: torch.Tensor) -> tuple[int, torch.device]:
    return id(param), param.device


def _versions(values: Mapping[str, Any]) -> list[int]:
    return [local(v)._version for v in values.values() if isinstance(v, torch.Tensor)]
