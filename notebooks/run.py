"""Runs notebooks and writes what they print and draw into them, without Jupyter.

Each notebook gets a process of its own, cells run in it from top to bottom, and figures that are
open at a cell's end are its pictures, as in Jupyter. So a machine with a GPU needs nothing but what
the notebooks import. A notebook that fails stays as it was.

    python notebooks/run.py [NOTEBOOK.ipynb ...]        # all of this folder by default
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import subprocess
import sys
import time
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

Output = dict[str, Any]


class Stream(io.TextIOBase):
    """A file that appends what is written to a cell's outputs, as text of one name."""

    def __init__(self, name: str, outputs: list[Output]) -> None:
        self._name, self._outputs = name, outputs

    def write(self, text: str) -> int:
        """Append."""
        if not self._outputs or self._outputs[-1].get("name") != self._name:
            self._outputs.append({"name": self._name, "output_type": "stream", "text": ""})
        self._outputs[-1]["text"] += text
        return len(text)


def run_cell(source: str, name: str, namespace: dict[str, Any]) -> list[Output]:
    """Run a cell in ``namespace`` and return its outputs as a notebook holds them."""
    outputs: list[Output] = []
    with (
        redirect_stdout(Stream("stdout", outputs)),
        redirect_stderr(Stream("stderr", outputs)),
    ):
        exec(compile(source, name, "exec"), namespace)
        outputs += _figures()
    for output in outputs:
        if output["output_type"] == "stream":
            output["text"] = output["text"].splitlines(keepends=True)
    return outputs


def run(path: Path) -> None:
    """Run a notebook in this process, from its folder, and write its outputs into it.

    Raises:
        SystemExit: a cell raised; its traceback was printed.
    """
    notebook = json.loads(path.read_text(encoding="utf-8"))
    os.environ["MPLBACKEND"] = "agg"
    os.chdir(path.parent)
    sys.path.insert(0, str(path.parent))
    namespace: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, start=1):
        name = f"{path.name}, cell {number}"
        try:
            cell["outputs"] = run_cell("".join(cell["source"]), name, namespace)
        except Exception:
            traceback.print_exc()
            raise SystemExit(f"{name} failed. {path.name} is as it was.") from None
        cell["execution_count"] = number
    text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")


def main(argv: list[str] | None = None) -> None:
    """Run each notebook."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("notebooks", nargs="*", type=Path)
    paths = [path.resolve() for path in parser.parse_args(argv).notebooks]
    if len(paths) == 1:
        began = time.perf_counter()
        run(paths[0])
        print(f"{paths[0].name}: {time.perf_counter() - began:.0f} s")
        return
    failed = []
    for path in paths or sorted(Path(__file__).resolve().parent.glob("*.ipynb")):
        if subprocess.run([sys.executable, __file__, path], check=False).returncode:
            failed.append(path.name)
    if failed:
        raise SystemExit(f"Failed: {', '.join(failed)}")


def _figures() -> list[Output]:
    """Return the open figures as pictures, and close them."""
    plt = sys.modules.get("matplotlib.pyplot")
    if plt is None:
        return []
    outputs = []
    for number in plt.get_fignums():
        picture = io.BytesIO()
        figure = plt.figure(number)
        figure.savefig(picture, format="png")
        data = base64.b64encode(picture.getvalue()).decode()
        outputs.append(
            {
                "data": {"image/png": data, "text/plain": [repr(figure)]},
                "metadata": {},
                "output_type": "display_data",
            }
        )
    plt.close("all")
    return outputs


if __name__ == "__main__":
    main()
