"""The autoload module: hooks run after their targets, and nothing of ours can break an import."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning_cases as cases
import pytest

import _torch_offload_autoload as autoload

HEAVY = {"torch", "lightning", "pytorch_lightning", "lightning_fabric", "accelerate"}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Return the module that holds the hooks for a throw-away package, with the log of its runs.

    The package `thirdparty` has the modules `good`, `bad` (raises the first time) and `swapped`
    (puts another object in its place).
    """
    root = tmp_path / "thirdparty"
    root.mkdir()
    (root / "__init__.py").write_text("")
    (root / "good.py").write_text("REGISTRY = {}\n")
    (root / "bad.py").write_text(
        "import ours\nours.tries += 1\nif ours.tries == 1:\n    raise RuntimeError('boom')\n"
    )
    (root / "swapped.py").write_text("import sys\nsys.modules[__name__] = sys\n")
    (tmp_path / "ours.py").write_text(
        "runs = []\n"
        "tries = 0\n"
        "def hook(module):\n"
        "    runs.append(module)\n"
        "    if hasattr(module, 'REGISTRY'): module.REGISTRY['ours'] = 1\n"
        "def failing(module):\n"
        "    raise LookupError('no such thing')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield importlib.import_module("ours")
    for name in [n for n in sys.modules if n == "ours" or n.partition(".")[0] == "thirdparty"]:
        del sys.modules[name]
    for name in [n for n in autoload._finder.hooks if n.startswith("thirdparty")]:
        del autoload._finder.hooks[name]


def test_a_hook_runs_after_its_target_and_leaves_the_loader_as_it_was(package: Any) -> None:
    autoload.watch({"thirdparty.good": "ours:hook"})
    assert package.runs == []
    target = importlib.import_module("thirdparty.good")
    assert package.runs == [target]
    assert target.REGISTRY == {"ours": 1}
    for loader in (target.__loader__, target.__spec__.loader):
        assert type(loader) is importlib.machinery.SourceFileLoader


def test_looking_for_a_target_is_not_importing_it(package: Any) -> None:
    autoload.watch({"thirdparty.good": "ours:hook"})
    spec = importlib.util.find_spec("thirdparty.good")
    assert spec is not None
    assert spec.loader is not None
    # what tools do with a spec works on ours
    assert "REGISTRY" in spec.loader.get_source("thirdparty.good")  # type: ignore[attr-defined]
    assert package.runs == []
    importlib.import_module("thirdparty.good")
    assert len(package.runs) == 1


def test_a_reload_and_a_second_import_run_the_hook_again(package: Any) -> None:
    autoload.watch({"thirdparty.good": "ours:hook"})
    target = importlib.import_module("thirdparty.good")
    assert importlib.reload(target).REGISTRY == {"ours": 1}
    del sys.modules["thirdparty.good"]
    assert importlib.import_module("thirdparty.good").REGISTRY == {"ours": 1}
    assert len(package.runs) == 3


def test_a_target_that_is_imported_already_gets_its_hook_now_and_once(package: Any) -> None:
    target = importlib.import_module("thirdparty.good")
    for _ in range(2):
        autoload.watch({"thirdparty.good": "ours:hook"})
    assert package.runs == [target]


def test_a_target_that_fails_is_not_hooked_and_can_be_imported_later(package: Any) -> None:
    autoload.watch({"thirdparty.bad": "ours:hook"})
    with pytest.raises(RuntimeError, match="boom"):
        importlib.import_module("thirdparty.bad")
    assert package.runs == []
    assert "thirdparty.bad" not in sys.modules
    target = importlib.import_module("thirdparty.bad")
    assert package.runs == [target]


def test_a_target_that_does_not_exist_is_missing_as_ever(package: Any) -> None:
    autoload.watch({"thirdparty.absent": "ours:hook"})
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'thirdparty\.absent'"):
        importlib.import_module("thirdparty.absent")
    assert importlib.util.find_spec("thirdparty.absent") is None


def test_a_target_that_replaces_itself_is_hooked_as_importers_see_it(package: Any) -> None:
    autoload.watch({"thirdparty.swapped": "ours:hook"})
    importlib.import_module("thirdparty.swapped")
    assert package.runs == [sys]


@pytest.mark.parametrize("hook", ["ours:failing", "ours:absent", "absent_module:hook"])
@pytest.mark.parametrize("imported_before", [False, True])
def test_a_failing_hook_is_logged_and_the_import_goes_on(
    package: Any, caplog: pytest.LogCaptureFixture, hook: str, imported_before: bool
) -> None:
    if imported_before:
        importlib.import_module("thirdparty.good")
    autoload.watch({"thirdparty.good": hook})
    assert importlib.import_module("thirdparty.good").REGISTRY == {}
    (record,) = caplog.records
    assert record.name == "torch_offload"
    assert record.levelno == logging.WARNING
    assert f"thirdparty.good is not extended: {hook} raised" in record.getMessage()


@pytest.mark.parametrize("position", [0, 1])
def test_another_finder_of_this_kind_is_left_its_turn(
    package: Any, monkeypatch: pytest.MonkeyPatch, position: int
) -> None:
    autoload.watch({"thirdparty.good": "ours:hook"})
    other = autoload._Finder()
    other.hooks["thirdparty.good"] = "ours:hook"
    finders = list(sys.meta_path)
    finders.insert(finders.index(autoload._finder) + position, other)
    monkeypatch.setattr(sys, "meta_path", finders)
    target = importlib.import_module("thirdparty.good")
    assert package.runs == [target, target]
    assert type(target.__spec__.loader) is importlib.machinery.SourceFileLoader


def test_a_finder_that_was_taken_out_finds_nothing(
    package: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    autoload.watch({"thirdparty.good": "ours:hook"})
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if f is not autoload._finder])
    assert autoload._finder.find_spec("thirdparty.good") is None


