"""Any optimizer that updates each parameter by itself is exact; any other is refused."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch.optim import Optimizer
from training import SHAPES, assert_same, make_params, set_grads, train

from torch_offload import (
    OffloadConfig,
    independence,
    offload,
    offload_stats,
    unoffload,
)

CONFIG = OffloadConfig(chunk_size=5_000)
CPU = torch.device("cpu")

MATRICES = ((30, 7), (7, 4), (16, 9), (64, 65), (5, 5), (9, 3), (40, 2))
NO_SCALARS = tuple(shape for shape in SHAPES if shape and 0 not in shape)

#: name: (class, settings, shapes that it takes)
OPTIMIZERS = {
    "Adadelta": (torch.optim.Adadelta, {}, SHAPES),
    "Adafactor": (torch.optim.Adafactor, {}, NO_SCALARS),
    "Adagrad": (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}, SHAPES),
    "Adam amsgrad": (torch.optim.Adam, {"amsgrad": True}, SHAPES),
    "AdamW maximize": (torch.optim.AdamW, {"maximize": True}, SHAPES),
    "Adamax": (torch.optim.Adamax, {}, SHAPES),
    "ASGD": (torch.optim.ASGD, {"t0": 2.0}, SHAPES),
    "Muon": (torch.optim.Muon, {}, MATRICES),
    "NAdam": (torch.optim.NAdam, {"decoupled_weight_decay": True}, SHAPES),
    "RAdam": (torch.optim.RAdam, {}, SHAPES),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}, SHAPES),
    "Rprop": (torch.optim.Rprop, {}, SHAPES),
    "SGD": (torch.optim.SGD, {}, SHAPES),
    "SGD momentum": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, SHAPES),
}


def flavours(name: str) -> list[dict[str, bool]]:
    choices: list[dict[str, bool]] = [{}]
    known = OPTIMIZERS[name][0]([torch.nn.Parameter(torch.ones(2, 2))]).defaults
    if "foreach" in known:
        choices += [{"foreach": True}, {"foreach": False}]
    if "fused" in known:
        choices.append({"fused": True})
    return choices


CASES = [(name, flavour) for name in OPTIMIZERS for flavour in flavours(name)]


@pytest.mark.parametrize(("name", "flavour"), CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_bits_as_plain(device, name, flavour, dtype):
    kind, settings, shapes = OPTIMIZERS[name]
    kwargs = {"optimizer_class": kind, "dtype": dtype, "shapes": shapes, **settings, **flavour}
    if name == "SGD momentum" and flavour.get("fused"):
        kwargs["has_grad"] = None  # torch's own fails where one parameter has no buffer yet
        if device.type == "cpu" and dtype is torch.bfloat16:
            pytest.skip("torch's kernel reads uninitialised memory: plain differs from plain")
    try:
        plain = train(device, config=None, **kwargs)
    except RuntimeError as error:  # Adagrad's fused kernel is for the CPU only in some versions
        if not flavour.get("fused"):
            raise
        pytest.skip(f"plain torch refuses: {error}")
    assert_same(plain, train(device, config=None, **kwargs))  # the control
    assert_same(plain, train(device, config=CONFIG, **kwargs))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_checkpoints_continue_both_ways(device, name):
    kind, settings, shapes = OPTIMIZERS[name]
    kwargs = {"optimizer_class": kind, "shapes": shapes, **settings}
    plain = train(device, config=None, **kwargs)
    resumed = []
    for first, second in ((None, None), (None, CONFIG), (CONFIG, None), (CONFIG, CONFIG)):
        params, optimizer = train(device, config=first, **kwargs)
        buffer = io.BytesIO()
        torch.save(optimizer.state_dict(), buffer)
        buffer.seek(0)
        saved = torch.load(buffer, weights_only=True)
        params = [torch.nn.Parameter(p.detach().clone()) for p in params]
        more = {"first_step": 6, "steps": 3, "params": params, "state_dict": saved}
        resumed.append(train(device, config=second, **more, **kwargs))
    assert plain is not None
    for other in resumed[1:]:
        assert_same(resumed[0], other)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_converting_in_the_middle_and_back(device, name):
    kind, settings, shapes = OPTIMIZERS[name]

    def run(convert: bool):
        params = make_params(device, shapes=shapes)
        optimizer = kind(params, lr=0.01, **settings)
        for step in range(6):
            if convert and step == 2:
                offload(optimizer, CONFIG)
            if convert and step == 4:
                unoffload(optimizer)
            set_grads(params, step)
            optimizer.step()
        return params, optimizer

    assert_same(run(False), run(True))


def test_state_of_momentum_free_sgd_is_nothing(device):
    _, optimizer = train(device, config=CONFIG, optimizer_class=torch.optim.SGD)
    assert optimizer.state_dict()["state"] == {}
    stats = offload_stats(optimizer)
    assert (stats.h2d_bytes, stats.d2h_bytes, stats.host_bytes) == (0, 0, 0)


class Counting(Optimizer):
    """Counts steps in its groups (as a number, a tensor and a list) and in an attribute."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "k": 0})
        for group in self.param_groups:
            group.update(t=torch.zeros(()), seen=[])
        self.calls = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        for group in self.param_groups:
            group["k"] += 1
            group["t"] += 1
            group["seen"].append(group["k"])
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state.setdefault("buf", torch.zeros_like(p)).add_(p.grad, alpha=group["k"])
                    p.sub_(state["buf"], alpha=group["lr"] / group["k"])


