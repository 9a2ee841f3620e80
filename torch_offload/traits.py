"""Traits: what a trial found out about an optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from .settings import Settings


@dataclass(frozen=True, slots=True)
class Traits:
    """What a trial found out about an optimizer.

    Attributes:
        sparse: it is one for sparse gradients.
        elementwise: it updates each element by itself, so a parameter may be stepped in parts.
        random: it draws random numbers when it makes state, or in every step if ``redraws``.
        redraws: it does for parameters that have state already.
        takes_closure: its step calls a closure, once and before anything else; or it ignores it.
        closure_error: what a step with a closure raises instead.
        settings: those that the trial has seen; ``None`` for torch's own classes, which do the same
            with any.
    """

    sparse: bool
    elementwise: bool
    random: bool = False
    redraws: bool = False
    takes_closure: bool = True
    closure_error: Exception | None = None
    settings: Settings | None = None
