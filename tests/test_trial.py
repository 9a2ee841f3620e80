"""What a hand-written optimizer may do: it is exact when offloaded, or refused with the reason."""

from __future__ import annotations

import abc
import copy
import cProfile
import pickle
import pstats
import random
import sys
import threading
from collections import deque
from typing import Generic, TypeVar

import numpy as np
import pytest
import torch
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_module
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from training import assert_same, late, make_params, set_grads

from torch_offload import OffloadConfig, blueprint, independence, offload, offload_stats, unoffload
from torch_offload.counters import Counters
from torch_offload.settings import Settings
from torch_offload.values import same

CPU = torch.device("cpu")
#: Chunks of one or two parameters.
CONFIG = OffloadConfig(chunk_size=5_000)
SHAPES = ((30, 7), (70,), (9, 3), (129, 65), (5, 5), (17,), (3, 5, 7))


class Base(Optimizer):
    """SGD with momentum, written plainly; what a test needs is overridden."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.start()
        for group in self.param_groups:
            self.visit(group)
            for p in group["params"]:
                if p.grad is not None:
                    self.update(group, p, self.state[p])
        return loss

    def start(self):
        pass

    def visit(self, group):
        pass

    def update(self, group, p, state):
        momentum = state.setdefault("momentum", torch.zeros_like(p, requires_grad=False))
        momentum.mul_(0.9).add_(p.grad)
        p.sub_(momentum, alpha=group["lr"])


def run(kind, config, device=CPU, has_grad=late, steps=6, shapes=SHAPES, meddle=None):
    """Train with three groups of different learning rates; the last gets its gradients late."""
    params = make_params(device, shapes=shapes)
    groups = [
        {"params": params[:2], "lr": 0.05},
        {"params": params[2:5], "lr": 0.1},
        {"params": params[5:], "lr": 0.2},
    ]
    if meddle:
        meddle(params, groups)
    optimizer = kind(groups)
    if config is not None:
        offload(optimizer, config)
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    torch.manual_seed(3)
    random.seed(3)
    for step in range(steps):
        set_grads(params, step, lambda i, s: (i < 5 or s > 1) and (not has_grad or has_grad(i, s)))
        optimizer.step()
        schedule.step()
    return params, optimizer


def kept(optimizer):
    """Settings and attributes, but those that are torch's or ours."""
    settings = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    ours = ("state", "param_groups", "step", "_offload_core", "_opt_called")
    names = [k for k in optimizer.__dict__ if k not in ours and not k.startswith("_optimizer_")]
    return settings, {k: optimizer.__dict__[k] for k in names if not k.startswith("_zero_grad")}


def assert_exact(kind, device=CPU, **kwargs):
    plain, offloaded = run(kind, None, device, **kwargs), run(kind, CONFIG, device, **kwargs)
    assert_same(plain, offloaded)
    for p, q in zip(plain[0], offloaded[0], strict=True):
        assert same(p.grad, q.grad)
        assert same(p.__dict__, q.__dict__)
    assert same(kept(plain[1]), kept(offloaded[1]))
    assert offload_stats(offloaded[1]).num_chunks > 2
    return offloaded[1]


def traits(kind):
    return offload(kind(make_params(CPU, shapes=SHAPES)))._offload_core.traits


def assert_refused(kind, message, params=None):
    params = make_params(CPU, shapes=SHAPES) if params is None else params
    optimizer = kind(params)
    before, values = dict(optimizer.__dict__), [p.detach().clone() for p in params]
    with pytest.raises(NotImplementedError, match=message) as caught:
        offload(optimizer)
    assert kind.__name__ in str(caught.value)
    assert type(optimizer) is kind
    assert optimizer.__dict__.keys() == before.keys()
    assert same(values, [p.detach() for p in params])


# --- exact -------------------------------------------------------------------


class NewData(Base):
    def update(self, group, p, state):
        super().update(group, p, state)
        p.data = p.data - group["lr"] * p.grad


class NewGradient(Base):
    def update(self, group, p, state):
        p.grad = p.grad / p.grad.abs().max()
        super().update(group, p, state)
        if state["momentum"].sum() > 0:
            p.grad = None


class MarksParameters(Base):
    def update(self, group, p, state):
        p.visits = getattr(p, "visits", 0) + 1
        super().update({"lr": group["lr"] / p.visits}, p, state)


class FirstGroup(Base):
    def update(self, group, p, state):
        super().update(self.param_groups[0], p, state)


class LastGroup(Base):
    def update(self, group, p, state):
        super().update(self.param_groups[2 % len(self.param_groups)], p, state)


class LargestRate(Base):
    def start(self):
        self.rate = max(group["lr"] for group in self.param_groups)

    def update(self, group, p, state):
        super().update({"lr": self.rate}, p, state)


class FirstDevice(Base):
    def start(self):
        self.place = str(self.param_groups[1]["params"][0].device)


class NestedHistory(Base):
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.table = {"steps": [[0]], "rates": deque(maxlen=3), "seen": {"k": {1}}}
        for group in self.param_groups:
            group["history"] = [[], {"n": [0]}]

    def start(self):
        count = self.table["steps"][0][0] = self.table["steps"][0][0] + 1
        self.table["seen"]["k"].add(count)
        self.table["rates"].append(self.param_groups[0]["lr"])

    def visit(self, group):
        group["history"][1]["n"][0] += 1
        group["history"][0].append(group["lr"])

    def update(self, group, p, state):
        factor = len(group["history"][0]) + group["history"][1]["n"][0] + len(self.table["rates"])
        super().update({"lr": group["lr"] / factor}, p, state)


class ReadsNames(Base):
    def update(self, group, p, state):
        names = dict(zip(map(id, group["params"]), group["param_names"], strict=True))
        rate = 0 if names[id(p)].endswith("bias") else group["lr"]
        super().update({"lr": rate}, p, state)


