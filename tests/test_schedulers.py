"""Every LR scheduler of torch, built before and after the conversion: rates, momenta and weights
are those of the plain optimizer at every step. Weight averages too."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiplicativeLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn
from training import assert_same, make_params, set_grads

from torch_offload import OffloadConfig, offload, offload_stats

CONFIG = OffloadConfig(chunk_size=500)
SHAPES = ((30, 7), (9,), (), (3, 5))
NUM_STEPS = 12


def _sequential(optimizer: torch.optim.Optimizer) -> SequentialLR:
    parts = [LinearLR(optimizer, 0.1, total_iters=4), CosineAnnealingLR(optimizer, 6)]
    return SequentialLR(optimizer, parts, milestones=[4])


def _chained(optimizer: torch.optim.Optimizer) -> ChainedScheduler:
    return ChainedScheduler([ConstantLR(optimizer, 0.5, 3), ExponentialLR(optimizer, 0.9)])


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: LambdaLR(o, [lambda step: 0.9**step, lambda step: 1 / (1 + step)]),
    "MultiplicativeLR": lambda o: MultiplicativeLR(o, lambda step: 0.8),
    "StepLR": lambda o: StepLR(o, 3),
    "MultiStepLR": lambda o: MultiStepLR(o, [2, 7], gamma=0.3),
    "ConstantLR": lambda o: ConstantLR(o, 0.5, 4),
    "LinearLR": lambda o: LinearLR(o, 0.2, total_iters=6),
    "ExponentialLR": lambda o: ExponentialLR(o, 0.7),
    "SequentialLR": _sequential,
    "PolynomialLR": lambda o: PolynomialLR(o, 9, 2.0),
    "CosineAnnealingLR": lambda o: CosineAnnealingLR(o, 5, 1e-4),
    "ChainedScheduler": _chained,
    "ReduceLROnPlateau": lambda o: ReduceLROnPlateau(o, patience=1),
    "CyclicLR": lambda o: CyclicLR(o, [0.01, 0.02], [0.1, 0.3], step_size_up=3),
    "CosineAnnealingWarmRestarts": lambda o: CosineAnnealingWarmRestarts(o, 3, 2),
    "OneCycleLR": lambda o: OneCycleLR(o, [0.1, 0.3], total_steps=NUM_STEPS + 1),
    "SWALR": lambda o: SWALR(o, [0.01, 0.05], anneal_epochs=5),
}


def adamw(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    groups = [{"params": params[:2], "lr": 0.1}, {"params": params[2:], "lr": 0.2}]
    return torch.optim.AdamW(groups, weight_decay=0.1)


def adamw_tensor_lr(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    groups = [{"params": part, "lr": torch.tensor(0.1)} for part in (params[:2], params[2:])]
    return torch.optim.AdamW(groups, foreach=False)


def sgd(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    groups = [{"params": params[:2], "lr": 0.1}, {"params": params[2:], "lr": 0.2}]
    return torch.optim.SGD(groups, momentum=0.9)


def test_none_of_torchs_schedulers_is_missing():
    known = {
        name
        for name, kind in vars(lr_scheduler).items()
        if inspect.isclass(kind) and issubclass(kind, lr_scheduler.LRScheduler)
    }
    assert known - {"LRScheduler", "_LRScheduler"} <= SCHEDULERS.keys()


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("build", [adamw, adamw_tensor_lr, sgd])
@pytest.mark.parametrize("when", ["before", "after"])
def test_rates_momenta_and_weights_at_every_step(device, name, build, when):
    def run(config: OffloadConfig | None) -> tuple[list[Any], Any]:
        params = make_params(device, shapes=SHAPES)
        optimizer = build(params)
        if config and when == "after":
            offload(optimizer, config)
        scheduler = SCHEDULERS[name](optimizer)
        if config and when == "before":
            offload(optimizer, config)
        assert name == "ChainedScheduler" or scheduler.optimizer is optimizer
        history = []
        for step in range(NUM_STEPS):
            set_grads(params, step)
            optimizer.step()
            settings = [
                (float(group["lr"]), group.get("betas"), group.get("momentum"))
                for group in optimizer.param_groups
            ]
            history.append((settings, [p.detach().clone() for p in params]))
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        if config:
            assert offload_stats(optimizer).d2h_bytes > 0, "the offload was bypassed"
        return history, (params, optimizer)

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "lr_scheduler.step() before optimizer.step()"
        if name == "SequentialLR":  # torch passes itself an epoch, and warns of that
            warnings.filterwarnings("ignore", message="The epoch parameter")
        plain, offloaded = run(None), run(CONFIG)
    for step, ((settings, values), (others, other_values)) in enumerate(
        zip(plain[0], offloaded[0], strict=True)
    ):
        assert settings == others, f"step {step}"
        for value, other in zip(values, other_values, strict=True):
            torch.testing.assert_close(other, value, rtol=0, atol=0, msg=f"step {step}")
    assert_same(plain[1], offloaded[1])
    rates = {str(settings) for settings, _ in plain[0]}
    assert len(rates) > 1, "this schedule changed nothing"


@pytest.mark.parametrize("average", ["mean", "exponential"])
def test_averaged_models(device, average):
    def run(config: OffloadConfig | None) -> tuple[list[torch.Tensor], Any]:
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Linear(5, 9), torch.nn.BatchNorm1d(9), torch.nn.Linear(9, 1)
        ).to(device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        if config:
            offload(optimizer, config)
        multi_avg_fn = get_ema_multi_avg_fn(0.9) if average == "exponential" else None
        averaged = AveragedModel(net, multi_avg_fn=multi_avg_fn)
        scheduler = SWALR(optimizer, swa_lr=0.01, anneal_epochs=3)
        data = torch.randn(6, 8, 5, generator=torch.Generator().manual_seed(1)).to(device)
        for batch in data:
            net(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            averaged.update_parameters(net)
            scheduler.step()
        update_bn(data, averaged)
        return list(averaged.state_dict().values()), (list(net.parameters()), optimizer)

    plain, offloaded = run(None), run(CONFIG)
    assert_same(plain[1], offloaded[1])
    for value, other in zip(plain[0], offloaded[0], strict=True):
        torch.testing.assert_close(other, value, rtol=0, atol=0)
    net_values = [p.detach() for p in plain[1][0]]
    assert any(not torch.equal(v, p) for v, p in zip(plain[0][1:], net_values, strict=False))
