"""Every way to switch offload on for a script that knows nothing of it."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate.commands.launch as launcher
import pytest
import torch
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.utils import CustomArgumentParser
from accelerate.utils import ComputeEnvironment
from accelerate_cases import (
    SWITCH,
    accelerate_launch,
    assert_same_tree,
    fresh_accelerate,
    run_python,
)

from accelerate_offload import __main__ as shim
from accelerate_offload import hooks, launch

SCRIPT = """
import sys
import torch
{imports}
from accelerate import Accelerator

torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
net = torch.nn.Sequential(torch.nn.Linear(8, 33), torch.nn.Tanh(), torch.nn.Linear(33, 1))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
net, optimizer, schedule = accelerator.prepare(net, optimizer, schedule)
for batch in torch.randn(10, 4, 8):
    with accelerator.accumulate(net):
        accelerator.backward(net(batch).pow(2).mean())
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
result = {{"net": net.state_dict(), "optimizer": optimizer.state_dict(), "argv": sys.argv[2:]}}
torch.save(result, sys.argv[1])
print("wrapper:", type(optimizer).__name__, "optimizer:", type(optimizer.optimizer).__name__)
"""
PLUGIN = "from accelerate_offload import OffloadOptimizerPlugin; OffloadOptimizerPlugin({})"
#: What a script is given after the result's path; it must reach the script as it is.
ARGUMENTS = ["--lr", "1", "--offload_optimizer", "--", "-m", "x"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with the script, as a file and as a module of a package."""
    path = tmp_path_factory.mktemp("launch")
    (path / "package").mkdir()
    (path / "package" / "__init__.py").touch()
    for target in ("train.py", "package/train.py"):
        (path / target).write_text(SCRIPT.format(imports=""))
    plugin = SCRIPT.format(imports=PLUGIN.format("chunk_size='1KiB'"))
    (path / "with_plugin.py").write_text(plugin)
    (path / "config.yaml").write_text(
        "distributed_type: 'NO'\nnum_processes: 1\nmixed_precision: 'no'\nuse_cpu: true\n"
        "optimizer_offload_config:\n  chunk_size: 1KiB\n  num_slots: 2\n  overlap: forward\n"
        "  gpu_budget: 50%\n  pin_memory: false\n"
    )
    return path


def train(
    folder: Path, command: Sequence[str | Path], **env: str
) -> tuple[dict[str, Any], subprocess.CompletedProcess[str]]:
    result = folder / "result.pt"
    result.unlink(missing_ok=True)
    done = run_python(*command, result, *ARGUMENTS, cwd=folder, **env)
    return torch.load(result, weights_only=True), done


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, Any]:
    result, done = train(folder, ["train.py"])
    assert "wrapper: AcceleratedOptimizer optimizer: AdamW" in done.stdout
    assert "accelerate_offload" not in done.stderr
    assert result["argv"] == ARGUMENTS
    return result


NO_AUTOLOAD = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
WAYS = {
    "variable": (["train.py"], {SWITCH: "true", "ACCELERATE_OFFLOAD_CHUNK_SIZE": "1KiB"}),
    "flag": (
        accelerate_launch("--offload_optimizer", "--offload_chunk_size", "1KiB", "train.py"),
        {},
    ),
    "flag-with-hyphens": (
        accelerate_launch("--offload-optimizer", "--offload-chunk-size=1KiB", "train.py"),
        {},
    ),
    "flags-of-all-fields": (
        accelerate_launch(
            *("--offload_optimizer", "--offload_chunk_size=1KiB", "--offload_num_slots=2"),
            *("--offload_overlap=forward", "--offload-gpu-budget=50%", "--offload_pin_memory=no"),
            "train.py",
        ),
        {},
    ),
    "config-file": (accelerate_launch("--config_file", "config.yaml", "train.py"), {}),
    "shim": (
        accelerate_launch("-m", "accelerate_offload", "--offload_chunk_size", "1KiB", "train.py"),
        {},
    ),
    "shim-without-autoload": (
        ["-m", "accelerate_offload", "--offload-chunk-size=1KiB", "train.py"],
        NO_AUTOLOAD,
    ),
    "shim-with-module": (
        ["-m", "accelerate_offload", "--offload_chunk_size", "1KiB", "-m", "package.train"],
        {"TORCH_OFFLOAD_AUTOLOAD": "0"},
    ),
    "plugin": (["with_plugin.py"], {}),
    "plugin-without-autoload": (["with_plugin.py"], NO_AUTOLOAD),
}


