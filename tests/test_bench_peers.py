"""The benchmark of peers at a tiny size on the CPU: its record, its outcomes and its table."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time

import pytest
import torch
from benchmark_modules import BENCHMARKS, COMMIT, module

CPU = torch.device("cpu")
SMALL = "--device cpu --seq 16 --tokens 16 32 --steps 2 --warmup 1".split()

bench_peers = module("bench_peers")
measuring = module("measuring")
peers = module("peers")
peer_tables = module("peer_tables")
tables = module("tables")


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    out = tmp_path_factory.mktemp("results")
    ways = ["none", "step", "per-tensor", "fsdp2", "torchao"]
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "bench_peers.py", *SMALL, "--ways", *ways, "--out", out],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"TORCH_OFFLOAD_COMMIT": COMMIT},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.iterdir()
    return json.loads(path.read_text())


def way(record, label):
    (found,) = (m for m in record["modes"] if m["label"] == label)
    return found


def test_every_way_is_in_the_record(record):
    labels = [mode["label"] for mode in record["modes"]]
    assert labels == ["none (control)", "none", "step", "per-tensor", "fsdp2", "torchao"]
    assert record["complete"]
    assert record["commit"] == COMMIT
    assert {"torch", "torchao", "deepspeed", "bitsandbytes"} <= record["versions"].keys()
    for label in labels[:5]:
        points = way(record, label)["points"]
        assert [p["tokens"] for p in points] == [16, 32]
        for point in points:
            assert point["outcome"] == "ok"
            assert len(point["step_s"]) == 2
            assert point["median_step_s"] == statistics.median(point["step_s"])
            assert point["host_used_bytes"] >= 0


def test_each_way_does_the_same_work(record):
    assert record["deterministic"] is True
    plain = way(record, "none")["points"]
    assert plain[0]["losses"] != plain[1]["losses"]
    # FSDP2's CPU update is torch's own, as everything is on a CPU.
    for label in ("none (control)", "step", "per-tensor", "fsdp2"):
        for found, expected in zip(way(record, label)["points"], plain, strict=True):
            assert found["equal"] is True, label
            assert found["losses"] == expected["losses"]


def test_what_cannot_run_here_says_why(record):
    for point in way(record, "torchao")["points"]:
        assert point["outcome"] == "unsupported"
        assert point["reason"] == "torchao needs a GPU."


def test_table_has_every_way_and_every_reason(record, peer_tables):
    rows = peer_tables.rows(record)
    assert len(rows) == 2 * 6
    assert all(len(row) == len(peer_tables.HEADER) for row in rows)
    plain, ours = rows[1], rows[2]
    assert plain[-1] == "reference"
    point = way(record, "step")["points"][0]
    expected = point["median_step_s"] / way(record, "none")["points"][0]["median_step_s"]
    assert ours[3] == f"{expected:.2f}"
    assert ours[-1] == "equal"
    page = peer_tables.markdown(record, "some.json")
    assert "torchao needs a GPU" in page
    assert "parameters and gradients on the host too" in page
    assert "benchmarks/results/some.json" in page
    assert "The control has the bits" in page
    peer_tables.table(record)


def test_a_way_with_other_bits_shows(record, peer_tables):
    changed = json.loads(json.dumps(record))
    way(changed, "fsdp2")["points"][0]["equal"] = False
    assert peer_tables.rows(changed)[4][-1] == "differ"


def test_set_up_is_what_the_first_step_took_longer(peer_tables):
    mode = {"convert_s": 1.0}
    assert peer_tables.setup_s(mode, {"first_step_s": 3.0, "median_step_s": 1.0}) == 3.0
    assert peer_tables.setup_s(mode, {"first_step_s": 0.5, "median_step_s": 1.0}) == 1.0


def test_missing_packages_are_a_reason(bench_peers, peers, monkeypatch):
    _, plan, _ = bench_peers.parse([*SMALL, "--ways", "none"])
    mode = bench_peers.way_of("deepspeed")
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    try:
        result = bench_peers.measure_here(plan, mode, CPU)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
    assert [p["outcome"] for p in result["points"]] == ["unsupported"] * 2
    assert "deepspeed cannot be imported: ModuleNotFoundError" in result["points"][0]["reason"]


def test_a_scheme_that_is_wrong_has_other_bits(bench_peers, peers, measuring, monkeypatch):
    from bench_train import measure_mode

    _, plan, _ = bench_peers.parse([*SMALL, "--ways", "none"])
    run = lambda: measure_mode(  # noqa: E731
        plan, bench_peers.way_of("per-tensor"), CPU, measuring.Hash(CPU), print, peers.PerTensor
    )
    right = run()["points"][0]["params_sha256"]
    assert run()["points"][0]["params_sha256"] == right
    monkeypatch.setattr(peers.ChunkedPerTensor, "step", lambda self: None)
    assert run()["points"][0]["params_sha256"] != right


def test_a_process_that_dies_or_hangs_is_an_outcome(bench_peers, monkeypatch, tmp_path):
    _, plan, _ = bench_peers.parse(SMALL)
    mode = bench_peers.way_of("torchao")
    script = tmp_path / "script.py"
    monkeypatch.setattr(bench_peers, "__file__", str(script))
    script.write_text("import sys; print('first'); sys.exit('no such kernel')")
    result = bench_peers.measure_apart(mode, plan, [], tmp_path, 60)
    assert {p["outcome"] for p in result["points"]} == {"error"}
    assert result["points"][0]["reason"] == "The process ended with 1: no such kernel"
    # A child of its own would go on, as a compiler does.
    late = tmp_path / "late"
    child = f"import time; time.sleep(4); open({str(late)!r}, 'w')"
    script.write_text(
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}])\ntime.sleep(60)"
    )
    began = time.perf_counter()
    result = bench_peers.measure_apart(mode, plan, [], tmp_path, 2)
    assert time.perf_counter() - began < 30
    assert result["points"][0]["outcome"] == "skipped"
    assert result["points"][0]["reason"] == "It took more than 2 s."
    time.sleep(5)
    assert not late.exists()


def test_what_the_time_does_not_reach_is_skipped(bench_peers, monkeypatch, tmp_path):
    out = tmp_path / "record.json"
    monkeypatch.setenv("TORCH_OFFLOAD_COMMIT", COMMIT)
    clock = iter(range(0, 10_000, 100))
    monkeypatch.setattr(bench_peers.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(
        bench_peers,
        "measure_apart",
        lambda mode, plan, *_: bench_peers._nothing(plan, mode, "error", "made up"),
    )
    bench_peers.main([*SMALL, "--ways", "none", "per-tensor", "--limit", "250", "--out", str(out)])
    record = json.loads(out.read_text())
    outcomes = [mode["points"][0]["outcome"] for mode in record["modes"]]
    assert outcomes[0] == "error"
    assert outcomes[-1] == "skipped"
    assert "limit=250 s had passed" in record["modes"][-1]["points"][0]["reason"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--tokens 100 --seq 32", "tokens=100 is not a multiple of seq=32. Use 96"),
        ("--params 5e9", "params='5e9' is no preset"),
        ("--ways megatron", "ways='megatron' is not known. Use none, step"),
        ("--steps 0", "steps=0 is too small"),
    ],
)
def test_wrong_arguments_are_refused_with_a_remedy(bench_peers, capsys, arguments, message):
    with pytest.raises(SystemExit):
        bench_peers.parse([*arguments.split(), "--device", "cpu"])
    assert message in capsys.readouterr().err


def test_readme_gets_the_newest_record(record, tables, monkeypatch, tmp_path):
    readme = tmp_path / "README.md"
    text = [tables.BEGIN, tables.END, tables.PEERS_BEGIN, tables.PEERS_END]
    readme.write_text("\n".join(text) + "\n")
    results = tmp_path / "results"
    results.mkdir()
    arguments = ["tables.py", "--readme", str(readme), "--results", str(results)]
    monkeypatch.setattr(sys, "argv", arguments)
    tables.main()
    assert "`make bench-peers`" in readme.read_text()
    made_up = record | {"device": "Some GPU", "device_type": "cuda"}
    (results / "bench_peers-some.json").write_text(json.dumps(made_up))
    tables.main()
    assert "DeepSpeed" not in readme.read_text()
    assert "FSDP2 CPUOffloadPolicy" in readme.read_text()
