"""A fresh run against committed records: ratios to the run's own probe, with made-up records."""

from __future__ import annotations

import copy
import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def check(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("bench_check")


def step_record(scale=1.0, step_s=0.8):
    """A link of 50 GB/s and 32 GB of state: the limit is 0.64 s."""
    return {
        "benchmark": "bench_step",
        "device": "Some GPU",
        "date": "2026-01-01T00:00:00+00:00",
        "state_bytes": 32 * 10**9,
        "duplex_bytes_per_s": [50e9 / scale] * 3,
        "config": {"num_params": 4 * 10**9},
        "variants": [
            {"name": "resident", "settings": {}, "step_s": [0.03]},
            {
                "name": "ours",
                "settings": {"chunk_size": 2**29, "num_slots": 3},
                "step_s": [step_s * scale] * 3,
            },
        ],
    }


def train_record(scale=1.0, **step_s):
    times = {"none": 1.0, "step": 1.6, "backward": 1.05, "none+clip": 1.01, "forward+clip": 1.3}
    times |= step_s
    modes = []
    for name, seconds in times.items():
        overlap = name.partition("+")[0]
        plain = overlap == "none"
        point = {
            "tokens": 16384,
            "outcome": "ok",
            "step_s": [seconds * scale] * 3,
            "forward_s": [0.25 * scale] * 3,
            "optimizer_s": [0.02 * scale] * 3,
            "stats": None if plain else {"h2d_bytes": 25 * 10**9, "resident_bytes": 0},
        }
        modes.append(
            {
                "name": name,
                "overlap": None if plain else overlap,
                "clip": "clip" in name,
                "control": False,
                "points": [point],
            }
        )
    return {
        "benchmark": "bench_train",
        "device": "Some GPU",
        "date": "2026-01-01T00:00:00+00:00",
        "state_bytes": 25 * 10**9,
        "link_bytes_per_s": {"duplex": [50e9 / scale] * 3},
        "config": {"num_params": 3_140_000_000, "sizes": {}},
        "modes": modes,
    }


def test_figures_are_times_over_what_the_probe_allows(check):
    (figure,) = check.figures(step_record())
    assert figure.ratio == pytest.approx(0.8 / 0.64)
    found = {f.name.partition(",")[0]: f.ratio for f in check.figures(train_record())}
    assert found == {
        "step": pytest.approx(1.6 / (1.0 - 0.02 + 0.5)),
        "backward": pytest.approx(1.05 / 1.0),
        "forward+clip": pytest.approx(1.3 / (1.01 - 0.25 + 0.5)),
    }


@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0])
def test_a_slower_machine_is_no_loss(check, scale):
    committed = [("a.json", step_record()), ("b.json", train_record())]
    found = check.compare([step_record(scale), train_record(scale)], committed)
    assert len(found) == 4
    assert not any(c.is_loss for c in found)
    assert all(c.growth == pytest.approx(0) for c in found)


def test_more_than_a_tenth_is_a_loss(check):
    committed = [("a.json", step_record()), ("b.json", train_record())]
    for fresh, lost in (
        (step_record(step_s=0.8 * 1.09), set()),
        (step_record(step_s=0.8 * 1.11), {"step alone"}),
        (train_record(backward=1.05 * 1.11), {"backward"}),
        (train_record(step=1.6 * 1.11, backward=0.9), {"step"}),
    ):
        found = check.compare([fresh], committed)
        assert {c.name.partition(",")[0] for c in found if c.is_loss} == lost


def test_a_faster_plain_step_is_no_excuse(check):
    """Offload that did not follow is a loss, though no time of its own grew."""
    fresh = train_record(**{"none": 0.8})
    found = check.compare([fresh], [("b.json", train_record())])
    assert {c.name.partition(",")[0] for c in found if c.is_loss} == {"step", "backward"}


def test_more_copies_are_no_excuse(check):
    """A step that copies its state twice takes as long as that, and is a loss."""
    fresh = train_record(step=1.6 + 0.5)
    for mode in fresh["modes"]:
        if mode["name"] == "step":
            mode["points"][0]["stats"]["h2d_bytes"] *= 2
    found = check.compare([fresh], [("b.json", train_record())])
    assert {c.name.partition(",")[0] for c in found if c.is_loss} == {"step"}


