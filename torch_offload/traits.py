"""Traits: what a trial found out about an optimizer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Traits:
    """What a trial found out about an optimizer.

    Attributes:
        sparse: it is one for sparse gradients.
        elementwise: it updates each element by itself, so a parameter may be stepped in parts.
        random: it draws random numbers when it makes state, or in every step if ``redraws``.
        redraws: it does for parameters that have state already.
    """

    sparse: bool
    elementwise: bool
    random: bool = False
    redraws: bool = False
