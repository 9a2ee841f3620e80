"""The notebooks run at their smallest size, and so does what runs and draws them."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torch_offload import OffloadConfig, offload, offload_stats

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))
#: What each must print, and how many pictures it must have.
EXPECTED = {
    "01_quickstart.ipynb": ({"equal to the last bit: ": 2}, 2),
    "02_where_the_time_goes.ipynb": ({" s a step\n": 4, "backward": 1}, 2),
    "03_what_fits.ipynb": ({"layers: ": 4, ": trained, ": 4}, 1),
}
CELLS = """
import sys
print("one")
print("two", file=sys.stderr)
print("three")
---
import matplotlib.pyplot as plt
figure, axes = plt.subplots()
axes.plot([1, 2])
plt.show()
---
text = "kept"
---
print(text, __name__)
"""


@pytest.fixture
def nbformat():
    return pytest.importorskip("nbformat")


@pytest.fixture
def memory_picture(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("memory_picture")


def environment(**more):
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path, "SIZE": "tiny"} | more


def printed(notebook, name):
    return "".join(
        "".join(output["text"])
        for cell in notebook["cells"]
        for output in cell.get("outputs", ())
        if output["output_type"] == "stream" and output["name"] == name
    )


def pictures(notebook):
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", ())]
    return [o["data"]["image/png"] for o in outputs if "image/png" in o.get("data", {})]


def check(notebook, name):
    texts, num_pictures = EXPECTED[name]
    text = printed(notebook, "stdout")
    for part, count in texts.items():
        assert text.count(part) >= count, text
    assert len(pictures(notebook)) == num_pictures


def write(nbformat, path, cells):
    cells = [nbformat.v4.new_code_cell(cell.strip()) for cell in cells]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)


def run(*paths, **more):
    return subprocess.run(
        [sys.executable, FOLDER / "run.py", *paths],
        capture_output=True,
        text=True,
        check=False,
        env=environment(**more),
    )


def execute(path, folder):
    """Run a notebook in a kernel, as Jupyter does."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    client = nbclient.NotebookClient(notebook, timeout=240, resources=resources)
    client.execute(env=environment(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1"))
    return notebook


def test_every_notebook_is_tested():
    assert sorted(EXPECTED) == NOTEBOOKS


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_runs_in_jupyter(name):
    check(execute(FOLDER / name, FOLDER), name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_runs_on_a_gpu(tmp_path, name):
    for folder in ("notebooks", "examples", "benchmarks"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    path = tmp_path / "notebooks" / name
    done = run(path)
    assert done.returncode == 0, done.stderr
    notebook = json.loads(path.read_text())
    check(notebook, name)
    assert "NVIDIA" in printed(notebook, "stdout") or torch.version.hip


def test_run_writes_what_jupyter_writes(nbformat, tmp_path):
    path = tmp_path / "some.ipynb"
    write(nbformat, path, CELLS.split("---"))
    there = execute(path, tmp_path)
    done = run(path)
    assert done.returncode == 0, done.stderr
    here = nbformat.read(path, as_version=4)
    nbformat.validate(here)
    for name in ("stdout", "stderr"):
        assert printed(here, name) == printed(there, name)
    assert printed(here, "stdout") == "one\nthree\nkept __main__\n"
    assert len(pictures(here)) == len(pictures(there)) == 1
    for cell, other in zip(here["cells"], there["cells"], strict=True):
        assert cell["execution_count"] == other["execution_count"]
        assert cell["source"] == other["source"]
    assert f"{path.name}: " in done.stdout


def test_a_notebook_that_fails_stays_as_it_was(nbformat, tmp_path):
    path, other = tmp_path / "some.ipynb", tmp_path / "other.ipynb"
    write(nbformat, path, ["print(1)", "raise KeyError('gone')"])
    write(nbformat, other, ["print(2)"])
    before = path.read_text()
    done = run(path, other)
    assert done.returncode == 1
    assert "KeyError: 'gone'" in done.stderr
    assert "some.ipynb, cell 2 failed. some.ipynb is as it was." in done.stderr
    assert "Failed: some.ipynb\n" in done.stderr
    assert path.read_text() == before
    assert printed(json.loads(other.read_text()), "stdout") == "2\n"  # it is run all the same


@pytest.mark.parametrize("overlap", [None, "step", "backward"])
def test_memory_is_told_by_kind(memory_picture, overlap):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=False) for _ in range(4)))
    layer_bytes = 4 * 16 * 16
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if overlap is not None:
        config = OffloadConfig(chunk_size=layer_bytes, num_slots=2, overlap=overlap)
        offload(optimizer, config, model=model)
    with memory_picture.watching(model, model, optimizer) as memory:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(8, 16)).sum().backward()
            optimizer.step()
            memory.end_step()
        staging = 0 if overlap is None else offload_stats(optimizer).staging_bytes
    assert memory.optimizer is None
    params, grads, states, others = zip(*memory.steps[-1], strict=True)
    assert len(params) == 4 + 4 + 1  # each layer's forward and backward, and the end
    assert set(params) == {4 * layer_bytes}
    if overlap == "backward":
        assert max(grads) < 4 * layer_bytes
        assert grads[-1] == 0
    else:
        assert grads == (0, 0, 0, 0, 0, layer_bytes, 2 * layer_bytes, 3 * layer_bytes,
                         4 * layer_bytes)  # fmt: skip
    if overlap is None:
        assert set(states) == {4 * layer_bytes}
        assert memory.peak_bytes == 12 * layer_bytes
    else:
        assert states[-1] == staging == 2 * layer_bytes
        assert states[0] == (staging if overlap == "backward" else 0)
    # Each layer keeps its input of 8 x 16 numbers until its backward has ended.
    input_bytes = 4 * 8 * 16
    assert others[:4] == tuple(input_bytes * n for n in (1, 2, 3, 4))
    assert others[-1] == 0
    assert max(others) == others[3]