@pytest.mark.parametrize("name", ["backward", "none"])
def test_a_mode_that_ends_in_an_error_is_no_success(check, tmp_path, name):
    results = tmp_path / "results"
    results.mkdir()
    (results / "bench_train-some-gpu.json").write_text(json.dumps(train_record()))
    fresh = train_record()
    for mode in fresh["modes"]:
        if mode["name"] == name:
            mode["points"][0] = {"tokens": 16384, "outcome": "error", "reason": "ValueError: no"}
    path = tmp_path / "fresh.json"
    path.write_text(json.dumps(fresh))
    with pytest.raises(SystemExit, match=r"No figure where .*backward, .*error: ValueError: no"):
        check.main(["--results", str(results), "--fresh", str(path)])
    # A point that no committed record has may fail.
    for mode in fresh["modes"]:
        mode["points"][0]["tokens"] = 32768
    assert check.failures([fresh], [("a.json", train_record())]) == []


def test_the_newest_record_of_the_same_gpu_counts(check):
    old, new, other = step_record(), step_record(step_s=0.7), step_record(step_s=0.1)
    new["date"] = "2026-02-01T00:00:00+00:00"
    other |= {"date": "2026-03-01T00:00:00+00:00", "device": "Another GPU"}
    committed = [("new.json", new), ("old.json", old), ("other.json", other)]
    (found,) = check.compare([step_record()], committed)
    assert found.source == "new.json"
    assert found.is_loss


@pytest.mark.parametrize(
    "change",
    [
        {"device": "Another GPU"},
        {"config": {"num_params": 10**9}},
        {"duplex_bytes_per_s": []},
        {"variants": []},
    ],
)
def test_what_cannot_be_compared_is_no_success(check, change):
    with pytest.raises(ValueError, match="No committed record has the same figures"):
        check.compare([step_record() | change], [("a.json", step_record())])


def test_points_that_failed_are_left_out(check):
    fresh = train_record()
    for mode in fresh["modes"]:
        if mode["name"] in ("none", "forward+clip"):
            mode["points"][0] = {"tokens": 16384, "outcome": "error", "reason": ""}
    assert check.figures(fresh) == []


def test_the_command_fails_on_a_loss(check, tmp_path, capsys):
    results = tmp_path / "results"
    results.mkdir()
    (results / "bench_step-some-gpu.json").write_text(json.dumps(step_record()))
    fresh = tmp_path / "fresh.json"
    arguments = ["--results", str(results), "--fresh", str(fresh)]
    fresh.write_text(json.dumps(step_record(2.0)))
    check.main(arguments)
    assert "ok" in capsys.readouterr().out
    fresh.write_text(json.dumps(step_record(step_s=1.0)))
    with pytest.raises(SystemExit, match=r"More than 10% slower than committed: step alone.*25.0%"):
        check.main(arguments)


def test_committed_records_have_the_figures_that_are_run(check):
    records = check.committed_records(BENCHMARKS / "results")
    names = {figure.name for _, record in records for figure in check.figures(record)}
    assert "step alone, 4.0e9, 512 MiB x 3" in names
    for mode in ("step", "backward", "forward+clip"):
        assert f"{mode}, 3.14e9, 16384 tokens" in names
    _, newest = max(records, key=lambda pair: pair[1]["date"])
    again = copy.deepcopy(newest)
    assert all(c.growth == 0 for c in check.compare([again], records))


def test_what_is_run_is_what_the_benchmarks_take(check, monkeypatch):
    step, train = (check.RUNS[name].split() for name in ("bench_step.py", "bench_train.py"))
    args = importlib.import_module("bench_step").parse([*step, "--device", "cpu"])
    assert (args.chunk_size, args.num_slots) == (["512MiB"], [3])
    _, plan, modes = importlib.import_module("train_plan").parse([*train, "--device", "cpu"])
    assert plan.tokens == (16384,)
    assert [m.name for m in modes if m.overlap] == ["step", "backward", "forward+clip"]