class TurnsFlagsOff(Base):
    """Deletes a setting and an entry of its state on the way."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        for group in self.param_groups:
            group["first"] = True

    def update(self, group, p, state):
        state["momentum"] = torch.full_like(p, 0.5) if group.get("first") else state["momentum"]
        super().update(group, p, state)

    def step(self, closure=None):
        result = super().step(closure)
        for group in self.param_groups:
            group.pop("first", None)
        return result


class NewArray(Base):
    """Comparing arrays gives no truth value."""

    def start(self):
        self.numbers = np.arange(3) + self.param_groups[0]["lr"]


EXACT = [
    NewData, NewGradient, MarksParameters, FirstGroup, LastGroup, LargestRate, FirstDevice,
    NestedHistory, NewArray,
]  # fmt: skip


@pytest.mark.parametrize("kind", EXACT, ids=lambda kind: kind.__name__)
def test_exact(kind, device):
    assert_exact(kind, device)


def test_a_setting_that_a_step_deletes():
    assert_exact(TurnsFlagsOff, has_grad=None, shapes=SHAPES[:5])


def test_names_of_parameters():
    def run(config):
        params = make_params(CPU, shapes=SHAPES)
        names = ["a.weight", "a.bias", "b.weight", "c.weight", "d.bias", "e.bias", "f.weight"]
        optimizer = ReadsNames(list(zip(names, params, strict=True)))
        if config:
            offload(optimizer, config)
        for step in range(4):
            set_grads(params, step, late)
            optimizer.step()
        return params, optimizer

    plain, offloaded = run(None), run(CONFIG)
    assert_same(plain, offloaded)
    assert offloaded[1].param_groups[0]["param_names"] == plain[1].param_groups[0]["param_names"]
    assert torch.equal(offloaded[0][4], make_params(CPU, shapes=SHAPES)[4]), "a bias stays"


class Special(torch.nn.Parameter):
    def scale(self):
        return 0.25


class AsksTheParameter(Base):
    def update(self, group, p, state):
        rate = group["lr"] * (p.scale() if isinstance(p, Special) else 1)
        super().update({"lr": 0 if getattr(p, "frozen", False) else rate}, p, state)


def test_classes_and_attributes_of_parameters(device):
    def meddle(params, groups):
        params[1].frozen = True
        for index in (0, 3):
            params[index] = Special(params[index].detach())
        groups[0]["params"], groups[1]["params"] = params[:2], params[2:5]

    optimizer = assert_exact(AsksTheParameter, device, meddle=meddle)
    assert type(optimizer.param_groups[0]["params"][0]) is Special


class AbstractFirst(abc.ABC, Optimizer):
    @abc.abstractmethod
    def update(self, group, p, state): ...


class Abstract(AbstractFirst, Base):
    def update(self, group, p, state):
        Base.update(self, group, p, state)


T = TypeVar("T")


class GenericFirst(Generic[T], Base):
    pass


class Slots(Base):
    __slots__ = ()


class Meta(type):
    def __call__(cls, *args, **kwargs):
        return super().__call__(*args, **kwargs)


class OfMeta(Base, metaclass=Meta):
    pass


@pytest.mark.parametrize("kind", [Abstract, GenericFirst, Slots, OfMeta])
def test_unusual_classes(kind):
    optimizer = assert_exact(kind)
    assert isinstance(optimizer, kind)
    clone = copy.deepcopy(optimizer)
    assert type(clone) is type(optimizer)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert type(pickle.loads(pickle.dumps(optimizer, protocol))) is kind
    assert type(unoffload(optimizer)) is kind


class WithSlot(Base):
    __slots__ = ("count",)

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.count = 1


class NoSubclasses(Base):
    def __init_subclass__(cls, code, **kwargs):
        super().__init_subclass__(**kwargs)


def test_classes_that_cannot_be_converted():
    assert_refused(WithSlot, r"keeps 'count' in __slots__")
    assert_refused(NoSubclasses, "can have no subclass that is made at run time.*'code'")


class Overrides(Base):
    """Has methods of its own around the step, each of which calls torch's."""

    def add_param_group(self, group):
        group.setdefault("boost", 2.0)
        super().add_param_group(group)

    def zero_grad(self, set_to_none=True):
        self.cleared = getattr(self, "cleared", 0) + 1
        super().zero_grad(set_to_none)

    def __setstate__(self, state):
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("boost", 2.0)

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for p, key in zip(group["params"], saved["params"], strict=True):
                if key in state_dict["state"]:  # torch casts it to the parameter's dtype
                    self.state[p]["signs"] = state_dict["state"][key]["signs"].clone()

    def state_dict(self):
        return {**super().state_dict(), "version": 3}

    def update(self, group, p, state):
        state["signs"] = p.grad.sign().to(torch.int8)
        super().update({"lr": group["lr"] * group["boost"]}, p, state)


def test_methods_of_its_own_around_torchs(device):
    def run(first, second):
        params = make_params(device, shapes=SHAPES)
        optimizer = Overrides(params[:4])
        if first:
            offload(optimizer, first)
        optimizer.add_param_group({"params": params[4:], "lr": 0.2})
        for step in range(6):
            if step == 3:
                saved = copy.deepcopy(optimizer.state_dict())
                assert saved["version"] == 3
                del saved["param_groups"][0]["boost"]
                optimizer = Overrides([{"params": params[:4]}, {"params": params[4:]}])
                if second:
                    offload(optimizer, second)
                optimizer.load_state_dict(saved)
            set_grads(params, step, late)
            optimizer.step()
            optimizer.zero_grad()
        return params, optimizer

    plain = run(None, None)
    for first, second in ((CONFIG, CONFIG), (CONFIG, None), (None, CONFIG)):
        other = run(first, second)
        assert_same(plain, other)
        assert same(kept(plain[1]), kept(other[1]))
    signs = [state["signs"] for state in run(CONFIG, CONFIG)[1].state.values()]
    assert all(s.dtype is torch.int8 and s.device == CPU for s in signs)


