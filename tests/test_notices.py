"""One line, once, where offload cannot help; silence where it does."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from training import make_params, set_grads

from torch_offload import OffloadConfig, offload
from torch_offload.notices import Notices

CPU = torch.device("cpu")
SHAPES = [(64, 64)] * 6  # 32 KiB of state each


@pytest.fixture
def said(caplog):
    """What was logged so far."""
    return lambda: [r.getMessage() for r in caplog.records if r.name == "torch_offload"]


def run(device, config=None, steps=3, has_grad=None, kind=torch.optim.AdamW, **kwargs):
    params = make_params(device, shapes=SHAPES)
    optimizer = offload(kind(params, lr=0.1, **kwargs), config)
    for step in range(steps):
        set_grads(params, step, has_grad)
        optimizer.step()
    return params, optimizer


def test_parameters_on_the_cpu(said):
    params, optimizer = run(CPU)
    assert said() == [
        "AdamW: the parameters are on cpu, where their state (196,608 bytes) is in host memory "
        "anyway: offload saves nothing. Move the model to another device before the first step, or "
        "train without offload."
    ]
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.add_param_group({"params": make_params(CPU)})
    set_grads(params, 5)
    optimizer.step()
    assert len(said()) == 1
    run(CPU, kind=torch.optim.SGD, momentum=0.9)
    assert said()[1].startswith("SGD: the parameters are on cpu")
    assert len(said()) == 2


def test_nothing_is_said_before_anything_was_updated(said):
    run(CPU, has_grad=lambda index, step: False)
    offload(torch.optim.AdamW(make_params(CPU)))
    assert said() == []


def test_nothing_is_said_without_state(device, said):
    run(device, kind=torch.optim.SGD)
    assert said() == []


@pytest.mark.gpu
def test_all_of_the_state_in_the_slots(said):
    """2 chunks, 3 slots."""
    run(torch.device("cuda"), OffloadConfig(chunk_size=3 * 32 * 1024))
    assert said() == [
        "AdamW: all of the state (196,608 bytes) fits into the slots (196,608 bytes), so step() "
        "has it on the device at once and offload saves memory between steps only. Set a smaller "
        "chunk_size or num_slots, or train without offload."
    ]


@pytest.mark.gpu
def test_silence_where_offload_helps(said):
    run(torch.device("cuda"), OffloadConfig(chunk_size=32 * 1024))
    assert said() == []


@pytest.mark.parametrize(
    ("devices", "state_bytes", "staging_bytes", "expected"),
    [
        ({"cuda"}, 1000, 999, None),
        ({"cuda"}, 1000, 1000, "all of the state (1,000 bytes) fits into the slots (1,000 bytes)"),
        ({"cuda"}, 1000, 5000, "fits into the slots (5,000 bytes)"),
        ({"cuda"}, 0, 0, None),
        ({"cpu"}, 0, 0, None),
        ({"cpu"}, 1000, 10, "on cpu, where"),
        ({"mps"}, 1000, 10, "on mps, where"),
        ({"mps", "cpu"}, 1000, 10, "on cpu and mps, where"),
        ({"cuda", "cpu"}, 1000, 10, None),
        ({"xpu"}, 1000, 10, None),
    ],
)
def test_when_offload_cannot_help(said, devices, state_bytes, staging_bytes, expected):
    notices = Notices("AdamW")
    for _ in range(2):
        notices.no_help(devices, state_bytes, staging_bytes)
    assert len(said()) == (expected is not None)
    assert expected is None or expected in said()[0]
    assert all("\n" not in line for line in said())


@pytest.mark.parametrize(("largest", "expected"), [(0, 0), (1000, 0), (1001, 1), (5000, 1)])
def test_a_parameter_that_is_larger_than_a_chunk(said, largest, expected):
    notices = Notices("Muon")
    for _ in range(2):
        notices.large_chunks(largest, 1000)
    assert len(said()) == expected
    assert all("Muon: the state of a parameter" in line and "as a whole" in line for line in said())


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "expected"), [(torch.optim.Muon, 1), (torch.optim.AdamW, 0)])
def test_a_parameter_that_is_larger_than_a_chunk_on_a_device(said, kind, expected):
    """An element-wise optimizer updates it in parts."""
    run(torch.device("cuda"), OffloadConfig(chunk_size=8 * 1024, num_slots=2), kind=kind)
    assert len(said()) == expected
    assert all("larger than chunk_size (8,192 bytes)" in line for line in said())


def test_a_parameter_that_is_larger_than_a_chunk_costs_nothing_on_a_cpu(said):
    run(CPU, OffloadConfig(chunk_size=8 * 1024), kind=torch.optim.Muon)
    assert len(said()) == 1
    assert "saves nothing" in said()[0]


def test_it_is_seen_without_any_logging_set_up_and_stops_nothing():
    """Also with warnings that are errors: advice must not end a step in the middle."""
    code = """if True:
        import torch, torch_offload
        p = torch.nn.Parameter(torch.ones(8))
        o = torch_offload.offload(torch.optim.AdamW([p]))
        for _ in range(3):
            p.grad = torch.ones(8)
            o.step()
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stderr.count("offload saves nothing") == 1
    assert len(done.stderr.splitlines()) == 1
