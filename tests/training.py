"""Small seeded training runs, shared by the tests: reference and candidate run separately."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from torch_offload import OffloadConfig, offload, stepper

#: Shapes that make a planner stumble: 0-dim, empty, one element, sizes off every alignment.
SHAPES = ((300, 70), (70,), (), (0, 5), (1,), (3, 5, 7), (129, 65), (1000,), (17, 1, 9))

FLAVOURS = {
    "for-loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def make_params(
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype))
        for shape in shapes
    ]


def set_grads(
    params: Sequence[torch.Tensor], step: int, has_grad: Callable[[int, int], bool] | None = None
) -> None:
    """Give every parameter a gradient that depends on its position and the step alone."""
    for index, param in enumerate(params):
        if has_grad is not None and not has_grad(index, step):
            param.grad = None
            continue
        generator = torch.Generator().manual_seed(1000 * step + index)
        values = torch.randn(param.shape, generator=generator, dtype=torch.float32)
        param.grad = values.to(param.device, param.dtype)


def late(index: int, step: int) -> bool:
    """Parameter 1 gets its first gradient on the second step, parameter 5 never gets one,
    parameter 6 has none on the fourth."""
    return not ((index == 1 and step == 0) or index == 5 or (index == 6 and step == 3))


def train(
    device: torch.device,
    *,
    config: OffloadConfig | None,
    optimizer_class: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    dtype: torch.dtype = torch.float32,
    steps: int = 6,
    first_step: int = 0,
    has_grad: Callable[[int, int], bool] | None = late,
    clip: float | None = 1.0,
    state_dict: dict[str, Any] | None = None,
    params: list[torch.nn.Parameter] | None = None,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    **kwargs: Any,
) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
    """Train with an LR schedule, clipping and two groups; plain without ``config``."""
    params = make_params(device, dtype, shapes) if params is None else params
    half = len(params) // 2
    groups = [
        {"params": params[:half], "weight_decay": 0.1},
        {"params": params[half:], "weight_decay": 0.0, "lr": 3e-3},
    ]
    optimizer = optimizer_class(groups, lr=1e-2, **kwargs)
    if config is not None:
        offload(optimizer, config)
    if state_dict is not None:
        optimizer.load_state_dict(state_dict)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    for step in range(first_step, first_step + steps):
        set_grads(params, step, has_grad)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(params, clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return params, optimizer


def fail_at_chunk(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let the next step raise "boom" from where it would update its ``number``-th chunk, from 1."""
    real, calls = stepper.step_detached, []

    def step_detached(*args: Any) -> Any:
        calls.append(args)
        if len(calls) >= number:
            raise RuntimeError("boom")
        return real(*args)

    monkeypatch.setattr(stepper, "step_detached", step_detached)


def assert_same(
    plain: tuple[Sequence[torch.Tensor], torch.optim.Optimizer],
    other: tuple[Sequence[torch.Tensor], torch.optim.Optimizer],
) -> None:
    """Parameters, every state tensor and ``step``: the same bits, dtypes and keys in order."""
    for index, (p, q) in enumerate(zip(plain[0], other[0], strict=True)):
        torch.testing.assert_close(q, p, rtol=0, atol=0, msg=lambda m, i=index: f"param {i}: {m}")
    state, candidate = plain[1].state, other[1].state
    for index, (p, q) in enumerate(zip(plain[0], other[0], strict=True)):
        expected, found = state.get(p), candidate.get(q)
        assert (expected is None) == (found is None), f"param {index}: {expected} / {found}"
        if expected is None or found is None:
            continue
        assert list(expected) == list(found), f"param {index}"
        for key, value in expected.items():
            if not torch.is_tensor(value):
                assert found[key] == value, f"param {index} state {key}"
                continue
            assert found[key].dtype == value.dtype
            assert found[key].shape == value.shape
            assert torch.equal(found[key].to(value.device), value), f"param {index} state {key}"
