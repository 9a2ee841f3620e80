"""When the update runs under Accelerate: what is chosen, told to the core, and refused."""

from __future__ import annotations

import itertools
import logging
import os
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from accelerate_cases import (
    Run,
    assert_same,
    assert_same_tree,
    fresh_accelerate,
    make_batches,
    make_net,
    make_optimizer,
    make_schedule,
    reset,
    start,
    switch,
)

from accelerate_offload import OffloadedOptimizer
from torch_offload import OffloadConfig, offload_stats

OVERLAP = "ACCELERATE_OFFLOAD_OVERLAP"


@pytest.fixture(autouse=True)
def _clean():
    with fresh_accelerate():
        yield


def has_run_early(run: Run) -> bool:
    """Whether the last step was made beside backward, all of it; else none of it must be."""
    stats = offload_stats(run.optimizer)
    assert stats.num_chunks > 1
    assert stats.num_early_chunks in (0, stats.num_chunks)
    return stats.num_early_chunks > 0


def choices(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if 'overlap="auto" goes on' in r.getMessage()]


# --- auto ---------------------------------------------------------------------------


def test_auto_is_the_default():
    run = start(True)
    assert run.optimizer.offload_config.overlap == "auto"


def test_auto_takes_forward_where_gradients_are_clipped(caplog: pytest.LogCaptureFixture):
    plain, other = start(False).train(5), start(True).train(5)
    assert_same(plain, other)
    assert not has_run_early(other)
    assert choices(caplog) == [
        "AdamW: overlap=\"auto\" goes on with 'forward': gradients are used between backward() and "
        "step(), as clipping does."
    ]


def test_auto_takes_backward_where_nothing_uses_gradients(caplog: pytest.LogCaptureFixture):
    plain, other = start(False).train(5, clip=False), start(True).train(5, clip=False)
    assert_same(plain, other)
    assert has_run_early(other)
    assert len(choices(caplog)) == 1
    assert "goes on with 'backward': nothing uses gradients" in choices(caplog)[0]


def test_auto_sees_clip_grad_value(caplog: pytest.LogCaptureFixture):
    runs = []
    for on in (False, True):
        run = start(on)
        for batch in make_batches(4):
            run.accelerator.backward(run.net(batch).pow(2).mean())
            run.accelerator.clip_grad_value_(run.net.parameters(), 0.01)
            run.optimizer.step()
            run.optimizer.zero_grad()
        runs.append(run)
    assert_same(*runs)
    assert "goes on with 'forward'" in choices(caplog)[0]


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("overlap", ["step", "forward", "backward"])
def test_a_mode_that_is_set(overlap: str, clip: bool):
    os.environ[OVERLAP] = overlap
    plain = start(False).train(4, clip=clip)
    other = start(True)
    if overlap == "backward" and clip:
        other.train(1, clip=False)
        with pytest.raises(RuntimeError, match=r"^clip_grad_norm_\(\) came after.*=forward"):
            other.train(3)
        return
    assert_same(plain, other.train(4, clip=clip))
    assert has_run_early(other) == (overlap == "backward")


@pytest.mark.parametrize("use", ["clip_grad_norm_", "clip_grad_value_"])
def test_clipping_that_begins_later_names_the_setting(use: str):
    run = start(True).train(3, clip=False)
    run.accelerator.backward(run.net(make_batches(1)[0]).pow(2).mean())
    with pytest.raises(RuntimeError) as caught:
        getattr(run.accelerator, use)(run.net.parameters(), 0.05)
    for remedy in (
        'overlap="auto" chooses that when the first two steps use none',
        "--offload_overlap forward",
        "ACCELERATE_OFFLOAD_OVERLAP=forward",
        "overlap: forward in the section optimizer_offload_config",
        "Load a checkpoint",
    ):
        assert remedy in str(caught.value)
    with pytest.raises(RuntimeError, match="Load a checkpoint"):  # not a step without clipping
        run.optimizer.step()


def test_a_run_that_was_refused_goes_on_after_load_state(tmp_path):
    straight = start(False).train(4, clip=False)
    run = start(True).train(3, clip=False)
    run.accelerator.save_state(str(tmp_path))
    run.accelerator.backward(run.net(make_batches(1)[0]).pow(2).mean())
    with pytest.raises(RuntimeError, match="--offload_overlap forward"):
        run.accelerator.clip_grad_norm_(run.net.parameters(), 0.05)
    run.optimizer.zero_grad()
    run.accelerator.load_state(str(tmp_path))
    assert_same(straight, run.train(1, clip=False))


