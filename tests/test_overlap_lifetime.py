"""What happens around updates in flight: backwards that raise, that come alone, and the end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_overlap import Failing, Net, batch, deterministic, model_of, simple, train
from test_races_gpu import sleep, slow_down
from torch import nn
from training import assert_same

from torch_offload import OffloadConfig, core, offload, offload_stats
from torch_offload.forward import ForwardOverlap, _Ticket
from torch_offload.streams import caller_stream

__all__ = ["deterministic"]  # a fixture

BOOM = "boom"


def skip(model: Net, optimizer: torch.optim.Optimizer) -> None:
    """As loops do that catch it when memory runs out."""
    optimizer.zero_grad()


def retry(model: Net, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(batch(model, 77)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def go_on(model: Net, optimizer: torch.optim.Optimizer) -> None:
    model(batch(model, 78)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def step(model: Net, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def outcome(device: torch.device, overlap: str | None, place: int, then: Any) -> Any:
    """Train, with a backward that raises in step 3 where the output of one layer was made."""

    def loop(model: Net, optimizer: torch.optim.Optimizer, number: int) -> None:
        if number != 3:
            simple(model, optimizer, number)
            return
        layers = [model.last, *reversed(model.layers), model.first]
        handle = layers[place].register_forward_hook(lambda *args: Failing.apply(args[2]))
        with pytest.raises(ValueError, match=BOOM):
            model(batch(model, number)).square().mean().backward()
        handle.remove()
        then(model, optimizer)

    return train(device, overlap, loop, steps=8)


@pytest.mark.parametrize("then", [skip, retry, go_on, step])
def test_a_backward_that_raises(device, then):
    """Before any update it is as if nothing had been there to be updated early; after one, the
    next step refuses."""
    refused, reasons = [], []
    for place in range(8):
        plain = outcome(device, None, place, then)
        try:
            other = outcome(device, "backward", place, then)
        except RuntimeError as error:
            refused.append(place)
            reasons.append(str(error))
        else:
            assert_same(plain, other)
            assert offload_stats(other[1]).num_early_chunks > 0  # again
    assert all("raised after parameters had been updated" in reason for reason in reasons)
    # The first layers of the backward are in one chunk with what comes after them.
    assert refused == list(range(refused[0], 8))
    assert refused[0] > 0


def alone(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """A graph that saves no parameter is gone through again after ``step()``, without a forward."""
    params = list(model.parameters())
    terms = [(p * torch.full_like(p, 0.1 * (i + 1))).sum() for i, p in enumerate(params)]
    loss = torch.stack(terms).sum()
    optimizer.zero_grad()
    loss.backward(retain_graph=True)
    optimizer.step()
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_a_backward_without_a_forward(monkeypatch, device, slow):
    if slow and device.type == "cpu":
        pytest.skip("a CPU has no streams that could be slow")
    plain = train(device, None, alone)
    assert_same(plain, train(device, None, alone))
    train(device, "forward")  # the trial of the class has been made
    if slow:
        slow_down(monkeypatch, "update")
    assert_same(plain, train(device, "forward", alone))
    if slow:
        monkeypatch.setattr(ForwardOverlap, "wait_for", lambda *args: None)
        with pytest.raises(AssertionError):
            assert_same(plain, train(device, "forward", alone))


@pytest.mark.gpu
@pytest.mark.parametrize("deleted", [False, True])
def test_an_optimizer_that_dies_under_its_updates(monkeypatch, deleted):
    """What it held is not given to others while updates still write to it."""
    gpu = torch.device("cuda", 0)
    if deleted:
        monkeypatch.setattr(core, "_synchronize", lambda pipelines: None)
    train(gpu, "forward", gpu_budget="100%")
    slow_down(monkeypatch, "update")
    params, optimizer = train(gpu, "forward", gpu_budget="100%", steps=4)
    model = model_of[optimizer]
    model(batch(model, 99)).square().mean().backward()
    optimizer.step()
    # Not empty_like(): what is held would be used.
    sizes = [tuple(param.shape) for param in params] * 3
    del model, params, optimizer
    filled = [torch.full(size, 77.0, device=gpu) for size in sizes]
    torch.cuda.synchronize()
    assert all((tensor == 77).all() for tensor in filled) != deleted


@pytest.mark.gpu
@pytest.mark.parametrize("deleted", [False, True])
def test_a_second_stream_may_use_a_parameter_first(monkeypatch, deleted):
    """The stream of the step waits as well, since to it the parameter is an ordinary one then."""
    gpu = torch.device("cuda", 0)
    other = torch.cuda.Stream(gpu)
    seen: list[list[torch.Tensor]] = []

    def loop(model: Net, optimizer: torch.optim.Optimizer, number: int) -> None:
        model(batch(model, number)).square().mean().backward()
        optimizer.step()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other), torch.no_grad():
            copies = [param * 1.0 for param in model.parameters()]
        with torch.no_grad():
            seen[-1] += [param * 1.0 for param in model.parameters()]
        torch.cuda.current_stream().wait_stream(other)
        seen[-1] += copies
        optimizer.zero_grad()

    def only_the_current_one(ticket: _Ticket) -> None:
        ticket._updated.take(caller_stream(gpu))

    seen.append([])
    plain = train(gpu, None, loop)
    train(gpu, "forward")  # the trial of the class has been made
    slow_down(monkeypatch, "update")
    if deleted:
        monkeypatch.setattr(_Ticket, "wait", only_the_current_one)
    seen.append([])
    other_run = train(gpu, "forward", loop)
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True)) != deleted
    if not deleted:
        assert_same(plain, other_run)


class Extension(nn.Linear):
    """As a C++ extension: it is handed the parameters, and nobody asks their class."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return torch._C._nn.linear(x, self.weight, self.bias)


