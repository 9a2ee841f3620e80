"""The training benchmark at a tiny size on the CPU, its record, and the timeline's picture."""

import dataclasses
import json
import math
import os
import re
import statistics
import subprocess
import sys
import weakref
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from benchmark_modules import BENCHMARKS, COMMIT, module

CPU = torch.device("cpu")

bench_train = module("bench_train")
live_gradients = module("live_gradients")
measuring = module("measuring")
timeline_plot = module("timeline_plot")
train_modes = module("train_modes")
train_plan = module("train_plan")
train_tables = module("train_tables")
transformer = module("transformer")


@pytest.fixture
def plan(train_plan):
    _, plan, _ = train_plan.parse(
        "--device cpu --seq 16 --tokens 32 64 --steps 2 --warmup 1".split()
    )
    return dataclasses.replace(plan, sizes={"chunk_size": "64KiB"})


@pytest.fixture
def measure(bench_train, measuring, train_modes, plan):
    """Measure one mode in this process."""

    def measure(mode, plan=plan):
        return bench_train.measure_mode(
            plan, train_modes.parse_mode(mode), CPU, measuring.Hash(CPU), lambda _: 0
        )

    return measure


def run(*arguments):
    return subprocess.run(
        [sys.executable, BENCHMARKS / "bench_train.py", "--device", "cpu", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"COLUMNS": "200"},
    )


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    out = tmp_path_factory.mktemp("results") / "record.json"
    arguments = ["--seq", 32, "--tokens", 128, 64, "--modes", "none", "step", "step+clip"]
    arguments += ["none+clip", "--steps", 3, "--chunk-size", "64KiB", "--accumulation", 2]
    done = run(*arguments, "--commit", COMMIT, "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text()), done.stdout


@pytest.fixture
def record(done):
    return json.loads(json.dumps(done[0]))


def points(record, name):
    return next(m["points"] for m in record["modes"] if m["label"] == name)


def test_offloaded_modes_have_the_losses_and_parameters_of_plain_ones(record):
    assert record["deterministic"]
    for name, reference in (("none (control)", "none"), ("step", "none"), ("step+clip", None)):
        for point, plain in zip(
            points(record, name), points(record, reference or "none+clip"), strict=True
        ):
            assert point["equal"]
            assert point["losses"] == plain["losses"]
            assert point["params_sha256"] == plain["params_sha256"]
    assert points(record, "step")[0]["losses"] != points(record, "step+clip")[0]["losses"]


def test_record_has_raw_samples_of_every_mode_and_size(record):
    assert record["complete"]
    assert record["commit"] == COMMIT
    assert record["state_bytes"] == 8 * record["config"]["num_params"]
    assert record["config"]["preset"] == "1e5"
    assert record["config"]["tokens"] == [64, 128]
    labels = [mode["label"] for mode in record["modes"]]
    assert labels == ["none (control)", "none", "step", "step+clip", "none+clip"]
    for mode in record["modes"]:
        assert [point["tokens"] for point in mode["points"]] == [64, 128]
        for point in mode["points"]:
            assert point["outcome"] == "ok"
            assert len(point["losses"]) == 2 + 3
            assert all(math.isfinite(loss) for loss in point["losses"])
            assert len(point["step_s"]) == 3
            assert point["median_step_s"] == statistics.median(point["step_s"])
            laps = [point[f"{n}_s"] for n in ("forward", "backward", "clip", "optimizer")]
            for step_s, *parts in zip(point["step_s"], *laps, strict=True):
                assert sum(parts) == pytest.approx(step_s)
                assert (parts[2] > 0) == mode["clip"]
            assert point["tokens_per_s"] == 3 * point["tokens"] / point["block_s"]
            assert (point["host_bytes"] > 0) == (mode["overlap"] is not None)
    assert points(record, "step")[0]["stats"]["num_chunks"] > 3


def test_table_shows_every_point(train_tables, done, record):
    rows = train_tables.rows(record)
    assert [row[:2] for row in rows] == [
        (str(tokens), mode["label"]) for tokens in (64, 128) for mode in record["modes"]
    ]
    equal = [row[-1] for row in rows[:5]]
    assert equal == ["yes", "reference", "yes", "yes", "reference"]
    assert "The control has the bits of its reference." in " ".join(done[1].split())
    assert "step+clip, 128 tokens: " in done[1]


def test_other_bits_and_missing_references_are_told_apart(train_tables, record):
    points(record, "step")[1]["params_sha256"] = "0"
    points(record, "none+clip")[0]["outcome"] = "out of memory"
    assert train_tables.compare(record["modes"])
    assert [p["equal"] for p in points(record, "step")] == [True, False]
    assert [p["equal"] for p in points(record, "step+clip")] == [None, True]
    points(record, "none (control)")[0]["losses"][-1] += 1e-7
    assert train_tables.compare(record["modes"]) is False
    assert "not deterministic" in train_tables.caption(record | {"deterministic": False})


def test_bound_of_backward_mode_is_forward_and_the_copies(train_tables, record):
    bounds = train_tables.bounds(record["modes"], 10**9, 4e9)
    assert [bound["tokens"] for bound in bounds] == [64, 128]
    forward_s = points(record, "none")[1]["median_forward_s"]
    assert bounds[1]["backward_s"] == forward_s + 0.25
    assert train_tables.bounds(record["modes"], 10**9, None) == []
    rows = train_tables.rows(record | {"bounds": bounds})
    assert rows[5][1:3] == ("bound of backward", f"{bounds[0]['backward_s']:.3f} s")


def test_presets_have_the_parameters_of_their_names(transformer):
    for name, size in transformer.SIZES.items():
        assert abs(transformer.num_params(size) / float(name) - 1) < 0.03, name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--tokens 100 --seq 32", "tokens=100 is not a multiple of .* = 32. Use 96"),
        ("--tokens 64 --seq 32 --accumulation 4", "tokens=64 .* = 128. Use 128"),
        ("--steps 0", "steps=0 is too small. Use 1 or more"),
        ("--params 5e9", "params='5e9' is no preset. Use one of 1e5, 0.3e9, 1e9, 3.1e9, 7e9"),
        ("--params many", "params='many' is no preset"),
        ("--modes during", "modes='during' begins with no mode. Use none, step"),
        ("--modes step+half", "'half', which is no budget. Use"),
        ("--modes none+50%", r"modes='none\+50%' has a budget, but offloads nothing"),
        ("--modes step+clip+clip", "says the same thing twice"),
        ("--modes step+50%+1GiB", "says the same thing twice"),
        ("--modes step+50%+clip step+clip+50%", "twice. Give it once"),
        ("--num-slots 1", "num_slots=1 leaves no second buffer"),
        ("--timeline a.svg", "timeline='a.svg' is no PNG. Give a name"),
    ],
)
def test_wrong_arguments_are_refused_with_a_remedy(train_plan, capsys, arguments, message):
    with pytest.raises(SystemExit):
        train_plan.parse(["--device", "cpu", *arguments.split()])
    error = capsys.readouterr().err
    assert re.search(message, error), error