def test_counters_of_groups_and_attributes_advance_once_a_step(device):
    plain = train(device, config=None, optimizer_class=Counting)
    offloaded = train(device, config=CONFIG, optimizer_class=Counting)
    assert_same(plain, offloaded)
    for group in (*plain[1].param_groups, *offloaded[1].param_groups):
        assert (group["k"], group["t"].item(), group["seen"]) == (6, 6.0, [1, 2, 3, 4, 5, 6])
    assert plain[1].calls == offloaded[1].calls == 6


def test_counters_advance_without_any_gradient():
    params = make_params(CPU)
    optimizer = offload(Counting(params), CONFIG)
    optimizer.step()
    assert (optimizer.param_groups[0]["k"], optimizer.calls) == (1, 1)
    assert optimizer.state_dict()["state"] == {}


class Growing(Optimizer):
    """Gets another state tensor on the third step, replaces one each step, and drops one."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                count = state["count"] = state.get("count", 0) + 1
                state["replaced"] = state.get("replaced", torch.zeros_like(p)) * 0.5 + p.grad
                if count == 3:
                    state["late"] = p.grad.clone()
                if count == 5:
                    del state["late"]
                state["wider"] = torch.cat([p.grad.flatten()] * min(count, 4))
                p.sub_(state["replaced"], alpha=0.1)
                if "late" in state:
                    p.sub_(state["late"], alpha=0.01)


def test_state_that_changes_its_tensors(device):
    plain = train(device, config=None, optimizer_class=_without_lr(Growing), steps=7)
    offloaded = train(device, config=CONFIG, optimizer_class=_without_lr(Growing), steps=7)
    assert_same(plain, offloaded)
    for state in offloaded[1].state.values():
        assert all(v.device == CPU for v in state.values() if torch.is_tensor(v) and v.dim())


def _without_lr(kind):
    def make(groups, lr):
        return kind([{"lr": lr, **group} for group in groups])

    return make


class SubclassThatCallsItsParent(torch.optim.AdamW):
    def step(self, closure=None):
        for group in self.param_groups:
            group["weight_decay"] *= 0.5
        return super().step(closure)


def test_a_subclass_that_calls_its_parents_step(device):
    calls = []
    results = []
    for config in (None, CONFIG):
        params = make_params(device)
        optimizer = SubclassThatCallsItsParent(params, lr=0.1)
        if config:
            offload(optimizer, config)
        optimizer.register_step_post_hook(lambda *_: calls.append(1))
        for step in range(3):
            set_grads(params, step)
            optimizer.step()
        results.append((params, optimizer))
        if config:
            assert len(calls) == 3, "hooks fire once a step"
        calls.clear()
    assert_same(*results)
    assert results[1][1].param_groups[0]["weight_decay"] == 0.01 * 0.125


class Coupled(Optimizer):
    """Normalises by all gradients together."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        params = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.float().norm() for p in params]).norm()
        for p in params:
            p.sub_(p.grad / norm, alpha=0.1)


class KeepsTensors(torch.optim.SGD):
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.copies = [p.detach().clone() for g in self.param_groups for p in g["params"]]


class OwnFormat(torch.optim.SGD):
    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict["inner"])


