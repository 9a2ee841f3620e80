"""Keeps objects of a device alive in forked children, which have the objects but not the device."""

from __future__ import annotations

import ctypes
import os
import weakref

_kept: weakref.WeakSet[object] = weakref.WeakSet()


def keep_in_children(obj: object) -> None:
    """Let an object, and what it holds, never die in a child that is forked while it lives.

    Registered memory would be unregistered and unmapped there, on a device that the child cannot
    use and at addresses where its own memory may be by now; the end of an event of torch ends the
    process.

    Args:
        obj: anything that can be weakly referenced and hashed; here it lives no longer than before.
    """
    _kept.add(obj)


def _keep() -> None:
    for obj in list(_kept):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(obj))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep)