def test_modes_are_read(train_modes):
    mode = train_modes.parse_mode("forward+50%+clip")
    assert (mode.name, mode.overlap, mode.budget) == ("forward+clip+50%", "forward", "50%")
    assert mode.clip
    assert mode.reference == "none+clip"
    assert train_modes.parse_mode("none").overlap is None
    assert train_modes.parse_mode("backward+8GiB").budget == "8GiB"


def test_the_first_plain_mode_is_run_twice(train_modes):
    modes = [train_modes.parse_mode(name) for name in ("step+clip", "none+clip", "none")]
    labels = [mode.label for mode in train_modes.with_control(modes)]
    assert labels == ["none+clip (control)", "step+clip", "none+clip", "none"]
    assert train_modes.with_control(modes[:1]) == modes[:1]


@dataclasses.dataclass
class Config:
    """A config that has the fields of every mode."""

    chunk_size: str = "1MiB"
    overlap: str = "step"
    gpu_budget: str | None = None
    given: dict = dataclasses.field(default_factory=dict)


def test_config_is_given_only_what_differs_from_its_defaults(bench_train, train_modes):
    class Recorded(Config):
        def __init__(self, **given):
            super().__init__()
            self.given = given

    def given(name):
        return bench_train.make_config(
            train_modes.parse_mode(name), {"chunk_size": 1}, Recorded
        ).given

    assert given("step") == {"chunk_size": 1}
    assert given("backward") == {"chunk_size": 1, "overlap": "backward"}
    assert given("step+clip+50%") == {"chunk_size": 1, "gpu_budget": "50%"}