class StateAtConstruction(Base):
    """Needs the state that its constructor made, as torch's Adagrad of some versions does."""

    def __init__(self, params, lr=0.1, start=0.5):
        super().__init__(params, lr)
        self.defaults["start"] = start
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["sum"] = torch.full_like(p, start, requires_grad=False)

    def update(self, group, p, state):
        state["sum"].addcmul_(p.grad, p.grad)
        p.addcdiv_(p.grad, state["sum"].sqrt(), value=-group["lr"])


def test_state_made_by_the_constructor(device):
    assert_exact(StateAtConstruction, device)
    assert traits(StateAtConstruction).elementwise


def test_adagrad_whose_state_is_made_by_its_constructor_alone(device, monkeypatch):
    def init_group(self, group, params_with_grad, grads, state_sums, state_steps):
        for p in group["params"]:
            if p.grad is not None:
                params_with_grad.append(p)
                grads.append(p.grad)
                state_sums.append(self.state[p]["sum"])
                state_steps.append(self.state[p]["step"])
        return False, False

    def constructor(self, params, lr=1e-2, lr_decay=0.1, initial_accumulator_value=0.5):
        original(self, params, lr, lr_decay, 0, initial_accumulator_value)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["step"] = torch.tensor(0.0)
                self.state[p]["sum"] = torch.full_like(p, 0.5, requires_grad=False)

    original = torch.optim.Adagrad.__init__
    monkeypatch.setattr(torch.optim.Adagrad, "__init__", constructor)
    monkeypatch.setattr(torch.optim.Adagrad, "_init_group", init_group)
    monkeypatch.setattr(independence, "_KNOWN", {})
    assert_exact(torch.optim.Adagrad, device)


FROZEN = (
    torch.uint8, torch.int8, torch.int64, torch.bool,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2,
)  # fmt: skip


@pytest.mark.parametrize("kind", [Base, torch.optim.AdamW])
@pytest.mark.parametrize("dtype", FROZEN, ids=str)
def test_frozen_weights_of_dtypes_that_are_never_trained(kind, dtype):
    def meddle(params, groups):
        made = torch.zeros(64, dtype=torch.uint8).view(dtype).view(2, -1)
        groups[0]["params"] = [torch.nn.Parameter(made, requires_grad=False), *params[:2]]

    assert_exact(kind, meddle=meddle)


def test_a_class_that_changes_frozen_weights_is_refused():
    class Counts(Base):
        def visit(self, group):
            for p in group["params"]:
                if p.dtype is torch.uint8:
                    p.add_(1)

    weight = torch.nn.Parameter(torch.zeros(8, dtype=torch.uint8), requires_grad=False)
    params = [weight, *make_params(CPU, shapes=SHAPES)]
    assert_refused(Counts, "updates parameters that have no gradient", params)


# --- refused: coupled --------------------------------------------------------


class WarmUp(Base):
    """Adapts all rates together, as Prodigy does, and does not as long as the rate is zero."""

    def __init__(self, params, lr=0.0):
        super().__init__(params, lr)
        for group in self.param_groups:
            group["d"] = 1e-3

    def start(self):
        if self.param_groups[0]["lr"] > 0:
            total = sum(
                p.grad.abs().sum().item()
                for group in self.param_groups
                for p in group["params"]
                if p.grad is not None
            )
            for group in self.param_groups:
                group["d"] = max(group["d"], total)

    def update(self, group, p, state):
        super().update({"lr": group["lr"] * group["d"]}, p, state)


class WarmUpOfAll(WarmUp):
    """Bears no different rates, as Prodigy does not."""

    def start(self):
        if len({group["lr"] for group in self.param_groups}) > 1:
            raise ValueError("one rate for all")
        super().start()


class Clips(Base):
    """Clips to a norm of all gradients, which is reached late or never."""

    largest = 10_000.0

    def start(self):
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        self.norm = self.measure(grads)
        self.factor = min(1.0, self.largest / (self.norm + 1e-6))
        del self.norm

    def measure(self, grads):
        return sum(grad.pow(2).sum().item() for grad in grads) ** 0.5

    def update(self, group, p, state):
        super().update({"lr": group["lr"] * self.factor}, p, state)


class ClipsNever(Clips):
    largest = 1e30

    def measure(self, grads):
        return torch.stack([grad.norm() for grad in grads]).norm().item() if grads else 0.0


class CouplesLate(Base):
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.count = 0

    def start(self):
        self.count += 1
        num_params = sum(len(group["params"]) for group in self.param_groups)
        self.factor = num_params if self.count > 9 else 1

    def update(self, group, p, state):
        super().update({"lr": group["lr"] / self.factor}, p, state)


class CouplesMuchLater(CouplesLate):
    def start(self):
        super().start()
        if self.count <= 1000:
            self.factor = 1


class CouplesAfterACountdown(CouplesLate):
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.schedule = {"left": [900.0]}

    def start(self):
        super().start()
        self.schedule["left"][0] -= 1
        if self.schedule["left"][0] > 0:
            self.factor = 1


class CouplesByState(Base):
    def start(self):
        counts = [entry["count"] for entry in self.state.values()]
        self.late = sum(count > 2000 for count in counts)

    def update(self, group, p, state):
        state["count"] = state.get("count", 0) + 1
        super().update({"lr": group["lr"] / (1 + self.late)}, p, state)


class ClipsMuchLater(ClipsNever):
    """Only the operations tell of it."""

    def visit(self, group):
        group["count"] = group.get("count", 0) + 1

    def measure(self, grads):
        late = self.param_groups[0].get("count", 0) > 700
        return super().measure(grads) if late else 0.0


