"""What our step is measured against: AdamW with its state resident, moved whole, or in chunks.

A *scheme* owns AdamW's state for the parameters it is given and has a `step` that issues one
update, and a `state` that returns each parameter's step, exp_avg and exp_avg_sq. All of them run
torch's own fused AdamW. Without a GPU the same code runs without streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from torch_offload import OffloadConfig, offload

ADAMW: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "fused": True}
STATE_BYTES_PER_PARAM = 8  # two fp32 moments

State = list[dict[str, Tensor]]
HostState = list[tuple[Tensor, Tensor]]


class Scheme(Protocol):
    """One way to run AdamW's step."""

    def step(self) -> None:
        """Issue one update on the current stream."""

    def state(self) -> State:
        """Return the state of each parameter. The caller has synchronised."""


def pinned_state(params: Sequence[Tensor]) -> HostState:
    """Return uninitialised host memory for both moments of each parameter, torch's way."""
    pin = params[0].is_cuda

    def empty(p: Tensor) -> Tensor:
        return torch.empty(p.shape, dtype=p.dtype, pin_memory=pin)

    return [(empty(p), empty(p)) for p in params]


def _step_count(p: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.float32, device=p.device)  # fused: on the device


class Resident:
    """The plain optimizer: all of its state stays on the GPU."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.params = params
        self.optimizer = torch.optim.AdamW(params, **ADAMW)

    def step(self) -> None:
        """Update."""
        self.optimizer.step()

    def state(self) -> State:
        """Return the optimizer's own state."""
        return [self.optimizer.state[p] for p in self.params]


class Ours(Resident):
    """This project."""

    def __init__(self, params: Sequence[Tensor], config: OffloadConfig) -> None:
        super().__init__(params)
        offload(self.optimizer, config)


class MoveAll:
    """Copy all state in, update, copy all state out."""

    def __init__(self, params: Sequence[Tensor], host: HostState) -> None:
        self.params, self.host = params, host
        self.optimizer = torch.optim.AdamW(params, **ADAMW)
        for p, moments in zip(params, host, strict=True):
            self.optimizer.state[p] = {"step": _step_count(p)}
            for moment in moments:
                moment.zero_()

    def step(self) -> None:
        """Update. Everything runs on one stream, so nothing overlaps."""
        state = self.optimizer.state
        for p, (exp_avg, exp_avg_sq) in zip(self.params, self.host, strict=True):
            state[p]["exp_avg"] = exp_avg.to(p.device, non_blocking=True)
            state[p]["exp_avg_sq"] = exp_avg_sq.to(p.device, non_blocking=True)
        self.optimizer.step()
        for p, (exp_avg, exp_avg_sq) in zip(self.params, self.host, strict=True):
            exp_avg.copy_(state[p].pop("exp_avg"), non_blocking=True)
            exp_avg_sq.copy_(state[p].pop("exp_avg_sq"), non_blocking=True)

    def state(self) -> State:
        """Return the host's moments and the step counts."""
        return [
            {"step": self.optimizer.state[p]["step"], "exp_avg": m, "exp_avg_sq": v}
            for p, (m, v) in zip(self.params, self.host, strict=True)
        ]


class ChunkedPerTensor:
    """Chunks through a few slots on three streams, with one copy for each tensor of state.

    Args:
        params: fp32 parameters with gradients.
        host: their moments, from `pinned_state`.
        chunk_bytes: bytes of state in a chunk; a larger parameter is a chunk of its own.
        num_slots: device buffers of one chunk each.
        settings: of AdamW.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        host: HostState,
        *,
        chunk_bytes: int,
        num_slots: int = 2,
        settings: dict[str, Any] = ADAMW,
    ) -> None:
        self.params, self.host = params, host
        device = params[0].device
        cuts, filled = [0], 0
        for index, p in enumerate(params):
            filled += STATE_BYTES_PER_PARAM * p.numel()
            if filled > chunk_bytes and index > cuts[-1]:
                cuts.append(index)
                filled = STATE_BYTES_PER_PARAM * p.numel()
        chunks = [range(*pair) for pair in pairwise([*cuts, len(params)])]
        numel = max(sum(2 * params[i].numel() for i in chunk) for chunk in chunks)
        slots = [torch.empty(numel, device=device) for _ in range(num_slots)]
        self.optimizers = []
        # For each chunk its copies, as (host, slot) pairs. A chunk always uses the same slot.
        self.copies: list[list[tuple[Tensor, Tensor]]] = []
        for number, chunk in enumerate(chunks):
            optimizer = torch.optim.AdamW([params[i] for i in chunk], **settings)
            copies, rest = [], slots[number % num_slots]
            for i in chunk:
                state = {"step": _step_count(params[i])}
                for name, moment in zip(("exp_avg", "exp_avg_sq"), host[i], strict=True):
                    state[name] = rest[: moment.numel()].view(moment.shape)
                    rest = rest[moment.numel() :]
                    copies.append((moment.zero_(), state[name]))
                optimizer.state[params[i]] = state
            self.optimizers.append(optimizer)
            self.copies.append(copies)
        self.num_slots = num_slots
        self.h2d = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.d2h = torch.cuda.Stream(device) if device.type == "cuda" else None

    def step(self) -> None:
        """Update: while one chunk is updated, the next comes in and the one before goes out."""
        main = torch.cuda.current_stream() if self.h2d is not None else None
        _wait(self.h2d, main)
        emptied: list[Any] = []  # one event for each chunk whose way out has been issued
        for number, (optimizer, copies) in enumerate(
            zip(self.optimizers, self.copies, strict=True)
        ):
            if number >= self.num_slots and self.h2d is not None:
                self.h2d.wait_event(emptied[number - self.num_slots])
            with torch.cuda.stream(self.h2d):
                for host, slot in copies:
                    slot.copy_(host, non_blocking=True)
            _wait(main, self.h2d)
            optimizer.step()
            _wait(self.d2h, main)
            with torch.cuda.stream(self.d2h):
                for host, slot in copies:
                    host.copy_(slot, non_blocking=True)
            emptied.append(self.d2h.record_event() if self.d2h is not None else None)
        _wait(main, self.d2h)

    def state(self) -> State:
        """Return the host's moments and the step counts."""
        steps = (o.state[p]["step"] for o in self.optimizers for p in o.param_groups[0]["params"])
        return [
            {"step": step, "exp_avg": m, "exp_avg_sq": v}
            for step, (m, v) in zip(steps, self.host, strict=True)
        ]


def _wait(waiting: torch.cuda.Stream | None, awaited: torch.cuda.Stream | None) -> None:
    if waiting is not None and awaited is not None:
        waiting.wait_stream(awaited)