def test_a_mode_without_its_field_is_unsupported_and_the_run_goes_on(
    bench_train, measure, monkeypatch
):
    @dataclasses.dataclass
    class Old:
        chunk_size: str = "1MiB"

    old = bench_train.make_config
    monkeypatch.setattr(bench_train, "make_config", lambda mode, sizes: old(mode, sizes, Old))
    for name, field in (("backward", "overlap"), ("step+50%", "gpu_budget")):
        for point in measure(name)["points"]:
            assert point["outcome"] == "unsupported"
            assert f"no field '{field}'" in point["reason"]


def test_the_model_and_the_last_micro_batch_are_handed_over(
    bench_train, measure, plan, monkeypatch
):
    seen = []

    def offload(optimizer, config, model=None):
        seen.append((config.overlap, type(model).__name__))
        return bench_train.torch_offload.offload(optimizer)

    @contextmanager
    def last_microbatch(optimizer):
        seen.append("last")
        yield

    monkeypatch.setattr(bench_train, "offload", offload)
    monkeypatch.setattr(bench_train, "make_config", lambda mode, _: Config(overlap=mode.overlap))
    monkeypatch.setattr(
        bench_train.torch_offload, "last_microbatch", last_microbatch, raising=False
    )
    twice = dataclasses.replace(plan, accumulation=2)
    result = measure("backward", twice)
    assert [point["outcome"] for point in result["points"]] == ["ok", "ok"]
    assert seen == [("backward", "Transformer"), *["last"] * 6]
    seen.clear()
    measure("step", twice)
    assert seen == [("step", "NoneType")]


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (torch.OutOfMemoryError("no room"), "out of memory"),
        (MemoryError("no room"), "out of memory"),
        (NotImplementedError("no room"), "unsupported"),
        (RuntimeError("no room"), "error"),
    ],
)
def test_what_goes_wrong_is_the_outcome_of_its_point(
    bench_train, measure, monkeypatch, error, outcome
):
    step, steps = bench_train.Training.step, []

    def failing(self, batch, laps):
        steps.append(batch)
        if len(steps) == 5:  # the second step of the second size
            raise error
        return step(self, batch, laps)

    monkeypatch.setattr(bench_train.Training, "step", failing)
    one, two = measure("none")["points"]
    assert (one["outcome"], two["outcome"]) == ("ok", outcome)
    assert "no room" in two["reason"]


def test_after_a_failure_larger_sizes_are_not_tried_and_the_model_is_freed(
    bench_train, measure, monkeypatch
):
    models = []

    def fail(self, tokens, hashed):
        models.append(weakref.ref(self.model))
        return 1 // 0

    monkeypatch.setattr(bench_train.Training, "measure", fail)
    one, two = measure("step")["points"]
    assert len(models) == 1
    assert models[0]() is None
    assert one["outcome"] == "error"
    assert one["reason"].startswith("ZeroDivisionError: ")
    assert two == {
        "tokens": 64,
        "outcome": "skipped",
        "reason": "The mode ended with 32 tokens.",
    }


def test_modes_that_cannot_fit_are_known_beforehand(train_modes, train_plan):
    arguments = "--device cpu --params 7e9 --tokens 16384"
    _, plan, _ = train_plan.parse(arguments.split())
    none, step, backward = (
        plan.least_bytes(train_modes.parse_mode(name), 16384) / plan.num_params
        for name in ("none", "step", "backward")
    )
    assert (none, step) == (16, 8)
    assert 4 < backward < 8


