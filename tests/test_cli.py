"""The `torch-offload` command: what it prints, writes and refuses, and that its advice works."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("click")

from click.testing import CliRunner

from accelerate_offload import environment, flags
from torch_offload import OffloadConfig, is_offloaded
from torch_offload.cli import advice, benchmarks, forecast, inputs, link, machine, state, subject
from torch_offload.cli.app import commands
from torch_offload.cli.forecast import MODES, Settings, Speed
from torch_offload.cli.inputs import Request
from torch_offload.cli.planning import make_plan

CPU = torch.device("cpu")
TINY = {"sizes": (2**20, 2**21), "repeats": 2, "span_bytes": 2**22}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """What is planned for does not depend on where the tests run."""
    monkeypatch.setattr(machine, "gpus", lambda: [])


def invoke(*arguments, code=0):
    result = CliRunner().invoke(commands, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def probe():
    """A probe in which CPUs stand in for two GPUs."""
    samples = link.measure_all([CPU, CPU], **TINY)
    gpu = machine.GpuInfo(
        index=0, name="NVIDIA H200", memory_bytes=10**11, free_bytes=10**10, numa_node=1
    )
    return machine.Probe(
        gpus=(gpu,),
        host_bytes=2**40,
        samples=tuple(samples),
        pinning=machine.time_pinning(CPU, 2**20),
        torch="2.13.0",
        date="2026-01-01T00:00:00+00:00",
    )


def test_copies_are_measured_by_way_size_and_number_of_gpus():
    ticks = []
    samples = link.measure_all([CPU, CPU], **TINY, tick=ticks.append)
    assert len(ticks) == len(samples) == link.num_ticks(2, TINY["sizes"]) == 2 * 3 * 2 + 3
    assert {s.way for s in samples} == {"h2d", "d2h", "duplex"}
    assert [s.devices for s in samples[-3:]] == [(0, 1)] * 3
    assert {s.copy_bytes for s in samples[-3:]} == {2**21}
    assert all(len(s.bytes_per_s) == 2 and min(s.bytes_per_s) > 0 for s in samples)
    assert link.num_ticks(1, TINY["sizes"]) == len(link.measure_all([CPU], **TINY))


@pytest.mark.gpu
def test_copies_of_a_gpu_are_measured():
    samples = link.measure_all([torch.device("cuda", 0)], sizes=(2**22, 2**25), repeats=2)
    median = {(s.way, s.copy_bytes): s.median for s in samples}
    assert min(median.values()) > 1e8
    # Both ways at once never give each way more than it has alone, but for noise.
    assert median["duplex", 2**25] < 1.1 * max(median["h2d", 2**25], median["d2h", 2**25])


@pytest.mark.gpu
def test_a_gpu_is_probed(monkeypatch):
    monkeypatch.setattr(machine, "gpus", lambda: [torch.device("cuda", 0)])
    found = machine.run_probe(sizes=(2**22,), repeats=1)
    assert found.gpus[0].name == torch.cuda.get_device_name(0)
    assert found.pinning.ours_s > 0
    assert found.pinning.torch_s > 0
    assert found.link_bytes_per_s(1) > 1e8
    assert json.loads(found.to_json())["probe"] == 1


def test_copies_carry_the_bytes():
    buffers = link.Link(CPU, 2**12, 2**10)
    buffers._host["h2d"].copy_(torch.arange(2**12) // 2**10)
    for number in range(5):
        buffers._slot["d2h"].fill_(10 + number)
        buffers.issue("duplex", 2**10, number)
        assert buffers._slot["h2d"].unique().tolist() == [number % 4]
    assert buffers._host["d2h"].view(4, -1).tolist() == [[n] * 2**10 for n in (14, 11, 12, 13)]


def test_a_probe_is_read_as_it_was_written(probe, tmp_path):
    path = tmp_path / "probe.json"
    path.write_text(probe.to_json())
    assert machine.read_probe(path) == probe
    for count, devices in ((1, 1), (2, 2)):
        largest = [s for s in probe.samples if s.copy_bytes == 2**21 and s.way == "duplex"]
        expected = min(s.median for s in largest if len(s.devices) == devices)
        assert probe.link_bytes_per_s(count) == expected
    assert probe.link_bytes_per_s(3) is None


@pytest.mark.parametrize("text", ["", "[]", '{"probe": 2}', '{"probe": 1}'])
def test_what_is_no_probe_is_refused(text, tmp_path):
    path = tmp_path / "probe.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"is not what `torch-offload probe --json` writes"):
        machine.read_probe(path)
    with pytest.raises(ValueError, match="cannot be read"):
        machine.read_probe(tmp_path / "missing.json")


def test_probe_without_a_gpu_tells_what_there_is(tmp_path):
    text = invoke("probe").output
    assert "free host memory" in text
    assert "No GPU is visible" in text
    record = json.loads(invoke("probe", "--json", "--out", tmp_path / "probe.json").stdout)
    assert record["gpus"] == record["samples"] == []
    assert json.loads((tmp_path / "probe.json").read_text()) == record


def test_probe_prints_every_figure(monkeypatch, probe):
    monkeypatch.setattr(machine, "run_probe", lambda **_: probe)
    text = invoke("probe").output
    assert "GPU 0" in text
    assert "NUMA node 1" in text
    assert "s per GiB" in text
    row = next(line for line in text.splitlines() if "2 at once" in line)
    numbers = re.findall(r"\d+\.\d", row)
    found = {s.way: f"{s.median / 1e9:.1f}" for s in probe.samples if len(s.devices) == 2}
    assert numbers == [found["h2d"], found["d2h"], found["duplex"]]


def test_the_command_starts_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "torch_offload.cli", "plan", "--params", "7e9"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Accelerate" in done.stdout
    assert "7,000,000,000" in done.stdout


# What is planned


def counted(params):
    return sum(torch.Size(shape).numel() * n for shape, n in params.shapes.items())


@pytest.mark.parametrize("count", [1e5, 123_456, 5e7, 1e9, 3.14e9, 7e9, 7e10])
def test_a_number_of_parameters_becomes_a_decoder_of_usual_proportions(count):
    found = subject.of_count(count)
    assert counted(found) == found.num_params == int(count)
    assert found.is_assumed
    if count >= 1e9:
        assert 100 < found.decoder.hidden / found.decoder.layers < 160


TINY_CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("llama", {"num_key_value_heads": 2}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("mistral", {"num_key_value_heads": 2, "head_dim": 32}),
        ("qwen2", {"num_key_value_heads": 2}),
        ("qwen3", {"num_key_value_heads": 2, "head_dim": 16}),
        ("gpt2", {"n_embd": 64, "n_layer": 3, "n_head": 4}),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_configs_are_counted_as_transformers_builds_them(kind, fields, tmp_path):
    transformers = pytest.importorskip("transformers")
    common = {"vocab_size": 100} if kind == "gpt2" else TINY_CONFIG
    config = transformers.AutoConfig.for_model(
        kind, **common, **fields, bos_token_id=0, eos_token_id=0
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    config.save_pretrained(tmp_path)
    found = subject.of_config(tmp_path / "config.json")
    built = state.of_module(model, "a model")
    assert dict(found.shapes) == dict(built.shapes)
    assert found.decoder == built.decoder
    assert found.decoder.layers == 3
    assert found.embedding_params == built.embedding_params


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mixtral"}, "model_type='mixtral'. Its parameters are counted for gpt2"),
        ({"model_type": "llama"}, "has no 'hidden_size'. Add it"),
        ({**TINY_CONFIG, "model_type": "llama", "hidden_size": "x"}, "hidden_size='x'"),
        ({**TINY_CONFIG, "model_type": "llama", "num_attention_heads": 10**6}, "1000000 heads"),
        ([1], "holds no settings"),
    ],
)
def test_configs_that_cannot_be_counted_are_refused(config, message, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        subject.of_config(path)


def small_model():
    layers = [nn.Sequential(nn.Linear(32, 96), nn.Linear(32, 64), nn.Linear(64, 32))] * 1
    layers += [nn.Sequential(nn.Linear(32, 96), nn.Linear(32, 64), nn.Linear(64, 32))]
    return nn.ModuleDict(
        {
            "words": nn.Embedding(50, 32),
            "layers": nn.ModuleList(layers),
            "head": nn.Linear(32, 50, bias=False),
        }
    )


def no_decoder():
    return nn.Linear(100, 1000)


def test_a_model_is_built_on_the_meta_device():
    found = state.of_factory(f"{__name__}:small_model")
    assert found.num_params == sum(p.numel() for p in small_model().parameters())
    assert found.decoder == subject.Decoder(hidden=32, mlp=64, layers=2, vocabulary=50)
    assert found.embedding_params == 50 * 32
    assert not found.is_assumed
    assert state.of_factory(f"{__name__}:no_decoder").is_assumed


def test_sequences_are_no_longer_than_a_micro_batch():
    long, short = (
        make_plan(
            Request(
                params=1e9, gpu="H200", tokens=2048, accumulation=2, sequence=s, host_memory="1TB"
            )
        )
        for s in (10**6, 1024)
    )
    assert long.speed == short.speed


def test_what_is_frozen_takes_memory_and_time_but_no_state():
    """As a base with adapters: it lies on the GPU, and is computed with."""
    model = small_model()
    whole = state.of_module(model, "")
    for param in model["layers"][0].parameters():
        param.requires_grad_(False)
    part = state.of_module(model, "")
    frozen = sum(p.numel() for p in model["layers"][0].parameters())
    assert part.frozen_params == frozen
    assert part.num_params == whole.num_params - frozen
    assert part.layer_params == whole.layer_params
    numbers = {"itemsize": 4, "tokens": 128}
    before = forecast.make_workload(whole, state_bytes=8 * whole.num_params, **numbers)
    after = forecast.make_workload(part, state_bytes=8 * part.num_params, **numbers)
    assert after.params_bytes == before.params_bytes
    assert after.grads_bytes == before.grads_bytes - 4 * frozen
    assert after.kept_bytes == before.kept_bytes
    # Twice for each element and token, for the gradient that is not needed.
    needed = [forecast.operations(each, 128, 64) for each in (whole, part)]
    assert needed[0] - needed[1] == 128 * 2 * frozen


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nothing", "is not of the form module:name"),
        ("no_such_module_here:f", "cannot be imported"),
        ("math:nothing", "math has no 'nothing'"),
        ("math:pi", "is no function"),
        ("os:getcwd", "returned a str. It must return a torch module"),
    ],
)
def test_models_that_cannot_be_built_are_refused(target, message):
    with pytest.raises(ValueError, match=message):
        state.of_factory(target)


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("AdamW", {}, 2 * 4 * 6000),
        ("Adam", {"amsgrad": True}, 3 * 4 * 6000),
        ("SGD", {"momentum": 0.9}, 4 * 6000),
        ("SGD", {}, 0),
        ("Adafactor", {}, 4 * (10 + 20) * 30),
        ("torch.optim:RMSprop", {}, 4 * 6000),
    ],
)
def test_state_is_that_of_the_class(name, settings, expected):
    kind = state.optimizer_class(name)
    assert state.state_bytes(kind, {(10, 20): 30}, torch.float32, settings) == expected


def test_bf16_parameters_have_bf16_state():
    kind = state.optimizer_class("AdamW")
    assert state.state_bytes(kind, {(10, 20): 30}, torch.bfloat16) == 2 * 2 * 6000


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("NoSuch", {}, "is no optimizer. Use a name of torch.optim"),
        ("math:pi", {}, "is no optimizer"),
        ("AdamW", {"momentum": 1}, "cannot be made with momentum=1"),
    ],
)
def test_optimizers_that_cannot_be_made_are_refused(name, settings, message):
    with pytest.raises(ValueError, match=message):
        state.state_bytes(state.optimizer_class(name), {(2, 2): 1}, torch.float32, settings)


# The plan


def plan_of(**options):
    return make_plan(Request(**{"params": 3.14e9, **options}))


def test_where_everything_fits_nothing_is_offloaded():
    plan = plan_of()
    assert plan.chosen.settings is None
    assert plan.offloading.settings.overlap == "backward"


def test_where_it_does_not_fit_the_fastest_mode_that_does_is_recommended():
    plan = plan_of(gpu_memory="40GiB")
    assert plan.candidates[0].fits is False
    assert plan.chosen is plan.offloading
    assert plan.chosen.settings.overlap == "backward"
    clipped = plan_of(gpu_memory="40GiB", clip=True)
    assert clipped.chosen.settings.overlap == "forward"
    (refused,) = (c for c in clipped.candidates if c.name == "backward")
    assert "clipping needs all gradients" in refused.reason
    assert plan_of(gpu_memory="20GiB").chosen is None
    assert plan_of(gpu_memory="40GiB", host_memory="8GiB").chosen is None


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("memory", ["36GiB", "40GiB", "44GiB", "50GiB", "60GiB"])
def test_a_recommendation_fits_and_nothing_that_fits_is_much_faster(memory, clip):
    plan = plan_of(gpu_memory=memory, clip=clip, tokens=8192)
    room = advice.USABLE_SHARE * plan.limits.gpu_bytes
    chosen = plan.chosen
    assert chosen.forecast.needed_bytes <= room
    for other in plan.candidates:
        if not other.reason and other.forecast.needed_bytes <= room:
            assert chosen.forecast.step_s <= 1.01 * other.forecast.step_s


def test_state_that_stays_is_as_much_as_helps():
    tight = plan_of(gpu_memory="36GiB", clip=True).chosen.settings.resident_bytes
    wide = plan_of(gpu_memory="44GiB", clip=True).chosen
    assert 0 < tight < wide.settings.resident_bytes < 25 * 10**9
    assert wide.forecast.exposed_s < 0.03 * wide.forecast.step_s


def test_what_is_given_is_used_and_said():
    plan = plan_of(bandwidth=20.0, compute_s=1.0, compute_tokens=8192, tokens=16384)
    facts = dict(plan.facts)
    assert facts["link"] == "20.0 GB/s each way, both at once (given)"
    assert "given at 8192 tokens" in facts["forward, backward"]
    assert plan.speed.forward_s + plan.speed.backward_s == pytest.approx(2.0)
    assert plan.speed.link_bytes_per_s == 20e9
    assert "(assumed)" in dict(plan_of().facts)["link"]


def test_a_probe_gives_the_link(probe, tmp_path):
    path = tmp_path / "probe.json"
    path.write_text(probe.to_json())
    plan = plan_of(probe_file=path, num_gpus=2)
    assert plan.speed.link_bytes_per_s == probe.link_bytes_per_s(2)
    with pytest.raises(ValueError, match="was not measured with 3 GPUs at once"):
        plan_of(probe_file=path, num_gpus=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"params": None}, "no model given. Give one of --params, --model, --config"),
        ({"model": "a:b"}, "params and model given"),
        ({"params": -1.0}, "params=-1 is no number of parameters"),
        ({"tokens": 0}, "tokens=0 is too small"),
        ({"tokens": 10, "accumulation": 3}, "tokens=10 is not a multiple of accumulation=3"),
        ({"bandwidth": 0.0}, "bandwidth=0.0 is not above zero"),
        ({"compute_s": float("nan")}, "compute_s=nan is not above zero"),
        ({"compute_tokens": 5}, "Give that too"),
        ({"sharded": True}, "sharded needs several GPUs"),
        ({"num_gpus": 8}, "num_gpus=8 share the host's memory"),
        ({"gpu": "Radeon"}, "Give --bandwidth or --probe"),
        ({"gpu": "Radeon", "bandwidth": 9.0}, "gpu='Radeon' is not known"),
        ({"optimizer": "SGD"}, "SGD has some with momentum"),
        ({"optimizer_setting": ("x",)}, "is not of the form name=value"),
        ({"gpu_memory": "much"}, "gpu_memory='much' is not a size"),
        ({"num_slots": 1}, "num_slots=1"),
        ({"bandwidth": 1.0, "probe_file": Path("x")}, "say the same thing"),
    ],
)
def test_wrong_requests_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        plan_of(**options)


def test_errors_have_no_traceback():
    result = invoke("plan", "--params", "7e9", "--tokens", "0", code=1)
    assert result.output.strip() == "Error: tokens=0 is too small. Use 1 or more."


def test_json_has_everything():
    record = json.loads(invoke("plan", "--params", "7e9", "--json").stdout)
    assert record["recommended"] == "no offload"
    assert record["recommended_offload"] == "backward"
    assert record["workload"]["state_bytes"] == 56 * 10**9
    assert {c["name"] for c in record["choices"]} >= {"no offload", *MODES}
    assert record["settings"]["python"].startswith("from torch_offload import")


def test_settings_of_optimizers_are_read_as_numbers():
    made = make_plan(
        Request(params=1e8, optimizer="SGD", optimizer_setting=("momentum=0.9", "lr=1"))
    )
    assert made.workload.state_bytes == 4 * 10**8


# What is written for the front ends

WRITTEN = [
    Settings(overlap=mode, chunk_bytes=chunk, num_slots=slots, resident_bytes=budget)
    for mode in MODES
    for chunk, slots, budget in ((2**29, 3, 0), (2**28, 4, 3 * 2**30))
]


@pytest.mark.parametrize("settings", WRITTEN, ids=str)
def test_python_code_runs(settings):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    exec(advice.python_code(settings), {"optimizer": optimizer, "model": model})
    assert is_offloaded(optimizer)
    assert optimizer._offload_core.config == advice.config_of(settings)


@pytest.mark.filterwarnings("ignore:.*tensorboardX")
@pytest.mark.parametrize(
    ("num_gpus", "is_sharded", "kind"), [(1, False, ""), (2, False, "DDP"), (2, True, "FSDP")]
)
@pytest.mark.parametrize("settings", WRITTEN, ids=str)
def test_lightning_code_runs(settings, num_gpus, is_sharded, kind):
    pytest.importorskip("lightning")
    names = {}
    exec(advice.lightning_code(settings, num_gpus, is_sharded), names)
    trainer = names["trainer"]
    assert type(trainer.strategy).__name__ == f"OffloadOptimizer{kind}Strategy"
    assert trainer.strategy.offload_config == advice.config_of(settings)
    assert trainer.num_devices == num_gpus


@pytest.mark.parametrize("settings", WRITTEN, ids=str)
def test_accelerate_command_has_flags_that_exist(settings, monkeypatch):
    words = advice.accelerate_command(settings, 1, False).split()
    assert words[:3] == ["accelerate", "launch", "--offload_optimizer"]
    assert words[-1] == "train.py"
    pairs = dict(zip(words[3:-1:2], words[4:-1:2], strict=True))
    known = {flags.flag(name): name for name in OffloadConfig.__dataclass_fields__}
    assert pairs.keys() <= known.keys()
    for flag, value in pairs.items():
        monkeypatch.setenv(environment.variable(known[flag]), value)
    # The defaults of what is not written are those of Accelerate.
    assert environment.config_from_environment() == advice.config_of(settings)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_several_gpus_are_launched_with_flags_that_accelerate_has(is_sharded):
    launch = pytest.importorskip("accelerate.commands.launch")
    words = advice.accelerate_command(WRITTEN[0], 4, is_sharded).split()
    kept = [w for w in words[2:] if not w.startswith("--offload") and w not in MODES]
    found = launch.launch_command_parser().parse_args(kept)
    assert found.num_processes == 4
    assert found.use_fsdp == is_sharded
    assert found.multi_gpu == (not is_sharded)


def test_benchmarks_run_in_a_process_of_their_own(monkeypatch, tmp_path):
    called = []

    class Done:
        returncode = 3

    monkeypatch.setattr(
        benchmarks.subprocess, "run", lambda command, check: called.append(command) or Done()
    )
    invoke("bench", "train", "--params", "1e5", "--device", "cpu", code=3)
    (command,) = called
    assert command[0] == sys.executable
    assert Path(command[1]).name == "bench_train.py"
    assert command[2:] == ["--params", "1e5", "--device", "cpu"]
    with pytest.raises(ValueError, match="the benchmarks are part of the repository"):
        benchmarks.run("step", [], tmp_path)
    assert all((benchmarks.FOLDER / name).is_file() for name in benchmarks.SCRIPTS.values())


def test_a_plan_is_measured_here_where_there_is_a_gpu(monkeypatch):
    monkeypatch.setattr(machine, "gpus", lambda: [CPU])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    info = machine.GpuInfo(
        index=0, name="NVIDIA H200", memory_bytes=10**11, free_bytes=10**11, numa_node=None
    )
    monkeypatch.setattr(machine, "gpu_info", lambda _: info)
    sample = link.Sample(devices=(0,), way="duplex", copy_bytes=2**28, bytes_per_s=(33e9,))
    monkeypatch.setattr(inputs, "measure_all", lambda *_, **__: [sample])
    said = []
    plan = make_plan(Request(params=7e9), say=said.append)
    assert said
    assert plan.speed == Speed(
        forward_s=plan.speed.forward_s,
        backward_s=plan.speed.backward_s,
        update_s=plan.speed.update_s,
        clip_s=0.0,
        link_bytes_per_s=33e9,
    )
    assert plan.limits.gpu_bytes == 10**11
    assert "measured here" in dict(plan.facts)["link"]