class Batches(Base):
    """Updates equal shapes as one tensor: the same bits on this CPU, not on any device."""

    def step(self, closure=None):
        with torch.no_grad():
            params = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
            for shape in {p.shape for p in params}:
                alike = [p for p in params if p.shape == shape]
                scaled = torch.stack([p.grad for p in alike]).mul(0.1)
                for p, update in zip(alike, scaled, strict=True):
                    p.sub_(update)


class KeepsOrder(Base):
    total = [0.0]  # noqa: RUF012

    def update(self, group, p, state):
        total[0] = total[0] * 0.5 + p.grad.sum().item()
        super().update({"lr": 0.1 + total[0] * 1e-3}, p, state)


total = [0.0]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (WarmUp, "couples its parameters: updated one by one"),
        (WarmUpOfAll, "couples its parameters: updated one by one"),
        (Clips, "couples its parameters: updated one by one"),
        (ClipsNever, "several of them are put into one aten::stack"),
        (CouplesLate, "couples its parameters: updated one by one"),
        (CouplesMuchLater, "couples its parameters: updated one by one"),
        (CouplesAfterACountdown, "couples its parameters: updated one by one"),
        (CouplesByState, "couples its parameters: updated one by one"),
        (ClipsMuchLater, "several of them are put into one aten::stack"),
        (Batches, "several of them are put into one aten::stack"),
        (KeepsOrder, "couples its parameters"),
    ],
)
def test_coupled_classes_are_refused(kind, message):
    assert_refused(kind, message)


class RatePerPosition(Base):
    """Has one setting for each parameter, by its place in its group."""

    scales: object = ()

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        for group in self.param_groups:
            group["scales"] = copy.deepcopy(self.scales)

    def pairs(self):
        for group in self.param_groups:
            yield from zip(group["params"], group["scales"], strict=False)

    @torch.no_grad()
    def step(self, closure=None):
        for p, scale in self.pairs():
            if p.grad is not None:
                rate = scale[0] if isinstance(scale, tuple) else scale
                self.update({"lr": 0.1 * rate}, p, self.state[p])


@pytest.mark.parametrize(
    "scales",
    [
        [1.0] * 12,
        [1.0] * 8 + [0.1] * 4,
        (1,) * 9 + (2,) * 3,
        [True] * 11 + [False],
        [(1.0, 2)] * 12,
    ],
)
def test_a_setting_for_each_place_in_a_group_is_refused(scales, monkeypatch):
    monkeypatch.setattr(RatePerPosition, "scales", scales)
    params = make_params(CPU, shapes=[(4, 3), (5,)] * 6)
    assert_refused(RatePerPosition, "couples its parameters|could not be tried out", params)


class RatePerPlace(RatePerPosition):
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.scales = [1.0] * 40

    def pairs(self):
        places = [p for group in self.param_groups for p in group["params"]]
        yield from zip(places, self.scales, strict=False)


def test_an_attribute_for_each_place_is_refused():
    params = make_params(CPU, shapes=[(4, 3), (5,)] * 20)
    assert_refused(RatePerPlace, "couples its parameters|could not be tried out", params)


def test_a_pair_of_settings_of_two_parameters_is_no_list_of_places():
    class Pair(Base):
        def __init__(self, params, lr=0.1, betas=(0.9, 0.9)):
            super().__init__(params, lr)
            self.param_groups[0]["betas"] = betas

        def update(self, group, p, state):
            first, second = group.get("betas", (0.5, 0.5))
            super().update({"lr": group["lr"] * first * second}, p, state)

    offload(Pair(make_params(CPU, shapes=[(4, 3), (5,)])))


# --- refused: state, attributes ----------------------------------------------


class GlobalState(Base):
    def start(self):
        self.state["count"] = self.state.get("count", 0) + 1


class ForeignKey(Base):
    def update(self, group, p, state):
        super().update(group, p, self.state[p.grad])


class SharesMemory(Base):
    def update(self, group, p, state):
        super().update(group, p, state)
        state["same"] = state["momentum"].view(-1)


class KeepsTheGradient(Base):
    def update(self, group, p, state):
        super().update(group, p, state)
        state["last"] = p.grad


class Nested(Base):
    def update(self, group, p, state):
        state.setdefault("list", [{"momentum": torch.zeros_like(p)}])
        super().update(group, p, state["list"][0])


class NoDict(Base):
    def update(self, group, p, state):
        self.state[p] = torch.zeros_like(p)
        p.sub_(p.grad)


class Decays(Base):
    def visit(self, group):
        for p in group["params"]:
            p.mul_(0.9)


class PreparesState(Base):
    def visit(self, group):
        for p in group["params"]:
            self.state[p].setdefault("momentum", torch.zeros_like(p, requires_grad=False))


class Caches(Base):
    def update(self, group, p, state):
        self.cache = p.grad.clone()
        super().update(group, p, state)


class CachesInGroup(Base):
    def update(self, group, p, state):
        group["cache"] = [p.grad.clone()]
        super().update(group, p, state)


class Counter:
    def __init__(self):
        self.count = 0


class KeepsAnObject(Base):
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.counter = [Counter()]

    def start(self):
        self.counter[0].count += 1


class KeepsAFunction(Base):
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        count = 0

        def advance():
            nonlocal count
            count += 1

        self.advance = advance

    def start(self):
        self.advance()


class CountsInTheClass(Base):
    counts = {"steps": 0}  # noqa: RUF012

    def start(self):
        self.counts["steps"] += 1


class KeepsALock(Base):
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.lock = threading.Lock()


