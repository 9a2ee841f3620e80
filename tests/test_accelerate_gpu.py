"""Offload through Accelerate on a GPU: the same bits, host state, and memory."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import GradScalerKwargs
from accelerate_cases import (
    FLAVOURS,
    Run,
    assert_same,
    assert_same_tree,
    fresh_accelerate,
    make_batches,
    make_optimizer,
    make_schedule,
    reset,
    start,
    switch,
)
from torch import nn

from accelerate_offload import OffloadedOptimizer
from torch_offload import is_offloaded, offload_stats

pytestmark = pytest.mark.gpu

# Read by cuBLAS when its first handle is made: before any test of this process runs.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

CHUNK_BYTES = 16 * 2**20
SLACK_BYTES = 2**20  # hyper-parameters, `step`, rounding of the allocator


@pytest.fixture(autouse=True)
def _clean():
    torch.use_deterministic_algorithms(True)
    try:
        with fresh_accelerate():
            yield
    finally:
        torch.use_deterministic_algorithms(False)


PRECISIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "fp32": dict,
    "bf16": lambda: {"mixed_precision": "bf16"},
    "fp16": lambda: {
        "mixed_precision": "fp16",
        "kwargs_handlers": [GradScalerKwargs(init_scale=2.0**10, growth_interval=2)],
    },
}


def train(on: bool, precision: str, num_steps: int = 6, **options: Any) -> Run:
    """Train on the GPU with clipping and a schedule; in fp16 the third step overflows."""
    run = start(on, accelerator=PRECISIONS[precision](), **copy.deepcopy(options))
    assert run.accelerator.device.type == "cuda"
    return run.train(num_steps, overflow_at=2 if precision == "fp16" else None)


def assert_on_host(run: Run) -> None:
    """The moments are pinned host memory, ``step`` is where its flavour wants it."""
    assert type(run.optimizer) is OffloadedOptimizer
    assert is_offloaded(run.optimizer)
    fused = bool(run.optimizer.param_groups[0]["fused"])
    for param, state in run.optimizer.state.items():
        assert param.device.type == "cuda"
        for key in ("exp_avg", "exp_avg_sq"):
            assert state[key].device.type == "cpu"
            assert state[key].is_pinned()
        assert state["step"].device.type == ("cuda" if fused else "cpu")


# --- the same bits -------------------------------------------------------------


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_same_bits(precision: str, flavour: str):
    options = FLAVOURS[flavour]
    plain = train(False, precision, **options)
    assert type(plain.optimizer) is AcceleratedOptimizer
    assert_same(plain, train(False, precision, **options))  # the control
    other = train(True, precision, **options)
    assert_same(plain, other)
    assert_on_host(other)
    assert offload_stats(other.optimizer).num_chunks > 1
    if precision == "fp16":
        scales = [run.accelerator.scaler.get_scale() for run in (plain, other)]
        assert scales[0] == scales[1]
        steps = {int(s["step"]) for s in other.optimizer.state.values()}
        assert steps == {5}  # six steps, one of which overflowed


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_same_bits_when_the_update_unscales_the_gradients(flavour: str):
    """Without clipping, ``fused`` is given the scale and unscales by itself."""
    runs = []
    for on in (False, False, True):
        run = start(on, accelerator=PRECISIONS["fp16"](), **FLAVOURS[flavour])
        runs.append(run.train(6, overflow_at=2, clip=False))
    assert_same(runs[0], runs[1])
    assert_same(runs[0], runs[2])


@pytest.mark.parametrize("scheduler_first", [True, False])
def test_same_bits_with_accumulation(scheduler_first: bool):
    def run(on: bool) -> Run:
        accelerator = {"gradient_accumulation_steps": 3}
        return start(
            on, accelerator=accelerator, scheduler_first=scheduler_first, fused=True
        ).train(6)

    plain = run(False)
    assert_same(plain, run(False))
    assert_same(plain, run(True))


def test_same_bits_with_a_learning_rate_on_the_device():
    """``prepare`` puts hyper-parameters that are tensors on the device, offloaded or not."""
    options = {"fused": True, "lr": torch.tensor(1e-2)}
    plain = train(False, "fp32", **options)
    assert_same(plain, train(False, "fp32", **options))
    other = train(True, "fp32", **options)
    assert_same(plain, other)
    assert other.optimizer.param_groups[0]["lr"].device.type == "cuda"
    assert_on_host(other)


# --- when the update runs --------------------------------------------------------


@pytest.mark.parametrize(
    ("overlap", "clip"),
    [
        *((overlap, clip) for overlap in ("auto", "step", "forward") for clip in (True, False)),
        ("backward", False),  # clipping there is an error, below
    ],
)
@pytest.mark.parametrize("num_micro", [1, 2])
def test_same_bits_in_each_mode(overlap: str, clip: bool, num_micro: int):
    os.environ["ACCELERATE_OFFLOAD_OVERLAP"] = overlap
    accelerator = {"gradient_accumulation_steps": num_micro}
    runs = [
        start(on, accelerator=accelerator, fused=True).train(6, clip=clip)
        for on in (False, False, True)
    ]
    assert_same(runs[0], runs[1])  # the control
    assert_same(runs[0], runs[2])
    assert_on_host(runs[2])
    stats = offload_stats(runs[2].optimizer)
    early = overlap == "backward" or (overlap == "auto" and not clip)
    assert stats.num_chunks > 1
    assert stats.num_early_chunks == (stats.num_chunks if early else 0)


def test_clipping_that_begins_later_is_an_error():
    run = start(True, accelerator={}, fused=True).train(3, clip=False)
    with pytest.raises(RuntimeError, match="--offload_overlap forward"):
        run.train(1, clip=True)


@pytest.mark.parametrize("clip", [True, False])
def test_a_mode_goes_on_after_load_state(tmp_path: Path, clip: bool):
    straight = start(False, accelerator={}, fused=True).train(6, clip=clip)
    run = start(True, accelerator={}, fused=True).train(3, clip=clip)
    run.accelerator.save_state(str(tmp_path))
    run.train(1, clip=clip)
    run.accelerator.load_state(str(tmp_path))
    run.num_done = 3
    assert_same(straight, run.train(3, clip=clip))


# --- checkpoints ---------------------------------------------------------------


@pytest.mark.parametrize("first", [False, True], ids=["from-plain", "from-offloaded"])
@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_save_state_continues_on_the_other_side(
    tmp_path: Path, precision: str, flavour: str, first: bool
):
    options = FLAVOURS[flavour]
    straight = train(False, precision, **options)
    saved = train(first, precision, num_steps=3, **options)
    saved.accelerator.save_state(str(tmp_path))
    resumed = start(not first, accelerator=PRECISIONS[precision](), **options)
    resumed.accelerator.load_state(str(tmp_path))
    resumed.num_done = 3
    assert_same(straight, resumed.train(3))
    if not first:
        assert_on_host(resumed)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_save_state_writes_a_plain_checkpoint(tmp_path: Path, flavour: str):
    for on in (False, True):
        run = train(on, "fp32", num_steps=3, **FLAVOURS[flavour])
        run.accelerator.save_state(str(tmp_path / str(on)))
    plain, other = (tmp_path / str(on) / "optimizer.bin" for on in (False, True))
    assert other.stat().st_size == pytest.approx(plain.stat().st_size, rel=0.01)
    assert_same_tree(torch.load(plain, weights_only=True), torch.load(other, weights_only=True))


# --- memory ----------------------------------------------------------------------


def big_net() -> nn.Module:
    """Return a net of 128 MiB: twice that in state, and more than 8 chunks."""
    torch.manual_seed(0)
    layers = [nn.Linear(2048, 2048) for _ in range(8)]
    return nn.Sequential(nn.Linear(16, 2048), *layers, nn.Linear(2048, 1))


def num_bytes(net: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in net.parameters())


def start_big(on: bool, overlap: str = "step") -> Run:
    os.environ["ACCELERATE_OFFLOAD_OVERLAP"] = overlap
    return start(on, accelerator={}, net=big_net(), chunk_bytes=CHUNK_BYTES, fused=True)


def allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


class Peak:
    """Bytes that the GPU had to give at most, above what was allocated on entry."""

    def __enter__(self) -> Peak:
        self.before = allocated()
        torch.cuda.reset_peak_memory_stats()
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.synchronize()
        self.num_bytes = torch.cuda.max_memory_allocated() - self.before


def test_loading_takes_less_than_training_did(tmp_path: Path):
    with Peak() as fresh:
        run = start_big(True).train(2)
    run.accelerator.save_state(str(tmp_path))
    state_bytes = 2 * num_bytes(run.net)
    growth, total = {}, {}
    for on in (False, True):
        del run
        base = allocated()
        run = start_big(on)
        with Peak() as load:
            run.accelerator.load_state(str(tmp_path))
        growth[on] = load.num_bytes
        total[on] = load.before - base + load.num_bytes
    assert growth[False] >= state_bytes  # the test can tell
    assert growth[True] <= CHUNK_BYTES + SLACK_BYTES
    assert total[True] <= fresh.num_bytes


def test_state_before_prepare_does_not_pass_through_the_gpu():
    peaks, runs = {}, []
    for on in (False, True):
        reset()
        switch(on, CHUNK_BYTES)
        os.environ["ACCELERATE_OFFLOAD_OVERLAP"] = "step"
        accelerator = Accelerator()
        net: Any = big_net()
        bare = make_optimizer(net, foreach=True)
        net(make_batches(1)[0]).pow(2).mean().backward()
        bare.step()
        bare.zero_grad()
        schedule = make_schedule(bare)
        with Peak() as peak:
            net, optimizer, schedule = accelerator.prepare(net, bare, schedule)
        peaks[on] = peak.num_bytes
        runs.append(Run(accelerator, net, optimizer, schedule).train(2))
    assert peaks[False] >= 3 * num_bytes(net)  # the test can tell
    assert peaks[True] <= num_bytes(net) + CHUNK_BYTES + SLACK_BYTES
    assert_same(*runs)
    assert_on_host(runs[1])


def test_a_step_stays_within_its_slots():
    start(True, accelerator={}).train(1)  # cuBLAS's workspace is not the optimizer's
    run = start_big(True)
    grad_bytes = num_bytes(run.net)
    with Peak() as peak:
        run.train(3)
    slot_bytes = max(CHUNK_BYTES, 2 * 4 * 2048 * 2048)  # the state of the largest parameter
    assert peak.num_bytes <= grad_bytes + 3 * slot_bytes + 64 * 2**20
    assert_on_host(run)


@pytest.mark.parametrize("overlap", ["step", "auto"])
@pytest.mark.parametrize("clip", [True, False])
def test_memory_is_given_back(overlap: str, clip: bool):
    start(True, accelerator={}).train(1)  # cuBLAS's workspace stays
    reset()
    before = allocated()
    run = start_big(True, overlap).train(3, clip=clip)
    assert allocated() > before
    run.accelerator.free_memory()
    del run
    assert allocated() <= before