@pytest.mark.parametrize("way", WAYS)
def test_unmodified_script(folder: Path, plain: dict[str, Any], way: str):
    command, env = WAYS[way]
    result, done = train(folder, command, **env)
    assert "wrapper: OffloadedOptimizer optimizer: OffloadedAdamW" in done.stdout
    assert_same_tree(plain, result)
    # One line in all: neither the launcher nor the end of the run adds a word.
    lines = [line for line in done.stderr.splitlines() if line.startswith("accelerate_offload:")]
    assert len(lines) == 1, done.stderr
    assert "offload is active" in lines[0]
    assert "AdamW" in lines[0]
    assert "chunk_size='1KiB'" in lines[0]
    if way in ("flags-of-all-fields", "config-file"):
        for field in ("num_slots=2", "overlap='forward'", "gpu_budget='50%'", "pin_memory=False"):
            assert field in lines[0]
    else:
        assert "overlap='auto'" in lines[0]


@pytest.mark.parametrize(
    ("command", "env"),
    [
        (["train.py"], {SWITCH: "false"}),
        (["train.py"], {SWITCH: "true", "TORCH_OFFLOAD_AUTOLOAD": "0"}),
        (["with_plugin.py"], {SWITCH: "false"}),
        (accelerate_launch("--offload_optimizer", "train.py"), {SWITCH: "0"}),
        (accelerate_launch("--config_file", "config.yaml", "train.py"), {SWITCH: "no"}),
        (["-m", "accelerate_offload", "train.py"], {SWITCH: "off"}),
    ],
    ids=["switched-off", "opted-out", "plugin", "flag", "config-file", "shim"],
)
def test_stays_plain(folder: Path, plain: dict[str, Any], command: list[str], env: dict[str, str]):
    result, done = train(folder, command, **env)
    assert "wrapper: AcceleratedOptimizer optimizer: AdamW" in done.stdout
    assert_same_tree(plain, result)
    if command != ["train.py"]:  # what asks for it is told that it has no effect
        assert f"accelerate_offload: {SWITCH}={env[SWITCH]}: " in done.stderr
        assert "has no effect" in done.stderr
    assert "WARNING" not in done.stderr


# --- the warning at exit -------------------------------------------------------

IDLE = "from accelerate import Accelerator\nAccelerator(cpu=True)\n"
DEEPSPEED = (
    IDLE + "from accelerate.state import AcceleratorState, PartialState\n"
    "from accelerate.utils import DistributedType\n"
    "for state in (AcceleratorState, PartialState):\n"
    "    state._shared_state['distributed_type'] = DistributedType.DEEPSPEED\n"
)
EARLY = (
    "import os, torch\nfrom accelerate import Accelerator\n"
    "Accelerator(cpu=True).prepare(torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))]))\n"
    f"os.environ['{SWITCH}'] = 'true'\n"
)


