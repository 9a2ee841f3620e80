"""Imports point one way: front ends use the core's public names and never each other."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("torch_offload", "lightning_offload", "accelerate_offload")


def imports(path: Path) -> set[tuple[str, int]]:
    """All (module, level) that a file imports, at any depth of nesting."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {(alias.name, 0) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "", node.level))
    return found


def files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


CLI = files("torch_offload/cli")
CORE = [path for path in files("torch_offload") if path not in CLI]


@pytest.mark.parametrize("package", PACKAGES)
def test_direction(package):
    allowed = {
        "torch_offload": set(),
        "lightning_offload": {"torch_offload"},
        "accelerate_offload": {"torch_offload"},
    }[package]
    assert files(package)
    for path in files(package):
        for module, level in imports(path):
            top = module.partition(".")[0]
            if level == 0 and top in PACKAGES and top != package:
                assert top in allowed, f"{path.name} imports {module}"
                assert module == top, f"{path.name} reaches into {module}"


def test_core_needs_only_torch():
    standard = sys.stdlib_module_names
    for path in CORE:
        for module, level in imports(path):
            top = module.partition(".")[0]
            assert level or top in standard or top == "torch", f"{path.name} imports {module}"


def test_core_does_not_import_the_command():
    assert CLI
    for path in CORE:
        for module, _ in imports(path):
            assert "cli" not in module.split("."), f"{path.name} imports {module}"
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert "cli" not in {alias.name for alias in node.names}, path.name


def test_command_needs_click_and_rich_only():
    standard = sys.stdlib_module_names
    for path in CLI:
        for module, level in imports(path):
            top = module.partition(".")[0]
            known = level or top in standard or top in ("torch", "click", "rich")
            assert known, f"{path.name} imports {module}"


@pytest.mark.parametrize("name", ["forecast", "subject", "hardware"])
def test_what_a_plan_computes_with_needs_no_torch(name):
    (path,) = (path for path in CLI if path.stem == name)
    for module, level in imports(path):
        top = module.partition(".")[0]
        assert level == 1 or top in sys.stdlib_module_names, f"{path.name} imports {module}"


def test_without_the_extra_the_command_names_it():
    code = (
        "import sys; sys.modules['click'] = None; from torch_offload.cli.entry import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 1
    assert done.stderr.strip() == (
        'torch-offload needs click, which is not installed. Run `pip install "torch-offload[cli]"`.'
    )


@pytest.mark.parametrize("package", ["lightning_offload", "accelerate_offload"])
def test_front_ends_hold_no_stream_and_no_buffer(package):
    for path in files(package):
        text = path.read_text()
        for word in ("torch.cuda", "torch.Stream", "torch.Event", "cudaHost", "torch.empty("):
            assert word not in text, f"{path.name}: {word}"


def test_public_names_exist_and_are_documented():
    module = importlib.import_module("torch_offload")
    for name in module.__all__:
        assert getattr(module, name).__doc__


def test_modules_are_small():
    for package in PACKAGES:
        for path in files(package):
            assert len(path.read_text().splitlines()) <= 400, path


def test_autoload_module_needs_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None; import _torch_offload_autoload; "
        "_torch_offload_autoload.install()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
