"""The global random state of Python, numpy and torch on the CPU: kept, seeded, compared.

The accelerators' is neither read nor written: that would wait for them, and ``torch.manual_seed``
would seed them too, and dropout with them.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def random_state() -> tuple[Any, ...]:
    """Return the state of every global generator on the CPU; states that are equal compare so."""
    numpy = _numpy_random()
    words = None if numpy is None else numpy.get_state()
    if words is not None:
        words = (words[0], words[1].tobytes(), *words[2:])
    return random.getstate(), words, torch.default_generator.get_state().tolist()


@contextmanager
def random_state_kept(seed: int | None = None) -> Iterator[None]:
    """Restore the state of every global generator on the CPU at the end.

    Args:
        seed: to start all of them from meanwhile; 32 bits. They go on from where they are if
            ``None``.
    """
    numpy = _numpy_random()
    words = None if numpy is None else numpy.get_state()
    python, torch_state = random.getstate(), torch.default_generator.get_state()
    try:
        if seed is not None:
            random.seed(seed)
            torch.default_generator.manual_seed(seed)
            if numpy is not None:
                numpy.seed(seed)
        yield
    finally:
        random.setstate(python)
        torch.default_generator.set_state(torch_state)
        if numpy is not None:
            numpy.set_state(words)


def is_generator(value: Any) -> bool:
    """Whether a value is a random generator of its own."""
    if isinstance(value, (torch.Generator, random.Random)):
        return True
    numpy = _numpy_random()
    return numpy is not None and isinstance(
        value, (numpy.Generator, numpy.RandomState, numpy.BitGenerator)
    )


def _numpy_random() -> Any:
    """``numpy.random`` where somebody imported it."""
    return sys.modules.get("numpy.random")
