"""Updates beside backward or beside the next forward: the bits of plain, whatever the loop does."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_races_gpu import delete_wait, sleep, slow_down
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint
from training import assert_same

from torch_offload import (
    OffloadConfig,
    last_microbatch,
    offload,
    offload_stats,
    prefetch,
    synchronize,
    unoffload,
)

CHUNK = 6_000
MODES = ["backward", "forward"]
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW fused": (torch.optim.AdamW, {"fused": True}),
    "AdamW foreach": (torch.optim.AdamW, {"foreach": True}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9}),
    "Adafactor": (torch.optim.Adafactor, {}),
    "Muon": (torch.optim.Muon, {}),
    "NAdam": (torch.optim.NAdam, {}),
}


class Net(nn.Module):
    """Layers with a tied pair, one that is used twice, and one that is used in some steps only."""

    def __init__(self, how: str = "plain", bias: bool = True) -> None:
        super().__init__()
        self.how = how
        self.first = nn.Linear(24, 32, bias=bias)
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=bias) for _ in range(6))
        self.twice = nn.Linear(32, 32, bias=bias)
        self.rare = nn.Linear(32, 32, bias=bias)
        self.last = nn.Linear(32, 32, bias=bias)
        self.tied = nn.Linear(32, 32, bias=bias)
        self.tied.weight = self.layers[0].weight

    def forward(self, x: torch.Tensor, rare: bool = False) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for layer in self.layers:
            if self.how == "plain":
                x = torch.tanh(layer(self.twice(x)))
            else:
                x = checkpoint(
                    lambda x, layer=layer: torch.tanh(layer(self.twice(x))),
                    x,
                    use_reentrant=self.how == "reentrant",
                )
        if rare:
            x = x + self.rare(x)
        return self.tied(self.last(x))


Loop = Callable[[Net, torch.optim.Optimizer, int], None]


def batch(model: Net, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(4, 24, generator=generator).to(model.first.weight)


def simple(model: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
    loss = model(batch(model, step), rare=step % 3 == 2).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def train(
    device: torch.device,
    overlap: str | None,
    loop: Loop = simple,
    *,
    name: str = "AdamW fused",
    dtype: torch.dtype = torch.float32,
    how: str = "plain",
    steps: int = 6,
    expect_early: bool = True,
    gpu_budget: int | str = 0,
) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net(how, bias=name != "Muon").to(device, dtype)
    kind, settings = OPTIMIZERS[name]
    params = list(model.parameters())
    groups = [{"params": params[:7]}, {"params": params[7:], "weight_decay": 0.1}]
    optimizer = kind(groups, lr=1e-2, **settings)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    if overlap is not None:
        config = OffloadConfig(chunk_size=CHUNK, overlap=overlap, gpu_budget=gpu_budget)
        offload(optimizer, config, model=model)
    early = []
    for step in range(steps):
        loop(model, optimizer, step)
        schedule.step()
        if overlap is not None:
            early.append(offload_stats(optimizer).num_early_chunks)
    if overlap == "backward":
        assert early[0] == 0
        assert not expect_early or early.count(0) <= steps // 2, early
    model_of[optimizer] = model
    return params, optimizer


model_of: weakref.WeakKeyDictionary[torch.optim.Optimizer, Net] = weakref.WeakKeyDictionary()


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def accumulating(count: int, context: bool) -> Loop:
    def loop(model: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
        for number in range(count):
            loss = model(batch(model, 10 * step + number)).square().mean()
            if context and number == count - 1 and hasattr(optimizer, "_offload_core"):
                with last_microbatch(optimizer):
                    loss.backward()
            else:
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return loop


@pytest.mark.parametrize("overlap", MODES)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_bits_as_plain(device, overlap, name, dtype):
    case = {"name": name, "dtype": dtype}
    plain = train(device, None, **case)
    assert_same(plain, train(device, None, **case))  # the control
    other = train(device, overlap, **case)
    assert_same(plain, other)

    def order(params: list[torch.Tensor], optimizer: torch.optim.Optimizer) -> list[int]:
        positions = {id(param): position for position, param in enumerate(params)}
        return [positions[id(param)] for param in optimizer.state]

    assert order(*plain) == order(*other)


@pytest.mark.parametrize("overlap", MODES)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("context", [False, True])
def test_accumulation(device, overlap, count, context):
    loop = accumulating(count, context)
    assert_same(train(device, None, loop), train(device, overlap, loop))


@pytest.mark.parametrize("overlap", MODES)
@pytest.mark.parametrize("how", ["reentrant", "not reentrant"])
def test_checkpointing(device, overlap, how):
    assert_same(train(device, None, how=how), train(device, overlap, how=how))


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", MODES)
@pytest.mark.parametrize("stages", [("h2d",), ("update",), ("d2h",), ("h2d", "update", "d2h")])
def test_any_stage_may_be_slow(monkeypatch, overlap, stages):
    gpu = torch.device("cuda", 0)
    plain = train(gpu, None)
    train(gpu, overlap)  # the trial of the class has been made
    slow_down(monkeypatch, *stages)
    assert_same(plain, train(gpu, overlap))


def overwriting(model: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Free gradients, take their memory and write into it; read weights without a forward."""
    simple(model, optimizer, step)
    for param in model.parameters():
        torch.empty_like(param).fill_(77)


