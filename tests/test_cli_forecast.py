"""The plan's model of time and memory, against the committed records of an H200.

Four constants are fitted to plain AdamW at 8,192 tokens and the probe of one run. All other points
are held out: 16,384 and 32,768 tokens, every mode, another number of parameters, and every other
record of training steps, for which only the plain step at its smallest number of tokens is given.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from torch_offload.cli import forecast, hardware
from torch_offload.cli.forecast import Settings, Speed
from torch_offload.cli.subject import Decoder, Subject

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
TRAIN = "bench_train-nvidia-h200-20261130T095200.json"
STEP = "bench_step-nvidia-h200-20261129T152045.json"
FITTED = 8192
TIME, MEMORY = 0.15, 0.05


@pytest.fixture(scope="module")
def train():
    return json.loads((RESULTS / TRAIN).read_text())


@pytest.fixture(scope="module")
def subject(train):
    return subject_of(train)


def subject_of(train):
    size = train["config"]["size"]
    h, mlp, layers, words = (size[k] for k in ("hidden", "mlp", "layers", "vocabulary"))
    found = Subject(
        shapes={
            (words, h): 2,
            (3 * h, h): layers,
            (h, h): layers,
            (mlp, h): 2 * layers,
            (h, mlp): layers,
            (h,): 2 * layers + 1,
        },
        decoder=Decoder(hidden=h, mlp=mlp, layers=layers, vocabulary=words),
        embedding_params=words * h,
        origin="the record",
    )
    assert found.num_params == train["config"]["num_params"]
    return found


def workload_of(subject, tokens, **options):
    return forecast.make_workload(
        subject,
        state_bytes=8 * subject.num_params,
        itemsize=4,
        tokens=tokens,
        loss_tokens=2048,
        **options,
    )


def point(train, name, tokens):
    (mode,) = (m for m in train["modes"] if m["name"] == name and not m["control"])
    (found,) = (p for p in mode["points"] if p["tokens"] == tokens)
    return mode, found


def predicted(train, subject, name, tokens, compute_s=None):
    """Predict from what the plan knows of the GPU, and the run's probe."""
    mode, _ = point(train, name, tokens)
    gpu = hardware.find(train["device"])
    rate = hardware.MEMORY_SHARE * gpu.memory_bytes_per_s
    workload = workload_of(subject, tokens, accumulation=train["config"]["accumulation"])
    if compute_s is None:
        needed = forecast.operations(subject, tokens, train["config"]["sequence"])
        compute_s = needed / (hardware.FLOPS_SHARE * gpu.flops)
    forward_s, backward_s = forecast.split(compute_s)
    speed = Speed(
        forward_s=forward_s,
        backward_s=backward_s,
        update_s=forecast.update_seconds(workload, rate),
        clip_s=forecast.clip_seconds(workload, rate) if mode["clip"] else 0.0,
        link_bytes_per_s=statistics.median(train["link_bytes_per_s"]["duplex"]),
    )
    if mode["overlap"] is None:
        return forecast.plain(workload, speed)
    share = 0.0 if mode["budget"] is None else float(mode["budget"].rstrip("%")) / 100
    settings = Settings(
        overlap=mode["overlap"],
        chunk_bytes=mode["settings"]["chunk_size"],
        num_slots=mode["settings"]["num_slots"],
        resident_bytes=int(share * workload.state_bytes),
    )
    return forecast.offloaded(workload, speed, settings)


def test_constants_are_fitted_to_one_point(train, subject):
    _, plain = point(train, "none", FITTED)
    gpu = hardware.find(train["device"])
    needed = forecast.operations(subject, FITTED, train["config"]["sequence"])
    compute_s = plain["median_forward_s"] + plain["median_backward_s"]
    assert needed / compute_s / gpu.flops == pytest.approx(hardware.FLOPS_SHARE, abs=0.001)
    workload = workload_of(subject, FITTED)
    update_s = forecast.update_seconds(workload, gpu.memory_bytes_per_s)
    assert update_s / plain["median_optimizer_s"] == pytest.approx(hardware.MEMORY_SHARE, abs=0.001)
    duplex = statistics.median(train["link_bytes_per_s"]["duplex"])
    assert duplex / gpu.link_bytes_per_s == pytest.approx(hardware.LINK_SHARE, abs=0.001)
    unit = workload.working_bytes / forecast.WORKING
    missing = plain["peak_allocated_bytes"] - predicted(train, subject, "none", FITTED).gpu_bytes
    assert forecast.WORKING + missing / unit == pytest.approx(forecast.WORKING, abs=0.02)


