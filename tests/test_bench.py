"""The benchmark at a tiny size on the CPU, its record, and the table that is made from records."""

import importlib
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("bench_step")


@pytest.fixture
def record_module(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("record")


def script(name, *arguments, **env):
    return subprocess.run(
        [sys.executable, BENCHMARKS / name, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | env,
    )


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    out = tmp_path_factory.mktemp("results")
    arguments = ["--device", "cpu", "--params", "60000", "--hidden", "32", "--steps", "3"]
    arguments += ["--chunk-size", "32KiB", "1MiB", "--reference-chunk-size", "64KiB"]
    done = script("bench_step.py", *arguments, "--out", out, TORCH_OFFLOAD_COMMIT=COMMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.iterdir()
    return json.loads(path.read_text())


def test_record_has_raw_samples_of_every_scheme(record):
    names = [variant["name"] for variant in record["variants"]]
    assert names == ["resident", "move-all", "per-tensor", "ours", "ours"]
    for variant in record["variants"]:
        assert len(variant["step_s"]) == record["config"]["steps"] == 3
        assert min(variant["step_s"]) > 0
        assert variant["median_step_s"] == statistics.median(variant["step_s"])
    assert record["commit"] == COMMIT
    assert record["state_bytes"] == 8 * record["config"]["num_params"]
    assert record["versions"]["torch"]


def test_record_says_what_ours_was_run_with_and_moved(record):
    one, two = (variant for variant in record["variants"] if variant["name"] == "ours")
    assert [v["settings"]["chunk_size"] for v in (one, two)] == [32 * 2**10, 2**20]
    assert one["stats"]["num_chunks"] > two["stats"]["num_chunks"] == 1


def test_every_scheme_ends_with_the_bits_of_resident_state(record):
    assert record["check"]["equal"]
    assert len(record["check"]["differing"]) == 5
    assert len({variant["params_checksum"] for variant in record["variants"]}) == 1


def test_case_has_the_parameters_that_were_asked_for(bench):
    for num_params in (1, 31, 32, 5000, 60000, 60001):
        case = bench.Case(num_params, 32, bench.torch.device("cpu"))
        assert num_params - 32 < case.num_params <= num_params
        assert all(p.grad is not None for p in case.params)


@pytest.mark.parametrize(
    ("scheme", "broken", "name"),
    [
        ("MoveAll", lambda self: None, "param"),
        ("Resident", lambda self: self.optimizer.step() or self.optimizer.step(), "step"),
    ],
)
def test_the_bit_check_sees_a_scheme_that_is_wrong(bench, monkeypatch, scheme, broken, name):
    class Broken(getattr(bench, scheme)):
        step = broken

    monkeypatch.setattr(bench, scheme, Broken)
    configs = [bench.OffloadConfig(chunk_size="32KiB")]
    check = bench.check_bits(configs, 20000, 32, bench.torch.device("cpu"))
    assert not check["equal"]
    assert any(name in names for names in check["differing"].values())


def test_commit_is_read_from_git_or_refused(record_module, monkeypatch, tmp_path):
    monkeypatch.delenv("TORCH_OFFLOAD_COMMIT", raising=False)
    monkeypatch.setattr(record_module, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match="Set TORCH_OFFLOAD_COMMIT"):
        record_module.commit()

    def git(*arguments):
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.com"]
        subprocess.run(["git", "-C", tmp_path, *identity, *arguments], check=True)

    git("init", "-q")
    with pytest.raises(SystemExit, match="Set TORCH_OFFLOAD_COMMIT"):
        record_module.commit()
    (tmp_path / "code.py").write_text("1\n")
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    git("add", ".")
    git("commit", "-q", "-m", "m", "--no-verify")
    head = record_module.commit()
    assert len(head) == 40
    (tmp_path / "benchmarks" / "results" / "new.json").write_text("{}")
    assert record_module.commit() == head
    (tmp_path / "code.py").write_text("2\n")
    assert record_module.commit() == head + "+dirty"


@pytest.mark.parametrize("commit", ["unknown", "main", "0123456-dirty"])
def test_a_commit_that_is_none_is_refused(record_module, monkeypatch, commit):
    monkeypatch.setenv("TORCH_OFFLOAD_COMMIT", commit)
    with pytest.raises(SystemExit, match="is not a commit"):
        record_module.commit()


@pytest.fixture
def gpu_record(record):
    """The CPU's record with the figures that only a GPU has."""
    changed = json.loads(json.dumps(record))
    changed |= {"device": "Some GPU", "device_type": "cuda", "driver": "1.2", "torch_pin_s": 2.0}
    changed |= {"duplex_bytes_per_s": [4e9, 5e9, 6e9], "limit_s": 0.5}
    for variant in changed["variants"]:
        variant["step_s"] = [0.6, 0.55, 0.7]
        for key in ("peak_allocated_bytes", "first_step_peak_allocated_bytes"):
            variant[key] = 3 * 2**30
        if variant["name"] != "resident":
            variant["pinned_bytes"] = 2**30
    return changed


@pytest.fixture
def published(gpu_record, tmp_path):
    """A README with the table of one record; returns the arguments that name both."""
    results = tmp_path / "results"
    results.mkdir()
    (results / "bench_step-some-gpu-1.json").write_text(json.dumps(gpu_record))
    readme = tmp_path / "README.md"
    markers = "<!-- bench_step:start -->\n<!-- bench_step:end -->"
    readme.write_text(f"above\n{markers}\nbelow\n")
    arguments = ("--readme", readme, "--results", results)
    assert script("tables.py", *arguments).returncode == 0
    return readme, results, arguments


def test_table_is_made_from_the_record(published):
    readme, _, arguments = published
    text = readme.read_text()
    assert text.startswith("above\n<!-- bench_step:start -->\n")
    assert text.endswith("\n<!-- bench_step:end -->\nbelow\n")
    assert "| limit: copies alone, 5.0 GB/s each way | 0.500 s |" in text
    row = (
        "| **torch_offload**, 32 KiB chunks, 3 slots | 0.600 s | 0.550 to 0.700 | 1.20 | 3.0 GiB |"
    )
    assert row in text
    assert "commit 0123456789. " in text
    assert "`benchmarks/results/bench_step-some-gpu-1.json`" in text
    assert script("tables.py", "--check", *arguments).returncode == 0


def test_check_sees_an_edited_number(published):
    readme, _, arguments = published
    readme.write_text(readme.read_text().replace("| 0.600 s |", "| 0.500 s |"))
    done = script("tables.py", "--check", *arguments)
    assert done.returncode == 1
    assert "does not show the newest record" in done.stderr


def test_check_sees_a_newer_record_but_not_an_older_or_a_cpu_one(published, gpu_record, record):
    _, results, arguments = published
    for name, other in (
        ("bench_step-old.json", gpu_record | {"date": "2000-01-01T00:00:00+00:00"}),
        ("bench_step-cpu.json", record | {"date": "2999-01-01T00:00:00+00:00"}),
    ):
        (results / name).write_text(json.dumps(other))
        assert script("tables.py", "--check", *arguments).returncode == 0
    newer = gpu_record | {"date": "2999-01-01T00:00:00+00:00", "limit_s": 0.25}
    (results / "bench_step-new.json").write_text(json.dumps(newer))
    assert script("tables.py", "--check", *arguments).returncode == 1


def test_a_dirty_tree_stays_visible(monkeypatch, gpu_record):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    tables = importlib.import_module("tables")
    assert "commit 5d76f33+dirty. " in tables.caption(gpu_record | {"commit": "5d76f33+dirty"})


def test_a_scheme_with_other_bits_is_called_out(monkeypatch, gpu_record):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    tables = importlib.import_module("tables")
    assert "the same in all rows" in tables.caption(gpu_record)
    gpu_record["variants"][2]["params_checksum"] += 1
    assert "**NOT the same in all rows**" in tables.caption(gpu_record)


def test_markers_are_required(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("no markers\n")
    done = script("tables.py", "--check", "--readme", readme)
    assert done.returncode == 1
    assert "<!-- bench_step:start -->" in done.stderr


def test_readme_shows_the_newest_record():
    done = script("tables.py", "--check")
    assert done.returncode == 0, done.stderr
