"""Configuration files: the strategy with parameters in a LightningCLI YAML."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import lightning_cases as cases
import pytest
import yaml

pytestmark = pytest.mark.slow

SCRIPT = """
import importlib
{imports}
import {package} as pl
import {package}.cli

import lightning_cases as cases


class Module(type(cases.make_module(pl))):
    def train_dataloader(self):
        return cases.make_loader()


if __name__ == "__main__":
    cli = pl.cli.LightningCLI(Module)
    strategy = cli.trainer.strategy
    (optimizer,) = cli.trainer.optimizers
    print("RAN", type(strategy).__module__, strategy.offload_config, type(optimizer).__name__)
"""


def run(
    tmp_path: Path, strategy: object, package: str = "lightning.pytorch", imports: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a user's script, which imports nothing of ours, with `strategy` in its configuration."""
    (tmp_path / "script.py").write_text(SCRIPT.format(package=package, imports=imports))
    trainer = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "default_root_dir": str(tmp_path),
        "strategy": strategy,
    }
    (tmp_path / "given.yaml").write_text(yaml.safe_dump({"trainer": trainer}))
    return cases.run_python(
        str(tmp_path / "script.py"), "fit", "--config", str(tmp_path / "given.yaml")
    )


def with_class(**init_args: object) -> dict[str, object]:
    return {"class_path": "lightning_offload.OffloadOptimizerStrategy", "init_args": init_args}


@pytest.mark.parametrize(
    ("package", "module"),
    [
        ("lightning.pytorch", "lightning_offload.trainer_lightning"),
        ("pytorch_lightning", "lightning_offload.trainer_pytorch_lightning"),
    ],
)
def test_class_path_and_init_args(tmp_path: Path, package: str, module: str) -> None:
    done = run(tmp_path, with_class(chunk_size="128KiB", num_slots=2), package)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        f"RAN {module} OffloadConfig(chunk_size='128KiB', num_slots=2, overlap='auto', "
        "gpu_budget=0, pin_memory=True) OffloadedAdamW"
    ) in done.stdout
    # the configuration that Lightning writes beside the run names the class and every parameter
    written = yaml.safe_load((tmp_path / "config.yaml").read_text())["trainer"]["strategy"]
    assert written["class_path"] == "lightning_offload.OffloadOptimizerStrategy"
    assert written["init_args"] == {
        "chunk_size": "128KiB",
        "num_slots": 2,
        "overlap": "auto",
        "gpu_budget": 0,
        "pin_memory": True,
    }


def test_the_name(tmp_path: Path) -> None:
    done = run(tmp_path, "offload_optimizer")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "RAN lightning_offload.trainer_lightning" in done.stdout


@pytest.mark.parametrize(
    ("short", "init_args"),
    [
        (
            "DDP",
            {
                "overlap": "forward",
                "gpu_budget": "10%",
                "gradient_as_bucket_view": True,
                "bucket_cap_mb": 5.0,
                "process_group_backend": "gloo",
            },
        ),
        ("", {"overlap": "step", "gpu_budget": 1000}),
    ],
)
def test_other_classes_and_their_arguments(
    tmp_path: Path, short: str, init_args: dict[str, object]
) -> None:
    name = f"lightning_offload.OffloadOptimizer{short}Strategy"
    done = run(tmp_path, {"class_path": name, "init_args": init_args})
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"overlap='{init_args['overlap']}'" in done.stdout
    written = yaml.safe_load((tmp_path / "config.yaml").read_text())["trainer"]["strategy"]
    assert init_args.items() <= written["init_args"].items()


def test_the_short_form_of_a_class_that_was_imported(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        {"class_path": "OffloadOptimizerStrategy", "init_args": {"num_slots": 2}},
        imports="from lightning_offload import OffloadOptimizerStrategy",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "num_slots=2" in done.stdout


def test_an_unknown_parameter_is_named(tmp_path: Path) -> None:
    done = run(tmp_path, with_class(chunk_sise="128KiB"))
    assert done.returncode != 0
    # the words are jsonargparse's and differ between its versions
    assert re.search(r"'chunk_sise' is not (accepted|expected)", done.stderr), done.stderr
    assert "RAN" not in done.stdout


def test_a_value_out_of_range_is_named(tmp_path: Path) -> None:
    done = run(tmp_path, with_class(chunk_size="12 bananas"))
    assert done.returncode != 0
    assert "chunk_size='12 bananas' is not a size" in done.stderr