HELD_OUT = [
    (name, tokens)
    for name in ("none", "step", "backward", "none+clip", "forward+clip", "forward+clip+50%")
    for tokens in (8192, 16384, 32768)
    if (name, tokens) != ("none", FITTED)
]


@pytest.mark.parametrize(("name", "tokens"), HELD_OUT)
def test_held_out_points(train, subject, name, tokens):
    mode, measured = point(train, name, tokens)
    found = predicted(train, subject, name, tokens)
    assert found.step_s == pytest.approx(measured["median_step_s"], rel=TIME)
    assert found.gpu_bytes == pytest.approx(measured["peak_allocated_bytes"], rel=MEMORY)
    assert found.host_bytes == pytest.approx(measured["host_bytes"], rel=MEMORY)
    _, plain = point(train, "none+clip" if mode["clip"] else "none", tokens)
    exposed_s = measured["median_step_s"] - plain["median_step_s"]
    assert found.exposed_s == pytest.approx(exposed_s, rel=TIME, abs=0.02)
    if tokens == FITTED:  # the first steps of a mode are there
        first = measured["warm_up_peak_allocated_bytes"]
        assert found.first_gpu_bytes == pytest.approx(first, rel=MEMORY)


OTHERS = sorted(path.name for path in RESULTS.glob("bench_train-*.json"))


@pytest.mark.parametrize("name", OTHERS)
def test_every_record_is_foretold_from_its_smallest_plain_step(name):
    """Each size, of model and of step, is held out but one number: the time of that step."""
    record = json.loads((RESULTS / name).read_text())
    if record["device_type"] == "cpu" or hardware.find(record["device"]) is None:
        pytest.skip("a GPU that the plan does not know")
    subject = subject_of(record)
    least = min(record["config"]["tokens"])
    _, plain = point(record, "none", least)
    given_s = (plain["median_forward_s"] + plain["median_backward_s"]) / least
    compared = 0
    for mode in record["modes"]:
        if mode["overlap"] not in (None, *forecast.MODES) or mode["budget"] == "auto":
            continue
        for measured in mode["points"]:
            if measured["outcome"] != "ok":
                continue
            tokens = measured["tokens"]
            found = predicted(record, subject, mode["name"], tokens, given_s * tokens)
            case = f"{mode['label']} at {tokens} tokens"
            assert found.step_s == pytest.approx(measured["median_step_s"], rel=TIME), case
            assert found.gpu_bytes == pytest.approx(measured["peak_allocated_bytes"], rel=MEMORY), (
                case
            )
            compared += 1
    assert compared > 1


def test_another_number_of_parameters():
    record = json.loads((RESULTS / STEP).read_text())
    link = statistics.median(record["duplex_bytes_per_s"])
    num_params = record["config"]["num_params"]
    gpu = hardware.find(record["device"])
    workload = forecast.Workload(
        params_bytes=4 * num_params,
        grads_bytes=4 * num_params,
        state_bytes=record["state_bytes"],
        layer_grads_bytes=0,
        first_grads_bytes=0,
        cast_bytes=0,
        kept_bytes=0,
        working_bytes=0,
        loss_bytes=0,
    )
    rate = hardware.MEMORY_SHARE * gpu.memory_bytes_per_s
    update_s = forecast.update_seconds(workload, rate)
    speed = Speed(forward_s=0, backward_s=0, update_s=update_s, clip_s=0, link_bytes_per_s=link)
    compared = 0
    for variant in record["variants"]:
        settings, measured_s = variant["settings"], statistics.median(variant["step_s"])
        if variant["name"] == "resident":
            assert update_s == pytest.approx(measured_s, rel=TIME)
        elif variant["name"] == "ours":
            found = forecast.offloaded(
                workload,
                speed,
                Settings(
                    overlap="step",
                    chunk_bytes=settings["chunk_size"],
                    num_slots=settings["num_slots"],
                ),
            )
            assert found.step_s == pytest.approx(measured_s, rel=TIME)
            assert found.gpu_bytes == pytest.approx(variant["peak_allocated_bytes"], rel=MEMORY)
            compared += 1
    assert compared == 4


