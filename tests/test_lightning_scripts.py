"""A user's script with each way to switch the offload on: the bits of the same script without.

The script imports nothing of ours unless the way is an import, and Lightning starts its processes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning_cases as cases
import pytest
import torch

pytestmark = pytest.mark.slow

TRAINER = """
{imports}
import torch
import {package} as pl
import lightning_cases as cases


class Net(type(cases.make_module(pl))):
    pass


if __name__ == "__main__":
    options = dict(accelerator="cpu", devices={devices}, max_epochs=2, logger=False,
                   enable_checkpointing=False, enable_progress_bar=False,
                   enable_model_summary=False)
    trainer = pl.Trainer({strategy}**options)
    trainer.fit(Net(), cases.make_loader())
    if trainer.is_global_zero:
        found = cases.training_state(trainer) if trainer.optimizers else dict(
            params=dict(trainer.lightning_module.named_parameters()))
        strategy = type(trainer.strategy)
        torch.save(found, {out!r})
        print("RAN", strategy.__module__, strategy.__name__, trainer.world_size,
              *[type(o).__name__ for o in trainer.optimizers])
"""

FABRIC = """
{imports}
import torch
import {package} as package
import lightning_cases as cases

if __name__ == "__main__":
    run = cases.train_fabric(cases.start_fabric(package, {strategy}, devices={devices}), 6)
    fabric = run["fabric"]
    if fabric.is_global_zero:
        torch.save(cases.fabric_state(run), {out!r})
        strategy = type(fabric.strategy)
        print("RAN", strategy.__module__, strategy.__name__, fabric.world_size,
              type(run["user_optimizer"]).__name__)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # else gloo's threads may end the process