def test_hash_sees_every_byte(measuring, monkeypatch):
    monkeypatch.setattr(measuring.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(measuring, "_PIECE_BYTES", 100)
    hashed = measuring.Hash(CPU)
    tensors = [torch.arange(60.0).view(6, 10), torch.zeros(3)]
    expected = hashed(tensors)
    assert len(expected) == 64
    assert hashed([t.clone() for t in tensors]) == expected
    for tensor, index in ((tensors[0], (5, 9)), (tensors[1], 0)):
        old = tensor[index].item()
        tensor[index] = -0.0 if old == 0 else -old
        assert hashed(tensors) != expected
        tensor[index] = old
    assert hashed(tensors) == expected


def test_lanes_are_those_of_the_library(timeline_plot, measure, plan, monkeypatch):
    drawn = {}

    def plot(lanes, path, title):
        drawn[path.name] = lanes, title

    monkeypatch.setattr(timeline_plot, "plot", plot)
    plan = dataclasses.replace(plan, tokens=(32,), timeline=Path("folder/step.png"))
    point = measure("none+clip", plan)["points"][0]
    lanes, title = drawn["step-none+clip-32.png"]
    assert title == "none+clip, 32 tokens"
    assert lanes == point["lanes"]
    assert {name: len(spans) for name, spans in lanes.items()} == {"compute": 2}
    point = measure("step", plan)["points"][0]
    lanes = point["lanes"]
    assert len(lanes["compute"]) == 2
    assert len(lanes["h2d"]) == len(lanes["step"]) == len(lanes["d2h"]) > 0
    two = measure("forward", plan)["points"][0]["lanes"]  # what one step leaves is in the next
    assert len(two["compute"]) == 4
    assert len(two["step"]) == 2 * len(lanes["step"])


def test_timeline_is_a_picture(timeline_plot, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "new" / "step.png"
    lanes = {"h2d": [(0.0, 0.2), (0.2, 0.5)], "step": [(0.2, 0.3)], "compute": [(0.0, 0.4)]}
    timeline_plot.plot(lanes, path, "backward, 16384 tokens")
    pixels = image.imread(path)
    assert pixels.shape[0] > 200
    assert pixels.shape[1] > 800
    colors = {tuple(color) for color in (pixels[..., :3] * 255).round().astype(int).reshape(-1, 3)}
    expected = {"h2d": (0x44, 0x77, 0xAA), "step": (0xEE, 0x66, 0x77), "compute": (0x99,) * 3}
    assert colors >= set(expected.values())
    assert (0x22, 0x88, 0x33) not in colors  # d2h is empty


def test_wrong_lanes_are_refused(timeline_plot, tmp_path):
    for lanes, path, message in (
        ({"copy": []}, "a.png", "lanes has 'copy', which is no lane. Use h2d"),
        ({"h2d": [(1.0, 0.5)]}, "a.png", "ends before it starts"),
        ({}, "a.svg", "is no PNG. Give a name that ends in .png"),
    ):
        with pytest.raises(ValueError, match=message):
            timeline_plot.plot(lanes, tmp_path / path, "title")


def test_without_matplotlib_the_remedy_is_named(timeline_plot, train_plan, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        timeline_plot.figure_class()
    with pytest.raises(SystemExit):
        train_plan.parse(["--device", "cpu", "--timeline", "a.png"])
    assert "pip install matplotlib" in capsys.readouterr().err


def test_gradients_that_live_at_once_are_counted(live_gradients):
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8, bias=False) for _ in range(4)])
    one = model[0].weight.nbytes

    def drop(param: torch.Tensor) -> None:
        param.grad = None

    with live_gradients.live_gradients(list(model.parameters())) as found:
        model(torch.randn(2, 8)).sum().backward()
    assert (found.most_bytes, found.all_bytes) == (4 * one, 4 * one)
    for param in model.parameters():
        param.grad = None
        param.register_post_accumulate_grad_hook(drop)
    with live_gradients.live_gradients(list(model.parameters())) as found:
        model(torch.randn(2, 8)).sum().backward()
    assert (found.most_bytes, found.all_bytes) == (one, 4 * one)
    assert all(len(param._post_accumulate_grad_hooks) == 1 for param in model.parameters())


def test_a_mode_that_ends_in_an_error_is_not_a_success(bench_train, monkeypatch, tmp_path):
    """The record says it as well."""
    step = bench_train.Training.step

    def failing(self, batch, laps, recorded=None):
        if self.mode.overlap == "step":
            raise RuntimeError("broken")
        return step(self, batch, laps, recorded)

    monkeypatch.setattr(bench_train.Training, "step", failing)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setenv("TORCH_OFFLOAD_COMMIT", COMMIT)
    arguments = "--device cpu --seq 16 --tokens 32 --steps 1 --warmup 1 --modes none step"
    try:
        with pytest.raises(SystemExit, match=r"Ended in an error.*step at 32 tokens"):
            bench_train.main([*arguments.split(), "--out", str(tmp_path / "record.json")])
    finally:
        torch.use_deterministic_algorithms(False)
    record = json.loads((tmp_path / "record.json").read_text())
    assert [mode["points"][0]["outcome"] for mode in record["modes"]] == ["ok", "ok", "error"]
