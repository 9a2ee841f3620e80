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
    for path in files("torch_offload"):
        for module, level in imports(path):
            top = module.partition(".")[0]
            assert level or top in standard or top == "torch", f"{path.name} imports {module}"


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
