"""torch.distributed.checkpoint on two processes: sharded state is saved, loaded and resharded."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Ranks
from test_dcp import SlowWriter
from test_fsdp import (
    CASES,
    CONFIG,
    Look,
    assert_on_host,
    assert_same,
    look,
    make_net,
    shard,
    steps,
    train,
    two_groups,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from torch_offload import OffloadConfig, offload

pytestmark = pytest.mark.filterwarnings(  # one process is what is meant in the parent
    "ignore:torch.distributed is disabled, unavailable or uninitialized"
)
OPTIONS = {
    "sharded": StateDictOptions(),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
    "full": StateDictOptions(full_state_dict=True),
    "from rank 0": StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
}


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.multigpu)])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    started = Ranks(request.param)
    yield started
    started.stop()


# What follows runs on the ranks, some of it in the parent too, up to the tests.


def new(
    device: str, case: str, config: OffloadConfig | None
) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """A net, sharded if there are several processes, and an optimizer that has not stepped."""
    net = make_net(device)
    if dist.is_initialized():
        net = shard(net, device)
    optimizer_class, options = CASES[case]
    optimizer = optimizer_class(two_groups(net), lr=1e-2, **options)
    return net, optimizer if config is None else offload(optimizer, config)


def asked(device: str, case: str, options: str) -> None:
    """Asking for state before the first step changes nothing, and gets DTensors on the host."""

    def run(times: int) -> Look:
        net, optimizer = new(device, case, CONFIG)
        for _ in range(times):
            sd = get_optimizer_state_dict(net, optimizer, options=OPTIONS[options])
            if case == "Adagrad":  # makes its state when it is made
                continue
            if options == "sharded":
                shown = {p: sd["state"].get(name, {}) for name, p in net.named_parameters()}
                optimizer.state.update(shown)
                assert_on_host(net, optimizer)
                optimizer.state.clear()
            assert len(optimizer.state) == 0
        steps(net, optimizer)
        return look(net, optimizer)

    assert_same(run(0), run(2))
    assert_same(look(*train(device, None, case)), run(2))


def template(device: str, case: str) -> None:
    """It is what plain torch makes, but for where it is and for the step that was not made."""

    def ask(config: OffloadConfig | None) -> dict[str, Any]:
        return get_optimizer_state_dict(*new(device, case, config))["state"]

    plain, other = ask(None), ask(CONFIG)
    assert list(plain) == list(other)
    for name, values in plain.items():
        assert list(values) == list(other[name])
        for key, value in values.items():
            found = other[name][key]
            assert type(found) is type(value), (name, key)
            assert found.shape == value.shape
            assert found.stride() == value.stride()
            assert found.dtype == value.dtype
            if isinstance(value, torch.distributed.tensor.DTensor):
                assert found.placements == value.placements
                assert found.device_mesh == value.device_mesh
                assert found.to_local().shape == value.to_local().shape
            else:
                assert found.device == value.device


def save(path: Path, net: nn.Module, optimizer: torch.optim.Optimizer, options: str) -> None:
    model, state = get_state_dict(net, optimizer, options=OPTIONS[options])
    dcp.save({"net": model, "optimizer": state}, checkpoint_id=path)


def load(path: Path, net: nn.Module, optimizer: torch.optim.Optimizer, options: str) -> None:
    """As torch's documentation says: ask for a template, load into it, set it."""
    model, state = get_state_dict(net, optimizer, options=OPTIONS[options])
    both = {"net": model, "optimizer": state}
    dcp.load(both, checkpoint_id=path)
    set_state_dict(
        net,
        optimizer,
        model_state_dict=both["net"],
        optim_state_dict=both["optimizer"],
        options=OPTIONS[options],
    )


def train_and_save(
    device: str, case: str, path: Path, config: OffloadConfig | None, options: str = "sharded"
) -> None:
    net, optimizer = new(device, case, config)
    steps(net, optimizer, num_steps=3)
    save(path, net, optimizer, options)


def resume(
    device: str,
    case: str,
    path: Path,
    config: OffloadConfig | None,
    options: str = "sharded",
    steps_before: int = 0,
) -> Look:
    net, optimizer = new(device, case, config)
    steps(net, optimizer, num_steps=steps_before)
    load(path, net, optimizer, options)
    if config is not None and dist.is_initialized():
        assert_on_host(net, optimizer)
    steps(net, optimizer, first_step=3, num_steps=3)
    return look(net, optimizer)


def round_trip(device: str, case: str, path: Path, options: str) -> None:
    plain = None
    for saved in (None, CONFIG):
        to = path / str(saved is None)
        train_and_save(device, case, to, saved, options)
        for loaded in (None, CONFIG):
            for steps_before in (0, 1):
                found = resume(device, case, to, loaded, options, steps_before)
                plain = plain or found
                assert_same(plain, found)


def never_set(device: str, case: str, path: Path) -> None:
    """In plain torch the tensors that one asks for are the state: loading into them is enough."""
    train_and_save(device, case, path, CONFIG)

    def run(config: OffloadConfig | None) -> Look:
        net, optimizer = new(device, case, config)
        model, state = get_state_dict(net, optimizer)
        dcp.load({"net": model, "optimizer": state}, checkpoint_id=path)
        steps(net, optimizer, first_step=3, num_steps=3)
        return look(net, optimizer)

    assert_same(run(None), run(CONFIG))