class BoundToItself(Base):
    """Its stand-ins would step the user's own parameters."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.flavour = {"default": self.all_of_them}

    def all_of_them(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(1.0)

    def start(self):
        self.flavour["default"]()


class KeepsAModule(Base):
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.modules = {"net": torch.nn.Linear(2, 2)}


class Table(Base):
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.decayed = {id(p) for group in self.param_groups for p in group["params"][:1]}

    def update(self, group, p, state):
        super().update({"lr": 0.0 if id(p) in self.decayed else group["lr"]}, p, state)


class Wrapper(Base):
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.inner = torch.optim.SGD(params, lr=lr)

    def step(self, closure=None):
        return self.inner.step(closure)


class Borrows(Optimizer):
    """A wrapper whose groups and state are those of the optimizer inside."""

    def __init__(self, params):
        self.__dict__["inner"] = torch.optim.SGD(params, lr=0.1)
        self.defaults = {}
        self._optimizer_step_pre_hooks = {}

    param_groups = property(lambda self: self.inner.param_groups)
    state = property(lambda self: self.inner.state)


class Generator(Base):
    make = staticmethod(lambda: torch.Generator())

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.generators = (self.make(),)


class NumpyGenerator(Generator):
    make = staticmethod(np.random.default_rng)


class PythonGenerator(Generator):
    make = staticmethod(random.Random)


class Regroups(Base):
    def start(self):
        self.param_groups[0]["params"].reverse()


class Returns(Base):
    def step(self, closure=None):
        super().step(closure)
        return {"norm": 1.0}


class Unscales(Base):
    """Is given the GradScaler itself, and would step with scaled gradients if it were not."""

    _step_supports_amp_scaling = True

    def step(self, closure=None, *, grad_scaler=None):
        if grad_scaler is not None:
            grad_scaler.unscale_(self)
        return super().step(closure)


class NeedsGradients(Base):
    def step(self, grads, closure=None):
        super().step(closure)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (GlobalState, "keeps state under 'count', which is no parameter"),
        (ForeignKey, "keeps state under a tensor, which is no parameter"),
        (SharesMemory, "keeps 'momentum' of its state in the same memory as 'same' of its state"),
        (KeepsTheGradient, "keeps 'last' of its state in the same memory as a gradient"),
        (Nested, "keeps tensors inside of a list in 'list' of its state"),
        (NoDict, "keeps a Tensor as the state of a parameter, not a dict"),
        (Decays, "updates parameters that have no gradient"),
        (PreparesState, "makes or changes the state of parameters that have no gradient"),
        (Caches, "keeps tensors in its attribute 'cache'"),
        (CachesInGroup, "keeps tensors in 'cache' of parameter group 0"),
        (KeepsAnObject, "changes something in its 'counter' that is no number"),
        (KeepsAFunction, "changes something in its 'advance' that is no number"),
        (CountsInTheClass, "changes its class's own 'counts' in a step"),
        (KeepsALock, "could not be tried out .*cannot pickle"),
        (BoundToItself, "keeps itself in its attribute 'flavour'"),
        (KeepsAModule, r"keeps a module \(Linear\) in its attribute 'modules'"),
        (Table, r"keeps addresses of parameters \(id\(\) or data_ptr\(\)\) in its attribute 'dec"),
        (
            Wrapper,
            r"another optimizer \(SGD\) .*Give offload\(\) that one instead.*optimizer.inner",
        ),
        (Borrows, "has no 'param_groups' of its own.*Give offload.. the optimizer inside"),
        (Generator, r"keeps a random generator of its own \(Generator\) in its attribute 'gen"),
        (NumpyGenerator, r"keeps a random generator of its own \(Generator\)"),
        (PythonGenerator, r"keeps a random generator of its own \(Random\)"),
        (Regroups, "changes the lists of its parameters"),
        (Returns, "step returns a dict; offload returns what the closure"),
        (NeedsGradients, "step needs an argument 'grads'"),
        (Unscales, "argument 'grad_scaler'.*GradScaler unscales the gradients before the step"),
    ],
)
def test_refused_with_the_reason(kind, message):
    assert_refused(kind, message)
    assert CountsInTheClass.counts == {"steps": 0}


def test_state_that_exists_is_looked_at():
    optimizer = Base(make_params(CPU, shapes=SHAPES))
    optimizer.state["best"] = {"loss": 1.0}
    with pytest.raises(NotImplementedError, match="keeps state under 'best', which is no param"):
        offload(optimizer)
    optimizer.state.clear()
    whole = torch.zeros(10)
    for p, part in zip(optimizer.param_groups[0]["params"], whole.split(5), strict=False):
        optimizer.state[p] = {"kept": part}
    offload(optimizer)  # parts of one storage that have no byte in common are no harm
    unoffload(optimizer)
    for p in optimizer.param_groups[0]["params"][:2]:
        optimizer.state[p] = {"kept": whole}
    with pytest.raises(NotImplementedError, match="'kept' of its state in the same memory as"):
        offload(optimizer)


# --- closures ----------------------------------------------------------------


class Twice(Base):
    def step(self, closure=None):
        if closure is not None:
            closure()
        return super().step(closure)


class AfterAChange(Base):
    def step(self, closure=None):
        if closure is not None:
            with torch.no_grad():
                for group in self.param_groups:
                    for p in group["params"]:
                        p.add_(0.01)
        return super().step(closure)


class OtherWithClosure(Base):
    def step(self, closure=None):
        loss = super().step(closure)
        if closure is not None:
            self.param_groups[0]["lr"] *= 0.5
        return loss


class OwnValue(Base):
    def step(self, closure=None):
        loss = super().step(closure)
        return None if loss is None else loss * 2


class Ignores(Base):
    def step(self, closure=None):
        return super().step()


class NoClosures(Base):
    def step(self, closure=None):
        if closure is not None:
            raise ArithmeticError("no closures here")
        return super().step()


class TakesNone(Base):
    def step(self):
        return super().step()


class ZeroesBefore(Base):
    def step(self, closure=None):
        if closure is not None:
            self.zero_grad()
        return super().step(closure)


class ZeroesAfter(Base):
    def step(self, closure=None):
        loss = super().step(closure)
        if closure is not None:
            self.zero_grad()
        return loss


class Differentiates(Base):
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
                loss.backward()
        super().step()
        return loss


class GivesArguments(Base):
    def step(self, closure=None):
        return super().step(closure and (lambda: closure(backward=False)))


class ByName(Base):
    def step(self, scale=1.0, *, closure=None):
        return super().step(closure)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Twice, "evaluates its closure 2 times, or after a change"),
        (AfterAChange, "evaluates its closure 1 times, or after a change"),
        (OtherWithClosure, "does something else with a closure than without"),
        (OwnValue, "does not return its value"),
    ],
)
def test_closures_that_are_not_just_called_first(kind, message):
    assert_refused(kind, message)


def test_a_closure_is_evaluated_once_and_first():
    params = make_params(CPU, shapes=SHAPES)
    optimizer = offload(Base(params), CONFIG)
    before, calls = [p.detach().clone() for p in params], []

    def closure():
        calls.append(same(before, [p.detach() for p in params]))
        set_grads(params, 0)
        return 4.0

    assert optimizer.step(closure) == 4.0
    assert calls == [True]
    assert not torch.equal(before[0], params[0])
    with pytest.raises(TypeError, match="takes a closure and nothing else, not True"):
        optimizer.step(True)


def closed(kind, config, by_name=False):
    """Step with a closure, and return what came of it."""
    params = make_params(CPU, shapes=SHAPES)
    optimizer = kind(params)
    if config:
        offload(optimizer, config)
    calls = []

    def closure():
        calls.append(1)
        loss = sum(p.pow(2).sum() for p in params)
        loss.backward()
        return loss.detach()

    set_grads(params, 0)
    losses = [
        optimizer.step(closure=closure) if by_name else optimizer.step(closure) for _ in range(3)
    ]
    return [p.detach() for p in params], [p.grad for p in params], losses, calls


@pytest.mark.parametrize(("kind", "num_calls"), [(Base, 3), (Ignores, 0)])
def test_a_closure_adds_to_the_gradients_that_there_are(kind, num_calls):
    assert same(closed(kind, None), closed(kind, CONFIG))
    assert len(closed(kind, CONFIG)[-1]) == num_calls


def test_a_closure_that_is_given_by_name():
    assert same(closed(ByName, None, by_name=True), closed(ByName, CONFIG, by_name=True))


def test_a_class_that_refuses_closures_goes_on_doing_so():
    for config in (None, CONFIG):
        with pytest.raises(ArithmeticError, match="no closures here"):
            closed(NoClosures, config)
        with pytest.raises(TypeError, match="takes"):
            closed(TakesNone, config)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (ZeroesBefore, "changes gradients before it"),
        (ZeroesAfter, "changes gradients besides"),
        (Differentiates, "differentiates its value"),
        (GivesArguments, "gives it arguments"),
    ],
)
def test_what_is_done_around_a_closure_is_refused_where_one_is_given(kind, message):
    assert_exact(kind)
    with pytest.raises(NotImplementedError, match=f"{message}.*Evaluate it yourself") as caught:
        closed(kind, CONFIG)
    assert kind.__name__ in str(caught.value)


def test_other_arguments_of_a_step_are_an_error():
    class More(Base):
        def step(self, closure=None, scale=1.0):
            return super().step(closure)

    optimizer = offload(More(make_params(CPU, shapes=SHAPES)))
    with pytest.raises(TypeError, match=r"takes a closure and nothing else, not \['scale'\]"):
        optimizer.step(scale=2.0)


# --- random numbers ----------------------------------------------------------


class DrawsAtBirth(Base):
    def update(self, group, p, state):
        if "momentum" not in state:
            state["momentum"] = torch.rand_like(p, requires_grad=False) + random.random()
        super().update(group, p, state)


class DrawsAlways(Base):
    def update(self, group, p, state):
        state["noise"] = torch.rand_like(p) * random.random()
        super().update(group, p, state)
        p.sub_(state["noise"], alpha=0.01)


class DrawsOnce(Base):
    def start(self):
        self.noise = random.random()

    def update(self, group, p, state):
        super().update({"lr": group["lr"] * self.noise}, p, state)


class DrawsLate(Base):
    """Explores after a warm-up, as stochastic gradient Langevin dynamics does."""

    def update(self, group, p, state):
        super().update(group, p, state)
        count = state["count"] = state.get("count", torch.zeros(())) + 1
        if count > 500:
            p.add_(torch.randn_like(p), alpha=0.01)


def test_random_numbers_after_a_warm_up():
    found = traits(DrawsLate)
    assert (found.random, found.redraws, found.elementwise) == (True, True, False)


def test_random_numbers_of_new_state(device):
    assert_exact(DrawsAtBirth, device)
    found = traits(DrawsAtBirth)
    assert (found.random, found.redraws, found.elementwise) == (True, False, False)


def test_random_numbers_of_every_step(device):
    assert_exact(DrawsAlways, device, has_grad=None, shapes=SHAPES[:5])
    found = traits(DrawsAlways)
    assert (found.random, found.redraws, found.elementwise) == (True, True, False)
    with pytest.raises(NotImplementedError, match="draws random numbers for one parameter after"):
        run(DrawsAlways, CONFIG, device)


def test_a_parameter_without_state_that_would_be_updated_first_changes_nothing():
    params = make_params(CPU, shapes=SHAPES)
    optimizer = offload(DrawsAlways(params), CONFIG)
    set_grads(params, 0, lambda index, _: index != 3)
    optimizer.step()
    set_grads(params, 1)
    before = [p.detach().clone() for p in params], copy.deepcopy(optimizer.state_dict())
    with pytest.raises(NotImplementedError, match=r"gradient from the first step on \(zeros"):
        optimizer.step()
    assert same(before, ([p.detach() for p in params], optimizer.state_dict()))
    params[3].grad = None
    optimizer.step()


def test_one_random_number_for_all_is_refused():
    assert_refused(DrawsOnce, "one by one, .* It draws random numbers, and not one after the")


def test_the_trial_leaves_no_trace():
    calls = []
    pre = register_optimizer_step_pre_hook(lambda *_: calls.append(1))
    post = register_optimizer_step_post_hook(lambda *_: calls.append(1))
    try:
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        params = make_params(CPU, shapes=SHAPES)
        for p in params:
            p.note = ["mine"]
        optimizer = NestedHistory(params)
        before = copy.deepcopy(kept(optimizer))
        offload(optimizer)
        offload(DrawsAlways(make_params(CPU)))
        assert same(before, kept(optimizer))
        assert not optimizer.state
        assert calls == []
        assert random.getstate() == states[0]
        assert same(np.random.get_state(), states[1])
        assert torch.equal(torch.get_rng_state(), states[2])
        set_grads(params, 0)
        optimizer.step()
        assert calls == [1, 1], "hooks of all optimizers fire once a step"
    finally:
        pre.remove()
        post.remove()


class CallsItsParent(torch.optim.AdamW):
    """Gets to torch's decorated step, which fires hooks."""

    @torch.no_grad()
    def step(self, closure=None):
        return super().step(closure)