def test_install_watches_every_target_once(monkeypatch: pytest.MonkeyPatch) -> None:
    finder = autoload._Finder()
    monkeypatch.setattr(autoload, "_finder", finder)
    monkeypatch.setattr(autoload, "_run", lambda hook, module: None)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delenv("TORCH_OFFLOAD_AUTOLOAD", raising=False)
    autoload.install()
    autoload.install()
    assert finder.hooks == {**autoload.LIGHTNING_HOOKS, **autoload.ACCELERATE_HOOKS}
    assert sys.meta_path.count(finder) == 1


@pytest.mark.parametrize("value", ["0", "false", "OFF", " no "])
def test_install_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("TORCH_OFFLOAD_AUTOLOAD", value)
    monkeypatch.setattr(autoload, "watch", lambda hooks: pytest.fail("watched"))
    autoload.install()


def test_install_never_raises(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(hooks: Any) -> None:
        raise RuntimeError("boom")

    monkeypatch.delenv("TORCH_OFFLOAD_AUTOLOAD", raising=False)
    monkeypatch.setattr(autoload, "watch", broken)
    autoload.install()
    assert "autoload is off: RuntimeError: boom" in caplog.text


def test_every_hook_exists() -> None:
    for hook in {**autoload.LIGHTNING_HOOKS, **autoload.ACCELERATE_HOOKS}.values():
        module, _, function = hook.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_the_entry_point_and_the_registration_import_nothing_heavy() -> None:
    code = (
        "import sys, _torch_offload_autoload as a; a.install(); import lightning_offload;"
        f"assert not {HEAVY | {'torch_offload', 'accelerate_offload'}!r} & sys.modules.keys()"
    )
    cases.succeed("-W", "error", "-c", code)


USE_EVERY_STRING = """
import importlib, sys
assert "torch_offload" not in sys.modules, "the strategy's module is imported before it is used"
built = []
for name in ("lightning.pytorch", "pytorch_lightning"):
    if name in sys.modules:
        trainer = sys.modules[name].Trainer(
            accelerator="cpu", devices=1, logger=False, strategy="offload_optimizer")
        built.append(type(trainer.strategy).__module__)
for name in ("lightning.fabric", "lightning_fabric"):
    if name in sys.modules:
        fabric = sys.modules[name].Fabric(
            accelerator="cpu", devices=1, strategy="offload_optimizer")
        built.append(type(fabric.strategy).__module__)
print(*built)
"""
LIGHTNING = "lightning_offload.trainer_lightning lightning_offload.fabric_lightning"
MIRROR = "lightning_offload.trainer_pytorch_lightning lightning_offload.fabric_lightning_fabric"
BOTH = (
    "lightning_offload.trainer_lightning lightning_offload.trainer_pytorch_lightning "
    "lightning_offload.fabric_lightning lightning_offload.fabric_lightning_fabric"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("imports", "built"),
    [
        ("import lightning", LIGHTNING),
        ("import torch, lightning", LIGHTNING),
        ("import lightning.pytorch.cli", LIGHTNING),
        ("import lightning.fabric", LIGHTNING),
        ("import pytorch_lightning", MIRROR),
        ("import lightning_fabric", "lightning_offload.fabric_lightning_fabric"),
        ("import accelerate, pytorch_lightning, lightning", BOTH),
        ("import lightning_offload, lightning", LIGHTNING),
    ],
)
def test_the_name_works_without_an_import_of_ours(imports: str, built: str) -> None:
    # A warning about a module that is imported twice or half-way would be an error here.
    out = cases.succeed("-W", "error::RuntimeWarning", "-c", f"{imports}\n{USE_EVERY_STRING}")
    assert out.split() == built.split()


@pytest.mark.slow
@pytest.mark.parametrize("switch", ["TORCH_OFFLOAD_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD"])
def test_switched_off_the_name_is_unknown_until_the_explicit_import(switch: str) -> None:
    code = """
import lightning.pytorch as pl
options = dict(accelerator="cpu", devices=1, logger=False, strategy="offload_optimizer")
try:
    pl.Trainer(**options)
except ValueError as error:
    assert "invalid strategy name" in str(error)
else:
    raise SystemExit("the name is known")
import lightning_offload
pl.Trainer(**options)
import pytorch_lightning
pytorch_lightning.Trainer(**options)
"""
    cases.succeed("-c", code, **{switch: "0"})


@pytest.mark.slow
def test_a_broken_front_end_breaks_no_import(tmp_path: Path) -> None:
    package = tmp_path / "lightning_offload"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('broken')\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import torch, lightning.pytorch as pl\n"
        "pl.Trainer(accelerator='cpu', devices=1, logger=False)\n"
    )
    done = cases.run_python("-W", "error::RuntimeWarning", "-c", code)
    assert done.returncode == 0, done.stderr
    assert (
        "torch-offload: lightning.pytorch.strategies is not extended: "
        "lightning_offload.registry:on_strategies raised RuntimeError: broken"
    ) in done.stderr