SPEED = Speed(forward_s=1.0, backward_s=2.0, update_s=0.1, clip_s=0.0, link_bytes_per_s=1e9)
CHUNKS = {"chunk_bytes": 10**6, "num_slots": 3}


def test_time_that_hides_copies_is_the_last_micro_batch(subject):
    workload = workload_of(subject, 8192)
    small = replace(workload, state_bytes=1_500_000_000)
    for overlap, count, exposed in (
        ("step", 1, 1.4),
        ("backward", 1, 0.0),
        ("backward", 4, 0.897),  # slots are filled before
        ("forward", 1, 0.4),
        ("forward", 4, 1.15),
    ):
        found = forecast.offloaded(
            replace(small, accumulation=count), SPEED, Settings(overlap=overlap, **CHUNKS)
        )
        assert found.exposed_s == pytest.approx(exposed, abs=1e-9), (overlap, count)


def test_state_that_stays_costs_its_own_memory_and_no_copies(subject):
    workload = workload_of(subject, 8192)
    for overlap in forecast.MODES:
        settings = Settings(overlap=overlap, **CHUNKS)
        none = forecast.offloaded(workload, SPEED, settings)
        some = forecast.offloaded(workload, SPEED, replace(settings, resident_bytes=10**9))
        everything = forecast.offloaded(
            workload, SPEED, replace(settings, resident_bytes=workload.state_bytes)
        )
        assert some.gpu_bytes - none.gpu_bytes == 10**9
        assert none.host_bytes - some.host_bytes == 10**9
        assert none.step_s - some.step_s == pytest.approx(1.0)
        assert everything.host_bytes == 0
        assert everything.exposed_s == pytest.approx(0, abs=1e-9)


def test_several_gpus_share_the_host_and_sharding_divides_the_model(subject):
    one = workload_of(subject, 8192)
    replicas = workload_of(subject, 8192, num_gpus=4)
    parts = workload_of(subject, 8192, num_gpus=4, is_sharded=True)
    settings = Settings(overlap="step", **CHUNKS)
    host = [forecast.offloaded(w, SPEED, settings).host_bytes for w in (one, replicas, parts)]
    assert host == [one.state_bytes, 4 * one.state_bytes, one.state_bytes]
    assert replicas.extra_bytes == one.grads_bytes  # DDP's buckets
    assert 4 * parts.params_bytes == pytest.approx(one.params_bytes, abs=4)
    waits = forecast.offloaded(parts, SPEED, replace(settings, overlap="forward"))
    assert waits.step_s == forecast.offloaded(parts, SPEED, settings).step_s


def test_gradients_that_earlier_micro_batches_left_are_counted(subject):
    settings = Settings(overlap="backward", **CHUNKS)
    once = forecast.offloaded(workload_of(subject, 8192), SPEED, settings)
    often = workload_of(subject, 4 * 8192, accumulation=4)
    found = forecast.offloaded(often, SPEED, settings)
    more = found.gpu_bytes - once.gpu_bytes
    assert 0.9 * often.grads_bytes < more <= often.grads_bytes


def test_unknown_mode_is_refused(subject):
    with pytest.raises(ValueError, match="overlap='auto' is not known"):
        forecast.offloaded(workload_of(subject, 8192), SPEED, Settings(overlap="auto", **CHUNKS))


def test_gpus_are_found_by_part_of_their_name():
    assert hardware.find("NVIDIA H100 PCIe").flops < hardware.find("nvidia h100 80GB hbm3").flops
    assert hardware.find("NVIDIA L40S").name == "L40S"
    assert hardware.find("NVIDIA L4").name == "L4"
    assert hardware.find("NVIDIA L40").flops == hardware.find("NVIDIA L40S").flops / 2
    assert hardware.find("NVIDIA A100-SXM4-80GB").name == "A100"
    assert hardware.find("NVIDIA A100-PCIE-40GB").memory_bytes < 43e9
    assert hardware.find("NVIDIA A100 80GB PCIe").memory_bytes_per_s == 1.935e12
    for other in ("Radeon", "NVIDIA GH200 480GB", "NVIDIA GB200"):
        assert hardware.find(other) is None
