"""Unusual loops beside backward: what comes late, several threads and streams, and the end."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from test_overlap import CHUNK, Net, batch, deterministic, simple, train
from test_races_gpu import sleep
from torch import nn
from training import assert_same, make_params, set_grads

from torch_offload import OffloadConfig, offload, offload_stats, pipeline, prefetch

__all__ = ["deterministic"]  # a fixture


def give(param: torch.Tensor) -> None:
    param.grad = torch.full_like(param, 0.5, requires_grad=False)


def late_gradients(model: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
    """The first layers that backward comes to have no gradient of it, so others overtake them."""
    if step < 3:
        simple(model, optimizer, step)
        return
    # What was copied in waits for these.
    late = [model.last, model.tied]
    for layer in late:
        for param in layer.parameters():
            param.requires_grad_(False)
    model(batch(model, step)).square().mean().backward()
    for layer in late:
        for param in layer.parameters():
            param.requires_grad_(True)
            give(param)
    for layer in late:
        state = optimizer.state[layer.weight]
        state["exp_avg"].mul_(3)
    optimizer.step()
    optimizer.zero_grad()


def test_a_state_that_is_edited_while_its_gradient_is_late(device):
    plain = train(device, None, late_gradients)
    assert_same(plain, train(device, None, late_gradients))  # the control
    assert_same(plain, train(device, "backward", late_gradients))


def edited_in_a_hook(model: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
    def edit(_: Any) -> None:
        optimizer.state[model.first.weight]["exp_avg"].mul_(3)

    handle = None
    if step > 2:
        handle = model.layers[2].bias.register_post_accumulate_grad_hook(edit)
    simple(model, optimizer, step)
    if handle is not None:
        handle.remove()


def test_a_state_that_is_edited_during_backward(device):
    plain = train(device, None, edited_in_a_hook)
    assert_same(plain, train(device, None, edited_in_a_hook))  # the control
    assert_same(plain, train(device, "backward", edited_in_a_hook))


def test_a_chunk_that_was_prefetched_overtakes_another(device):
    """The first chunk has lost a member in this step, and has as many as the second one now."""

    def run(config: OffloadConfig | None) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
        params = make_params(device, shapes=[(128,)] * 3 + [(256,)] * 4)
        optimizer = torch.optim.AdamW(params, lr=1e-2)
        if config is not None:
            offload(optimizer, config)
        for step in range(4):
            if config is not None:
                prefetch(optimizer)
            set_grads(params, step, lambda index, step: not step or index != 1)
            optimizer.step()
        return params, optimizer

    assert_same(run(None), run(OffloadConfig(chunk_size=4_500)))


def in_threads(model: nn.ModuleList, optimizer: torch.optim.Optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(4, 16, generator=generator).to(model[0].weight)
    losses = []
    for first in range(4):
        y = x
        for layer in model[first::4]:
            y = torch.tanh(layer(y))
        losses.append(y.square().mean())
    threads = [threading.Thread(target=loss.backward) for loss in losses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    optimizer.step()
    optimizer.zero_grad()


def test_backwards_in_several_threads(device):
    """They have no parameter in common, but chunks and slots."""

    def run(overlap: str | None) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.ModuleList(nn.Linear(16, 16) for _ in range(32)).to(device)
        params = list(model.parameters())
        optimizer = torch.optim.AdamW(params, lr=1e-2)
        if overlap is not None:
            offload(optimizer, OffloadConfig(chunk_size=CHUNK, num_slots=2, overlap=overlap))
        for step in range(12):
            in_threads(model, optimizer, step)
        if overlap is not None:
            assert offload_stats(optimizer).num_early_chunks
        return params, optimizer

    plain = run(None)
    assert_same(plain, run(None))  # the control
    assert_same(plain, run("backward"))


def started(device: torch.device) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    offload(optimizer, OffloadConfig(chunk_size=CHUNK, overlap="backward"), model=model)
    for step in range(3):
        simple(model, optimizer, step)
    return model, optimizer


def test_an_optimizer_that_dies_between_backward_and_step(device):
    """Its parameters say so once, and can be used again after that."""
    model, optimizer = started(device)
    checkpoint = {name: torch.ones_like(p) for name, p in model.state_dict().items()}
    model(batch(model, 9)).square().mean().backward()
    del optimizer
    with pytest.raises(RuntimeError, match=r"Its optimizer is gone.*Load a checkpoint"):
        model(batch(model, 9))
    model.load_state_dict(checkpoint)
    model.zero_grad()
    model(batch(model, 9)).square().mean().backward()
    torch.optim.AdamW(model.parameters()).step()
    assert not any((param == 1).all() for param in model.first.parameters())


def regrouped(model: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad(set_to_none=False)
    model(batch(model, step)).square().mean().backward()
    optimizer.step()
    first, second = optimizer.param_groups
    second["params"].insert(0, first["params"].pop())


def test_gradients_are_zeroed_after_a_change_of_group(device):
    plain = train(device, None, regrouped)
    assert_same(plain, train(device, None, regrouped))  # the control
    assert_same(plain, train(device, "backward", regrouped))


@pytest.mark.parametrize("overlap", ["auto", "forward"])
def test_two_models_of_which_one_teaches_the_other(device, caplog, overlap):
    """The second loss's backward adds to the gradients of the first model, which drops them."""

    def run(overlap: str | None) -> tuple[list[torch.Tensor], list[torch.optim.Optimizer]]:
        torch.manual_seed(0)
        judge = nn.Sequential(*(nn.Linear(24, 24) for _ in range(4))).to(device)
        maker = nn.Sequential(*(nn.Linear(24, 24) for _ in range(4))).to(device)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (judge, maker)]
        if overlap is not None:
            for optimizer, model in zip(optimizers, (judge, maker), strict=True):
                config = OffloadConfig(chunk_size=CHUNK, overlap=overlap)
                offload(optimizer, config, model=model)
        x = torch.randn(4, 24, generator=torch.Generator().manual_seed(1)).to(device)
        for _ in range(6):
            optimizers[0].zero_grad()
            (judge(maker(x).detach()) - judge(x)).square().mean().backward()
            optimizers[0].step()
            optimizers[1].zero_grad()
            judge(maker(x)).square().mean().backward()
            optimizers[1].step()
        return [*judge.parameters(), *maker.parameters()], optimizers

    plain = run(None)
    control, other = run(None), run(overlap)
    for number in range(2):
        own = slice(8 * number, 8 * number + 8)
        expected = plain[0][own], plain[1][number]
        assert_same(expected, (control[0][own], control[1][number]))
        assert_same(expected, (other[0][own], other[1][number]))
    if overlap == "auto":
        assert "by 1 backwards in the first step and by 2 in the second" in caplog.text
        assert "goes on with 'backward'" in caplog.text  # the second model's optimizer


