"""Offload through Accelerator.prepare: the wrapper, and everything that goes through it."""

from __future__ import annotations

import copy
import importlib
import os
import pickle
from typing import Any

import accelerate.optimizer
import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, PartialState
from accelerate_cases import (
    FLAVOURS,
    SWITCH,
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

from accelerate_offload import OffloadedOptimizer, OffloadOptimizerPlugin, hooks
from torch_offload import OffloadConfig, is_offloaded, offload, offload_stats, unoffload


@pytest.fixture(autouse=True)
def _clean():
    with fresh_accelerate():
        yield


def assert_plain(optimizer: Any) -> None:
    assert type(optimizer) is AcceleratedOptimizer
    assert type(optimizer.optimizer) is torch.optim.AdamW


# --- prepare ------------------------------------------------------------------


def test_prepare_wraps_and_converts_in_place():
    os.environ[SWITCH] = "true"
    net = make_net()
    bare = make_optimizer(net)
    optimizer = Accelerator(cpu=True).prepare(bare)
    assert type(optimizer) is OffloadedOptimizer
    assert optimizer.optimizer is bare
    assert isinstance(bare, torch.optim.AdamW)
    assert is_offloaded(bare)


@pytest.mark.parametrize("text", ["false", "0", "no", "", None])
def test_switched_off_leaves_everything_plain(text: str | None):
    if text is not None:
        os.environ[SWITCH] = text
        os.environ["ACCELERATE_OFFLOAD_NUM_SLOTS"] = "1"  # wrong, and nobody's business
        if text == "":
            del os.environ["ACCELERATE_OFFLOAD_NUM_SLOTS"]
    assert_plain(Accelerator(cpu=True).prepare(make_optimizer(make_net())))


@pytest.mark.parametrize("scheduler_first", [True, False])
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_same_bits_with_accumulation_clipping_and_schedule(flavour: str, scheduler_first: bool):
    options = {"scheduler_first": scheduler_first, **FLAVOURS[flavour]}
    accelerator = {"cpu": True, "gradient_accumulation_steps": 3}
    plain = start(False, accelerator=accelerator, **options).train(6)
    other = start(True, accelerator=accelerator, **options).train(6)
    assert_plain(plain.optimizer)
    assert type(other.optimizer) is OffloadedOptimizer
    assert offload_stats(other.optimizer).num_chunks > 1
    assert other.schedule.get_last_lr() == [1e-2 / 7] * 2  # one schedule step per optimizer step
    assert_same(plain, other)


def test_bf16_mixed_precision():
    accelerator = {"cpu": True, "mixed_precision": "bf16"}
    plain = start(False, accelerator=accelerator).train(4)
    assert_same(plain, start(True, accelerator=accelerator).train(4))


def test_closure_is_evaluated_once():
    run = start(True)
    calls = []

    def closure() -> torch.Tensor:
        calls.append(1)
        loss = run.net(make_batches(1)[0]).pow(2).mean()
        run.accelerator.backward(loss)
        return loss

    run.optimizer.step(closure)
    assert calls == [1]
    assert len(run.optimizer.state) == len(list(run.net.parameters()))


def test_micro_batches_do_not_step():
    run = start(True, accelerator={"cpu": True, "gradient_accumulation_steps": 2})
    with run.accelerator.accumulate(run.net):
        run.accelerator.backward(run.net(make_batches(1)[0]).pow(2).mean())
        run.optimizer.step()
        run.optimizer.zero_grad()
    assert not run.optimizer.state
    assert all(p.grad is not None for p in run.net.parameters())


def test_prepared_wrapper_passes_through_every_prepare():
    run = start(True)
    assert run.accelerator.prepare(run.optimizer) is run.optimizer
    assert run.accelerator.prepare_optimizer(run.optimizer) is run.optimizer
    assert run.accelerator._optimizers == [run.optimizer]
    assert Accelerator(cpu=True).prepare(run.optimizer) is run.optimizer


def test_preparing_the_bare_optimizer_again():
    plain, other = start(False), start(True)
    for run in (plain, other):
        switch(run is other)
        run.optimizer = run.accelerator.prepare(run.optimizer.optimizer)
    assert type(other.optimizer) is OffloadedOptimizer
    assert type(other.optimizer.optimizer).__name__ == "OffloadedAdamW"  # once, not twice
    assert_same(plain.train(3), other.train(3))


def test_each_schedule_steps_with_its_own_optimizer_only():
    os.environ[SWITCH] = "true"
    accelerator = Accelerator(cpu=True)
    nets = [make_net(), make_net()]
    bare = [make_optimizer(net) for net in nets]
    optimizers = accelerator.prepare(*bare)
    schedules = accelerator.prepare(*[make_schedule(optimizer) for optimizer in bare])
    for optimizer, schedule in zip(optimizers, schedules, strict=True):
        assert schedule.optimizers == [optimizer]
    # One that is skipped holds back its own schedule and not the other's.
    optimizers[0]._is_overflow = True
    for net, optimizer, schedule in zip(nets, optimizers, schedules, strict=True):
        accelerator.backward(net(make_batches(1)[0]).mean())
        optimizer.step()
        optimizers[0]._is_overflow = True
        schedule.step()
    assert [schedule.get_last_lr()[0] for schedule in schedules] == [1e-2, 1e-2 / 2]


def test_hooks_of_the_user_fire_once_a_step():
    run = start(True)
    calls: list[str] = []
    bare = run.optimizer.optimizer
    bare.register_step_pre_hook(lambda *_: calls.append("pre"))
    bare.register_step_post_hook(lambda *_: calls.append("post"))
    run.train(2)
    assert calls == ["pre", "post"] * 2


def test_released_and_prepared_again():
    run = start(True).train(2)
    run.accelerator.free_memory()
    assert run.accelerator._optimizers == []
    run.accelerator.prepare(run.optimizer)
    assert_same(start(False).train(4), run.train(2))


# --- state that is there before prepare ---------------------------------------


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_loaded_before_prepare(flavour: str):
    saved = start(False, **FLAVOURS[flavour]).train(3)
    runs = []
    for on in (False, True):
        reset()
        switch(on)
        accelerator = Accelerator(cpu=True)
        net = make_net()
        net.load_state_dict(saved.net.state_dict())
        optimizer = make_optimizer(net, **FLAVOURS[flavour])
        # A copy: torch may keep the very tensors that it is given.
        optimizer.load_state_dict(copy.deepcopy(saved.optimizer.state_dict()))
        net, optimizer, schedule = accelerator.prepare(net, optimizer, make_schedule(optimizer))
        runs.append(Run(accelerator, net, optimizer, schedule, num_done=3).train(3))
    assert_same(*runs)


def test_device_placement_moves_hyper_parameters_and_no_state(monkeypatch: pytest.MonkeyPatch):
    """A stand-in device shows what is sent to the device: the meta device keeps no data."""
    net = make_net()
    bare = make_optimizer(net, foreach=False)
    net(make_batches(1)[0]).mean().backward()
    bare.step()
    for group in bare.param_groups:
        group["lr"] = torch.tensor(1e-2)
    moments = copy.deepcopy(bare.state_dict()["state"])
    loads: list[int] = []
    bare.register_load_state_dict_post_hook(lambda _: loads.append(1))
    accelerator = Accelerator(cpu=True)
    for state in (AcceleratorState._shared_state, PartialState._shared_state):
        monkeypatch.setitem(state, "device", torch.device("meta"))
    switch(True)
    optimizer = accelerator.prepare(bare)
    assert_same_tree(moments, optimizer.state_dict()["state"])
    assert [group["lr"].device.type for group in optimizer.param_groups] == ["meta", "meta"]
    assert loads == [1]  # as often as with the plain wrapper
    assert optimizer.device_placement is True


def test_without_device_placement_nothing_is_loaded():
    switch(True)
    accelerator = Accelerator(cpu=True, device_placement=False)
    bare = make_optimizer(make_net())
    bare.register_load_state_dict_post_hook(lambda _: pytest.fail("loaded"))
    optimizer = accelerator.prepare(bare)
    assert type(optimizer) is OffloadedOptimizer
    assert optimizer.device_placement is False


# --- fp16: the gradient scaler ------------------------------------------------


def train_scaled(
    on: bool, *, convert_late: bool = False, clip: bool = True, **options: Any
) -> tuple[list[Any], Run]:
    """Train with a scaler on the CPU. Step 2 overflows."""
    reset()
    switch(on and not convert_late)
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    net = make_net()
    net, optimizer, schedule = accelerator.prepare(
        net, *(lambda o: (o, make_schedule(o)))(make_optimizer(net, **options))
    )
    if on and convert_late:
        offload(optimizer, OffloadConfig(chunk_size=4096))
    seen = []
    for index, batch in enumerate(make_batches(6)):
        loss = net(batch).pow(2).mean() * (float("inf") if index == 2 else 1.0)
        accelerator.backward(loss)
        if clip:
            accelerator.clip_grad_norm_(net.parameters(), 0.05)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        seen.append((optimizer.step_was_skipped, accelerator.scaler.get_scale()))
    return seen, Run(accelerator, net, optimizer, schedule)


@pytest.mark.parametrize("clip", [True, False])  # without, fused unscales by itself
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_scaler_skips_the_same_steps(flavour: str, clip: bool):
    seen, plain = train_scaled(False, clip=clip, **FLAVOURS[flavour])
    seen_too, other = train_scaled(True, clip=clip, **FLAVOURS[flavour])
    assert type(other.optimizer) is OffloadedOptimizer
    assert offload_stats(other.optimizer).num_chunks > 1
    assert seen == seen_too
    assert seen[2][1] < seen[1][1]  # the overflow was seen
    assert_same(plain, other)


def test_offload_of_a_plain_wrapper_with_scaler():
    _, plain = train_scaled(False)
    _, other = train_scaled(True, convert_late=True)
    assert offload_stats(other.optimizer).num_chunks > 1
    assert_same(plain, other)


def test_scaler_and_schedule_after_the_first_step():
    """After a scaled step the wrapper leaves ``step`` on the optimizer as an attribute."""
    _, run = train_scaled(True)
    schedule = make_schedule(run.optimizer.optimizer)
    run.accelerator.backward(run.net(make_batches(1)[0]).mean())
    run.optimizer.step()
    schedule.step()
    steps = {int(state["step"]) for state in run.optimizer.state_dict()["state"].values()}
    assert steps == {6}  # seven steps, one of which overflowed


# --- a wrapper that the user builds -------------------------------------------


def test_user_built_wrapper_passes_through_prepare():
    plain = start(False).train(4)
    reset()
    del os.environ[SWITCH]
    accelerator = Accelerator(cpu=True)
    net = make_net()
    mine = OffloadedOptimizer(make_optimizer(net), config=OffloadConfig(chunk_size=1000))
    net, optimizer, schedule = accelerator.prepare(net, mine, make_schedule(mine))
    assert optimizer is mine
    assert accelerator._optimizers == [mine]
    assert schedule.optimizers == [mine] or schedule.optimizers == accelerator._optimizers
    assert_same(plain, Run(accelerator, net, optimizer, schedule).train(4))
    assert offload_stats(mine).num_chunks > 3


def test_schedule_on_a_user_built_wrapper_belongs_to_it():
    accelerator = Accelerator(cpu=True)
    nets = [make_net(), make_net()]
    mine = [OffloadedOptimizer(make_optimizer(net)) for net in nets]
    accelerator.prepare(*mine)
    schedules = accelerator.prepare(*[make_schedule(optimizer.optimizer) for optimizer in mine])
    assert [schedule.optimizers for schedule in schedules] == [[mine[0]], [mine[1]]]


def test_never_two_wrappers():
    Accelerator(cpu=True)
    mine = OffloadedOptimizer(make_optimizer(make_net()))
    for build in (OffloadedOptimizer, AcceleratedOptimizer):
        with pytest.raises(ValueError, match=r"wrapped, in OffloadedOptimizer.*wrapper\.opt"):
            build(mine)
    plain = AcceleratedOptimizer(make_optimizer(make_net()))
    with pytest.raises(ValueError, match="already wrapped, in AcceleratedOptimizer"):
        OffloadedOptimizer(plain)
    assert_plain(plain)


def test_wrapper_needs_an_accelerator_and_leaves_the_optimizer_alone():
    bare = make_optimizer(make_net())
    with pytest.raises(ValueError, match=r"build `accelerator = Accelerator\(\)` first"):
        OffloadedOptimizer(bare)
    assert not is_offloaded(bare)
    Accelerator(cpu=True, mixed_precision="bf16")  # the failure left no half-made Accelerator


def test_fp16_wrapper_without_scaler_is_refused(monkeypatch: pytest.MonkeyPatch):
    Accelerator(cpu=True)
    monkeypatch.setitem(AcceleratorState._shared_state, "_mixed_precision", "fp16")
    for state in (AcceleratorState._shared_state, PartialState._shared_state):
        monkeypatch.setitem(state, "device", torch.device("meta"))
    bare = make_optimizer(make_net())
    with pytest.raises(ValueError, match=r"scaler=accelerator\.scaler"):
        OffloadedOptimizer(bare)
    assert not is_offloaded(bare)


def test_optimizer_offloaded_in_code_keeps_its_config():
    """``offload()`` before ``prepare`` needs no switch, and wins over the variables."""
    for on in (False, True):
        reset()
        switch(on)
        bare = offload(make_optimizer(make_net()), OffloadConfig(chunk_size=1000))
        optimizer = Accelerator(cpu=True).prepare(bare)
        assert type(optimizer) is OffloadedOptimizer
        with pytest.raises(ValueError, match=r"already offloaded with.*chunk_size='1000'"):
            OffloadedOptimizer(bare, config=OffloadConfig(chunk_size=2000))


def test_undone_in_the_middle():
    run = start(True).train(2)
    unoffload(run.optimizer)
    assert type(run.optimizer.optimizer) is torch.optim.AdamW
    assert_same(start(False).train(4), run.train(2))


# --- refusals -----------------------------------------------------------------


def test_unsupported_optimizer_is_refused_by_prepare():
    switch(True)
    with pytest.raises(NotImplementedError, match=r"LBFGS.step needs a closure"):
        Accelerator(cpu=True).prepare(torch.optim.LBFGS(make_net().parameters(), lr=0.1))


@pytest.mark.parametrize("field", ["NUM_SLOTS", "CHUNK_SIZE", "PIN_MEMORY", "BANANAS"])
def test_wrong_variables_are_named(field: str):
    value = {"NUM_SLOTS": "1", "CHUNK_SIZE": "12 bananas", "PIN_MEMORY": "maybe", "BANANAS": "1"}
    remedy = {
        "NUM_SLOTS": "Use 2 or more",
        "CHUNK_SIZE": '"512MiB"',
        "PIN_MEMORY": "Use true or false",
        "BANANAS": "Unset it, or use one of: .*ACCELERATE_OFFLOAD_NUM_SLOTS",
    }
    os.environ[SWITCH] = "true"
    os.environ[f"ACCELERATE_OFFLOAD_{field}"] = value[field]
    bare = make_optimizer(make_net())
    with pytest.raises(
        ValueError, match=f"^ACCELERATE_OFFLOAD_{field}={value[field]}.*{remedy[field]}"
    ):
        Accelerator(cpu=True).prepare(bare)
    assert type(bare) is torch.optim.AdamW


def test_wrong_switch_is_named():
    os.environ[SWITCH] = "maybe"
    with pytest.raises(ValueError, match=f"{SWITCH}='maybe' is not a truth value. Use true or"):
        Accelerator(cpu=True).prepare(make_optimizer(make_net()))


def test_fields_without_the_switch_are_pointed_out():
    os.environ["ACCELERATE_OFFLOAD_NUM_SLOTS"] = "4"
    with pytest.warns(UserWarning, match=f"ACCELERATE_OFFLOAD_NUM_SLOTS is set.*{SWITCH}=true"):
        assert_plain(Accelerator(cpu=True).prepare(make_optimizer(make_net())))


# --- one line -----------------------------------------------------------------


def test_one_line_for_any_number_of_optimizers(capfd: pytest.CaptureFixture[str]):
    switch(True)
    Accelerator(cpu=True).prepare(make_optimizer(make_net()), make_optimizer(make_net()))
    lines = capfd.readouterr().err.splitlines()
    assert len([line for line in lines if "offload is active" in line]) == 1
    assert any("AdamW" in line and "chunk_size='4KiB'" in line for line in lines)


# --- checkpoints --------------------------------------------------------------


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("first", [False, True], ids=["from-plain", "from-offloaded"])
def test_save_state_continues_on_the_other_side(tmp_path, first: bool, flavour: str):
    options = FLAVOURS[flavour]
    straight = start(False, **options).train(6)
    saved = start(first, **options).train(3)
    saved.accelerator.save_state(str(tmp_path))
    resumed = start(not first, **options)
    resumed.accelerator.load_state(str(tmp_path))
    resumed.num_done = 3
    assert_same(straight, resumed.train(3))


def test_save_state_writes_a_plain_checkpoint(tmp_path):
    for on in (False, True):
        start(on).train(3).accelerator.save_state(str(tmp_path / str(on)))
    plain, other = ((tmp_path / str(on) / "optimizer.bin") for on in (False, True))
    assert other.stat().st_size == pytest.approx(plain.stat().st_size, rel=0.01)
    assert_same_tree(torch.load(plain, weights_only=True), torch.load(other, weights_only=True))


def test_loading_replaces_the_values_and_not_the_memory(tmp_path):
    run = start(True).train(2)
    run.accelerator.save_state(str(tmp_path))
    pointers = [s["exp_avg"].data_ptr() for s in run.optimizer.state.values()]
    run.train(2)
    run.accelerator.load_state(str(tmp_path))
    assert [s["exp_avg"].data_ptr() for s in run.optimizer.state.values()] == pointers
    run.num_done = 2
    assert_same(start(False).train(4), run.train(2))


# --- copies -------------------------------------------------------------------


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
@pytest.mark.parametrize("on", [True, False], ids=["offloaded", "plain"])
def test_a_copy_is_a_wrapper_of_the_same_kind(on: bool, copier: Any):
    run = start(on).train(2)
    twin = copier(run.optimizer)
    assert type(twin) is type(run.optimizer)
    assert type(twin.optimizer) is type(run.optimizer.optimizer)
    assert is_offloaded(twin) is on
    assert twin.optimizer is not run.optimizer.optimizer
    assert_same_tree(run.optimizer.state_dict(), twin.state_dict())
    before = copy.deepcopy(twin.state_dict())
    run.train(1)
    assert_same_tree(before, twin.state_dict())  # it shares no state


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_copied_run_goes_on(copier: Any):
    runs = []
    for on in (False, True):
        run = start(on).train(2)
        run.net, run.optimizer = copier((run.net, run.optimizer))
        run.schedule = run.accelerator.prepare(make_schedule(run.optimizer.optimizer))
        runs.append(run.train(2))
    assert offload_stats(run.optimizer).num_chunks > 1
    assert_same(*runs)


def test_a_pickle_of_the_plain_wrapper_stays_plain_with_the_switch_on():
    data = pickle.dumps(start(False).train(1).optimizer)
    switch(True)
    assert_plain(pickle.loads(data))


def test_a_copy_of_an_undone_wrapper_is_not_offloaded_again():
    run = start(True).train(1)
    unoffload(run.optimizer)
    assert type(copy.deepcopy(run.optimizer).optimizer) is torch.optim.AdamW


# --- the plugin ---------------------------------------------------------------


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_plugin_may_come_before_or_after_the_accelerator(before: bool):
    if before:
        OffloadOptimizerPlugin(chunk_size="1KiB")
    accelerator = Accelerator(cpu=True)
    if not before:
        OffloadOptimizerPlugin(chunk_size="1KiB")
    net = make_net()
    optimizer = accelerator.prepare(make_optimizer(net))
    net(make_batches(1)[0]).mean().backward()
    optimizer.step()
    assert type(optimizer) is OffloadedOptimizer
    assert optimizer.offload_config == OffloadConfig(chunk_size=1024, overlap="auto")


def test_plugin_has_the_fields_and_sets_the_environment():
    os.environ["ACCELERATE_OFFLOAD_NUM_SLOTS"] = "4"
    plugin = OffloadOptimizerPlugin(chunk_size="1MiB", pin_memory=False)
    assert (plugin.chunk_size, plugin.num_slots, plugin.pin_memory) == (2**20, 4, False)
    ours = {k: v for k, v in os.environ.items() if k.startswith("ACCELERATE_OFFLOAD_")}
    assert ours == {
        SWITCH: "true",
        "ACCELERATE_OFFLOAD_CHUNK_SIZE": str(2**20),
        "ACCELERATE_OFFLOAD_NUM_SLOTS": "4",
        "ACCELERATE_OFFLOAD_OVERLAP": "auto",
        "ACCELERATE_OFFLOAD_GPU_BUDGET": "0",
        "ACCELERATE_OFFLOAD_PIN_MEMORY": "false",
    }


def test_wrong_plugin_leaves_the_environment_alone():
    with pytest.raises(ValueError, match="num_slots=1"):
        OffloadOptimizerPlugin(num_slots=1)
    with pytest.raises(TypeError, match="bananas"):
        OffloadOptimizerPlugin(bananas=1)
    assert not [name for name in os.environ if name.startswith("ACCELERATE_OFFLOAD_")]


# --- the hook -----------------------------------------------------------------


def test_hook_may_run_again_and_after_a_reload():
    new = AcceleratedOptimizer.__new__
    hooks.on_optimizer(accelerate.optimizer)
    assert AcceleratedOptimizer.__new__ is new


def test_subclasses_of_others_are_left_alone():
    class OtherWrapper(AcceleratedOptimizer):
        def __init__(self, optimizer: Any, extra: int) -> None:
            super().__init__(optimizer, device_placement=False)
            self.extra = extra

    switch(True)
    Accelerator(cpu=True)
    bare = make_optimizer(make_net())
    wrapper = OtherWrapper(bare, extra=3)
    assert type(wrapper) is OtherWrapper
    assert wrapper.extra == 3
    assert type(bare) is torch.optim.AdamW


def test_hook_keeps_a_constructor_that_is_there_already():
    made: list[Any] = []

    class Base:
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            made.append((args, kwargs))
            return object.__new__(cls)

        def __init__(self, optimizer: Any, flag: bool = False) -> None:
            self.optimizer = optimizer

    module: Any = type(os)("accelerate.optimizer")
    module.AcceleratedOptimizer = Base
    hooks.on_optimizer(module)
    bare = make_optimizer(make_net())
    assert Base(bare, flag=True).optimizer is bare
    assert made == [((bare,), {"flag": True})]


def test_lazy_names():
    package = importlib.import_module("accelerate_offload")
    assert {"OffloadedOptimizer", "OffloadOptimizerPlugin"} <= set(dir(package))
    with pytest.raises(AttributeError, match="has no attribute 'bananas'"):
        _ = package.bananas


def test_a_plugin_and_an_equal_config_are_the_same():
    optimizer = make_optimizer(make_net())
    offload(optimizer, OffloadOptimizerPlugin(chunk_size=1000))
    assert offload(optimizer, OffloadConfig(chunk_size=1000, overlap="auto")) is optimizer
