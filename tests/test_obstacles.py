"""Why a step is taken as a whole though another mode was asked for: each reason, and the bits."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from training import assert_same, make_params

from torch_offload import OffloadConfig, attach_model, offload
from torch_offload.obstacles import obstacle

CPU = torch.device("cpu")
SHAPES = [(8, 8), (8,), (4, 4)]


class Noisy(torch.optim.Optimizer):
    """Adds noise in the first update of a parameter."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["noise"] = torch.randn_like(param)
                param.add_(state["noise"] + param.grad, alpha=-group["lr"])


class Own(torch.Tensor):
    pass


def adamw(**settings: Any) -> Any:
    return torch.optim.AdamW(make_params(CPU, shapes=SHAPES), lr=0.1, **settings)


def made(kind: str) -> Any:
    if kind == "random":
        return Noisy(make_params(CPU, shapes=SHAPES))
    if kind == "sparse":
        return torch.optim.SparseAdam(make_params(CPU, shapes=SHAPES))
    if kind == "kinds":
        params = make_params(CPU, shapes=SHAPES)
        params[1] = torch.nn.Parameter(params[1].detach().as_subclass(Own))
        return torch.optim.AdamW(params)
    return adamw()


REASONS = {
    "random": "random numbers",
    "sparse": "sparse gradients",
    "kinds": r"param_groups\[0\] has parameters of several kinds",
    "hook": "step pre-hooks are registered",
    "failed": "an earlier step failed",
    "ranks": "only the model tells how their gradients meet",
}


@pytest.mark.parametrize("kind", REASONS)
def test_each_reason_beside_backward(monkeypatch, kind):
    optimizer = offload(made(kind), OffloadConfig(overlap="backward"))
    core = optimizer._offload_core
    if kind == "hook":
        optimizer.register_step_pre_hook(lambda *_: None)
    elif kind == "failed":
        core.fail("so")
    elif kind == "ranks":
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
    found = obstacle(core)
    assert found is not None
    assert re.search(REASONS[kind], found)


@pytest.mark.parametrize("kind", ["random", "kinds"])
def test_steps_are_taken_as_a_whole_then(caplog, kind):
    results = []
    for config in (None, OffloadConfig(overlap="backward", chunk_size=256)):
        torch.manual_seed(3)
        optimizer = made(kind)
        params = optimizer.param_groups[0]["params"]
        if config is not None:
            offload(optimizer, config)
        torch.manual_seed(4)
        for step in range(4):
            loss = sum((param * (step + 1)).square().sum() for param in params)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append((params, optimizer))
    assert_same(*results)
    assert "overlap='backward' has no effect" in caplog.text


def test_nothing_is_in_the_way():
    optimizer = offload(adamw(), OffloadConfig(overlap="backward"))
    assert obstacle(optimizer._offload_core) is None
    model = torch.nn.Linear(2, 2)
    attach_model(optimizer, model)
    assert obstacle(optimizer._offload_core, beside_backward=False) is None


class Counting(torch.optim.Optimizer):
    """Keeps a tensor in its group, which is on the device where the parameters are."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": torch.tensor(0.1)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(group["lr"].to(param.device) * param.grad)


@pytest.mark.gpu
@pytest.mark.parametrize("beside_backward", [True, False])
@pytest.mark.parametrize("own", [True, False])
def test_hyper_parameters_on_a_device(beside_backward, own):
    """Torch's own classes only read them, so beside forward copies will do."""
    gpu = torch.device("cuda", 0)
    params = make_params(gpu, shapes=SHAPES)
    optimizer = Counting(params) if own else torch.optim.AdamW(params, lr=torch.tensor(0.1))
    offload(optimizer, OffloadConfig(overlap="backward"))
    for group in optimizer.param_groups:
        group["lr"] = group["lr"].to(gpu)
    found = obstacle(optimizer._offload_core, beside_backward=beside_backward)
    assert (found is not None) == (own or beside_backward)