@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_an_extension_is_handed_finished_parameters(monkeypatch, device, slow):
    if slow and device.type == "cpu":
        pytest.skip("a CPU has no streams that could be slow")

    def run(overlap: str | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*[Extension(32, 32) for _ in range(4)]).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        if overlap is not None:
            offload(optimizer, OffloadConfig(chunk_size=6_000, overlap=overlap), model=model)
        x = torch.linspace(-1, 1, 4 * 32, device=device).view(4, 32)
        for _ in range(6):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [param.detach().cpu() for param in model.parameters()]

    plain = run(None)
    assert all(torch.equal(a, b) for a, b in zip(plain, run("forward"), strict=True))
    if slow:
        slow_down(monkeypatch, "update")
        assert all(torch.equal(a, b) for a, b in zip(plain, run("forward"), strict=True))
        monkeypatch.setattr(ForwardOverlap, "wait", lambda *args: None)  # what modules' hooks call
        assert not all(torch.equal(a, b) for a, b in zip(plain, run("forward"), strict=True))


@pytest.mark.gpu
def test_gradients_are_freed_as_backward_goes_on():
    """At most those of four chunks live at once, of 32, although the CPU runs ahead."""
    gpu = torch.device("cuda", 0)
    mib = 2**20
    peaks = {}
    for overlap in ("step", "backward"):
        layers = [nn.Linear(512, 512, bias=False) for _ in range(32)]  # 1 MiB of gradient each
        model = nn.Sequential(*layers).to(gpu)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        offload(optimizer, OffloadConfig(chunk_size=2 * mib, overlap=overlap), model=model)
        x = torch.randn(8, 512, device=gpu)
        for _ in range(4):
            loss = model(x).square().mean()
            sleep(50)
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            loss.backward()
            peaks[overlap] = torch.cuda.max_memory_allocated() - before
            optimizer.step()
            optimizer.zero_grad()
        if overlap == "backward":
            assert offload_stats(optimizer).num_early_chunks == 32
    assert peaks["step"] >= 31 * mib
    assert peaks["backward"] <= 4 * mib + mib // 2