@pytest.mark.parametrize(
    ("script", "command", "reason"),
    [
        (IDLE + "raise SystemExit(0)", [], "and none was: the script may only evaluate"),
        ("print(1)", ["-m", "accelerate_offload"], "this script builds no Accelerator"),
        (DEEPSPEED, [], f"DEEPSPEED is in charge of the optimizer.*unset {SWITCH}"),
        (EARLY, [], "prepared before that variable was set.*OffloadOptimizerPlugin"),
        (IDLE + "raise RuntimeError('mine')", [], None),  # it has something else to say
        (IDLE + "import accelerate.commands.launch", [], None),  # it starts others
    ],
    ids=["idle", "no-accelerate", "deepspeed", "early", "failed", "launcher"],
)
def test_warning_at_exit(tmp_path: Path, script: str, command: list[str], reason: str | None):
    (tmp_path / "idle.py").write_text(script)
    env = {} if script == EARLY else {SWITCH: "1"}
    done = run_python(*command, "idle.py", cwd=tmp_path, check=False, **env)
    warned = f"WARNING: {SWITCH} asked for optimizer offload, but no optimizer was" in done.stderr
    assert warned is (reason is not None), done.stderr
    if reason is not None:
        assert re.search(reason, done.stderr), done.stderr


NOTEBOOK = """
import sys
import torch
import accelerate
{imports}

def train(folder):
    accelerator = accelerate.Accelerator(cpu=True)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 33), torch.nn.Tanh(), torch.nn.Linear(33, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    net, optimizer = accelerator.prepare(net, optimizer)
    for batch in torch.randn(6, 2, 4, 8)[:, accelerator.process_index]:
        accelerator.backward(net(batch).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
    result = [accelerator.unwrap_model(net).state_dict(), optimizer.state_dict()]
    torch.save([type(optimizer).__name__, result], f"{{folder}}/{{accelerator.process_index}}.pt")

accelerate.{launcher}(train, ("{{folder}}".format(folder=sys.argv[1]),), num_processes={number})
"""


@pytest.mark.parametrize(
    ("launcher", "number"), [("notebook_launcher", 1), ("debug_launcher", 2)], ids=lambda v: str(v)
)
@pytest.mark.parametrize("way", ["variable", "plugin"])
def test_launched_from_a_notebook(tmp_path: Path, launcher: str, number: int, way: str):
    results = {}
    for on in (False, True):
        folder = tmp_path / str(on)
        folder.mkdir()
        imports = PLUGIN.format("chunk_size='1KiB'") if on and way == "plugin" else ""
        text = NOTEBOOK.format(imports=imports, launcher=launcher, number=number)
        (folder / "book.py").write_text(text)
        env = {SWITCH: "true", "ACCELERATE_OFFLOAD_CHUNK_SIZE": "1KiB"}
        env = env if on and way == "variable" else {}
        done = run_python("book.py", ".", cwd=folder, **env)
        files = [folder / f"{rank}.pt" for rank in range(number)]
        results[on] = [torch.load(file, weights_only=True) for file in files]
        assert done.stderr.count("offload is active") == on, done.stderr
        assert "WARNING" not in done.stderr
    for plain, other in zip(results[False], results[True], strict=True):
        assert [plain[0], other[0]] == ["AcceleratedOptimizer", "OffloadedOptimizer"]
        assert_same_tree(plain[1], other[1])


def test_no_warning_from_workers_and_the_launcher_as_a_module(tmp_path: Path):
    (tmp_path / "spawn.py").write_text(
        "import accelerate\n"
        "from multiprocessing import get_context\n"
        "def work(): pass\n"
        "if __name__ == '__main__':\n"
        "    from accelerate_offload import report\n"
        "    report._num_converted = 1\n"
        "    worker = get_context('spawn').Process(target=work)\n"
        "    worker.start(); worker.join(); assert worker.exitcode == 0\n"
    )
    done = run_python("spawn.py", cwd=tmp_path, ACCELERATE_OFFLOAD_OPTIMIZER="1")
    assert "accelerate_offload" not in done.stderr
    done = run_python(
        "-m", "accelerate.commands.launch", "-h", cwd=tmp_path, ACCELERATE_OFFLOAD_OPTIMIZER="1"
    )
    assert "accelerate_offload" not in done.stderr


# --- the shim as a stand-in for python -------------------------------------------

SHOW = """
import sys
print([__name__, sys.argv[1:], sys.path[0], __file__, __spec__ and __spec__.name,
       sys.modules["__main__"].__dict__ is globals(), "torch" in sys.modules])
"""


