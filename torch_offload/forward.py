"""Forward overlap: ``step()`` issues all updates on the side stream and returns.

Until the next use of a parameter its update may be in flight, and the parameter waits for itself
(``waiting.py``). Gradients do as well, since the updates read them. Chunks are updated in the order
in which parameters were first used after the step before.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch

from .distributed import is_distributed
from .flow import Flow
from .obstacles import obstacle
from .shard import Shard
from .stepper import Stepper
from .streams import Handoff, caller_stream
from .tasks import update_of
from .waiting import hold, is_held, release
from .work import Traffic

if TYPE_CHECKING:
    from .core import OffloadCore


class _Ticket:
    """What the parameters of one chunk wait for. It keeps their gradients until then.

    Args:
        updated: the end of the update.
        device: where it runs.
        grads: what it reads.
    """

    def __init__(
        self, updated: Handoff[None], device: torch.device, grads: Sequence[torch.Tensor]
    ) -> None:
        self._updated = updated
        self._device = device
        self._owner = caller_stream(device)
        #: The streams that have waited, or will: the parameters of a chunk share this.
        self._waited: list[torch.Stream | None] = []
        self._grads = list(grads)

    def wait(self) -> None:
        """Make the current stream wait for the update, and the stream of the step as well."""
        current = caller_stream(self._device)
        if current in self._waited:
            return
        for stream in {self._owner, current}:
            self._updated.take(stream)
            self._waited.append(stream)
        self._grads.clear()  # I5


class _Tensor:
    """The ticket of one parameter or gradient: it notes when that is used."""

    def __init__(self, ticket: _Ticket, note: Callable[[int], None] | None, key: int) -> None:
        self._ticket, self._note, self._key = ticket, note, key

    def wait(self) -> None:
        if self._note is not None:
            self._note(self._key)
        self._ticket.wait()


class ForwardRun:
    """The updates of one step, in flight until their parameters are used."""

    def __init__(self, core: OffloadCore, note: Callable[[int], None]) -> None:
        self._core = core
        self._note = note
        self.traffic = Traffic()
        self.done: frozenset[int] = frozenset()
        self.stepper: Stepper | None = core.new_stepper(own_tensors=True)
        self._flows: dict[torch.device, Flow] = {}
        #: What may be in flight, and what its own class waits for.
        self._tickets: dict[int, tuple[torch.Tensor, _Ticket]] = {}

    def finish(self, device: torch.device, chunks: Sequence[list[Shard]]) -> None:
        """Issue all updates of one device."""
        assert self.stepper is not None
        if not chunks:
            return
        overlap = self._core.overlap
        alone = any(is_distributed(s.param) and not s.unwraps for c in chunks for s in c)
        if overlap is not None and not self._core.traits.random and not alone:
            chunks = sorted(chunks, key=lambda c: min(overlap.position(s.param) for s in c))
        pipeline = self._core.pipelines[device]
        work = [update_of(chunk, self.stepper) for chunk in chunks]
        flow = self._flows[device] = pipeline.flow_beside(work, self.traffic)
        flow.wait_for(caller_stream(device))
        flow.expect(work)
        for number, chunk in enumerate(chunks):
            flow.update(number)
            params = {id(shard.param): shard.param for shard in chunk}.values()
            grads = [param.grad for param in params if param.grad is not None]
            ticket = _Ticket(flow.updates_so_far(), device, grads)
            self._tickets.update({id(param): (param, ticket) for param in params})

    def end(self) -> None:
        """After the last update was issued: let what is in flight wait for itself."""
        for flow in self._flows.values():
            flow.pause()
        for param, ticket in self._tickets.values():
            grad = param.grad  # before the parameter is held: then each look at it is a call
            hold(param, _Tensor(ticket, self._note, id(param)))
            if grad is not None:
                hold(grad, _Tensor(ticket, None, id(param)))

    @property
    def is_in_flight(self) -> bool:
        """Whether an update may be, of any parameter."""
        return bool(self._tickets)

    def wait(self, params: Iterable[torch.Tensor] | None = None) -> None:
        """Let the current streams wait for the updates of these parameters; of all by default."""
        for key in list(self._tickets) if params is None else [id(param) for param in params]:
            self.wait_for(key)

    def wait_for(self, key: int) -> None:
        """Let the current stream wait for the update of the parameter with this id."""
        param, ticket = self._tickets.pop(key, (None, None))
        if param is None or ticket is None:
            return
        self._note(key)
        ticket.wait()
        release(param)
        grad = param.grad
        if is_held(grad):
            release(cast(torch.Tensor, grad))


class ForwardOverlap:
    """Lets the updates of one optimizer run while the next forward does.

    Args:
        core: that of the optimizer; a weak proxy.
    """

    def __init__(self, core: OffloadCore) -> None:
        self._core = core
        self._run: ForwardRun | None = None
        #: When parameters were first used after the last step and the one before, by their ids.
        self._used: dict[int, int] = {}
        self._order: dict[int, int] = {}
        #: What was hooked: modules and parameters.
        self._entrances: list[tuple[weakref.ref[torch.nn.Module], bool]] = []
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._of_params: dict[int, torch.utils.hooks.RemovableHandle] = {}
        # Modules and parameters may outlive the optimizer.
        weakref.finalize(self, _remove, self._hooks, self._of_params).atexit = False

    @contextmanager
    def last_microbatch(self) -> Iterator[None]:
        """All gradients are final when ``step()`` is called, so there is nothing to say."""
        yield

    def position(self, param: torch.Tensor) -> float:
        """Tell when ``param`` is first used, as far as was seen yet."""
        return self._order.get(id(param), math.inf)

    def watch(self) -> None:
        """See to it that the model's modules wait for their parameters, and so does a backward
        that adds to their gradients.

        Parameters wait for themselves, but not in compiled code, which looks at their class, nor in
        C++ extensions, nor where FSDP2 gathers the memory under them.
        """
        model = self._core.model()
        if model is None:
            return
        reference = weakref.ref(self)
        params = [p for group in self._core.optimizer.param_groups for p in group["params"]]
        entrances = _entrances(model, any(is_distributed(param) for param in params))
        hooked = [(weakref.ref(module), recurse) for module, recurse in entrances]
        if hooked != self._entrances:
            self._unhook()
            self._entrances = hooked
            self._hooks += [
                module.register_forward_pre_hook(_Hook(reference, recurse), prepend=True)
                for module, recurse in entrances
            ]
        for param in params:
            handle = self._of_params.get(id(param))
            present = param._backward_hooks or {}
            if param.requires_grad and (handle is None or handle.id not in present):
                hook = _gradient_hook(reference, id(param))
                self._of_params[id(param)] = param.register_hook(hook)

    def unwatch(self) -> None:
        """Wait for everything, and remove all hooks."""
        self.reset()
        self._unhook()

    def _unhook(self) -> None:
        _remove(self._hooks, self._of_params)
        self._entrances = []

    def reset(self) -> None:
        """Wait for everything that is in flight."""
        if self._run is not None:
            self._run.wait()
        self._run = None

    def finish(self) -> None:
        """As `reset`: nothing is left to give up."""
        self.reset()

    @property
    def is_in_flight(self) -> bool:
        """Whether an update may be, of any parameter."""
        return self._run is not None and self._run.is_in_flight

    def wait(self, params: Iterable[torch.Tensor]) -> None:
        """Let the current streams wait for the updates of these parameters."""
        if self._run is not None:
            self._run.wait(params)

    def wait_for(self, key: int) -> None:
        """Let the current stream wait for the update of the parameter with this id."""
        if self._run is not None:
            self._run.wait_for(key)

    def before_step(self) -> ForwardRun | None:
        """Return what takes the updates of this step.

        Raises:
            RuntimeError: the model is not known.
        """
        self.reset()
        if self._core.model() is None:
            raise RuntimeError(
                'overlap="forward" needs the model, whose modules wait for their parameters. Call '
                'attach_model(optimizer, model) once, or use overlap="step".'
            )
        self.watch()
        reason = obstacle(self._core, beside_backward=False)
        if reason is not None:
            self._core.notices.not_beside("forward", reason)
            return None
        self._order, self._used = self._used or self._order, {}
        self._run = ForwardRun(self._core, _noter(weakref.ref(self)))
        return self._run

    def after_step(self) -> None:
        """Nothing is copied ahead: the link is busy."""

    def used(self, key: int) -> None:
        """Note the first use of a parameter since the last step."""
        self._used.setdefault(key, len(self._used))


def _noter(reference: weakref.ref[ForwardOverlap]) -> Callable[[int], None]:
    def note(key: int) -> None:
        overlap = reference()
        if overlap is not None:
            overlap.used(key)

    return note


class _Hook:
    """As a forward pre-hook: waits for the module's parameters. Copies of it wait for nobody.

    Args:
        reference: to who waits; ``None`` for nobody.
        recurse: whether for those of the modules below, too.
    """

    def __init__(
        self, reference: weakref.ref[ForwardOverlap] | None = None, recurse: bool = False
    ) -> None:
        self._reference = reference
        self._recurse = recurse

    def __reduce__(self) -> Any:
        return _Hook, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return _Hook()

    # It reads what compiled code cannot be told of.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: torch.nn.Module, _: Any) -> None:
        overlap = self._reference() if self._reference is not None else None
        if overlap is not None and overlap.is_in_flight:
            params = module.parameters() if self._recurse else module._parameters.values()
            overlap.wait(param for param in params if param is not None)


def _gradient_hook(
    reference: weakref.ref[ForwardOverlap], key: int
) -> Callable[[torch.Tensor], None]:
    def before_accumulation(_: torch.Tensor) -> None:
        overlap = reference()
        if overlap is not None:
            overlap.wait_for(key)

    return before_accumulation


def _remove(
    hooks: list[torch.utils.hooks.RemovableHandle],
    by_id: dict[int, torch.utils.hooks.RemovableHandle],
) -> None:
    for handle in [*hooks, *by_id.values()]:
        handle.remove()
    hooks.clear()
    by_id.clear()


def _entrances(model: torch.nn.Module, distributed: bool) -> list[tuple[torch.nn.Module, bool]]:
    """Return the modules before which to wait, and whether for all below them, too.

    Args:
        model: whose parameters are updated.
        distributed: some are DTensors. FSDP2 gathers those of a module and of modules below it,
            in whichever module is called first: not always in the model itself.
    """
    found: dict[torch.nn.Module, bool] = {}

    def visit(module: torch.nn.Module) -> bool:
        """Return whether the module or one below it has parameters."""
        if module in found:
            return True
        if _is_compiled(module):
            found[module] = True
            return True
        children = [visit(child) for child in module._modules.values() if child is not None]
        if module._parameters or (distributed and any(children)):
            found[module] = distributed
        return bool(module._parameters) or any(children)

    visit(model)
    return list(found.items())


def _is_compiled(module: torch.nn.Module) -> bool:
    return (
        type(module).__name__ == "OptimizedModule"
        or getattr(module, "_compiled_call_impl", None) is not None
    )