class Failing(torch.optim.SGD):
    def step(self, closure=None):
        raise RuntimeError("needs a GPU")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Coupled, "Coupled couples its parameters: updated one by one, a parameter of shape"),
        (KeepsTensors, "KeepsTensors keeps tensors in its attribute 'copies'"),
        (OwnFormat, "OwnFormat has a load_state_dict of its own"),
        (Failing, r"Failing could not be tried out on a tiny CPU copy, .*needs a GPU"),
        (torch.optim.LBFGS, "LBFGS.step needs a closure, which it may evaluate several times"),
    ],
)
def test_refused_with_the_reason_and_untouched(kind, message):
    optimizer = kind(make_params(CPU))
    before = dict(optimizer.__dict__)
    with pytest.raises(NotImplementedError, match=message) as caught:
        offload(optimizer)
    assert "Train it without offload" in str(caught.value)
    assert type(optimizer) is kind
    assert optimizer.__dict__.keys() == before.keys()


def test_trying_out_does_not_touch_the_random_state_or_the_optimizer():
    params, optimizer = train(CPU, config=None)
    before = copy.deepcopy(optimizer.state_dict())
    values = [p.detach().clone() for p in params]
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    independence.check_independent(
        type(optimizer),
        {k: v for k, v in optimizer.__dict__.items() if k not in ("state", "param_groups")},
        optimizer.param_groups,
    )
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(a, b) for a, b in zip(params, values, strict=True))
    assert before["param_groups"] == optimizer.state_dict()["param_groups"]


def test_sparse_adam(device):
    def run(config):
        torch.manual_seed(0)
        layers = [torch.nn.Embedding(40, 6, sparse=True).to(device) for _ in range(3)]
        params = [layer.weight for layer in layers]
        optimizer = torch.optim.SparseAdam(params, lr=0.1)
        if config:
            offload(optimizer, config)
        for step in range(6):
            rows = torch.arange(step, 20 + step, 3, device=device)
            used = layers if step else layers[:2]  # the last one's first gradient comes later
            sum((layer(rows) ** 2).sum() for layer in used).backward()
            optimizer.step()
            optimizer.zero_grad()
        return params, optimizer

    plain, offloaded = run(None), run(CONFIG)
    assert_same(plain, offloaded)
    assert offload_stats(offloaded[1]).h2d_bytes > 0


class Noisy(torch.optim.SGD):
    """Rounds stochastically: draws numbers in the order of its parameters."""

    def step(self, closure=None):
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        state = self.state[p]
                        state.setdefault("noise", torch.zeros_like(p)).add_(torch.rand_like(p))
                        p.sub_(state["noise"], alpha=0.1)


def test_an_optimizer_that_draws_random_numbers(device):
    def run(config):
        params = make_params(device)
        optimizer = Noisy(params, lr=0.1)
        if config:
            offload(optimizer, config)
        torch.manual_seed(3)
        for step in range(4):
            set_grads(params, step)
            optimizer.step()
        return params, optimizer

    assert_same(run(None), run(CONFIG))


class Pair(torch.Tensor):
    """A tensor made of two others, as quantised state is."""

    @staticmethod
    def __new__(cls, a, b):
        return torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype, device=a.device)

    def __init__(self, a, b):
        self.a, self.b = a, b

    def __tensor_flatten__(self):
        return ["a", "b"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


class Quantised(torch.optim.SGD):
    """Keeps small state plain and large state in pairs."""

    large = 4096

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    buffer = torch.zeros_like(p, requires_grad=False)
                    paired = p.numel() >= self.large
                    self.state[p]["buffer"] = Pair(buffer, buffer) if paired else buffer


def test_state_in_tensor_subclasses_is_refused():
    message = "Quantised keeps 'buffer' in a Pair, a tensor made of"
    with pytest.raises(NotImplementedError, match=message):
        offload(Quantised(make_params(CPU, shapes=[(8, 8)])))


def test_state_in_tensor_subclasses_is_refused_before_anything_changes(monkeypatch):
    monkeypatch.setattr(Quantised, "large", 50_000)  # more than a tiny copy has
    params = make_params(CPU, shapes=[(8, 8), (500, 100)])
    optimizer = offload(Quantised(params))
    set_grads(params, 0)
    before = [p.detach().clone() for p in params]
    with pytest.raises(NotImplementedError, match="keeps 'buffer' in a Pair, a tensor made of"):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
    assert optimizer.state_dict()["state"] == {}
