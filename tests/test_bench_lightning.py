"""The benchmarks of Lightning's Trainer and of the CPU's time, tiny and on the CPU."""

import json
import os
import subprocess
import sys

from benchmark_modules import BENCHMARKS, COMMIT


def run(name, out, *arguments):
    done = subprocess.run(
        [sys.executable, BENCHMARKS / name, "--device", "cpu", "--out", out, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"TORCH_OFFLOAD_COMMIT": COMMIT},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


def test_trainer_has_the_bits_of_plain(tmp_path):
    record = run("bench_lightning.py", tmp_path / "record.json", "--steps", "2")
    assert record["complete"]
    assert record["commit"] == COMMIT
    plain, control, ours = record["ways"]
    assert control["equal"]
    assert ours["equal"]
    assert ours["losses"] == plain["losses"]
    assert len(ours["losses"]) == 5
    assert ours["overlap"] == "backward"
    assert plain["overlap"] is None
    assert max(plain["of_plain"], control["of_plain"]) == 1


def test_overhead_is_that_of_a_mode_beyond_step(tmp_path):
    arguments = ("--params", "20", "--steps", "2", "--rounds", "2")
    record = run("bench_overhead.py", tmp_path / "record.json", *arguments)
    medians = record["median_seconds_per_param"]
    assert list(medians) == ["none", "step", "backward", "forward"]
    assert all(len(samples) == 4 for samples in record["seconds_per_param"].values())
    for mode, seconds in record["seconds_per_param_beyond_step"].items():
        assert seconds == medians[mode] - medians["step"]