"""


def run(
    folder: Path,
    script: str,
    package: str,
    *,
    strategy: str = "",
    imports: str = "",
    devices: int = 1,
    env: dict[str, str] | None = None,
    launcher: tuple[str, ...] = (),
) -> tuple[list[str], Any]:
    """Run the script, and return what it said of the strategy and what came out."""
    out = folder / "out.pt"
    out.unlink(missing_ok=True)
    path = folder / "script.py"
    path.write_text(
        script.format(
            package=package, strategy=strategy, imports=imports, devices=devices, out=str(out)
        )
    )
    said = cases.succeed(*launcher, str(path), **(env or {}))
    (line,) = [line for line in said.splitlines() if line.startswith("RAN")]
    return line.split()[1:], torch.load(out, weights_only=False)


def plain(folder: Path, script: str, package: str, devices: int = 1) -> Any:
    strategy = "'auto'" if script is FABRIC else ""
    return run(folder, script, package, strategy=strategy, devices=devices)[1]


#: Ways, each with what is written into the script and what is around it.
TRAINER_WAYS: dict[str, dict[str, Any]] = {
    "no import": {"strategy": "strategy='offload_optimizer', "},
    "alias": {"strategy": "strategy='optstate_host', "},
    "torch first": {"strategy": "strategy='offload_optimizer', ", "imports": "import torch"},
    "explicit import": {
        "strategy": "strategy='offload_optimizer', ",
        "imports": "import lightning_offload",
        "env": {"TORCH_OFFLOAD_AUTOLOAD": "0"},
    },
    "object": {
        "strategy": "strategy=lightning_offload.OffloadOptimizerStrategy(chunk_size=4096), ",
        "imports": "import {package}, lightning_offload",
    },
    "environment": {"env": {"PL_TRAINER_STRATEGY": "offload_optimizer"}},
}


@pytest.mark.parametrize(
    ("package", "module"),
    [
        ("lightning.pytorch", "lightning_offload.trainer_lightning"),
        pytest.param(
            "pytorch_lightning",
            "lightning_offload.trainer_pytorch_lightning",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_a_trainer_is_switched_in_each_way(tmp_path: Path, package: str, module: str) -> None:
    expected = plain(tmp_path, TRAINER, package)
    for name, way in TRAINER_WAYS.items():
        way = {**way, "imports": way.get("imports", "").format(package=package)}
        said, found = run(tmp_path, TRAINER, package, **way)
        assert said == [module, "OffloadOptimizerStrategy", "1", "OffloadedAdamW"], name
        cases.assert_same(expected, found, name)


@pytest.mark.parametrize(
    "package",
    [
        cases.TRAINERS[0],
        *(pytest.param(p, marks=pytest.mark.exhaustive) for p in cases.TRAINERS[1:]),
    ],
)
def test_lightning_starts_two_processes(tmp_path: Path, package: str) -> None:
    expected = plain(tmp_path, TRAINER, package, devices=2)
    for name in ("offload_optimizer", "offload_optimizer_ddp_find_unused_parameters_true"):
        said, found = run(tmp_path, TRAINER, package, strategy=f"strategy={name!r}, ", devices=2)
        assert said[1:] == ["OffloadOptimizerDDPStrategy", "2", "OffloadedAdamW"]
        cases.assert_same(expected, found, name)


@pytest.mark.exhaustive
def test_lightning_spawns_two_processes(tmp_path: Path) -> None:
    """The strategy is sent to them, and the parameters come back."""
    package = "lightning.pytorch"
    expected = plain(tmp_path, TRAINER, package, devices=2)
    way = "strategy='offload_optimizer_ddp_spawn', "
    said, found = run(tmp_path, TRAINER, package, strategy=way, devices=2)
    assert said == ["lightning_offload.trainer_lightning", "OffloadOptimizerDDPStrategy", "2"]
    cases.assert_same(expected["params"], found["params"])


FABRIC_WAYS: dict[str, dict[str, Any]] = {
    "no import": {"strategy": "'offload_optimizer'"},
    "explicit import": {
        "strategy": "'offload_optimizer'",
        "imports": "import lightning_offload",
        "env": {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    },
    "object": {
        "strategy": "lightning_offload.OffloadOptimizerFabricStrategy(num_slots=2)",
        "imports": "import {package}, lightning_offload",
    },
    "environment": {"strategy": "'auto'", "env": {"LT_STRATEGY": "offload_optimizer"}},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("package", "module"),
    [
        ("lightning.fabric", "lightning_offload.fabric_lightning"),
        ("lightning_fabric", "lightning_offload.fabric_lightning_fabric"),
    ],
)
def test_a_fabric_is_switched_in_each_way(tmp_path: Path, package: str, module: str) -> None:
    expected = plain(tmp_path, FABRIC, package)
    for name, way in FABRIC_WAYS.items():
        way = {**way, "imports": way.get("imports", "").format(package=package)}
        said, found = run(tmp_path, FABRIC, package, **way)
        assert said == [module, "OffloadOptimizerFabricStrategy", "1", "OffloadedAdamW"], name
        cases.assert_same(expected, found, name)


@pytest.mark.parametrize(
    ("package", "devices"),
    [
        ("lightning.fabric", 2),
        pytest.param("lightning.fabric", 1, marks=pytest.mark.exhaustive),
        pytest.param("lightning_fabric", 2, marks=pytest.mark.exhaustive),
    ],
)
def test_fabric_run_takes_the_alias(tmp_path: Path, package: str, devices: int) -> None:
    pytest.importorskip("click")

    def launch(strategy: str) -> tuple[list[str], Any]:
        options = ("--accelerator=cpu", f"--devices={devices}", f"--strategy={strategy}")
        launcher = ("-m", f"{package}.cli", *options)  # what `fabric run` calls
        return run(tmp_path, FABRIC, package, strategy="'auto'", devices=devices, launcher=launcher)

    expected = launch("ddp")[1]
    said, found = launch("optstate_host")
    kind = "DDP" if devices > 1 else ""
    assert said[1:] == [f"OffloadOptimizerFabric{kind}Strategy", str(devices), "OffloadedAdamW"]
    # names differ by "module." where plain is DDP for one process, too
    expected["params"], found["params"] = (
        list(state["params"].values()) for state in (expected, found)
    )
    cases.assert_same(expected, found)


def test_fabric_run_takes_no_name_with_offload() -> None:
    """Or the alias would not be needed."""
    pytest.importorskip("click")
    options = ("--strategy=offload_optimizer", __file__)
    done = cases.run_python("-m", "lightning.fabric.cli", *options)
    assert done.returncode != 0
    assert "optstate_host" in done.stderr


UNUSED = """
import sys, warnings
warnings.simplefilter("error", RuntimeWarning)
import {package} as pl
import lightning_cases as cases
from torch_offload import is_offloaded

before = set(sys.modules)
trainer = cases.fit(pl, "auto", 1)
assert not is_offloaded(trainer.optimizers[0])
assert type(trainer.strategy).__module__.startswith({package!r}.split(".")[0])
assert not [m for m in sys.modules if m.startswith("lightning_offload.") and "registry" not in m]
"""


@pytest.mark.parametrize("package", cases.TRAINERS)
def test_a_trainer_without_the_name_is_lightnings_own(package: str) -> None:
    cases.succeed("-c", UNUSED.format(package=package))


def test_the_entry_point_costs_less_than_five_milliseconds() -> None:
    """Of each `import torch`, and of each import of Lightning; measured where nothing is cached."""
    code = """
import sys, time
begin = time.perf_counter()
import _torch_offload_autoload as autoload
autoload.install()
installed = time.perf_counter() - begin
assert "torch" not in sys.modules
names = [f"module_{i}" for i in range(1000)]
begin = time.perf_counter()
for name in names:
    autoload._finder.find_spec(name)
asked = time.perf_counter() - begin
print(installed + asked)
"""
    seconds = min(
        float(cases.succeed("-c", code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")) for _ in range(5)
    )
    assert seconds < 0.005
