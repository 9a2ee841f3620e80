"""What Accelerate does around an optimizer, row by row: whatever moves, replaces or counts state.

A test of a row that other files have as well names it: prepare and its order (test_accelerate.py,
test_accelerate_overlap.py), several processes and FSDP2 (test_accelerate_ranks.py), memory of the
GPU (test_accelerate_gpu.py).
"""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import accelerate.checkpointing
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size
from accelerate_cases import (
    Run,
    assert_same,
    fresh_accelerate,
    make_batches,
    make_net,
    make_optimizer,
    make_schedule,
    reset,
    start,
    switch,
)

from accelerate_offload import OffloadedOptimizer, accelerator
from torch_offload import OffloadConfig, is_offloaded, offload, offload_stats


@pytest.fixture(autouse=True)
def _clean():
    with fresh_accelerate():
        yield


def is_mapped(file: Path) -> bool:
    """Whether a tensor still lies in this file: who writes it anew would end the process."""
    gc.collect()
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("this system does not list what is mapped")
    return str(file) in maps.read_text()


# --- device_placement ---------------------------------------------------------------


@pytest.mark.parametrize("placement", [True, False])
def test_row_device_placement_of_each_object(placement: bool):
    runs = []
    for on in (False, True):
        reset()
        switch(on)
        acc = Accelerator(cpu=True)
        net: Any = make_net()
        bare = make_optimizer(net)
        net, optimizer, schedule = acc.prepare(
            net, bare, make_schedule(bare), device_placement=[placement, placement, None]
        )
        assert optimizer.device_placement is placement
        runs.append(Run(acc, net, optimizer, schedule).train(3))
    assert_same(*runs)


@pytest.mark.parametrize("flavour", [{"foreach": True}, {"fused": True}], ids=str)
def test_row_state_groups_and_dicts_are_replaced_by_prepare(flavour: dict[str, bool]):
    """Stock ``prepare`` gives the optimizer new groups and new state: nobody may hold the old."""
    bare = make_optimizer(make_net(), **flavour)
    switch(True)
    Accelerator(cpu=True)
    groups = bare.param_groups
    optimizer = OffloadedOptimizer(bare, config=OffloadConfig(chunk_size=1000))
    assert bare.param_groups is not groups
    assert optimizer.param_groups is bare.param_groups


# --- gradients ------------------------------------------------------------------------


