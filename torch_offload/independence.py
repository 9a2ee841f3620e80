"""Finds out whether an optimizer can be stepped chunk by chunk, by trying tiny CPU copies of it.

It is tested and not listed, so that classes nobody has heard of here work, or are refused. Copies
with the optimizer's class, attributes and hyper-parameters, and parameters of the same ranks and
dtypes, are stepped as the plain class does and offloaded: every bit must be the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .blueprint import Blueprint, draw, setting_kind, stretched
from .dataflow import Dataflow
from .holdings import ADVICE, Refused, Steadies, check_holdings, check_state, class_values_kept
from .interface import check_saving, try_closure
from .moments import Moment, difference, same_in_pieces
from .random_state import random_state
from .settings import Settings
from .standin import undecorated
from .traits import Traits
from .trial import AGE, NUM_STEPS, Tiny, TinyOffloaded, apart
from .values import fingerprint, same

#: Parameters in a chunk of the offloaded copies: each by itself, then a few together.
_ALONE, _FEW = 1, 3
#: What was found out about torch's own classes: no code of others runs in those.
_KNOWN: dict[str, Traits] = {}
_MAX_KNOWN = 1000
_NUM_WATCHED = 4
_NUM_STRETCHED = 3
#: How much a trial asks of a class (gaps and turns of a blueprint), in the order in which a class
#: that cannot bear it is asked less.
_STRENGTHS = ((2, 2), (2, 1), (1, 2), (1, 1), (2, 0), (0, 2), (1, 0), (0, 1), (0, 0))


@dataclass(slots=True)
class _Plain:
    """What stepping a copy as the plain class does showed."""

    blueprint: Blueprint
    moments: list[Moment]
    random: bool
    redraws: bool


def check_independent(
    plain_class: type[torch.optim.Optimizer],
    attributes: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    state: Mapping[Any, Any] | None = None,
) -> Traits:
    """Refuse an optimizer whose parameters cannot be updated one chunk at a time.

    Nothing of the user's changes: attributes, groups and state are copied, and the global random
    state is restored.

    Args:
        plain_class: the user's optimizer class.
        attributes: its attributes but groups, state and hooks.
        groups: its parameter groups.
        state: the state that it has already.

    Returns:
        What else the trial found out.

    Raises:
        NotImplementedError: it cannot be offloaded. The message says why and what to do.
    """
    name = plain_class.__name__
    params = [param for group in groups for param in group["params"]]
    check_state(name, state or {}, params, known_only=False)
    blueprint = draw(plain_class, attributes, groups)
    key = _key(blueprint)
    if key not in _KNOWN:
        traits, plain = _try(name, blueprint)
        if key is None:
            seen = [group for moment in plain.moments for group in moment.groups]
            return replace(traits, settings=Settings([*groups, *blueprint.groups, *seen]))
        if len(_KNOWN) >= _MAX_KNOWN:
            _KNOWN.clear()
        _KNOWN[key] = traits
    return _KNOWN[key]


def _key(blueprint: Blueprint) -> str | None:
    """What the trial of one of torch's own classes depends on; None for a class of others.

    These have no secrets: of a number only its sign decides what they do.
    """
    if not blueprint.plain_class.__module__.startswith("torch.optim."):
        return None
    samples = [
        (s.group, s.copy, s.shape, s.source.dtype, type(s.source)) for s in blueprint.samples
    ]
    return repr(
        [
            id(blueprint.plain_class),
            fingerprint(undecorated(blueprint.plain_class)),
            [_settings(values) for values in (blueprint.attributes, *blueprint.groups)],
            samples,
        ]
    )


def _settings(values: Mapping[str, Any]) -> list[Any]:
    return [(key, setting_kind(value, isinstance(value, str))) for key, value in values.items()]


def _try(name: str, blueprint: Blueprint) -> tuple[Traits, _Plain]:
    plain = _step_plainly(name, blueprint)
    traits = Traits(sparse=plain.blueprint.sparse, elementwise=False, random=plain.random)
    found = None
    if not plain.redraws:
        found = _offloaded_difference(name, plain, traits)
    if plain.redraws or (found and plain.random):
        # Perhaps only because parameters without state are updated first.
        plain = _run_plain(name, replace(plain.blueprint, gaps=0))
        traits = replace(traits, redraws=True)
        found = _offloaded_difference(name, plain, traits)
    if found:
        why = "" if not plain.random else " It draws random numbers, and not one after the other."
        raise Refused(
            f"{name} couples its parameters: updated {found} is not what it is when they are "
            f"updated together.{why} {ADVICE}"
        )
    traits = try_closure(name, plain.blueprint, plain.moments, traits)
    check_saving(name, plain.blueprint, traits)
    flow = _watch(plain.blueprint)
    if flow is not None and (flow.exchange or flow.meeting):
        what = (
            f"exchanges data with other processes ({flow.exchange}), which would wait for each "
            "other chunk by chunk"
            if flow.exchange
            else f"couples its parameters: several of them are put into one {flow.meeting}"
        )
        raise Refused(f"{name} {what}. {ADVICE}")
    if flow is None or flow.reduction or flow.size or traits.sparse or traits.random:
        return traits, plain
    return replace(traits, elementwise=_is_elementwise(name, plain)), plain


def _step_plainly(name: str, blueprint: Blueprint) -> _Plain:
    """Step a copy as the plain class does, in the first of several ways that it bears."""
    first: Exception | None = None
    ways = [
        replace(blueprint, sparse=sparse, constructed=constructed, gaps=gaps, turns=turns)
        for sparse, constructed in ((False, False), (False, True), (True, False))
        for gaps, turns in _STRENGTHS
    ]
    for way in ways:
        try:
            # A short look first: some classes take long for the large one, only to be refused.
            small = [sample for sample in way.samples if not sample.is_large]
            _run_plain(name, replace(way, samples=small), num_steps=1)
            try:
                return _run_plain(name, way)
            except Refused:
                raise
            except Exception as error:
                first = first or error
            return _run_plain(name, replace(way, ages=False))  # perhaps it ends after some steps
        except Refused:
            raise
        except Exception as error:
            first = first or error
    advice = ADVICE
    if callable(getattr(blueprint.plain_class, "train", None)):
        advice = f"If it has to be in training mode, call its train() before offload(). {ADVICE}"
    raise Refused(
        f"{name} could not be tried out on a tiny CPU copy, which is how offload finds out whether "
        f"it is safe ({type(first).__name__}: {first}). {advice}"
    ) from first


def _run_plain(name: str, blueprint: Blueprint, num_steps: int = NUM_STEPS) -> _Plain:
    """Step a copy as the plain class does.

    Raises:
        Refused: what it does then cannot be done chunk by chunk.
    """
    moments: list[Moment] = []
    draws = redraws = False
    with apart(), class_values_kept(name, blueprint.plain_class):
        tiny = Tiny(blueprint)
        members = tiny.members()
        last = tiny.moment()
        for step in range(num_steps):
            tiny.give_gradients(step)
            if step == AGE:
                last = tiny.moment()
            has_grad = [param.grad is not None for param in tiny.flat]
            has_newcomers = any(
                had and not tiny.optimizer.state.get(param)
                for param, had in zip(tiny.flat, has_grad, strict=True)
            )
            shared = Steadies(tiny.kept())
            before = random_state()
            result = tiny.step()
            if random_state() != before:
                draws, redraws = True, redraws or not has_newcomers
            check_state(name, tiny.optimizer.state, tiny.flat, known_only=True)
            now = tiny.moment()
            _check_step(name, result, has_grad, last, now)
            if shared.changed():
                raise Refused(
                    f"{name} changes something in its {shared.changed()!r} that is no number, "
                    f"tensor or container of such, and that all chunks would share. {ADVICE}"
                )
            moments.append(now)
            last = now
        if tiny.members() != members:
            raise Refused(f"{name} changes the lists of its parameters in a step. {ADVICE}")
        check_holdings(name, tiny.attributes, tiny.optimizer.param_groups)
    return _Plain(blueprint, moments, draws, redraws)


def _check_step(
    name: str, result: Any, has_grad: Sequence[bool], before: Moment, after: Moment
) -> None:
    if result is not None:
        raise Refused(
            f"{name}.step returns a {type(result).__name__}; offload returns what the closure "
            f"returns, or None. {ADVICE}"
        )
    for index, had in enumerate(has_grad):
        if had:
            continue
        if not same(before.values[index], after.values[index]):
            raise Refused(
                f"{name} updates parameters that have no gradient; offload leaves those, and "
                f"their state on the host, alone. {ADVICE}"
            )
        if not same(before.states[index], after.states[index]):
            raise Refused(
                f"{name} makes or changes the state of parameters that have no gradient; offload "
                f"leaves it on the host. {ADVICE}"
            )


def _offloaded_difference(name: str, plain: _Plain, traits: Traits) -> str | None:
    """Step copies chunk by chunk, and say how and where they differ from plain ones."""
    for num_params, backwards in ((_ALONE, False), (_FEW, True)):
        if backwards and plain.random:
            continue
        with apart():
            try:
                tiny = TinyOffloaded(plain.blueprint, num_params, traits, backwards)
                found = _first_difference(plain, tiny)
            except (NotImplementedError, MemoryError):
                raise
            except Exception as error:
                raise Refused(
                    f"{name} can be stepped as a whole, but not chunk by chunk "
                    f"({type(error).__name__}: {error}). {ADVICE}"
                ) from error
        if found:
            return f"{'in parts' if backwards else 'one by one'}, {found}"
    return None


def _first_difference(plain: _Plain, tiny: Tiny) -> str | None:
    for step, moment in enumerate(plain.moments):
        tiny.give_gradients(step)
        tiny.step()
        found = difference(moment, tiny.moment())
        if found:
            return found
    return None


def _watch(blueprint: Blueprint) -> Dataflow | None:
    """Step a copy and follow what is computed from what; None where that cannot be followed."""
    flow = Dataflow()
    with apart():
        try:
            tiny = Tiny(replace(blueprint, gaps=0))
            if blueprint.turns:
                tiny.turn()
            for step in range(_NUM_WATCHED):
                tiny.give_gradients(step)
                if step == _NUM_WATCHED - 1:
                    tiny.age()
                state = tiny.optimizer.state
                for index, param in enumerate(tiny.flat):
                    own = [value for value in state.get(param, {}).values()]
                    flow.own(index, [param, param.grad, *own])
                with flow:
                    tiny.step()
                if step == 0:
                    flow.forget_sizes()
        except Exception:
            return None
    return flow


def _is_elementwise(name: str, plain: _Plain) -> bool:
    """Whether parts of a parameter get the bits that they have in the whole."""
    if not _is_same_in_pieces(plain):
        return False
    for dim in (0, -1):
        other = replace(stretched(plain.blueprint, dim), gaps=0)
        try:
            if not _is_same_in_pieces(_run_plain(name, other, _NUM_STRETCHED)):
                return False
        except Exception:
            return False
    return True


def _is_same_in_pieces(plain: _Plain) -> bool:
    """Whether pieces of the parameters of a copy get the bits that they had in the whole."""
    with apart():
        try:
            tiny = Tiny(plain.blueprint, in_pieces=True)
            start, samples = tiny.moment().marks, plain.blueprint.samples
            for step, whole in enumerate(plain.moments):
                tiny.give_gradients(step)
                before = [(param.data_ptr(), param.grad) for param in tiny.flat]
                tiny.step()
                now = [(param.data_ptr(), param.grad) for param in tiny.flat]
                if any(a[0] != b[0] or a[1] is not b[1] for a, b in zip(before, now, strict=True)):
                    return False  # there is no way back for those from a part
                parts = tiny.moment()
                counts = [len(params) for params in tiny.params]
                if parts.marks != start or not same_in_pieces(samples, whole, parts, counts):
                    return False
        except Exception:
            return False
    return True
