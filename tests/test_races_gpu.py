"""Races, on a real device: each stage slowed down on purpose, and each wait deleted in turn.

Every wait of the pipeline is one ``Handoff`` taken by one stream from another, so a wait is named
by its producer and consumer. The table in ``WAITS`` says which invariant each serves; a scenario
must hold with all the waits and must break without its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from training import assert_same, make_params, set_grads

from torch_offload import OffloadConfig, offload, pipeline, stepper, synchronize
from torch_offload.streams import CopyStreams, Handoff

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
SHAPES = [(256, 1024)] * 8
CONFIG = OffloadConfig(chunk_size=2 * 4 * 256 * 1024, num_slots=2)  # a chunk per parameter
SLOT_BYTES = 2 * 4 * 256 * 1024
SLOW_MS = 10.0


def sleep(milliseconds: float) -> None:
    """Keep the current stream busy without touching memory."""
    torch.cuda._sleep(int(milliseconds * 1.7e6))


@pytest.fixture(autouse=True)
def known_class():
    """The trial of the class has been made: it steps tiny copies, which nothing here is about."""
    offload(torch.optim.AdamW(make_params(GPU, shapes=SHAPES), lr=0.1, fused=True), CONFIG)


def slow_down(monkeypatch: pytest.MonkeyPatch, *stages: str) -> None:
    """Let each copy in, copy out or update take ``SLOW_MS`` more on its own stream."""
    real_in, real_out = pipeline.Pipeline.copy_in, pipeline.Pipeline.copy_out
    real_born, real_step = pipeline.Pipeline._copy_born, stepper.step_detached

    def on(stream, real):
        def slowed(self, *args):
            if self.streams.h2d is not None:  # that of a trial has none
                with getattr(self.streams, stream):
                    sleep(SLOW_MS)
            real(self, *args)

        return slowed

    if "h2d" in stages:
        monkeypatch.setattr(pipeline.Pipeline, "copy_in", on("h2d", real_in))
    if "d2h" in stages:
        monkeypatch.setattr(pipeline.Pipeline, "copy_out", on("d2h", real_out))
        monkeypatch.setattr(pipeline.Pipeline, "_copy_born", on("d2h", real_born))
    if "update" in stages:

        def slowed_step(*args):
            sleep(SLOW_MS)
            return real_step(*args)

        monkeypatch.setattr(stepper, "step_detached", slowed_step)


def delete_wait(monkeypatch: pytest.MonkeyPatch, producer: str, consumer: str) -> list[str]:
    """Make the pipeline skip one wait. Returns a list that grows with each wait skipped."""
    known: dict[int, str] = {}
    skipped: list[str] = []
    real_create, real_take, real_block = CopyStreams.create, Handoff.take, Handoff.take_on_cpu

    def create(device):
        streams = real_create(device)
        known.update({id(getattr(streams, n)): n for n in ("h2d", "d2h", "side")})
        return streams

    def take(self, stream):
        ends = known.get(id(self.producer), "caller"), known.get(id(stream), "caller")
        if ends == (producer, consumer):
            skipped.append(producer)
            return self._value
        return real_take(self, stream)

    def take_on_cpu(self):
        if (known.get(id(self.producer), "caller"), consumer) == (producer, "cpu"):
            skipped.append(producer)
            return self._value
        return real_block(self)

    monkeypatch.setattr(CopyStreams, "create", staticmethod(create))
    monkeypatch.setattr(Handoff, "take", take)
    monkeypatch.setattr(Handoff, "take_on_cpu", take_on_cpu)
    return skipped


def run(offloaded: bool, steps: int = 3, between: Callable[[], None] = lambda: None):
    """Train; ``between`` runs right after each step. Ends with a device-wide wait."""
    params = make_params(GPU, shapes=SHAPES)
    optimizer = torch.optim.AdamW(params, lr=0.1, fused=True)
    if offloaded:
        offload(optimizer, CONFIG)
    for step in range(steps):
        set_grads(params, step)
        torch.cuda.synchronize()
        optimizer.step()
        between()
    torch.cuda.synchronize()
    return params, optimizer


def overwrite_freed_memory() -> None:
    """Take what the step gave back and write into it, as the next forward does."""
    scratch = [torch.empty(SLOT_BYTES, dtype=torch.uint8, device=GPU) for _ in range(4)]
    scratch += [torch.empty(SLOT_BYTES // 2, dtype=torch.uint8, device=GPU) for _ in range(8)]
    for tensor in scratch:
        tensor.fill_(77)


def plain_run():
    return run(offloaded=False)


def steps_are_exact() -> None:
    assert_same(plain_run(), run(offloaded=True))


def freed_memory_may_be_overwritten() -> None:
    assert_same(plain_run(), run(offloaded=True, between=overwrite_freed_memory))


def first_step_is_exact() -> None:
    """Only creation: the allocator hands the memory of one chunk's state to the next one."""
    assert_same(run(offloaded=False, steps=1), run(offloaded=True, steps=1))


