"""State that users or classes take away, replace, keep and put back: never written over."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from typing import Any

import pytest
import torch
from training import assert_same, make_params, set_grads

from torch_offload import OffloadConfig, offload

CPU = torch.device("cpu")
SHAPES = [(16, 8), (8,), (), (4, 4)]
#: One or two parameters in a chunk, and all in one.
CONFIGS = [OffloadConfig(chunk_size=256), OffloadConfig()]


def steps(params, optimizer, first, count):
    for step in range(first, first + count):
        set_grads(params, step)
        optimizer.step()


def take_away_and_put_back(params, optimizer):
    saved = {param: dict(state) for param, state in optimizer.state.items()}
    optimizer.state.clear()
    steps(params, optimizer, 2, 2)
    optimizer.state.clear()
    optimizer.state.update(saved)


def take_turns(params, optimizer):
    mine, other = optimizer.state, defaultdict(dict)
    for step in range(2, 6):
        optimizer.state = (other, mine)[step % 2]
        steps(params, optimizer, step, 1)


def replace_one_tensor(params, optimizer):
    state = optimizer.state[params[0]]
    old, state["exp_avg"] = state["exp_avg"], torch.zeros_like(state["exp_avg"])
    steps(params, optimizer, 2, 1)
    optimizer.state[params[0]]["exp_avg"] = old


def load_what_was_kept(params, optimizer):
    kept = optimizer.state_dict()
    optimizer.state.clear()
    steps(params, optimizer, 2, 1)
    optimizer.load_state_dict(kept)


@pytest.mark.parametrize(
    "edit", [take_away_and_put_back, take_turns, replace_one_tensor, load_what_was_kept]
)
@pytest.mark.parametrize("config", CONFIGS)
def test_kept_tensors_stay_what_they_are(device, edit, config):
    results = []
    for chosen in (None, config):
        params = make_params(device, shapes=SHAPES)
        optimizer = torch.optim.AdamW(params, lr=1e-2)
        if chosen is not None:
            offload(optimizer, chosen)
        steps(params, optimizer, 0, 2)
        edit(params, optimizer)
        steps(params, optimizer, 6, 2)
        results.append((params, optimizer))
    assert_same(*results)


def test_state_that_nobody_keeps_is_born_into_the_same_memory():
    params = make_params(CPU, shapes=SHAPES)
    optimizer = offload(torch.optim.AdamW(params))
    steps(params, optimizer, 0, 1)
    before = optimizer._offload_core.planner.layout.home(params[0])
    optimizer.state.clear()
    steps(params, optimizer, 1, 1)
    assert optimizer._offload_core.planner.layout.home(params[0]) is before


class Restarting(torch.optim.Optimizer):
    """Every so often it begins anew."""

    def __init__(self, params: Any, how: str, every: int = 20) -> None:
        self.how, self.count = how, 0
        super().__init__(params, {"lr": 0.1, "every": every})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        now = self.count % self.param_groups[0]["every"] == 0
        if now and self.how == "all":
            self.state = defaultdict(dict)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                if now and self.how == "entry":
                    self.state[param] = {}
                elif now and self.how == "pop":
                    self.state.pop(param)
                state = self.state[param]
                if not state:
                    state["sum"] = torch.zeros_like(param)
                state["sum"].mul_(0.9).add_(param.grad)
                param.add_(state["sum"], alpha=-group["lr"])


@pytest.mark.parametrize("how", ["all", "entry", "pop"])
@pytest.mark.parametrize("config", CONFIGS)
def test_a_class_that_begins_anew(device, how, config):
    results = []
    for chosen in (None, config):
        params = make_params(device, shapes=SHAPES)
        optimizer = Restarting(params, how)
        if chosen is not None:
            offload(optimizer, chosen)
        steps(params, optimizer, 0, 44)
        results.append((params, optimizer))
    assert_same(*results)


class WarmingUp(torch.optim.SGD):
    """Deletes an attribute when it is done with it."""

    warm: int

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.warm = 20

    def step(self, closure: Any = None) -> Any:
        if hasattr(self, "warm"):
            self.warm -= 1
            if self.warm < 0:
                del self.warm
        else:
            for group in self.param_groups:
                group["lr"] *= 0.9
        return super().step(closure)


@pytest.mark.parametrize("config", CONFIGS)
def test_an_attribute_that_a_step_deletes(config):
    results = []
    for chosen in (None, config):
        params = make_params(CPU, shapes=SHAPES)
        optimizer = WarmingUp(params)
        if chosen is not None:
            offload(optimizer, chosen)
        steps(params, optimizer, 0, 26)
        assert not hasattr(optimizer, "warm")
        results.append((params, optimizer))
    assert_same(*results)


class AllOfIt(torch.optim.SGD):
    """Copies have all attributes, not only those of torch."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr, momentum=0.9)
        self.boost = 1.0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()

    def step(self, closure: Any = None) -> Any:
        self.boost *= 1.01
        for group in self.param_groups:
            group["lr"] *= self.boost
        return super().step(closure)


class OwnCopy(AllOfIt):
    __getstate__ = torch.optim.Optimizer.__getstate__

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        made.boost = self.boost
        return made


class OwnPickle(torch.optim.SGD):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr, momentum=0.9)

    def __reduce__(self) -> Any:
        return self.__class__._make, (self.param_groups[0]["params"], self.state_dict())

    @classmethod
    def _make(cls, params: Any, state: Any) -> Any:
        made = cls(params)
        made.load_state_dict(state)
        return made


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        (AllOfIt, "deepcopy"),
        (AllOfIt, "pickle"),
        (OwnCopy, "deepcopy"),
        (OwnPickle, "deepcopy"),
        (OwnPickle, "pickle"),
    ],
)
def test_copies_by_a_class_of_its_own(kind, how):
    results = []
    for config in (None, CONFIGS[0]):
        params = make_params(CPU, shapes=SHAPES)
        optimizer = kind(params)
        if config is not None:
            offload(optimizer, config)
        steps(params, optimizer, 0, 2)
        if how == "deepcopy":
            params, optimizer = copy.deepcopy((params, optimizer))
        else:
            params, optimizer = pickle.loads(pickle.dumps((params, optimizer)))
            params = optimizer.param_groups[0]["params"]
            if config is not None:
                offload(optimizer, config)
        steps(params, optimizer, 2, 2)
        results.append((params, optimizer))
    assert_same(*results)
    assert getattr(results[0][1], "boost", 0) == getattr(results[1][1], "boost", 0)