def test_backward_with_a_scaler_is_refused():
    os.environ[OVERLAP] = "backward"
    switch(True)
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu")
    bare = make_optimizer(make_net())
    with pytest.raises(ValueError, match=r'overlap="backward".*fp16.*Use overlap="forward"'):
        accelerator.prepare(bare)
    assert type(bare) is torch.optim.AdamW


# --- gradient accumulation -------------------------------------------------------------


@pytest.mark.parametrize("overlap", ["auto", "backward"])
@pytest.mark.parametrize("stray", [False, True], ids=["accelerator.backward", "loss.backward"])
def test_only_the_micro_batch_with_sync_gradients_is_the_last(overlap: str, stray: bool):
    """Steps of 3, 1, 2, 4, 2 micro-batches: counting them would not do."""
    os.environ[OVERLAP] = overlap
    sizes = [3, 1, 2, 4, 2]
    runs = []
    for on in (False, True):
        run = start(on)
        batches = iter(make_batches(sum(sizes)))
        early = []
        for size in sizes:
            run.accelerator.gradient_accumulation_steps = size
            run.accelerator.step = 0
            for batch in itertools.islice(batches, size):
                with run.accelerator.accumulate(run.net):
                    loss = run.net(batch).pow(2).mean()
                    if stray:
                        (loss / size).backward()
                    else:
                        run.accelerator.backward(loss)
                    run.optimizer.step()
                    run.schedule.step()
                    run.optimizer.zero_grad()
            if on:
                early.append(has_run_early(run))
        runs.append(run)
    assert_same(*runs)
    watched = 2 if overlap == "auto" else 1
    assert early == [False] * watched + [True] * (len(sizes) - watched)


def test_flag_that_a_trainer_sets_by_itself():
    """transformers' Trainer never enters ``accumulate``: it sets ``sync_gradients``."""
    sizes = [2, 1, 3]
    runs = []
    for on in (False, True):
        run = start(on)
        batches = iter(make_batches(sum(sizes)))
        for size in sizes:
            for index in range(size):
                run.accelerator.gradient_state._set_sync_gradients(index == size - 1)
                run.accelerator.backward(run.net(next(batches)).pow(2).mean() / size)
            run.optimizer.step()
            run.schedule.step()
            run.net.zero_grad()
        runs.append(run)
    assert_same(*runs)
    assert has_run_early(runs[1])


def test_the_last_batch_of_a_loader_ends_an_accumulation():
    data = torch.utils.data.DataLoader(torch.stack(make_batches(5)).flatten(0, 1), batch_size=8)
    runs = []
    for on in (False, True):
        plugin = GradientAccumulationPlugin(num_steps=2)
        run = start(on, accelerator={"cpu": True, "gradient_accumulation_plugin": plugin})
        loader = run.accelerator.prepare(data)
        for _ in range(3):
            for batch in loader:
                with run.accelerator.accumulate(run.net):
                    run.accelerator.backward(run.net(batch).pow(2).mean())
                    run.optimizer.step()
                    run.schedule.step()
                    run.optimizer.zero_grad()
        runs.append(run)
    assert_same(*runs)
    assert has_run_early(runs[1])
    steps = {int(state["step"]) for state in runs[1].optimizer.state.values()}
    assert steps == {9}  # three in each of three epochs


def test_accumulation_by_hand_needs_nothing():
    """A loop that knows no ``accumulate``: ``sync_gradients`` is always true."""
    runs = []
    for on in (False, True):
        run = start(on)
        for index, batch in enumerate(make_batches(9)):
            run.accelerator.backward(run.net(batch).pow(2).mean() / 3)
            if index % 3 == 2:
                run.optimizer.step()
                run.schedule.step()
                run.optimizer.zero_grad()
        runs.append(run)
    assert_same(*runs)
    assert has_run_early(runs[1])


# --- the model reaches the core ------------------------------------------------------------


def prepare(order: str, on: bool) -> Run:
    reset()
    switch(on)
    accelerator = Accelerator(cpu=True)
    net: Any = make_net()
    optimizer: Any = make_optimizer(net)
    schedule: Any = make_schedule(optimizer)
    if order == "together":
        schedule, optimizer, net = accelerator.prepare(schedule, optimizer, net)
    elif order == "model first":
        net = accelerator.prepare(net)
        optimizer = accelerator.prepare(optimizer)
        schedule = accelerator.prepare(schedule)
    elif order == "optimizer first":
        optimizer = accelerator.prepare(optimizer)
        schedule = accelerator.prepare(schedule)
        net = accelerator.prepare(net)
    elif order == "by the single methods":
        optimizer = accelerator.prepare_optimizer(optimizer)
        net = accelerator.prepare_model(net)
        schedule = accelerator.prepare_scheduler(schedule)
    elif order == "twice":
        net, optimizer, schedule = accelerator.prepare(net, optimizer, schedule)
        net, optimizer, schedule = accelerator.prepare(net, optimizer, schedule)
    elif order == "by two accelerators":
        net, optimizer = accelerator.prepare(net, optimizer)
        accelerator = Accelerator(cpu=True)
        net, optimizer, schedule = accelerator.prepare(net, optimizer, schedule)
    return Run(accelerator, net, optimizer, schedule)


