"""DDP and FSDP2 on all GPUs of this machine, one process each: bit for bit like plain training.

The ranks are started once for all tests, since that takes long with NCCL; each case is a call of
its own, with a time limit. On a machine without GPUs two processes on the CPU do the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from multi_checks import (
    compare,
    compare_late,
    compare_resumed,
    compare_slowed,
    memory_before_the_first_collective,
    train_and_save,
    when_memory_is_taken,
)
from multi_training import Case
from ranks import Ranks

pytestmark = pytest.mark.filterwarnings(  # one process is what is meant in the parent
    "ignore:torch.distributed is disabled, unavailable or uninitialized"
)
KINDS = ["DDP", "FSDP2"]
MODES = ["step", "backward", "forward", "auto"]
DTYPES = [torch.float32, torch.bfloat16]
STAGES = ["h2d", "update", "d2h"]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.multigpu)])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    num_ranks = 2 if request.param == "cpu" else max(2, torch.cuda.device_count())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # plain training must have one result
        started = Ranks(request.param, num_ranks=num_ranks)
        yield started
        started.stop()


@pytest.mark.parametrize("overlap", ["backward", "forward"])
def test_host_memory_before_the_first_collective(ranks, overlap):
    """Of state that is there when the optimizer is converted; NCCL itself begins afterwards."""
    ranks.stop()  # so that new ones begin
    ranks(memory_before_the_first_collective, Case("DDP", ranks.device), overlap)


@pytest.mark.parametrize("overlap", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_host_memory_is_taken_in_the_first_step_and_never_during_backward(ranks, kind, overlap):
    for taken in ranks(when_memory_is_taken, Case(kind, ranks.device), overlap):
        assert taken
        assert set(taken) == {(0, False)}


@pytest.mark.parametrize("overlap", MODES)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_same_bits_as_plain(ranks, kind, dtype, count, overlap):
    is_early = overlap in ("backward", "auto")
    for early, num_chunks in ranks(compare, Case(kind, ranks.device, dtype, count), overlap):
        assert num_chunks > 3
        assert all(early[3:]) == is_early
        assert any(early) == is_early


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("overlap", MODES[:3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_slow_rank(ranks, kind, overlap, stage):
    if stage != "update" and ranks.device == "cpu":
        pytest.skip("a CPU has no streams that could be slow")
    *others, slowed = ranks(compare_slowed, Case(kind, ranks.device), overlap, stage)
    assert slowed > 8
    assert not any(others)


@pytest.mark.parametrize("overlap", MODES[:3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_late_rank(ranks, kind, overlap):
    ranks(compare_late, Case(kind, ranks.device), overlap)


@pytest.mark.parametrize("overlap", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_saved_by_all_and_resumed_by_all_and_by_one(
    ranks, tmp_path: Path, kind: str, dtype: torch.dtype, overlap: str
):
    case = Case(kind, ranks.device, dtype)
    ranks(train_and_save, case, None, tmp_path / "plain")
    ranks(train_and_save, case, overlap, tmp_path / "offloaded")
    ranks(compare_resumed, case, overlap, tmp_path, resharded=False)
    compare_resumed(Case("one", ranks.device, dtype), overlap, tmp_path, resharded=True)


@pytest.mark.parametrize("overlap", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_saved_by_one_and_resumed_by_all(ranks, tmp_path: Path, kind: str, overlap: str):
    one = Case("one", ranks.device)
    train_and_save(one, None, tmp_path / "plain")
    train_and_save(one, overlap, tmp_path / "offloaded")
    ranks(compare_resumed, Case(kind, ranks.device), overlap, tmp_path, resharded=True)