def test_hooks_for_all_optimizers_stay_where_they_are():
    """Other threads may step other optimizers meanwhile, and a step may be interrupted."""
    calls, seen = [], []

    class Looks(CallsItsParent):
        def step(self, closure=None):
            seen.append((len(pre), len(post)))
            return super().step(closure)

    pre, post = (
        optimizer_module._global_optimizer_pre_hooks,
        optimizer_module._global_optimizer_post_hooks,
    )
    handles = [
        register_optimizer_step_pre_hook(lambda optimizer, *_: calls.append(("pre", optimizer))),
        register_optimizer_step_post_hook(lambda optimizer, *_: calls.append(("post", optimizer))),
    ]
    try:
        params = make_params(CPU, shapes=SHAPES)
        optimizer = offload(Looks(params), CONFIG)
        for step in range(2):
            set_grads(params, step)
            optimizer.step()
        other = torch.optim.SGD(params[:1], lr=0.1)
        other.step()
    finally:
        for handle in handles:
            handle.remove()
    assert set(seen) == {(1, 1)}
    assert calls == [(when, o) for o in (optimizer, optimizer, other) for when in ("pre", "post")]
    assert not pre
    assert not post


def test_profilers_go_on():
    def mark():
        pass

    profile = cProfile.Profile()
    profile.enable()
    offload(Base(make_params(CPU)))
    mark()
    profile.disable()
    assert any(name == "mark" for _, _, name in pstats.Stats(profile).stats)
    names = []
    sys.setprofile(lambda frame, event, _: names.append(frame.f_code.co_name))
    try:
        offload(Base(make_params(CPU)))
        mark()
    finally:
        sys.setprofile(None)
    assert "mark" in names