@pytest.mark.parametrize(
    "order",
    [
        "together",
        "model first",
        "optimizer first",
        "by the single methods",
        "twice",
        "by two accelerators",
    ],
)
def test_prepare_in_any_order(order: str, caplog: pytest.LogCaptureFixture):
    plain, other = prepare(order, False).train(4), prepare(order, True).train(4)
    assert_same(plain, other)
    assert len(choices(caplog)) == 1
    assert "goes on with 'forward'" in choices(caplog)[0]  # which it cannot without the model


def test_a_model_that_was_not_prepared_is_not_known(caplog: pytest.LogCaptureFixture):
    runs = []
    for on in (False, True):
        reset()
        switch(on)
        accelerator = Accelerator(cpu=True)
        net = make_net()
        bare = make_optimizer(net)
        optimizer, schedule = accelerator.prepare(bare, make_schedule(bare))
        runs.append(Run(accelerator, net, optimizer, schedule).train(4))
    assert_same(*runs)
    assert "goes on with 'step'" in choices(caplog)[0]
    assert "attach_model" in choices(caplog)[0]


@pytest.mark.parametrize("clip", [True, False])
def test_one_optimizer_for_two_models(clip: bool, caplog: pytest.LogCaptureFixture):
    ends = []
    for on in (False, True):
        reset()
        switch(on)
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        front, back = torch.nn.Linear(16, 300), torch.nn.Linear(300, 1)
        bare = torch.optim.AdamW([*front.parameters(), *back.parameters()], lr=1e-2)
        front, optimizer, back = accelerator.prepare(front, bare, back)
        for batch in make_batches(4):
            accelerator.backward(back(front(batch).tanh()).pow(2).mean())
            if clip:
                accelerator.clip_grad_norm_([*front.parameters(), *back.parameters()], 0.05)
            optimizer.step()
            optimizer.zero_grad()
        state = optimizer.state_dict()
        ends.append(([p.detach() for p in [*front.parameters(), *back.parameters()]], state))
    assert_same_tree(*ends)
    assert f"goes on with '{'forward' if clip else 'backward'}'" in choices(caplog)[0]


def test_each_optimizer_has_its_own_model(caplog: pytest.LogCaptureFixture):
    """As in adversarial training: the losses of one pass through the other's model."""
    ends = []
    for on in (False, True):
        reset()
        switch(on)
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        maker: Any = torch.nn.Sequential(torch.nn.Linear(16, 200), torch.nn.Linear(200, 16))
        judge: Any = torch.nn.Sequential(torch.nn.Linear(16, 200), torch.nn.Linear(200, 1))
        optimizers: Any = [torch.optim.AdamW(net.parameters(), lr=1e-2) for net in (maker, judge)]
        maker, judge, *optimizers = accelerator.prepare(maker, judge, *optimizers)
        for batch in make_batches(5):
            judge.requires_grad_(False)
            accelerator.backward(judge(maker(batch)).mean())
            optimizers[0].step()
            optimizers[0].zero_grad()
            judge.requires_grad_(True)
            accelerator.backward(judge(batch).mean() - judge(maker(batch).detach()).mean())
            optimizers[1].step()
            optimizers[1].zero_grad()
        params = [p.detach() for net in (maker, judge) for p in net.parameters()]
        ends.append((params, [o.state_dict() for o in optimizers]))
    assert_same_tree(*ends)
    assert ["'backward'" in text for text in choices(caplog)] == [True, True]


def test_a_wrapper_does_not_keep_its_model_in_a_pickle():
    accelerator = Accelerator(cpu=True)
    nets = [torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)]
    params = [p for net in nets for p in net.parameters()]
    mine = OffloadedOptimizer(torch.optim.AdamW(params), config=OffloadConfig(overlap="forward"))
    accelerator.prepare(*nets, mine)
    assert mine._models is not None
    assert mine.__getstate__()["_models"] is None


def test_nothing_is_told_where_nothing_is_offloaded(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG, logger="torch_offload")
    start(False).train(3)
    assert not [record for record in caplog.records if record.name == "torch_offload"]