def test_row_unscale_gradients_before_clipping(monkeypatch: pytest.MonkeyPatch):
    """The scaler knows the optimizer by its identity: unscaled once, stepped once."""
    runs = []
    for on in (False, True):
        reset()
        switch(on)
        acc = Accelerator(cpu=True)
        acc.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        monkeypatch.setattr(acc, "native_amp", True)
        monkeypatch.setitem(acc.state._shared_state, "_mixed_precision", "fp16")
        net: Any = make_net()
        acc.native_amp = False  # or the net would run under autocast
        bare = make_optimizer(net)
        net, optimizer, schedule = acc.prepare(net, bare, make_schedule(bare))
        acc.native_amp = True
        for batch in make_batches(4):
            acc.backward(net(batch).pow(2).mean())
            acc.unscale_gradients(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        assert not optimizer.step_was_skipped
        runs.append(Run(acc, net, optimizer, schedule))
    assert_same(*runs)
    assert offload_stats(runs[1].optimizer).num_chunks > 1


def test_row_no_sync_and_trigger_sync_are_left_alone():
    runs = []
    for on in (False, True):
        run = start(on)
        for first, second in zip(make_batches(6)[::2], make_batches(6)[1::2], strict=True):
            with run.accelerator.no_sync(run.net):
                run.accelerator.backward(run.net(first).pow(2).mean())
            loss = run.net(second).pow(2).mean()
            with run.accelerator.trigger_sync_in_backward(run.net):
                run.accelerator.backward(loss)
            run.optimizer.step()
            run.schedule.step()
            run.optimizer.zero_grad()
        runs.append(run)
    assert_same(*runs)


# --- save_state and load_state ------------------------------------------------------------


def test_row_load_state_reads_optimizer_state_on_the_host_from_the_mapped_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With several processes stock Accelerate reads all of it onto each device."""
    seen: list[tuple[str, Any, Any]] = []
    real = torch.load

    def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
        seen.append((Path(f).name, map_location, kwargs.get("mmap", False)))
        return real(f, map_location=map_location, **kwargs)

    monkeypatch.setattr(torch, "load", load)
    for on in (False, True):
        run = start(on).train(2)
        run.accelerator.save_state(str(tmp_path))
        seen.clear()
        with monkeypatch.context() as patch:
            patch.setattr(Accelerator, "multi_device", True)
            patch.setattr(Accelerator, "num_processes", 2)
            run.accelerator.load_state(str(tmp_path))
        device = run.accelerator.device
        expected = ("optimizer.bin", "cpu", True) if on else ("optimizer.bin", device, False)
        assert expected in seen
        assert ("scheduler.bin", None, False) in seen
        run.train(1)
    assert not is_mapped(tmp_path / "optimizer.bin")
    assert_same(start(False).train(3), run)


def test_row_load_state_does_what_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[Any] = []
    real = accelerate.checkpointing.load

    def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
        seen.append(map_location)
        return real(f, map_location=map_location, **kwargs)

    run = start(True).train(2)
    run.accelerator.save_state(str(tmp_path))
    monkeypatch.setattr(accelerate.checkpointing, "load", load)
    run.accelerator.load_state(str(tmp_path), map_location="on_device")
    assert run.accelerator.device in seen


def test_row_a_plain_optimizer_beside_keeps_no_mapped_file(tmp_path: Path):
    """Torch keeps tensors that it is given, which must not be those of a file then."""
    switch(True)
    acc = Accelerator(cpu=True)
    nets = [make_net(), make_net()]
    ours = acc.prepare(make_optimizer(nets[0]))
    switch(False)
    plain = acc.prepare(make_optimizer(nets[1], foreach=True))
    assert [is_offloaded(ours), is_offloaded(plain)] == [True, False]
    assert len(acc._optimizers) == 2
    for net, optimizer in zip(nets, (ours, plain), strict=True):
        acc.backward(net(make_batches(1)[0]).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
    acc.save_state(str(tmp_path))
    acc.load_state(str(tmp_path))
    assert plain.state
    assert not is_mapped(tmp_path / "optimizer.bin")
    assert not is_mapped(tmp_path / "optimizer_1.bin")


def test_row_hooks_of_save_state_and_load_state(tmp_path: Path):
    for on in (False, True):
        run = start(on).train(1)
        calls: list[str] = []

        def save(models: Any, weights: Any, folder: str, calls: list[str] = calls) -> None:
            calls.append("save")

        def load(models: Any, folder: str, calls: list[str] = calls) -> None:
            calls.append("load")

        handles = [
            run.accelerator.register_save_state_pre_hook(save),
            run.accelerator.register_load_state_pre_hook(load),
        ]
        run.accelerator.save_state(str(tmp_path / str(on)))
        run.accelerator.load_state(str(tmp_path / str(on)))
        assert calls == ["save", "load"]
        for handle in handles:
            handle.remove()


def test_row_hooks_of_state_dict_fire_on_the_optimizer():
    run = start(True).train(1)
    calls: list[str] = []
    bare = run.optimizer.optimizer
    bare.register_state_dict_pre_hook(lambda _: calls.append("save"))
    bare.register_load_state_dict_pre_hook(lambda _, found: calls.append(str(len(found["state"]))))
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    assert calls == ["save", str(len(list(run.net.parameters())))]


def test_row_state_dict_waits_for_updates_in_flight():
    os.environ["ACCELERATE_OFFLOAD_OVERLAP"] = "forward"
    plain, other = start(False).train(3), start(True).train(3)
    state = other.optimizer.state_dict()["state"]
    for index, expected in plain.optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, state[index][key]) for key, value in expected.items())


# --- releasing ---------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [True, False])
def test_row_free_memory_gives_everything_back(clip: bool):
    run: Any = start(True).train(3, clip=clip)
    references = [weakref.ref(run.optimizer.optimizer), weakref.ref(run.net)]
    references += [weakref.ref(p) for p in run.net.parameters()]
    acc = run.accelerator
    run.net, run.optimizer, run.schedule = acc.free_memory(run.net, run.optimizer, run.schedule)
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)
    assert accelerator.offloaded(acc) == []


def test_row_find_executable_batch_size_starts_afresh():
    ends = []
    for on in (False, True):
        reset()
        switch(on)
        acc = Accelerator(cpu=True)
        tried: list[tuple[int, int]] = []
        alive: list[weakref.ref[Any]] = []

        @find_executable_batch_size(starting_batch_size=8)
        def train(
            batch_size: int,
            acc: Accelerator = acc,
            tried: list[tuple[int, int]] = tried,
            alive: list[weakref.ref[Any]] = alive,
        ) -> Run:
            acc.free_memory()
            gc.collect()
            tried.append((batch_size, sum(reference() is not None for reference in alive)))
            net = make_net()
            bare = make_optimizer(net)
            net, optimizer, schedule = acc.prepare(net, bare, make_schedule(bare))
            alive.append(weakref.ref(bare))
            run = Run(acc, net, optimizer, schedule).train(2)
            if batch_size > 4:
                raise RuntimeError("CUDA out of memory. Tried to allocate")
            return run.train(1)

        ends.append(train())
        assert [size for size, _ in tried][-1] <= 4
        assert {count for _, count in tried} == {0}  # no optimizer of an attempt is left
    assert_same(*ends)


# --- optimizers that cannot be offloaded ------------------------------------------------------


def test_row_train_and_eval_of_schedule_free_are_refused():
    schedulefree = pytest.importorskip("schedulefree")
    switch(True)
    bare = schedulefree.AdamWScheduleFree(make_net().parameters(), lr=1e-2)
    with pytest.raises(NotImplementedError, match=r"train\(\) and eval\(\).*OPTIMIZER=false"):
        Accelerator(cpu=True).prepare(bare)
    assert type(bare) is schedulefree.AdamWScheduleFree


def test_row_train_and_eval_of_others_do_nothing():
    run = start(True).train(1)
    run.optimizer.train()
    run.optimizer.eval()
    assert_same(start(False).train(2), run.train(1))


def test_row_a_refusal_says_how_to_go_on():
    switch(True)
    with pytest.raises(NotImplementedError, match="ACCELERATE_OFFLOAD_OPTIMIZER=false trains wi"):
        Accelerator(cpu=True).prepare(torch.optim.LBFGS(make_net().parameters()))


def test_row_offloaded_in_code_passes_where_the_switch_is_off():
    """``offload()`` was called by name; the switch is about ``prepare``."""
    os.environ["ACCELERATE_OFFLOAD_OPTIMIZER"] = "false"
    bare = offload(make_optimizer(make_net()), OffloadConfig(chunk_size=1000))
    assert is_offloaded(Accelerator(cpu=True).prepare(bare))


def test_row_a_wrapper_that_is_switched_off_is_a_plain_one(capfd: pytest.CaptureFixture[str]):
    os.environ["ACCELERATE_OFFLOAD_OPTIMIZER"] = "false"
    plain = start(False).train(3)
    reset()
    acc = Accelerator(cpu=True)
    net: Any = make_net()
    mine = OffloadedOptimizer(make_optimizer(net))
    net, optimizer, schedule = acc.prepare(net, mine, make_schedule(mine.optimizer))
    assert not is_offloaded(optimizer)
    assert "OPTIMIZER=false: OffloadedOptimizer has no effect" in capfd.readouterr().err
    assert_same(plain, Run(acc, net, optimizer, schedule).train(3))
