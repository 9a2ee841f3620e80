"""Random trainings, bit for bit against the plain optimizer: shapes, dtypes, groups, chunk sizes,
missing gradients, and saves, loads and conversions at any step."""

from __future__ import annotations

import copy
import io
from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from training import assert_same

from torch_offload import OffloadConfig, offload, unoffload

KINDS = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "AdamW fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "Adam foreach amsgrad": (torch.optim.Adam, {"lr": 0.01, "foreach": True, "amsgrad": True}),
    "SGD foreach": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "foreach": True}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.01}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
}

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])


@dataclass(frozen=True)
class Plan:
    """A training that both optimizers follow."""

    kind: str
    params: list[tuple[tuple[int, ...], torch.dtype, int]]
    chunk_size: int
    num_slots: int
    missing: list[set[int]]
    events: list[str]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    params = draw(st.lists(st.tuples(shapes, dtypes, st.integers(0, 2)), min_size=1, max_size=7))
    num_steps = draw(st.integers(1, 7))
    indices = st.sets(st.integers(0, len(params) - 1), max_size=3)
    event = st.sampled_from(["", "", "save and load", "new optimizer", "there and back", "freeze"])
    return Plan(
        kind=draw(st.sampled_from(sorted(KINDS))),
        params=params,
        chunk_size=draw(st.integers(1, 6000)),
        num_slots=draw(st.integers(2, 5)),
        missing=draw(st.lists(indices, min_size=num_steps, max_size=num_steps)),
        events=draw(st.lists(event, min_size=num_steps, max_size=num_steps)),
    )


def build(plan: Plan, params: list[torch.nn.Parameter], offloaded: bool) -> torch.optim.Optimizer:
    kind, kwargs = KINDS[plan.kind]
    groups = [
        {"params": [p for p, (_, _, own) in zip(params, plan.params, strict=True) if own == g]}
        for g in range(3)
    ]
    for index, group in enumerate(groups):
        group["weight_decay"] = 0.1 * index
    optimizer = kind(groups, **kwargs)
    if offloaded:
        offload(optimizer, OffloadConfig(chunk_size=plan.chunk_size, num_slots=plan.num_slots))
    return optimizer


def follow(plan: Plan, offloaded: bool) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
    generator = torch.Generator().manual_seed(0)
    params = [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for shape, dtype, _ in plan.params
    ]
    optimizer = build(plan, params, offloaded)
    for missing, event in zip(plan.missing, plan.events, strict=True):
        if event == "save and load":
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        elif event == "new optimizer":
            buffer = io.BytesIO()
            torch.save(optimizer.state_dict(), buffer)
            buffer.seek(0)
            optimizer = build(plan, params, offloaded)
            optimizer.load_state_dict(torch.load(buffer, weights_only=True))
        elif event == "there and back" and offloaded:
            unoffload(optimizer)
            offload(optimizer, OffloadConfig(chunk_size=plan.chunk_size + 100))
        elif event == "freeze":
            params[0].requires_grad_(not params[0].requires_grad)
        for index, param in enumerate(params):
            gradient = torch.randn(param.shape, generator=generator).to(param.dtype)
            absent = index in missing or not param.requires_grad
            param.grad = None if absent else gradient
        optimizer.step()
    return params, optimizer


@settings(max_examples=120, deadline=None)
@given(plans())
def test_any_training_has_the_bits_of_plain(plan: Plan):
    assert_same(follow(plan, False), follow(plan, True))