@pytest.mark.parametrize(
    "command",
    [
        ["show.py"],
        ["show.py", "--", "a", "-m", "b"],
        ["folder/show.py", "--offload_optimizer", "-h"],
        ["link.py", "a"],
        ["-m", "show", "--", "a"],
        ["-m", "folder.show", "-h", "-m", "b"],
    ],
    ids=" ".join,
)
def test_script_sees_what_python_would_show_it(tmp_path: Path, command: list[str]):
    (tmp_path / "folder").mkdir()
    for name in ("show.py", "folder/show.py"):
        (tmp_path / name).write_text(SHOW)
    (tmp_path / "link.py").symlink_to("folder/show.py")
    expected = run_python(*command, cwd=tmp_path).stdout
    assert run_python("-m", "accelerate_offload", *command, cwd=tmp_path).stdout == expected


@pytest.mark.parametrize(
    "options", [["--offload_optimizer"], ["--offload-optimizer", "--"], ["--"]], ids=" ".join
)
def test_shim_takes_the_launchers_switch_and_a_separator(tmp_path: Path, options: list[str]):
    (tmp_path / "show.py").write_text("import sys; print(sys.argv)")
    done = run_python("-m", "accelerate_offload", *options, "show.py", "a", cwd=tmp_path)
    assert done.stdout == "['show.py', 'a']\n"


LATE = """
import atexit, pickle, threading
class C: pass
def late(): print(pickle.loads(pickle.dumps(C())).__class__ is C)
atexit.register(late)
threading.Timer(0.2, late).start()
"""


@pytest.mark.parametrize("command", [["late.py"], ["-m", "late"]], ids=" ".join)
def test_the_script_stays_main_after_its_last_line(tmp_path: Path, command: list[str]):
    (tmp_path / "late.py").write_text(LATE)
    done = run_python("-m", "accelerate_offload", *command, cwd=tmp_path)
    assert done.stdout == "True\nTrue\n", done.stderr


