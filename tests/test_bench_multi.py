"""The benchmark of several GPUs at a tiny size on two CPU processes, its record and its tables."""

import json
import os
import subprocess
import sys
import time

import pytest
from benchmark_modules import BENCHMARKS, COMMIT, module

TINY = "--device cpu --params 60000 --hidden 32 --steps 2 --seq 32 --tokens 64 --train-steps 2"
TINY += f" --warmup 1 --chunk-size 64KiB --commit {COMMIT}"

bench_multi = module("bench_multi")
multi_parts = module("multi_parts")
multi_ranks = module("multi_ranks")
multi_tables = module("multi_tables")
train_plan = module("train_plan")


def run(*arguments):
    return subprocess.run(
        [sys.executable, BENCHMARKS / "bench_multi.py", *TINY.split(), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=200,
    )


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    out = tmp_path_factory.mktemp("results") / "record.json"
    done = run("--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text()), done.stdout


@pytest.fixture
def record(done):
    return json.loads(json.dumps(done[0]))


def test_every_part_and_mode_is_measured_on_every_rank(record):
    assert record["complete"]
    assert record["commit"] == COMMIT
    assert (record["device"], record["num_ranks"]) == ("2 x CPU", 2)
    assert [row["name"] for row in record["step"]] == [
        "none (control)",
        "none",
        "step+0",
        "step+50%",
    ]
    assert list(record["train"]) == ["DDP", "FSDP2"]
    for rows in record["train"].values():
        names = ["none (control)", "none", "step", "backward", "forward"]
        assert [row["name"] for row in rows] == names
    for rows in (record["step"], *record["train"].values()):
        for row in rows:
            assert row["outcome"] == "ok"
            assert [len(rank["step_s"]) for rank in row["ranks"]] == [2, 2]
            pairs = zip(*(rank["step_s"] for rank in row["ranks"]), strict=True)
            assert row["step_s"] == [max(pair) for pair in pairs]
            offloads = not row["name"].startswith("none")
            assert all((rank["host_bytes"] > 0) == offloads for rank in row["ranks"])
    assert {row["limit_s"] for row in record["step"]} == {None}  # a CPU has no link


def test_everything_has_the_bits_of_what_is_not_offloaded(record):
    for rows in (record["step"], *record["train"].values()):
        by_name = {row["name"]: row["equal"] for row in rows}
        assert by_name.pop("none") is None
        assert len(by_name) > 2
        assert all(by_name.values())


def test_gradients_are_counted_where_they_are(record):
    num_bytes = 4 * record["config"]["train"]["num_params"]
    ddp, fsdp2 = (
        [rank["gradients"]["all_bytes"] for rank in rows[3]["ranks"]]
        for rows in record["train"].values()
    )
    assert ddp == [num_bytes, num_bytes]
    assert sum(fsdp2) == num_bytes


def test_ranks_have_other_tokens_and_the_same_model(record):
    for kind, rows in record["train"].items():
        one, two = rows[1]["ranks"]
        assert one["losses"] != two["losses"]
        # A shard is another half of the parameters.
        assert (one["params_sha256"] == two["params_sha256"]) == (kind == "DDP")
    one, two = record["step"][1]["ranks"]
    assert one["params_checksum"] != two["params_checksum"]


def test_what_travels_is_all_or_what_does_not_stay(record):
    _, _, all_of_it, half = record["step"]
    for whole, part in zip(all_of_it["ranks"], half["ranks"], strict=True):
        assert whole["travelling_bytes"] == 8 * whole["num_params"]
        assert 0 < part["travelling_bytes"] <= whole["travelling_bytes"]


def test_other_bits_on_one_rank_are_seen(multi_tables, record):
    rows = record["train"]["DDP"]
    rows[3]["ranks"][1]["losses"][-1] += 1e-7
    rows[2]["ranks"][0]["params_sha256"] = "0"
    multi_tables.compare(rows)
    assert [row["equal"] for row in rows] == [True, None, False, False, True]
    record["step"][0]["ranks"][1]["params_checksum"] += 1
    multi_tables.compare(record["step"])
    assert [row["equal"] for row in record["step"]] == [False, None, True, True]
    assert "**A control differs.**" in multi_tables.caption(record)
    assert "**differ**" in multi_tables.markdown([("a.json", record)])


def test_tables_show_all_numbers_of_gpus_beside_each_other(multi_tables, record):
    fast = [{"h2d": [6e9], "d2h": [6e9], "duplex": [4e9, 5e9, 6e9]}] * 2
    slow = [{"h2d": [3e9], "d2h": [3e9], "duplex": [2e9]}, {"duplex": [2.5e9]}]
    record["probe"] |= {"alone": fast[:1], "together": slow}
    for rank in record["step"][2]["ranks"]:
        rank["travelling_bytes"] = 4_000_000_000
    record["step"][2]["median_step_s"] = 2.2
    assert multi_tables.limit_s(record, record["step"][2]) == 2.0
    other = json.loads(json.dumps(record)) | {"num_ranks": 1}
    text = multi_tables.markdown([("two.json", record), ("one.json", other)])
    row = "| 0.0 GB | 5.0 GB/s | 2.0 GB/s | 0 | 2.200 s | 2.000 s | 1.10 |"
    assert text.index(f"| 1 {row}") < text.index(f"| 2 {row}")
    assert "| 2 | FSDP2 | backward |" in text
    assert text.index("`benchmarks/results/one.json`") < text.index("`benchmarks/results/two.json`")


@pytest.fixture
def here(bench_multi, multi_ranks, monkeypatch):
    """One rank, which is this process."""

    class Here(multi_ranks.Here):
        def barrier(self):
            pass

    class Ranks(multi_ranks.Ranks):
        def __call__(self, limit_s, function, *args):
            here = Here(0, 1, multi_ranks.torch.device("cpu"))
            return [function(here, *args)]

    monkeypatch.setattr(bench_multi, "Ranks", Ranks)


def test_parts_and_budgets_are_chosen(bench_multi, here, tmp_path):
    out = tmp_path / "record.json"
    arguments = ["--parts", "step", "--budgets", "25%", "--ranks", "1", "--out", out]
    bench_multi.main([*TINY.split(), *map(str, arguments)])
    record = json.loads(out.read_text())
    assert not {"probe", "train"} & set(record)
    assert [row["name"] for row in record["step"]] == ["none (control)", "none", "step+25%"]
    assert record["step"][2]["settings"]["gpu_budget"] == "25%"
    assert record["step"][2]["equal"]


def test_without_time_the_rest_is_skipped_and_said(bench_multi, here, tmp_path, monkeypatch):
    out = tmp_path / "record.json"
    step, calls = bench_multi.multi_parts.step, []

    def slow(*args):
        calls.append(args)
        monkeypatch.setattr(bench_multi, "_LEAST_S", 1e9)  # as if time had passed
        return step(*args)

    monkeypatch.setattr(bench_multi.multi_parts, "step", slow)
    with pytest.raises(SystemExit, match="Not everything was measured"):
        bench_multi.main([*TINY.split(), "--parts", "step", "--ranks", "1", "--out", str(out)])
    record = json.loads(out.read_text())
    assert [row["outcome"] for row in record["step"]] == ["ok", "skipped", "skipped", "skipped"]
    assert "may take 300 s" in record["step"][-1]["reason"]
    assert len(calls) == 1


def fail_on_the_second(here):
    if here.rank == 1:
        raise ValueError("not here")
    here.barrier()


def take_long(here):
    time.sleep(60)


def who(here):
    here.barrier()
    return here.rank, here.num_ranks, here.device.type


def test_a_failure_or_a_hang_ends_all_ranks_in_time_and_the_next_call_works(multi_ranks):
    ranks = multi_ranks.Ranks(2, "cpu")
    try:
        began = time.monotonic()
        with pytest.raises(multi_ranks.RankError, match="rank 1: ValueError: not here"):
            ranks(60.0, fail_on_the_second)
        assert time.monotonic() - began < 40
        assert ranks(60.0, who) == [(0, 2, "cpu"), (1, 2, "cpu")]
        with pytest.raises(multi_ranks.RankError, match=r"ranks \[0, 1\] took over 1 s"):
            ranks(1.0, take_long)
    finally:
        ranks.stop()


def test_memory_grows_as_it_is_touched(multi_parts, multi_ranks, monkeypatch):
    """As on a virtual machine: 6 GiB more is there for each GiB that is used."""
    gib = 2**30
    used = []
    monkeypatch.setattr(multi_parts, "available_host_bytes", lambda: (8 + 5 * len(used)) * gib)
    monkeypatch.setattr(
        multi_parts.torch, "empty", lambda *_, **__: type("T", (), {"fill_": used.append})()
    )
    monkeypatch.setattr(multi_ranks.Here, "barrier", lambda self: None)
    here = multi_ranks.Here(0, 1, multi_parts.torch.device("cpu"))
    assert multi_parts.grow(here, 30 * gib) == 28 * gib
    assert len(used) == 4
    assert multi_parts.grow(here, 10 * gib) == 28 * gib


def test_parameters_are_as_many_as_fit_into_the_share_of_the_host(bench_multi, monkeypatch):
    args, plan, _ = bench_multi.parse(["--device", "cpu", "--params", "1e9", "--parts", "step"])
    monkeypatch.setenv("TORCH_OFFLOAD_COMMIT", COMMIT)
    bench = bench_multi.Bench(args, lambda text: None)
    monkeypatch.setattr(bench, "run", lambda *_: {"ranks": [10e9, 8e9], "wall_s": 0.0})
    bench.host_memory(plan)
    assert args.params == int(8e9 * 0.7) // (2 * 8)
    assert bench.record["host"]["wanted_bytes"] == int(2 * 8e9 / 0.7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cuda", "--ranks", "999"], "ranks=999, and there are"),
        (["--device", "cpu", "--budgets", "much"], "gpu_budget='much'"),
        (["--device", "cpu", "--modes", "sideways"], "modes='sideways' begins with no mode"),
        (["--device", "cpu", "--tokens", "100"], "tokens=100 is not a multiple"),
    ],
)
def test_wrong_arguments_are_refused(bench_multi, capsys, arguments, message):
    with pytest.raises(SystemExit):
        bench_multi.parse(arguments)
    assert message in capsys.readouterr().err
