"""The pages in docs/ agree with the tests: what they name exists, what they say was found."""

from __future__ import annotations

import ast
import importlib
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import outcomes
import pytest
import test_matrix
from outcomes import EQUAL, REFUSED, Outcome

import accelerate_offload
import lightning_offload
import torch_offload
from torch_offload import OffloadConfig

ROOT = Path(__file__).parent.parent
CONFIGURED = ("OffloadConfig", "OffloadOptimizerPlugin", "OffloadOptimizerStrategy")
FAULTS = ROOT / "docs" / "faults.md"
NODE = re.compile(r"`(tests/\w+\.py)::(\w+)`")


def names_in(path: Path) -> set[str]:
    """Names of the test functions of a file."""
    return {
        node.name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_every_fault_names_tests_that_exist():
    rows = [line for line in FAULTS.read_text().splitlines() if line.startswith("|")]
    faults = [row for row in rows if not row.startswith(("| kind", "|---"))]
    assert len(faults) > 30
    for fault in faults:
        named = NODE.findall(fault)
        assert named, f"no test: {fault}"
        assert fault.count("::") == len(named), f"a name that is not `tests/file.py::test`: {fault}"
        for file, name in named:
            assert name in names_in(ROOT / file), f"{file} has no {name}"


def test_every_case_is_in_the_table():
    named = {name for file, name in NODE.findall(FAULTS.read_text()) if "test_cases" in file}
    assert named == names_in(ROOT / "tests/test_cases.py")


def literals() -> list[str]:
    """Every piece of text in the sources, with what is next to each other put together."""
    found = []
    for path in ROOT.glob("*_offload/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_every_message_in_the_page_on_trouble_is_one_of_the_library():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) > 15
    texts = literals()
    for row in rows:
        match = re.match(r"\| `([^`]+)` \|", row)
        assert match, f"the first column is not one message: {row}"
        assert any(match[1] in text for text in texts), f"no such message: {match[1]}"


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda p: p.stem)
def test_code_in_the_pages_is_code(page):
    for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        tree = ast.parse(code)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").endswith("_offload"):
                module = importlib.import_module(str(node.module))
                for alias in node.names:
                    assert hasattr(module, alias.name), f"{page.name}: {alias.name}"
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in CONFIGURED:
                for keyword in node.keywords:
                    assert keyword.arg in OffloadConfig.__dataclass_fields__, page.name


def test_pages_have_no_link_that_leads_nowhere(tmp_path):
    pytest.importorskip("sphinx")
    pytest.importorskip("myst_parser")
    pytest.importorskip("furo")
    for package in ("lightning", "accelerate", "transformers"):
        pytest.importorskip(package)  # whose classes ours extend
    build = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]

    def built(source, target):
        return subprocess.run([*build, source, target], capture_output=True, text=True, check=False)

    done = built(ROOT / "docs", tmp_path / "site")
    assert done.returncode == 0, done.stdout + done.stderr
    api = (tmp_path / "site" / "api.html").read_text()
    for package in (torch_offload, lightning_offload, accelerate_offload):
        for name in package.__all__:
            assert f'id="{package.__name__}.{name}"' in api, f"docs/api.md lacks {name}"
    source = tmp_path / "docs"
    shutil.copytree(ROOT / "docs", source)
    (source / "index.md").write_text("[x](nowhere.md)\n" + (source / "index.md").read_text())
    assert "nowhere.md" in built(source, tmp_path / "again").stderr


def test_the_table_of_optimizers_is_made_from_its_record():
    rows = outcomes.load()
    assert outcomes.TABLE.read_text() == outcomes.render(rows), "run make docs-table"


def test_the_record_of_the_cpu_is_of_the_version_that_the_tests_run_with():
    pinned = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned
    assert {row.torch for row in outcomes.load() if row.device == "cpu"} == {pinned[1]}


def test_the_record_has_each_case_once_and_no_other():
    rows = outcomes.load()
    assert len({row.key for row in rows}) == len(rows)
    for row in rows:
        file, name = row.test.split("::")
        assert name in names_in(ROOT / file), row
    own = f"tests/test_matrix.py::{test_matrix.test_bits_of_plain_or_refused.__name__}"
    expected = {
        (kind.__name__, flavour, str(dtype).removeprefix("torch."))
        for kind, flavour in test_matrix.CASES
        for dtype in test_matrix.DTYPES
    }
    for device in {row.device for row in rows} | {"cpu"}:
        found = {
            (row.optimizer, row.flavour, row.dtype)
            for row in rows
            if row.device == device and row.test == own
        }
        assert found in (expected, set())
        assert found or device != "cpu"


ROW = Outcome(
    device="cpu",
    torch="2.13.0",
    package="torch.optim",
    optimizer="Adam",
    flavour="default",
    dtype="float32",
    outcome=EQUAL,
    reason="",
    test="tests/test_matrix.py::test_bits_of_plain_or_refused",
)
GPU_ROW = replace(ROW, device="some GPU", torch="2.14.0")


@pytest.mark.parametrize(
    "change",
    [{"outcome": REFUSED, "reason": "so"}, {"dtype": "float64"}, {"flavour": "fused"}],
)
def test_a_run_that_differs_from_the_record_is_noticed(change):
    assert outcomes.disagreement(ROW, [GPU_ROW, ROW]) is None
    message = outcomes.disagreement(replace(ROW, **change), [GPU_ROW, ROW])
    assert message is not None
    assert "make docs-table" in message


def test_runs_of_other_versions_and_devices_are_not_compared():
    changed = replace(ROW, outcome=REFUSED, reason="so")
    assert outcomes.disagreement(replace(changed, torch="2.10.0"), [ROW]) is None
    assert outcomes.disagreement(replace(changed, device="some GPU"), [ROW]) is None
    third = replace(ROW, package="lion 1.0")
    other = replace(changed, package="lion 1.1")
    assert outcomes.disagreement(other, [third]) is None
    assert outcomes.disagreement(replace(other, package="lion 1.0"), [third]) is not None


def test_new_rows_replace_those_of_their_tests_on_their_device(tmp_path):
    old = [ROW, replace(ROW, flavour="gone"), GPU_ROW, replace(ROW, test="a::b", optimizer="Z")]
    new = [replace(ROW, outcome=REFUSED, reason="so")]
    whole = outcomes.merge(old, new, complete=True)
    assert [row.flavour for row in whole if row.device == "cpu"] == ["default", "default"]
    assert [row.optimizer for row in whole] == ["Adam", "Z", "Adam"]
    part = outcomes.merge(old, new, complete=False)
    assert len(part) == 4
    assert new[0] in part
    assert ROW not in part
    outcomes.save(part, tmp_path / "record.jsonl")
    assert outcomes.load(tmp_path / "record.jsonl") == part


def test_the_page_numbers_reasons_once():
    rows = [
        ROW,
        replace(ROW, optimizer="B", outcome=REFUSED, reason="B has a flaw"),
        replace(ROW, optimizer="C", outcome=REFUSED, reason="C has a flaw"),
        replace(ROW, optimizer="C", dtype="float64", outcome=REFUSED, reason="another"),
        GPU_ROW,
    ]
    page = outcomes.render(rows)
    assert "| Adam | default | equal |  |" in page
    assert "| B | default | refused (1) |  |" in page
    assert "| C | default | refused (1) | refused (2) |" in page
    assert page.count("This class has a flaw") == 1
    assert "## torch.optim on some GPU\n\nWith torch 2.14.0." in page