def host_reads_see_final_values() -> None:
    params, optimizer = run(offloaded=True, steps=2)
    set_grads(params, 2)
    torch.cuda.synchronize()
    optimizer.step()
    early = [optimizer.state[p]["exp_avg"].clone() for p in params]  # no wait of our own
    torch.cuda.synchronize()
    for param, value in zip(params, early, strict=True):
        assert torch.equal(value, optimizer.state[param]["exp_avg"])


def memory_of_the_caller_is_not_taken_early() -> None:
    """The caller frees buffers that its stream is still going to read; slots reuse them."""
    params, optimizer = run(offloaded=True, steps=2)
    synchronize(optimizer)
    torch.cuda.empty_cache()
    expected = sum(range(1, 3)) * SLOT_BYTES
    set_grads(params, 2)
    torch.cuda.synchronize()
    buffers = [
        torch.full((SLOT_BYTES,), value, dtype=torch.uint8, device=GPU) for value in range(1, 3)
    ]
    torch.cuda.synchronize()
    sleep(SLOW_MS * 5)
    total = torch.stack([buffer.sum() for buffer in buffers]).sum()
    del buffers
    optimizer.step()
    assert total.item() == expected


#: invariant: (producer, consumer, slowed stage, the scenario that dies without it)
WAITS = {
    "I1": ("d2h", "h2d", "d2h", steps_are_exact),
    "I2": ("h2d", "caller", "h2d", steps_are_exact),
    "I3": ("caller", "d2h", "update", steps_are_exact),
    "I4": ("d2h", "cpu", "d2h", host_reads_see_final_values),
    "I5 update": ("d2h", "caller", "d2h", freed_memory_may_be_overwritten),
    "I5 create": ("d2h", "caller", "d2h", first_step_is_exact),
    "I6": ("caller", "h2d", None, memory_of_the_caller_is_not_taken_early),
}


@pytest.mark.parametrize("name", WAITS)
def test_holds_with_every_wait(monkeypatch, name):
    _, _, stage, scenario = WAITS[name]
    if stage:
        slow_down(monkeypatch, stage)
    scenario()


@pytest.mark.parametrize("name", WAITS)
def test_each_wait_is_needed(monkeypatch, name):
    producer, consumer, stage, scenario = WAITS[name]
    if stage:
        slow_down(monkeypatch, stage)
    skipped = delete_wait(monkeypatch, producer, consumer)
    with pytest.raises(AssertionError):
        scenario()
    assert skipped, "the wait was never reached"


@pytest.mark.parametrize("stages", [("h2d",), ("update",), ("d2h",), ("h2d", "update", "d2h")])
def test_any_stage_may_be_slow(monkeypatch, stages):
    slow_down(monkeypatch, *stages)
    freed_memory_may_be_overwritten()


@pytest.mark.parametrize("flavour", [{"fused": True}, {"foreach": True}, {"foreach": False}])
@pytest.mark.parametrize("stage", [None, "h2d", "d2h"])
def test_shapes_that_starve_compute(monkeypatch, flavour, stage):
    """Long copies, short compute, and a forward right after the step."""

    def train(offloaded: bool):
        torch.manual_seed(3)
        model = torch.nn.Sequential(
            torch.nn.Linear(32, 131072), torch.nn.ReLU(), torch.nn.Linear(131072, 64)
        ).to(GPU)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **flavour)
        if offloaded:
            offload(optimizer, OffloadConfig(chunk_size="16MiB"))
        for step in range(4):
            data = torch.randn(4, 32, generator=torch.Generator().manual_seed(step)).to(GPU)
            model(data).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return list(model.parameters()), optimizer

    plain = train(False)
    assert_same(plain, train(False))
    if stage:
        slow_down(monkeypatch, stage)
    assert_same(plain, train(True))


def test_step_on_another_stream_than_the_default():
    """The caller is whatever stream is current (I9)."""
    plain = plain_run()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        offloaded = run(offloaded=True, between=overwrite_freed_memory)
    assert_same(plain, offloaded)


SANITIZED = """
import sys
sys.path[:0] = {path!r}
import torch
import test_races_gpu as races
if {producer!r}:
    import pytest
    races.delete_wait(pytest.MonkeyPatch(), {producer!r}, {consumer!r})
for flavour in ({{"fused": True}}, {{"foreach": True}}, {{"foreach": False}}):
    params = races.make_params(races.GPU)
    optimizer = races.offload(
        torch.optim.AdamW(params, lr=0.1, **flavour), races.OffloadConfig(chunk_size=50_000)
    )
    for step in range(3):
        races.set_grads(params, step)
        optimizer.step()
    optimizer.state_dict()
print("finished")
"""


def run_sanitized(producer: str = "", consumer: str = "") -> subprocess.CompletedProcess[str]:
    here = Path(__file__).parent
    code = SANITIZED.format(
        path=[str(here), str(here.parent)], producer=producer, consumer=consumer
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TORCH_CUDA_SANITIZER": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )


def test_sanitizer_is_clean():
    result = run_sanitized()
    assert "finished" in result.stdout, result.stderr
    assert "CSAN" not in result.stderr, result.stderr


def test_sanitizer_would_see_a_missing_wait():
    result = run_sanitized("h2d", "caller")
    assert "CSAN" in result.stderr, result.stdout + result.stderr
