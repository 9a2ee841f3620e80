"""Tries out what a class does around its update: with a closure, and with checkpoints."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch.optim import Optimizer

from .blueprint import Blueprint
from .holdings import ADVICE, Refused
from .moments import difference
from .standin import undecorated
from .traits import Traits
from .trial import Tiny, TinyOffloaded, apart
from .values import same

_NUM_CLOSURES = 2
#: Steps before a checkpoint is taken, and after it was loaded.
_NUM_SAVED = 3


def check_closure(name: str, blueprint: Blueprint) -> None:
    """Refuse a class that does more with a closure than to call it once, before anything else."""
    names = list(inspect.signature(undecorated(blueprint.plain_class)).parameters)[1:]
    if not names or "closure" not in names[0]:
        return
    moments = []
    with apart():
        tiny = Tiny(blueprint)
        for step in range(_NUM_CLOSURES):
            tiny.give_gradients(step)
            tiny.step()
            moments.append(tiny.moment())
    loss = torch.tensor(1.5)
    with apart():
        tiny = Tiny(blueprint)
        for step, moment in enumerate(moments):
            start = tiny.moment().values
            calls: list[bool] = []

            def closure(step: int = step, start: Any = start, calls: list[bool] = calls) -> Any:
                calls.append(same(start, [param.detach() for param in tiny.flat]))
                tiny.give_gradients(step)
                return loss

            try:
                result = tiny.step(closure)
            except Exception:  # it takes none
                return
            if not calls:  # it ignores it
                return
            if len(calls) > 1 or not calls[0]:
                raise Refused(
                    f"{name}.step evaluates its closure {len(calls)} times, or after a change of "
                    f"the parameters; offload evaluates it once, before the update. {ADVICE}"
                )
            if result is not loss or difference(moment, tiny.moment()):
                raise Refused(
                    f"{name}.step does something else with a closure than without, or does not "
                    f"return its value. {ADVICE}"
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
