"""The demo: it runs, and it fails when an offloaded run is not what it claims to be."""

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
LOSS = 2.25


@pytest.fixture
def demo(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("demo")


def run_demo(*arguments, **env):
    return subprocess.run(
        [sys.executable, EXAMPLES / "demo.py", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | env,
    )


def agreeing_reports(demo):
    return {
        run: {
            "optimizer": "OffloadedAdamW" if run.offloaded else "AdamW",
            "losses": [5.5, LOSS],
            "params_checksum": -7,
            "state_gpu_bytes": 0 if run.offloaded else 8000,
            "state_host_bytes": 8000 if run.offloaded else 0,
        }
        for run in demo.runs()
    }


def test_agreeing_runs_have_no_problems(demo):
    assert demo.problems(agreeing_reports(demo)) == []


@pytest.mark.parametrize("name", ["Lightning, offloaded", "Accelerate, offloaded"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"losses": [5.5, math.nextafter(LOSS, 3)]}, "the loss of step 1 is 2.25000"),
        ({"losses": [5.5]}, "the loss of step 1 is None, plain it is 2.25"),
        ({"losses": [5.5, math.nan]}, "the loss of step 1 is nan"),
        ({"params_checksum": -8}, "the parameters differ at the end"),
        ({"optimizer": "AdamW"}, "the optimizer was a AdamW"),
        ({"state_gpu_bytes": 4000}, "4000 bytes of state on the GPU"),
    ],
)
def test_an_offloaded_run_that_is_not_the_plain_one_is_named(demo, name, change, message):
    reports = agreeing_reports(demo)
    run = next(run for run in reports if run.name == name)
    reports[run] |= change
    (problem,) = demo.problems(reports)
    assert problem.startswith(f"{name}: ")
    assert message in problem


def test_frameworks_are_not_compared_with_each_other(demo):
    reports = agreeing_reports(demo)
    for run, report in reports.items():
        if run.framework == "Accelerate":
            report["losses"] = [5.5, 2.0]
    assert demo.problems(reports) == []


def test_unknown_size_is_refused():
    done = run_demo("--size", "12")
    assert done.returncode == 1
    assert "SIZE=12: there is no such size. Use one of tiny, small," in done.stderr


def test_size_for_a_gpu_is_refused_without_one():
    done = run_demo("--size", "1b", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert "SIZE=1b needs a GPU with 24 GiB" in done.stderr


@pytest.mark.slow
def test_four_runs_agree(tmp_path):
    done = run_demo("--size", "tiny", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All four runs agree to the last bit: 6 losses and every parameter." in done.stdout
    reports = {path.stem: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert {name: report["optimizer"] for name, report in reports.items()} == {
        "lightning-plain": "AdamW",
        "lightning-offloaded": "OffloadedAdamW",
        "accelerate-plain": "AdamW",
        "accelerate-offloaded": "OffloadedAdamW",
    }


@pytest.mark.slow
def test_a_run_that_fails_fails_the_demo(tmp_path):
    done = run_demo("--size", "tiny", "--out", str(tmp_path), TORCH_OFFLOAD_AUTOLOAD="0")
    assert done.returncode == 1
    assert "Lightning, offloaded: `python train_lightning.py" in done.stderr
    assert "agree" not in done.stdout