def full_in_memory(device: str, case: str, options: str) -> None:
    """Gathered on every rank or on the first, handed over in memory, and distributed again."""

    def run(saved: OffloadConfig | None, loaded: OffloadConfig | None) -> Look:
        net, optimizer = new(device, case, saved)
        steps(net, optimizer, num_steps=3)
        full = StateDictOptions(full_state_dict=True, cpu_offload=options == "from rank 0")
        model, state = get_state_dict(net, optimizer, options=full)
        model, state = copy.deepcopy((model, state))
        other, resumed = new(device, case, loaded)
        # As torch wants it: every rank has the keys of the groups before.
        torch.optim.lr_scheduler.LambdaLR(resumed, lambda _: 1.0)
        set_model_state_dict(other, model, options=OPTIONS[options])
        set_optimizer_state_dict(other, resumed, state, options=OPTIONS[options])
        steps(other, resumed, first_step=3, num_steps=3)
        if loaded is not None:
            assert_on_host(other, resumed)
        return look(other, resumed)

    plain = run(None, None)
    for saved in (None, CONFIG):
        for loaded in (None, CONFIG):
            assert_same(plain, run(saved, loaded))


def compare_resumed(device: str, case: str, path: Path) -> None:
    """From the checkpoints of a plain and an offloaded training, with either optimizer."""
    plain = resume(device, case, path / "plain", None)
    assert_same(plain, resume(device, case, path / "offloaded", None))
    assert_same(plain, resume(device, case, path / "plain", CONFIG))
    assert_same(plain, resume(device, case, path / "offloaded", CONFIG))


def async_saved(device: str, case: str, path: Path, process: bool) -> None:
    """Later steps write the same host memory while it is saved."""
    net, optimizer = new(device, case, CONFIG)
    steps(net, optimizer, num_steps=3)
    model, state = get_state_dict(net, optimizer)
    writer = dcp.FileSystemWriter(path) if process else SlowWriter(path)
    future = dcp.async_save(
        {"net": model, "optimizer": state},
        storage_writer=writer,
        process_group=dist.new_group(backend="gloo"),  # the other one is busy with the steps
        async_checkpointer_type=(
            AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
        ),
    )
    steps(net, optimizer, first_step=3, num_steps=3)
    expected = look(net, optimizer)
    if isinstance(writer, SlowWriter):
        writer.go.set()
    future.result(timeout=60)
    assert_same(expected, resume(device, case, path, CONFIG))
    plain, other = new(device, case, None)
    for first_step in (0, 3):
        steps(plain, other, first_step=first_step, num_steps=3)
    assert_same(look(plain, other), expected)


# The tests.


@pytest.mark.parametrize("options", ["sharded", "flat", "full"])
@pytest.mark.parametrize("case", ["AdamW foreach", "AdamW fused", "SGD momentum", "Adagrad"])
def test_asking_before_the_first_step_changes_nothing(ranks, case, options):
    ranks(asked, ranks.device, case, options)


@pytest.mark.parametrize("case", CASES)
def test_template_has_the_tensors_that_plain_makes(ranks, case):
    ranks(template, ranks.device, case)


@pytest.mark.parametrize("options", ["sharded", "flat"])
@pytest.mark.parametrize("case", ["AdamW foreach", "SGD momentum", "Adagrad"])
def test_saved_and_loaded_on_as_many_processes(ranks, tmp_path, case, options):
    ranks(round_trip, ranks.device, case, tmp_path, options)


@pytest.mark.parametrize("case", ["AdamW foreach", "SGD momentum"])
def test_loaded_into_the_template_and_never_set(ranks, tmp_path, case):
    ranks(never_set, ranks.device, case, tmp_path)


@pytest.mark.parametrize("options", ["full", "from rank 0"])
@pytest.mark.parametrize("case", ["AdamW foreach", "AdamW fused", "SGD momentum"])
def test_gathered_and_distributed(ranks, case, options):
    ranks(full_in_memory, ranks.device, case, options)


@pytest.mark.parametrize("case", ["AdamW foreach", "SGD momentum"])
def test_from_two_processes_to_one(ranks, tmp_path, case):
    for name, config in (("plain", None), ("offloaded", CONFIG)):
        ranks(train_and_save, ranks.device, case, tmp_path / name, config)
    compare_resumed(ranks.device, case, tmp_path)


@pytest.mark.parametrize("case", ["AdamW foreach", "SGD momentum"])
def test_from_one_process_to_two(ranks, tmp_path, case):
    for name, config in (("plain", None), ("offloaded", CONFIG)):
        train_and_save(ranks.device, case, tmp_path / name, config)
    ranks(compare_resumed, ranks.device, case, tmp_path)


@pytest.mark.parametrize(
    "process", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["thread", "process"]
)
def test_async_save(ranks, tmp_path, process):
    ranks(async_saved, ranks.device, "AdamW foreach", tmp_path, process)
