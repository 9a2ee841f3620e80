"""Two processes through ``accelerate launch``: DDP and FSDP2, the bits of the plain launch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate
import accelerate.utils
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate_cases import (
    assert_same_tree,
    fresh_accelerate,
    make_net,
    make_optimizer,
    run_python,
    switch,
)

from torch_offload import is_offloaded

SCRIPT = Path(__file__).with_name("accelerate_ranks_script.py")
OFFLOAD = ["--offload_optimizer", "--offload_chunk_size", "4KiB"]
KINDS = {
    "ddp": ["--multi_gpu"],
    "fsdp2": ["--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "NO_WRAP"],
}
CASES = {
    "ddp": ["clip", "no", "apart", "stray", "hook", "clip+forward"],
    "fsdp2": ["clip", "full+step", "no"],
}
OLD = accelerate.__version__.startswith("1.10.")
NAMES = {"ddp": "MULTI_[CG]PU", "fsdp2": "FSDP"}


@dataclass
class Launched:
    """What one launch printed, and where each rank ended."""

    output: str
    ends: list[dict[str, Any]]

    def counts(self, case: str, resumed: bool = False) -> set[tuple[int, int]]:
        """Early chunks and all chunks of the last step, as each rank printed them."""
        words = re.escape("+".join(sorted(case.split("+"))))
        pattern = (
            rf"case {words} resumed={resumed}: \w+ OffloadedOptimizer early=(\d+) chunks=(\d+)"
        )
        found = re.findall(pattern, self.output)
        assert len(found) == 2, self.output
        return {(int(early), int(chunks)) for early, chunks in found}


def launch(
    folder: Path, name: str, place: tuple[str, str], options: Sequence[str], other: str = "-"
) -> Launched:
    kind, device = place
    env = {"RANKS_ON_GPU": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if device == "cuda" else {}
    (folder / name).mkdir()
    command = ["-m", "accelerate.commands.accelerate_cli", "launch", *KINDS[kind], *options]
    command += ["--num_processes", "2", "--main_process_port", "0", "--mixed_precision", "no"]
    done = run_python(*command, SCRIPT, name, other, *CASES[kind], cwd=folder, **env)
    files = [folder / name / f"end{rank}.pt" for rank in range(2)]
    return Launched(done.stdout + done.stderr, [torch.load(f, weights_only=True) for f in files])


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.multigpu)])
def device(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def launched(
    kind: str, device: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Launched]:
    """Plain, offloaded and once more plain; the later ones resume from the one before as well."""
    folder, place = tmp_path_factory.mktemp(kind), (kind, device)
    return {
        "plain": launch(folder, "plain", place, []),
        "offloaded": launch(folder, "offloaded", place, OFFLOAD, "plain"),
        "again": launch(folder, "again", place, [], "offloaded"),
    }


@pytest.mark.slow
def test_the_control_has_the_bits_of_plain(kind: str, launched: dict[str, Launched]):
    for plain, again in zip(launched["plain"].ends, launched["again"].ends, strict=True):
        for case in CASES[kind]:
            assert_same_tree(plain[case], again[case], case)
    assert "accelerate_offload" not in launched["plain"].output
    assert re.search(f"{NAMES[kind]} AcceleratedOptimizer", launched["plain"].output)


@pytest.mark.slow
def test_offloaded_has_the_bits_of_plain(kind: str, launched: dict[str, Launched]):
    for plain, other in zip(launched["plain"].ends, launched["offloaded"].ends, strict=True):
        for case in CASES[kind]:
            assert_same_tree(plain[case], other[case], case)
    assert re.search(f"{NAMES[kind]} OffloadedOptimizer", launched["offloaded"].output)
    assert launched["offloaded"].output.count("offload is active") == 1  # of two ranks


@pytest.mark.slow
@pytest.mark.parametrize("name", ["offloaded", "again"], ids=["from-plain", "from-offloaded"])
def test_save_state_and_load_state_across(kind: str, launched: dict[str, Launched], name: str):
    for plain, other in zip(launched["plain"].ends, launched[name].ends, strict=True):
        for case in CASES[kind]:
            if kind == "fsdp2" and "full" not in case and OLD:
                continue  # plain that resumes plain differs as well, with torch 2.10
            resumed = other[f"{case} resumed"]
            half = len(resumed["losses"])
            assert_same_tree(plain[case]["losses"][-half:], resumed["losses"], case)
            for key in ("params", "state", "schedule"):
                assert_same_tree(plain[case][key], resumed[key], f"{case} {key}")


@pytest.mark.slow
def test_each_loop_has_the_mode_that_fits(kind: str, launched: dict[str, Launched]):
    run = launched["offloaded"]
    for case in CASES[kind]:
        # Without clipping gradients are used up in backward.
        beside_backward = case in ("no", "apart", "stray")
        for resumed in (False, True):
            for early, chunks in run.counts(case, resumed):
                assert chunks > 1
                assert early == (chunks if beside_backward else 0), f"{case}: {run.output}"
    reasons = {
        "ddp": [r"'forward': gradients are used between backward\(\) and step\(\), as clipping",
                r"'backward': nothing uses gradients between",
                r"'forward': DistributedDataParallel has a communication hook already"],
        "fsdp2": [r"'forward': gradients are used between backward\(\) and step\(\), as clipping",
                  r"'backward': nothing uses gradients between"],
    }  # fmt: skip
    for reason in reasons[kind]:
        assert re.search(rf'overlap="auto" goes on with {reason}', run.output), run.output


# --- what is refused ------------------------------------------------------------


@pytest.fixture
def accelerator():
    with fresh_accelerate():
        switch(True)
        yield Accelerator(cpu=True)


def pretend(monkeypatch: pytest.MonkeyPatch, kind: str, **attributes: Any) -> None:
    found = accelerate.utils.DistributedType(kind)
    for state in (AcceleratorState._shared_state, PartialState._shared_state):
        monkeypatch.setitem(state, "distributed_type", found)
    for name, value in attributes.items():
        monkeypatch.setitem(AcceleratorState._shared_state, name, value)


@dataclass
class Settings:
    """What Accelerate's plugins say."""

    fsdp_version: int = 2
    tp_enabled: bool = False


@pytest.mark.parametrize(
    ("kind", "attributes", "message"),
    [
        ("FSDP", {"fsdp_plugin": Settings(1)}, r"has version 1.*--fsdp_version 2, or unset ACC"),
        (
            "MULTI_GPU",
            {"parallelism_config": Settings(tp_enabled=True)},
            "tensor parallelism.*--parallelism_config_tp_size 1, or unset ACCELERATE_",
        ),
        ("XLA", {}, "does not run on XLA"),
        ("DEEPSPEED", {}, "brings an optimizer and an offload of its own"),
    ],
    ids=["fsdp1", "tensor-parallel", "xla", "deepspeed"],
)
def test_clear_refusal(
    monkeypatch: pytest.MonkeyPatch,
    accelerator: Accelerator,
    kind: str,
    attributes: dict[str, Any],
    message: str,
):
    pretend(monkeypatch, kind, **attributes)
    bare = make_optimizer(make_net())
    with pytest.raises(NotImplementedError, match=message):
        accelerator.prepare_optimizer(bare)
    assert not is_offloaded(bare)