def test_accelerate_goes_on_working_when_the_core_is_broken(tmp_path: Path):
    (tmp_path / "torch_offload").mkdir()
    (tmp_path / "torch_offload" / "__init__.py").write_text("raise ImportError('too old a torch')")
    (tmp_path / "train.py").write_text("print('trained')")
    done = run_python(*accelerate_launch("train.py"), cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert "trained" in done.stdout
    assert "accelerate launch has no --offload_optimizer: ImportError: too old" in done.stderr


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["--"], "the following arguments are required: script"),
        ([], "the following arguments are required: script"),
        (["nowhere.py"], "there is no script 'nowhere.py'"),
        (["-m", "nowhere"], "no module named 'nowhere'"),
        (["-m", "nowhere.at_all"], "no module named 'nowhere.at_all'"),
        (["--bananas", "show.py"], "unrecognized arguments: --bananas"),
        (["--offload_bananas", "1", "show.py"], "unrecognized arguments: --offload_bananas"),
        (["--offload_num_slots", "1", "show.py"], "num_slots=1 leaves .* Use 2 or more"),
        (["--offload_chunk_size", "12 bananas", "show.py"], "chunk_size='12 bananas' is not a"),
        (["--offload_num_slots"], "expected one argument"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_shim_explains_misuse(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    message: str,
):
    monkeypatch.chdir(tmp_path)
    Path("show.py").write_text("raise AssertionError('it ran')")
    with pytest.raises(SystemExit, match="2"):
        shim.main(command)
    shown = capsys.readouterr().err
    assert "usage: python -m accelerate_offload [-h] [--offload_<field> VALUE ...]" in shown
    assert re.search(message, shown), shown
    assert SWITCH not in os.environ


def test_shim_does_not_hide_what_a_module_lacks(tmp_path: Path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("import not_installed")
    done = run_python("-m", "accelerate_offload", "-m", "package.x", cwd=tmp_path, check=False)
    assert "ModuleNotFoundError: No module named 'not_installed'" in done.stderr


def test_shim_help_lists_the_fields(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="0"):
        shim.main(["-h"])
    text = capsys.readouterr().out
    for flag in ("--offload_chunk_size", "--offload_num_slots", "--offload-pin-memory"):
        assert flag in text
    assert "accelerate launch -m accelerate_offload --offload_chunk_size 512MiB train.py" in text


def test_importing_the_package_imports_neither_torch_nor_accelerate(tmp_path: Path):
    code = (
        "import sys, accelerate_offload, accelerate_offload.hooks;"
        "assert not {'torch', 'accelerate'} & set(sys.modules), 'heavy'"
    )
    run_python("-c", code, cwd=tmp_path, **NO_AUTOLOAD)


def test_nothing_is_imported_for_those_who_do_not_ask(tmp_path: Path):
    """The core takes longer to import than the launcher may be slowed down by."""
    code = (
        "import sys, torch, accelerate, accelerate.commands.launch as launch\n"
        "assert 'torch_offload' not in sys.modules\n"
        "parser = launch.launch_command_parser()\n"
        "assert '--offload_optimizer' in parser._option_string_actions\n"
        "own = {name for name in sys.modules if name.startswith('torch_offload')}\n"
        "assert own == {'torch_offload', 'torch_offload.config', 'torch_offload.residency'}, own\n"
        "net = torch.nn.Linear(2, 2)\n"
        "accelerate.Accelerator(cpu=True).prepare(net, torch.optim.SGD(net.parameters()))\n"
        "assert 'torch_offload.core' not in sys.modules\n"
    )
    run_python("-c", code, cwd=tmp_path)


# --- the flags ---------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with fresh_accelerate():
        # The user's own default file would be merged into every launch.
        monkeypatch.setattr(launcher, "default_config_file", str(tmp_path / "none.yaml"))
        yield


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What the launched process would have of our variables."""
    found: dict[str, str] = {}

    def simple_launcher(args: Any) -> None:
        env = launcher.prepare_simple_launcher_cmd_env(args)[1]
        found.update({k: v for k, v in env.items() if k.startswith("ACCELERATE_OFFLOAD_")})

    monkeypatch.setattr(launcher, "simple_launcher", simple_launcher)
    return found


BASE = ["--cpu", "--num_processes=1", "--num_machines=1", "--mixed_precision=no"]
BASE += ["--dynamo_backend=no", "--num_cpu_threads_per_process=1"]


def do_launch(*args: str) -> None:
    parser = launcher.launch_command_parser()
    launcher.launch_command(parser.parse_args([*BASE, *args]))


def test_flags_set_the_variables_of_the_children_only(launched: dict[str, str]):
    do_launch("--offload_optimizer", "--offload-num-slots", "4", "train.py")
    assert launched == {SWITCH: "true", "ACCELERATE_OFFLOAD_NUM_SLOTS": "4"}
    assert SWITCH not in os.environ
    launched.clear()
    do_launch("train.py", "--offload_optimizer")  # the script's own
    assert launched == {}


def test_flags_win_over_file_over_environment(launched: dict[str, str], tmp_path: Path):
    config = tmp_path / "config.yaml"
    config.write_text(
        "distributed_type: 'NO'\nnum_processes: 1\noptimizer_offload_config:\n"
        "  offload_optimizer: true\n  chunk_size: 1KiB\n  num_slots: 2\n  pin_memory: false\n"
    )
    os.environ["ACCELERATE_OFFLOAD_CHUNK_SIZE"] = "1GiB"
    do_launch("--config_file", str(config), "--offload_num_slots", "4", "train.py")
    assert launched == {
        SWITCH: "true",
        "ACCELERATE_OFFLOAD_CHUNK_SIZE": "1KiB",
        "ACCELERATE_OFFLOAD_NUM_SLOTS": "4",
        "ACCELERATE_OFFLOAD_PIN_MEMORY": "false",
    }
    assert os.environ["ACCELERATE_OFFLOAD_CHUNK_SIZE"] == "1GiB"


def test_environment_reaches_the_children_as_it_is(launched: dict[str, str]):
    os.environ.update({SWITCH: "yes", "ACCELERATE_OFFLOAD_NUM_SLOTS": "4"})
    do_launch("train.py")
    assert launched == {SWITCH: "yes", "ACCELERATE_OFFLOAD_NUM_SLOTS": "4"}


def test_a_flag_turns_on_a_section_that_is_off(launched: dict[str, str], tmp_path: Path):
    config = tmp_path / "config.yaml"
    config.write_text(
        "distributed_type: 'NO'\n"
        "optimizer_offload_config: {offload_optimizer: false, num_slots: 4}\n"
    )
    do_launch("--config_file", str(config), "--offload_optimizer", "train.py")
    assert launched == {SWITCH: "true", "ACCELERATE_OFFLOAD_NUM_SLOTS": "4"}


def test_an_empty_value_in_the_file_means_the_default(launched: dict[str, str], tmp_path: Path):
    config = tmp_path / "config.yaml"
    config.write_text(
        "distributed_type: 'NO'\noptimizer_offload_config:\n  chunk_size:\n  num_slots: 4\n"
    )
    do_launch("--config_file", str(config), "train.py")
    assert launched == {SWITCH: "true", "ACCELERATE_OFFLOAD_NUM_SLOTS": "4"}


@pytest.mark.parametrize("section", ["{}", "{offload_optimizer: false, num_slots: 4}"])
def test_a_section_can_be_off(launched: dict[str, str], tmp_path: Path, section: str):
    config = tmp_path / "config.yaml"
    config.write_text(f"distributed_type: 'NO'\noptimizer_offload_config: {section}\n")
    do_launch("--config_file", str(config), "train.py")
    assert launched == {}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("{bananas: 1}", "optimizer_offload_config: bananas=1 is no option.*chunk_size"),
        ("{num_slots: 1}", "optimizer_offload_config: num_slots=1: .*Use 2 or more"),
        ("{offload_optimizer: maybe}", "offload_optimizer='maybe' is not a truth value"),
        ("[num_slots]", "must be a section of `field: value` lines"),
    ],
)
def test_wrong_sections_are_explained(tmp_path: Path, section: str, message: str):
    config = tmp_path / "config.yaml"
    config.write_text(f"distributed_type: 'NO'\noptimizer_offload_config: {section}\n")
    with pytest.raises(ValueError, match=message):
        load_config_from_file(str(config))


def test_a_config_file_is_written_back_with_its_section(tmp_path: Path):
    config = tmp_path / "config.yaml"
    config.write_text("distributed_type: 'NO'\noptimizer_offload_config: {num_slots: 4}\n")
    load_config_from_file(str(config)).to_yaml_file(tmp_path / "again.yaml")
    again = load_config_from_file(str(tmp_path / "again.yaml"))
    assert isinstance(again, ClusterConfig)
    assert again.optimizer_offload_config == {"num_slots": 4}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--offload_num_slots=4", "x.py"], "--offload_num_slots needs --offload_optimizer"),
        (["--offload_optimizer", "--use_megatron_lm", "x.py"], "DeepSpeed or Megatron-LM"),
    ],
)
def test_wrong_combinations_of_flags(launched: dict[str, str], args: list[str], message: str):
    with pytest.raises(ValueError, match=message):
        do_launch(*args)
    assert not launched


@pytest.mark.parametrize("value", ["1", "many"])
def test_wrong_values_of_flags(value: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        do_launch("--offload_optimizer", "--offload_num_slots", value, "train.py")
    message = capsys.readouterr().err
    assert "argument --offload_num_slots" in message
    assert f"num_slots={value}" in message.replace("'", "")
    assert "Use 2" in message


def test_a_wrong_variable_is_reported_by_the_launcher(launched: dict[str, str]):
    os.environ["ACCELERATE_OFFLOAD_NUM_SLOTS"] = "1"
    with pytest.raises(ValueError, match=r"^ACCELERATE_OFFLOAD_NUM_SLOTS=1: "):
        do_launch("--offload_optimizer", "train.py")
    assert not launched


def test_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    shown = {}
    for name, args in {
        "all": ["-h"],
        "selected": ["--cpu", "--offload-optimizer", "-h"],
        "other": ["--cpu", "--multi_gpu", "-h"],
    }.items():
        monkeypatch.setattr("sys.argv", ["accelerate", "launch", *args])
        with pytest.raises(SystemExit):
            launcher.launch_command_parser().parse_args(args)
        shown[name] = capsys.readouterr().out
    for name in ("all", "selected"):
        assert launch.GROUP in shown[name]
        assert "--offload_chunk_size CHUNK_SIZE" in shown[name]
        assert "Default: 512MiB." in shown[name]
        assert "--offload-chunk-size" not in shown[name]  # as Accelerate shows its own
    assert launch.GROUP not in shown["other"]


# --- a future Accelerate -------------------------------------------------------------


def future_launcher(*flags: str) -> Any:
    """A launcher that has flags of its own by our names, extended by our hook."""
    seen: list[Any] = []

    def launch_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
        parser = CustomArgumentParser()
        group = parser.add_argument_group("Theirs")
        for flag in flags:
            group.add_argument(flag, default=None)
        parser.add_argument("training_script")
        return parser

    module = SimpleNamespace(
        launch_command_parser=launch_command_parser,
        _validate_launch_command=lambda args: (args, None, False),
        launch_command=lambda args: seen.append(
            (module._validate_launch_command(args)[0], dict(os.environ))
        ),
        options_to_group={},
        seen=seen,
    )
    hooks.on_launch(module)  # type: ignore[arg-type]
    return module


def launch_future(module: Any, *args: str) -> tuple[Any, dict[str, str]]:
    namespace = module.launch_command_parser().parse_args([*args, "train.py"])
    namespace.use_deepspeed = namespace.use_megatron_lm = False
    module.launch_command(namespace)
    found, env = module.seen.pop()
    return found, {k: v for k, v in env.items() if k.startswith("ACCELERATE_OFFLOAD_")}


def test_a_future_flag_keeps_its_meaning():
    args, env = launch_future(future_launcher("--offload_optimizer"), "--offload-optimizer", "nvme")
    assert args.offload_optimizer == "nvme"
    assert env == {}


def test_a_future_field_flag_keeps_its_meaning_and_leaves_us_the_others():
    module = future_launcher("--offload_num_slots")
    args, env = launch_future(
        module, "--offload_optimizer", "--offload_num_slots", "1", "--offload_chunk_size", "1KiB"
    )
    assert args.offload_num_slots == "1"
    assert env == {SWITCH: "true", "ACCELERATE_OFFLOAD_CHUNK_SIZE": "1KiB"}


def test_sagemaker_is_refused():
    module = future_launcher()
    config = SimpleNamespace(compute_environment=ComputeEnvironment.AMAZON_SAGEMAKER)
    args = module.launch_command_parser().parse_args(["--offload_optimizer", "train.py"])
    args.use_deepspeed = args.use_megatron_lm = False
    with pytest.raises(NotImplementedError, match=f"SageMaker.*{SWITCH}=true"):
        launch._export(args, config)
    assert SWITCH not in os.environ


def test_extending_twice_adds_the_flags_once():
    module = future_launcher()
    parser = module.launch_command_parser
    hooks.on_launch(module)
    assert module.launch_command_parser is parser


def test_a_future_section_of_the_same_name_is_left_alone():
    class Theirs:
        __dataclass_fields__ = {"optimizer_offload_config": "theirs"}  # noqa: RUF012

        def __init__(self, optimizer_offload_config: Any) -> None:
            self.value = optimizer_offload_config

    hooks.on_config_args(SimpleNamespace(ClusterConfig=Theirs))  # type: ignore[arg-type]
    assert Theirs({"bananas": 1}).value == {"bananas": 1}