# --- element-wise ------------------------------------------------------------


class ByPosition(Base):
    def update(self, group, p, state):
        if "place" not in state:
            state["place"] = torch.arange(p.numel(), dtype=p.dtype).view_as(p)
        super().update(group, p, state)


class ByRow(Base):
    def update(self, group, p, state):
        p.sub_(p.grad / (p.grad.norm(dim=-1, keepdim=True) + 1), alpha=0.1)
        super().update(group, p, state)


class ByColumn(Base):
    def update(self, group, p, state):
        p.sub_(p.grad / (p.grad.norm(dim=0, keepdim=True) + 1), alpha=0.1)
        super().update(group, p, state)


class ByNormAboveAnything(Base):
    """A sleeping switch that looks at a whole parameter."""

    def update(self, group, p, state):
        if p.grad.norm() < 1e30:
            super().update(group, p, state)


class BySize(Base):
    def update(self, group, p, state):
        super().update({"lr": group["lr"] / p.shape[-1] if p.numel() > 9000 else 1.0}, p, state)


class ByAspect(Base):
    """Muon's rate: only tall matrices see a factor."""

    def update(self, group, p, state):
        aspect = p.size(0) / p.size(1) if p.dim() > 1 else 1.0
        super().update({"lr": group["lr"] * max(1, aspect) ** 0.5}, p, state)


class ByAspectOfBirth(Base):
    """The same, asked once, and in a way that nobody can watch."""

    def update(self, group, p, state):
        if "factor" not in state:
            rows, columns = (*p.tolist(), 0.0), (p.tolist() if p.dim() == 1 else p[0].tolist())
            state["factor"] = max(1, (len(rows) - 1) / len(columns)) ** 0.5 if p.dim() > 1 else 1.0
        super().update({"lr": group["lr"] * state["factor"]}, p, state)


class ByLength(Base):
    def update(self, group, p, state):
        super().update({"lr": 0.1 if p.numel() < 1_000_000 else 0.01}, p, state)


class ShapeOfState(Base):
    """Asks for the shape in order to make state, as many do."""

    def update(self, group, p, state):
        if not state:
            state["momentum"] = torch.zeros(p.shape, dtype=p.dtype, device=p.device)
        super().update(group, p, state)


class OtherShape(Base):
    def update(self, group, p, state):
        super().update(group, p, state)
        state["twice"] = torch.cat([p.grad.flatten()] * 2)


@pytest.mark.parametrize(
    "kind",
    [
        ByPosition,
        ByRow,
        ByColumn,
        ByNormAboveAnything,
        BySize,
        ByAspect,
        ByAspectOfBirth,
        ByLength,
        OtherShape,
        NewData,
        NewGradient,
        MarksParameters,
    ],
)
def test_not_element_wise(kind):
    assert not traits(kind).elementwise


@pytest.mark.parametrize("kind", [Base, FirstGroup, NestedHistory, ShapeOfState, torch.optim.AdamW])
def test_element_wise(kind):
    assert traits(kind).elementwise


# --- steps and settings to come ---------------------------------------------