def with_slow_gradients(model: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
    loss = model(batch(model, step)).square().mean()
    sleep(30)  # gradients are computed later than they are issued
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


#: name: (mode, producer, consumer, slowed stages, the loop that dies without it)
WAITS: dict[str, tuple[str, str, str, tuple[str, ...], Loop]] = {
    f"{overlap} {name}": (overlap, *case)
    for overlap in MODES
    for name, case in {
        "I1 and I11": ("d2h", "h2d", ("d2h",), simple),
        "I2 state": ("h2d", "side", ("h2d",), simple),
        "I2 gradients": ("caller", "side", (), with_slow_gradients),
        "I3": ("side", "d2h", ("update",), simple),
        "I5": ("side", "caller", ("update",), overwriting),
    }.items()
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", WAITS)
@pytest.mark.parametrize("deleted", [False, True])
def test_each_wait_is_needed(monkeypatch, name, deleted):
    gpu = torch.device("cuda", 0)
    overlap, producer, consumer, stages, loop = WAITS[name]
    plain = train(gpu, None, loop)
    train(gpu, overlap)  # the trial of the class has been made
    slow_down(monkeypatch, *stages)
    if not deleted:
        assert_same(plain, train(gpu, overlap, loop))
        return
    skipped = delete_wait(monkeypatch, producer, consumer)
    with pytest.raises(AssertionError):
        assert_same(plain, train(gpu, overlap, loop))
    assert skipped, "the wait was never reached"


@pytest.mark.parametrize("overlap", MODES)
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("whose", ["optimizer", "model"])
def test_zero_grad(device, overlap, set_to_none, whose):
    def loop(model: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
        model(batch(model, step), rare=step % 3 == 2).square().mean().backward()
        optimizer.step()
        (model if whose == "model" else optimizer).zero_grad(set_to_none=set_to_none)

    assert_same(train(device, None, loop), train(device, overlap, loop))


def clipping(model: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
    model(batch(model, step)).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    optimizer.zero_grad()


def test_clipping_beside_forward(device):
    assert_same(train(device, None, clipping), train(device, "forward", clipping))


# Wrong use of backward -----------------------------------------------------------------------


def started(
    device: torch.device, steps: int = 2, overlap: str = "backward"
) -> tuple[Net, torch.optim.Optimizer]:
    """A model whose next backward updates parameters."""
    _, optimizer = train(device, overlap, steps=steps)
    return model_of[optimizer], optimizer


def backward(model: Net, number: int = 50) -> None:
    model(batch(model, number)).square().mean().backward()


def unscale(model: Net, optimizer: torch.optim.Optimizer) -> None:
    device = model.first.weight.device
    scaler = torch.amp.GradScaler(device.type, enabled=True)
    scaler.scale(torch.ones((), device=device))
    scaler.unscale_(optimizer)


USES: dict[str, Callable[[Net, torch.optim.Optimizer], Any]] = {
    "clip_grad_norm_": lambda m, o: nn.utils.clip_grad_norm_(m.parameters(), 1.0),
    "clip_grad_value_": lambda m, o: nn.utils.clip_grad_value_(m.parameters(), 1.0),
    "GradScaler": unscale,
    "an edit": lambda m, o: [p.grad.mul_(2) for p in m.parameters() if p.grad is not None],
    "a look": lambda m, o: [p.grad.norm() for p in m.parameters() if p.grad is not None],
    "another backward": lambda m, o: backward(m, 51),
}


@pytest.mark.parametrize("use", USES)
def test_gradients_that_were_used_are_refused(device, use):
    """Also if the error is caught: the step is then refused, not taken unclipped."""
    model, optimizer = started(device)
    backward(model)
    with pytest.raises(RuntimeError, match=r"used (by the update|between its)"):
        USES[use](model, optimizer)
    with pytest.raises(RuntimeError, match="Load a checkpoint"):
        optimizer.step()


def test_another_backward_after_zero_grad_is_refused(device):
    """As for a step that is left out because its loss is not finite."""
    model, optimizer = started(device)
    backward(model)
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"Call step\(\) before the next forward"):
        backward(model, 51)
    with pytest.raises(RuntimeError, match="Load a checkpoint"):
        optimizer.step()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "lr": lambda o: o.param_groups[0].update(lr=0.5),
    "betas": lambda o: o.param_groups[1].update(betas=(0.8, 0.9)),
    "grad_scale": lambda o: setattr(o, "grad_scale", torch.tensor(2.0)),
    "a new key": lambda o: o.param_groups[1].update(new=1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_set_after_backward_is_refused(device, change):
    model, optimizer = started(device)
    backward(model)
    CHANGES[change](optimizer)
    with pytest.raises(RuntimeError, match=r"changed .* Set it before backward"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="Load a checkpoint"):
        optimizer.step()


class Detached(nn.Module):
    """Computes anew, in backward, with a weight that was updated by then."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(24, 24), nn.Linear(24, 24)
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def block(x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.first(x) @ self.head.weight.detach())

        x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(x)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_weight_that_backward_uses_after_its_update(device, use_reentrant):
    torch.manual_seed(0)
    model = Detached(use_reentrant).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    offload(optimizer, OffloadConfig(chunk_size=2_000, overlap="backward"), model=model)
    data = torch.randn(4, 24, device=device, requires_grad=True)
    model(data).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="used between its update"):
        model(data).square().mean().backward()
    with pytest.raises(RuntimeError, match="Load a checkpoint"):
        optimizer.step()


BETWEEN: dict[str, Callable[[Net, Any], Any]] = {
    "evaluation": lambda m, o: m(batch(m, 7)),
    "an edit": lambda m, o: m.last.weight.data.mul_(0.5),
    "new memory": lambda m, o: setattr(m.last.weight, "data", torch.ones(32, 32).to(m.last.bias)),
    "weights loaded": lambda m, o: m.load_state_dict(copy.deepcopy(m.state_dict())),
    "state cleared": lambda m, o: o.state.clear(),
    "a state edited": lambda m, o: [s["exp_avg"].zero_() for s in o.state.values()],
    "groups exchanged": lambda m, o: exchange_params(o),
    "global hook": lambda m, o: GLOBAL_HOOKS.append(
        register_optimizer_step_pre_hook(lambda *_: None)
    ),
}
GLOBAL_HOOKS: list[Any] = []


def exchange_params(optimizer: torch.optim.Optimizer) -> None:
    one, other = optimizer.param_groups
    one["params"], other["params"] = other["params"], one["params"]


def use_and_step(what: str, model: Net, optimizer: torch.optim.Optimizer) -> None:
    BETWEEN[what](model, optimizer)
    optimizer.step()


@pytest.mark.parametrize("what", BETWEEN)
def test_what_plain_would_see_before_step_is_refused(device, what):
    model, optimizer = started(device)
    backward(model)
    try:
        with pytest.raises(RuntimeError, match="step"):
            use_and_step(what, model, optimizer)
        with pytest.raises(RuntimeError, match="Load a checkpoint"):
            optimizer.step()
    finally:
        while GLOBAL_HOOKS:
            GLOBAL_HOOKS.pop().remove()


def test_state_is_not_saved_half_way_without_a_word(device):
    model, optimizer = started(device)
    backward(model)
    with pytest.warns(UserWarning, match=r"backward\(\) has begun"):
        optimizer.state_dict()
    for function in (copy.deepcopy, unoffload):
        with pytest.raises(RuntimeError, match="call step"):
            function(optimizer)
    optimizer.step()


@pytest.mark.parametrize("when", ["before", "after"])
def test_compiled_models_beside_forward(when):
    results = []
    for overlap in (None, "forward"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        optimizer = torch.optim.AdamW(model.parameters())
        if when == "before":
            model.compile(backend="eager")
        if overlap is not None:
            offload(optimizer, OffloadConfig(chunk_size=300, overlap=overlap), model=model)
        if when == "after":
            model.compile(backend="eager")
        for step in range(4):
            data = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            model(data).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append((list(model.parameters()), optimizer))
    assert_same(*results)


@pytest.mark.parametrize("overlap", MODES)
def test_models_can_be_pickled(device, overlap):
    model, optimizer = started(device, overlap=overlap)
    values = [p.detach().clone() for p in model.parameters()]
    other = pickle.loads(pickle.dumps(model))
    assert all(torch.equal(a, b) for a, b in zip(values, other.parameters(), strict=True))
    backward(other)
    assert optimizer is not None


HANDS: dict[str, Callable[[Net, Any], Any]] = {
    "zero_grad": lambda m, o: o.zero_grad(),
    "zeros": lambda m, o: o.zero_grad(set_to_none=False),
    "one of them": lambda m, o: setattr(m.first.weight, "grad", None),
    "by hand": lambda m, o: setattr(m.last.bias, "grad", torch.ones(32, device=m.last.bias.device)),
}


@pytest.mark.parametrize("hand", HANDS)
def test_gradients_that_were_exchanged_after_backward_are_refused(device, hand):
    """Plain would step without them, or with the others."""
    model, optimizer = started(device)
    backward(model)
    HANDS[hand](model, optimizer)
    with pytest.raises(RuntimeError, match=r"between backward\(\) and step\(\)"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="Load a checkpoint"):
        optimizer.step()


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("boom")


def test_a_backward_that_raises_half_way(device):
    model, optimizer = started(device)
    checkpointed = copy.deepcopy(optimizer.state_dict())
    weights = copy.deepcopy(model.state_dict())
    handle = model.layers[2].register_forward_hook(lambda *args: Failing.apply(args[2]))
    with pytest.raises(ValueError, match="boom"):
        backward(model)
    handle.remove()
    with pytest.raises(RuntimeError, match="raised after parameters had been updated"):
        optimizer.step()
    optimizer.zero_grad()
    # A checkpoint heals it.
    plain = train(device, None, steps=2)
    other = model_of[plain[1]]
    model.load_state_dict(weights)
    optimizer.load_state_dict(checkpointed)
    for net, stepped in ((other, plain[1]), (model, optimizer)):
        for number in range(60, 63):
            backward(net, number)
            stepped.step()
            stepped.zero_grad()
    assert_same(plain, (list(model.parameters()), optimizer))


def test_a_gradient_from_the_step_before_is_refused(device):
    """Without zero_grad() plain adds to it, and it is gone."""
    model, optimizer = started(device)
    backward(model)
    optimizer.step()
    with pytest.raises(RuntimeError, match="used by the update during backward"):
        backward(model)


def test_step_pre_hooks_come_before_any_update(device, caplog):
    def loop(model: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 2:

            def clip(*_: Any) -> None:
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)

            optimizer.register_step_pre_hook(clip)
        simple(model, optimizer, step)

    plain = train(device, None, loop)
    assert_same(plain, train(device, "backward", loop, expect_early=False))
    assert "step pre-hooks are registered" in caplog.text


def test_a_state_that_was_edited_after_it_was_copied_ahead(device):
    def loop(model: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 3:
            for state in optimizer.state.values():
                state["exp_avg"].zero_()
        if step == 4:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        simple(model, optimizer, step)

    plain = train(device, None, loop)
    assert_same(plain, train(device, "backward", loop))


# Readers between step() and the next forward -------------------------------------------------


def average(model: Net, optimizer: torch.optim.Optimizer) -> Any:
    ema = torch.optim.swa_utils.AveragedModel(model)
    ema.update_parameters(model)
    return [p.detach().clone() for p in ema.parameters()]


READERS: dict[str, Callable[[Net, torch.optim.Optimizer], Any]] = {
    "evaluation": lambda m, o: [m(batch(m, 7)).detach()],
    "state_dict": lambda m, o: [v.clone() for v in m.state_dict().values()],
    "norms": lambda m, o: [p.norm().detach() for p in m.parameters()],
    "foreach norms": lambda m, o: list(torch._foreach_norm(list(m.parameters()))),
    "average": average,
    "deepcopy": lambda m, o: [p.detach() for p in copy.deepcopy(m).parameters()],
    "vector": lambda m, o: [nn.utils.parameters_to_vector(m.parameters()).detach()],
    "data": lambda m, o: [p.data.clone() for p in m.parameters()],
    "optimizer state": lambda m, o: [
        s[k].clone() for s in o.state.values() for k in ("exp_avg", "exp_avg_sq", "step")
    ],
    "optimizer state_dict": lambda m, o: [
        v.clone() for s in o.state_dict()["state"].values() for v in s.values()
    ],
    "an edit": lambda m, o: [p.data.mul_(0.5).clone() for p in m.parameters()],
    "gradients": lambda m, o: [p.grad.clone() for p in m.parameters() if p.grad is not None],
    "export": lambda m, o: exported(m),
    "torch.save": lambda m, o: list(saved(m).values()),
    "numpy": lambda m, o: [torch.from_numpy(p.detach().cpu().numpy()) for p in m.parameters()],
    "another thread": lambda m, o: in_a_thread(lambda: [p.norm().detach() for p in m.parameters()]),
}


def exported(model: Net) -> list[torch.Tensor]:
    program = torch.export.export(model, (batch(model, 7),))
    values = [value.detach().clone() for value in program.state_dict.values()]
    return [*values, program.module()(batch(model, 8)).detach()]


def saved(model: Net) -> dict[str, torch.Tensor]:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return torch.load(file)  # type: ignore[no-any-return]


def in_a_thread(work: Callable[[], Any]) -> Any:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool, torch.no_grad():
        return pool.submit(work).result()


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_readers_see_finished_values(monkeypatch, device, reader, slow):
    if slow and device.type == "cpu":
        pytest.skip("a CPU has no streams that could be slow")
    seen: list[list[Any]] = []

    def loop(model: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
        model(batch(model, step)).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            seen[-1] += [v.cpu() for v in READERS[reader](model, optimizer)]
        optimizer.zero_grad()

    seen.append([])
    plain = train(device, None, loop)
    if slow:
        train(device, "forward")  # the trial of the class has been made
        slow_down(monkeypatch, "update")
    seen.append([])
    assert_same(plain, train(device, "forward", loop))
    assert len(seen[0]) == len(seen[-1])
    assert all(torch.equal(a, b) for a, b in zip(seen[0], seen[-1], strict=True))


@pytest.mark.gpu
# With 50 %, the wait for the last copy to the host covers for it.
@pytest.mark.parametrize(("budget", "deleted"), [("50%", False), ("100%", False), ("100%", True)])
def test_state_that_stays_is_read_when_it_is_final(monkeypatch, budget, deleted):
    gpu = torch.device("cuda", 0)
    seen: list[list[Any]] = []

    def loop(model: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
        model(batch(model, step)).square().mean().backward()
        optimizer.step()
        seen[-1] += [s["exp_avg"].clone() for s in optimizer.state.values()]
        optimizer.zero_grad()

    seen.append([])
    plain = train(gpu, None, loop)
    train(gpu, "forward")  # the trial of the class has been made
    slow_down(monkeypatch, "update")
    skipped = delete_wait(monkeypatch, "side", "cpu") if deleted else []
    seen.append([])
    other = train(gpu, "forward", loop, gpu_budget=budget)
    equal = all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(*seen, strict=True))
    assert equal != deleted
    assert bool(skipped) == deleted
    if not deleted:
        assert_same(plain, other)


def with_lr(model: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
    model(batch(model, step)).square().mean().backward()
    for group in optimizer.param_groups:
        group["lr"] *= 0.9
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("loop", "chosen"),
    [
        (simple, "backward"),
        (accumulating(3, False), "backward"),
        (accumulating(3, True), "backward"),
        (clipping, "forward"),
        (with_lr, "forward"),
    ],
)
def test_the_mode_is_chosen_by_what_the_first_steps_do(device, caplog, loop, chosen):
    plain = train(device, None, loop)
    other = train(device, "auto", loop)
    assert_same(plain, other)
    assert f"goes on with '{chosen}'" in caplog.text
    assert caplog.text.count('overlap="auto"') == 1
    # What gpu_budget="auto" keeps after the third step are chunks whose copies would be seen.
    budget = other[1]._offload_core.planner.layout.budget
    assert budget.from_end == (chosen == "backward")


def test_the_mode_is_step_where_the_model_is_not_known(device, caplog):
    params, optimizer = train(device, None, clipping, steps=0)
    plain = train(device, None, clipping)
    offload(optimizer, OffloadConfig(chunk_size=CHUNK, overlap="auto"))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    for step in range(6):
        clipping(model_of[optimizer], optimizer, step)
        schedule.step()
    assert_same(plain, (params, optimizer))
    assert "goes on with 'step'" in caplog.text
    assert "attach_model(optimizer, model)" in caplog.text


def test_clipping_that_begins_later_is_an_error(device):
    model, _optimizer = started(device, overlap="auto")
    backward(model)
    with pytest.raises(RuntimeError, match="used by the update during backward"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def test_forward_needs_the_model(device):
    param = nn.Parameter(torch.ones(8, device=device))
    optimizer = offload(torch.optim.AdamW([param]), OffloadConfig(overlap="forward"))
    param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError, match=r"attach_model\(optimizer, model\)"):
        optimizer.step()


@pytest.mark.parametrize("overlap", MODES)
def test_nothing_is_left_behind(device, overlap):
    """Reference counts alone free optimizer, model and memory; hooks are gone after unoffload()."""
    params, optimizer = train(device, overlap)
    model = model_of[optimizer]
    hooks = [len(p._post_accumulate_grad_hooks or ()) for p in params]
    assert any(hooks) == (overlap == "backward")
    unoffload(optimizer)
    assert not any(len(p._post_accumulate_grad_hooks or ()) for p in params)
    assert not any(len(module._forward_pre_hooks) for module in model.modules())
    offload(optimizer, OffloadConfig(chunk_size=CHUNK, overlap=overlap), model=model)
    for step in range(3):
        simple(model, optimizer, step)
    alive = [weakref.ref(optimizer._offload_core), weakref.ref(model)]
    gc.collect()
    gc.disable()
    try:
        synchronize(optimizer)
        del optimizer, model, params
        assert [reference() for reference in alive] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("overlap", MODES)
def test_copies_of_model_and_optimizer(device, overlap):
    def loop(model: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
        simple(model, optimizer, step)
        if step == 3:
            net, other = copy.deepcopy((model, optimizer))
            for number in range(2):
                if overlap == "forward" and hasattr(other, "_offload_core"):
                    other._offload_core.attach(net)
                simple(net, other, number)

    assert_same(train(device, None, loop), train(device, overlap, loop))


def edit(model: Net, optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].mul_(0.5)


def drop(model: Net, optimizer: torch.optim.Optimizer) -> None:
    for state in list(optimizer.state.values())[:3]:
        state.clear()


def load(model: Net, optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@pytest.mark.parametrize("meanwhile", [None, edit, drop, load])
@pytest.mark.parametrize("slow", [(), ("h2d",), ("d2h",), ("update",)])
def test_prefetch(monkeypatch, device, meanwhile, slow):
    """In step mode: some parameters have no gradient, and what was copied may be stale."""
    if slow and device.type == "cpu":
        pytest.skip("a CPU has no streams that could be slow")
    copied = []

    def loop(model: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
        is_offloaded = hasattr(optimizer, "_offload_core")
        if is_offloaded and step != 4:
            handle = prefetch(optimizer)
            if step == 3:
                handle.cancel()
        if meanwhile is not None and step == 2:
            meanwhile(model, optimizer)
        model(batch(model, step), rare=step % 3 == 2).square().mean().backward()
        if is_offloaded:
            run = optimizer._offload_core._ahead
            copied.append(sum(flow._traffic.h2d_bytes for flow in run.flows.values()) if run else 0)
        optimizer.step()
        optimizer.zero_grad()

    plain = train(device, None, loop)
    train(device, "step")  # the trial of the class has been made
    if slow:
        slow_down(monkeypatch, *slow)
    assert_same(plain, train(device, "step", loop))
    # Whoever looks at the state may change it, so that it is copied in again.
    trusted = meanwhile is None
    assert [number > 0 for number in copied[-6:]] == [False, True, trusted, False, False, True]
