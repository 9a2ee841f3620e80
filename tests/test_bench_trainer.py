"""The benchmark of transformers' Trainer: what it runs, and that it notices another result."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
TINY = ["--size", "tiny", "--batch", "2", "--length", "16", "--chunk_size", "16KiB"]
TINY += ["--steps", "5", "--first_timed", "3", "--save_at", "2"]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import bench_trainer

    return bench_trainer


@pytest.mark.exhaustive
def test_all_runs_have_the_bits_of_plain(tmp_path: Path):
    out = tmp_path / "record.json"
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "bench_trainer.py", *TINY, "--out", out],
        capture_output=True,
        text=True,
        env={**os.environ, "TORCH_OFFLOAD_COMMIT": "0123456789abcdef"},
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    record = json.loads(out.read_text())
    assert record["complete"] is True
    names = [run["name"] for run in record["runs"]]
    assert names == ["plain", "plain again", "step", "auto", "auto, resumed"]
    assert [run["equal"] for run in record["runs"]] == [True] * 5
    assert [len(run["losses"]) for run in record["runs"]] == [5, 5, 5, 5, 3]
    said = [" ".join(run["said"]) for run in record["runs"]]
    assert ["offload is active" in text for text in said] == [False, False, True, True, True]
    assert ["goes on with 'forward'" in text for text in said] == [False] * 3 + [True] * 2
    assert {"accelerate", "transformers", "torch"} <= record["versions"].keys()
    assert "auto, resumed" in done.stdout


def test_another_result_is_noticed(bench: Any):
    good = {"outcome": "ok", "losses": [3.0, 2.0, 1.0], "params_sha256": "a"}
    resumed = {**good, "losses": [2.0, 1.0]}
    others = [
        {**good, "losses": [3.0, 2.0, 1.5]},
        {**good, "params_sha256": "b"},
        {**resumed, "losses": [3.0, 2.0]},
        {**good, "losses": []},
        {"outcome": "error"},
    ]
    runs = copy.deepcopy([good, good, resumed, *others])
    bench.compare(runs)
    assert [run["equal"] for run in runs] == [True] * 3 + [False] * 4 + [None]


def test_the_shim_stands_for_the_flag_where_there_is_no_entry_point(
    bench: Any, monkeypatch: pytest.MonkeyPatch
):
    run = bench.Run("auto", "auto")
    monkeypatch.setattr(bench, "way", lambda: "--offload_optimizer")
    flag = bench.command(run, ["--out", "x"], "1MiB")
    monkeypatch.setattr(bench, "way", lambda: "-m accelerate_offload")
    shim = bench.command(run, ["--out", "x"], "1MiB")
    fields = ["--offload_overlap", "auto", "--offload_chunk_size", "1MiB"]
    script = [str(bench.SCRIPT), "--out", "x"]
    assert flag[-8:] == ["--offload_optimizer", *fields, *script]
    assert shim[-9:] == ["-m", "accelerate_offload", *fields, *script]
    plain = bench.command(bench.Run("plain"), [], None)
    assert not {"--offload_optimizer", "accelerate_offload"} & set(plain)


def test_saving_must_not_be_timed(bench: Any, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        bench.parse(["--save_at", "6", "--first_timed", "6"])
    assert "--save_at=6 --first_timed=6 --steps=12" in capsys.readouterr().err