def test_no_memory_for_the_next_step_is_no_failure_of_this_one(monkeypatch, device, caplog):
    """The loops that catch it would skip a batch that had been taken."""

    def without_memory(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory")

    def loop(model: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
        model(batch(model, step)).square().mean().backward()
        with monkeypatch.context() as patch:
            if step == 0:  # it makes its state, and no slot
                patch.setattr(pipeline, "allocate_slot", without_memory)
            optimizer.step()
        optimizer.zero_grad()

    plain = train(device, None, loop)
    assert_same(plain, train(device, "backward", loop))
    assert "no memory left for a slot after step()" in caplog.text


def test_a_step_inside_of_a_backward_is_named(device):
    model, optimizer = started(device)
    problems = []

    def step(_: Any) -> None:
        try:
            optimizer.step()
        except RuntimeError as error:
            problems.append(str(error))

    model.first.bias.register_post_accumulate_grad_hook(step)
    model(batch(model, 9)).square().mean().backward()
    assert len(problems) == 1
    assert "step() was called by a hook, while a backward() ran" in problems[0]


@pytest.mark.gpu
def test_gradients_of_several_streams(monkeypatch):
    """An update waits for each stream on which one of its chunk's gradients became final."""
    gpu = torch.device("cuda", 0)
    streams = [torch.cuda.Stream(gpu) for _ in range(2)]

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            sleep(20)
            return grad * 1.0

    def run(overlap: str | None) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
        torch.manual_seed(0)
        towers = nn.ModuleList(
            nn.ModuleList(nn.Linear(16, 16) for _ in range(8)) for _ in streams
        ).to(gpu)
        # Each chunk has parameters of both.
        params = [p for pair in zip(*towers, strict=True) for m in pair for p in m.parameters()]
        optimizer = torch.optim.AdamW(params, lr=1e-2)
        if overlap is not None:
            offload(optimizer, OffloadConfig(chunk_size=CHUNK, overlap=overlap))
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1)).to(gpu)
        for _ in range(6):
            losses = []  # backward begins with that of the last one, which is slow
            for stream, tower in zip(streams, towers, strict=True):
                stream.wait_stream(torch.cuda.current_stream(gpu))
                with torch.cuda.stream(stream):
                    y = x
                    for layer in tower:
                        y = torch.tanh(layer(y if stream is streams[0] else Slow.apply(y)))
                    losses.append(y.square().mean())
            for stream in streams:
                torch.cuda.current_stream(gpu).wait_stream(stream)
            sum(losses).backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize(gpu)
        return params, optimizer

    plain = run(None)
    assert_same(plain, run(None))  # the control
    assert_same(plain, run("backward"))
