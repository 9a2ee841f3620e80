"""Wheel and source archive: what is in them, and that what they install works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("build")

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch_offload", "lightning_offload", "accelerate_offload")


def run(*command, **options):
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """What git has of this tree: build output that lies around must not end up in a wheel."""
    folder = tmp_path_factory.mktemp("source")
    listed = run(
        "git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard"
    ).splitlines()
    for name in listed:
        if (ROOT / name).is_file() and not name.startswith(("tests/", "benchmarks/")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def built(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source)
    return out


def test_wheel_has_every_module_and_nothing_else(built):
    (wheel,) = built.glob("*.whl")
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    expected = {"_torch_offload_autoload.py"}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*"):
            if path.suffix == ".py" or path.name == "py.typed":
                expected.add(path.relative_to(ROOT).as_posix())
    assert names == expected


def test_the_source_archive_builds_the_same_wheel(built, tmp_path):
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    assert (folder / "LICENSE").is_file()
    assert (folder / "README.md").is_file()
    out = tmp_path / "again"
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", out, folder)
    (first,), (second,) = built.glob("*.whl"), out.glob("*.whl")
    assert first.name == second.name
    one, two = zipfile.ZipFile(first), zipfile.ZipFile(second)
    assert {n: one.read(n) for n in one.namelist()} == {n: two.read(n) for n in two.namelist()}


def test_what_is_installed_works_without_the_repository(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    target = tmp_path / "site"
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index")
    run(*pip, "--target", target, wheel)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    smoke = ROOT / "tests" / "smoke.py"
    text = run(sys.executable, smoke, cwd=tmp_path, env=environment | {"PYTHONPATH": str(target)})
    assert str(target) in text
    assert "same bits" in text


def test_the_version_is_in_one_place():
    found = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert len(found) == 1
    pattern = re.compile(r"__version__\s*=|VERSION\s*=")
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            assert not pattern.search(path.read_text()), path