class CountsEverywhere(Base):
    """Has counters in every place, and stays exact after many steps."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.nested = {"steps": [0], "left": 1e6}
        for group in self.param_groups:
            group["steps"] = 0

    def start(self):
        self.nested["steps"][0] += 1
        self.nested["left"] -= 1

    def visit(self, group):
        group["steps"] += 1

    def update(self, group, p, state):
        state["step"] = state.get("step", torch.zeros(())) + 1
        total = self.nested["steps"][0] + group["steps"] + float(state["step"])
        super().update({"lr": group["lr"] / total}, p, state)


class Ends(Base):
    """Is at its end after some steps, as a schedule of its own may be."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.count = 0

    def start(self):
        self.count += 1
        if self.count > 50:
            raise ValueError("the schedule has 50 steps")


def test_many_steps_are_no_obstacle():
    assert_exact(CountsEverywhere)
    assert traits(CountsEverywhere).elementwise
    assert_exact(Ends)


def test_counters_go_on_and_nothing_else():
    one, same_one = torch.zeros(()), torch.ones(3)
    root = {"up": 0, "down": 5.0, "tensor": one, "alias": one, "list": [[1], {"k": 2}]}
    root |= {"flag": 0, "fixed": 1, "twos": 0, "turns": 0, "bool": False, "wide": same_one}
    roots = {"root": (root, list(root))}
    counters = Counters()
    for step in range(4):
        counters.look(roots)
        root["up"] += 1
        root["down"] -= 1
        root["list"][0][0] += 1
        root["list"][1]["k"] += 1
        root["twos"] += 2
        root["turns"] += (-1) ** step
        root["flag"] = 1
        one.add_(1)
    counters.look(roots)
    counters.advance(roots)
    assert root["up"] == 10_004
    assert root["down"] == -9_999.0
    assert one == 10_004
    assert root["list"] == [[10_005], {"k": 10_006}]
    assert (root["flag"], root["fixed"], root["twos"], root["turns"]) == (1, 1, 8, 0)


class MaySwitch(Base):
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        for group in self.param_groups:
            group.update(clip=None, mode=False, decay=0.0, steps=0)

    def visit(self, group):
        group["steps"] += 1
        group["new"] = 1.0


def test_settings_that_no_trial_has_seen():
    optimizer = offload(MaySwitch(make_params(CPU, shapes=SHAPES)), CONFIG)
    seen, groups = optimizer._offload_core.traits.settings, optimizer.param_groups
    for step in range(3):
        assert not seen.has_others(groups)
        set_grads(groups[0]["params"], step)
        optimizer.step()
        groups[0]["lr"] = (0.0, np.float64(0.5), 1)[step]
        groups[0]["initial_lr"] = 0.1
    assert not seen.has_others(groups)
    for key, value in (("clip", 0.1), ("mode", True), ("decay", 0.1), ("steps", -1), ("more", 1)):
        for changed in ({**groups[0], key: value}, {**groups[0], "params": [], key: value}):
            assert seen.has_others([*groups, changed])
    assert seen.has_others([{key: value for key, value in groups[0].items() if key != "clip"}])
    changed = [*groups, {**groups[0], "clip": 0.1}, {**groups[0], "more": 1}]
    both = seen.joined(Settings(changed))
    assert not both.has_others(changed)
    assert seen.has_others(changed)
    assert both.has_others([{**groups[0], "mode": True}])
    own = offload(torch.optim.AdamW(make_params(CPU)))
    assert own._offload_core.traits.settings is None


# --- size of the trial -------------------------------------------------------


def test_many_groups_are_tried_out_by_their_settings():
    groups = [
        {"params": make_params(CPU, shapes=[(3, 4), (5,)][i % 2 :]), "name": f"layer {i}",
         "lr": 0.1 * 0.9**i, "weight_decay": 0.1 * (i % 2), "index": i, "flag": i % 3 == 0}
        for i in range(1000)
    ]  # fmt: skip
    tiny = blueprint.draw(torch.optim.AdamW, {}, groups)
    assert len(tiny.groups) <= 8
    assert len(tiny.samples) <= 30
    assert {group["flag"] for group in tiny.groups} == {True, False}
    assert {group["weight_decay"] for group in tiny.groups} == {0.0, 0.1}


def test_a_single_group_is_tried_out_as_two():
    params = make_params(CPU, shapes=[(3, 4)])
    tiny = blueprint.draw(Base, {}, [{"params": params, "lr": 0.0}])
    assert len(tiny.groups) == 2
    for turns, num_rates in ((2, 2), (1, 1)):
        turned = blueprint.turned(tiny.groups, {"lr": 0.0}, turns)
        rates = [group["lr"] for group in turned]
        assert len(set(rates)) == num_rates
        assert min(rates) > 0


class Clipping(torch.optim.Optimizer):
    """SGD that clips the norm of all gradients, where that is asked for."""

    def __init__(self, params, lr=0.1, clip=None):
        super().__init__(params, {"lr": lr, "clip": clip})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if group["clip"] is not None:
                torch.nn.utils.clip_grad_norm_(params, group["clip"])
            for param in params:
                param.add_(param.grad, alpha=-group["lr"])


@pytest.mark.parametrize("how", ["changed", "another group"])
def test_settings_that_come_after_the_conversion_are_tried_as_well(how):
    params = make_params(CPU, shapes=[(8, 8), (8,), (4, 4)])
    optimizer = offload(Clipping(params[:2]), OffloadConfig(chunk_size=256))
    set_grads(params, 0)
    optimizer.step()
    before = [param.detach().clone() for param in params]
    if how == "changed":
        optimizer.param_groups[0]["clip"] = 0.1
    else:
        optimizer.add_param_group({"params": params[2:], "clip": 0.1})
    with pytest.raises(NotImplementedError, match="couples its parameters"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
    optimizer.param_groups[-1]["clip"] = None
    optimizer.step()
