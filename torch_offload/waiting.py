"""Makes a tensor whose update is in flight wait for itself, at its first use.

Vocabulary: a *held* tensor is one whose update is in flight; its *ticket* makes the current stream
wait for that; to *release* is to make it an ordinary tensor again. A *use* is a call of torch with
the tensor, alone or in lists, of a function that is not in ``METADATA``.

A held tensor has a class made here, a subclass of its own, whose ``__torch_function__`` waits for
all held tensors of a call, gives them their own classes back, and makes the call again: it runs as
if nothing had been held, and the next one costs nothing. Of a DTensor, whoever takes the local
tensor waits.

Not seen, because torch does not ask the class:

- memory that another tensor shares: views, ``detach()`` or a ``state_dict()`` from before;
- C++ that is handed the tensor itself: extensions, TorchScript, the arguments of ``torch.func``'s
  transforms, ``torch.tensor(held)`` and its like, ``other.data = held``, ``other.set_(held)``;
- a gradient into which a backward accumulates;
- calls inside ``DisableTorchFunctionSubclass``: so does an operand of a class with its own
  ``__torch_function__`` that stands before the held tensor, if that ends there.

Code that is compiled looks at classes: release what is held before it is entered.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from .distributed import is_distributed
from .metadata import METADATA

_TICKET = "_torch_offload_ticket"
_DETACH = torch.Tensor.detach
_NEW_PARAMETER = torch.nn.Parameter.__new__.__code__


class Ticket(Protocol):
    """What a held tensor waits for."""

    def wait(self) -> object:
        """Make the current stream wait for the update.

        Called before the first use runs, by its thread and on its stream; again for each tensor of
        several with one ticket, and by each thread that comes while another one is in here. Then
        the tensor is an ordinary one for *all* streams. One that was ordered after the step, but
        not after this stream, would not wait: where there can be such streams, it is here that
        they, or the CPU, must be made to.
        """


class _Hidden:
    """An attribute that a class does not have, whatever its bases have."""

    def __get__(self, instance: object, owner: type) -> Any:
        raise AttributeError("not of a tensor whose update is in flight")


class _Held:
    """First base of each class made here; the second is the tensor's own."""

    __slots__ = ()
    _own: type[torch.Tensor]
    # Consumers would read memory through it without a call of any function.
    __dlpack_c_exchange_api__ = _Hidden()

    def __init_subclass__(cls) -> None:
        """Do not call that of the tensor's own class: it is for classes of its author."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            own_types = tuple(kind._own if issubclass(kind, _Held) else kind for kind in types)
            function: Callable[..., Any] = cls._own.__torch_function__
            return function(func, own_types, args, kwargs)
        _wait(args)
        _wait(kwargs)
        result = func(*args, **kwargs)
        if func is _DETACH and cls._own is torch.nn.Parameter:
            if sys._getframe(1).f_code is _NEW_PARAMETER:
                # Parameter(held) has seen the class made here, takes it for one of a user's, and so
                # insists that detach() keeps the class.
                return torch.Tensor._make_subclass(cls._own, result)
        return result

    # Parameter's own look at type(self) first, and at the attributes.
    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        _wait(self)
        return self.__deepcopy__(memo)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        _wait(self)
        return self.__reduce_ex__(protocol)


def _local_tensor(tensor: Any) -> Any:
    _wait(tensor)
    return tensor._local_tensor


def _set_local_tensor(tensor: Any, value: Any) -> None:
    _wait(tensor)
    tensor._local_tensor = value


#: By own class. Values are held by their instances only, and for the two usual ones here.
_classes: weakref.WeakValueDictionary[type, type[torch.Tensor]] = weakref.WeakValueDictionary()


def _held_class(own: type[torch.Tensor]) -> type[torch.Tensor]:
    made = _classes.get(own)
    if made is None:
        names: dict[str, Any] = {"__slots__": (), "__module__": own.__module__, "_own": own}
        if hasattr(own, "_local_tensor"):  # a DTensor's methods are not calls of torch
            names["_local_tensor"] = property(_local_tensor, _set_local_tensor)
        metaclass: Any = type(own)
        made = _classes[own] = metaclass(own.__name__, (_Held, own), names)
    return made


_usual = [_held_class(own) for own in (torch.Tensor, torch.nn.Parameter)]


def _wait(value: Any) -> None:
    """Wait for and release each held tensor in a value, or in lists, tuples and dicts in it."""
    if isinstance(value, _Held):
        ticket = vars(value).get(_TICKET)
        if ticket is not None:  # else another thread came first
            ticket.wait()
        _release(value, ticket)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            _wait(item)
    elif isinstance(value, dict):
        for item in value.values():
            _wait(item)


def _release(tensor: Any, ticket: Any) -> None:
    """Release a tensor that is held with this ticket, and not with a later one. One that has none
    was made by ``type(held)(...)``."""
    held, names = type(tensor), tensor.__dict__
    if issubclass(held, _Held):
        # Nothing is called from here on, so that no other thread comes in between.
        if _TICKET not in names:
            tensor.__class__ = held._own
        elif names[_TICKET] is ticket:
            tensor.__class__ = held._own
            del names[_TICKET]


def hold(tensor: torch.Tensor, ticket: Ticket) -> None:
    """Make a tensor wait for itself: its first use calls ``ticket.wait()`` before it runs.

    The tensor stays the same object, and an instance of its class. One that is held already waits
    for the new ticket instead.

    Args:
        tensor: a parameter or a gradient. Its own ``__torch_function__``, if it has one, is called
            after the wait as it would have been.
        ticket: what to wait for, kept until then. It must not hold the tensor. Several tensors may
            have the same; each waits by itself.

    Raises:
        NotImplementedError: the tensor is made of other tensors, and is no DTensor.
    """
    if hasattr(tensor, "__tensor_flatten__") and not is_distributed(tensor):
        raise NotImplementedError(
            f"a {type(tensor).__name__} (shape {tuple(tensor.shape)}) is made of other tensors and "
            "cannot wait for itself: those can be reached without it. Wait for its update before "
            "it is used."
        )
    vars(tensor)[_TICKET] = ticket
    if not isinstance(tensor, _Held):
        tensor.__class__ = _held_class(type(tensor))


def release(tensor: torch.Tensor) -> None:
    """Make a held tensor an ordinary one without a wait. Others are left as they are.

    Args:
        tensor: held, with the wait done by the caller, or any other.
    """
    _release(tensor, vars(tensor).get(_TICKET))


def is_held(tensor: object) -> bool:
    """Return whether the next use of ``tensor`` waits. Reads nothing of it."""
    return isinstance(tensor, _Held)
