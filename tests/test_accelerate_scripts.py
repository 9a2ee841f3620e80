"""Scripts of Accelerate's own wheel, which know nothing of offload, pass with it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from accelerate_cases import SWITCH, run_python

pytestmark = pytest.mark.slow

#: Runs a module as ``python -m`` does, and prints how many optimizers were offloaded in it.
COUNT = """
import atexit, runpy, sys
from accelerate_offload import report
atexit.register(lambda: print("offloaded:", report._num_converted, flush=True))
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize(("script", "num_optimizers"), [("test_sync", 1), ("test_script", 8)])
def test_own_script(tmp_path: Path, script: str, num_optimizers: int, num_processes: int):
    (tmp_path / "count.py").write_text(COUNT)
    options = ["--num_processes", str(num_processes), "--main_process_port", "0"]
    options += ["--multi_gpu"] if num_processes > 1 else []
    done = run_python(
        *("-m", "accelerate.commands.accelerate_cli", "launch", *options),
        *("count.py", f"accelerate.test_utils.scripts.{script}"),
        cwd=tmp_path,
        **{SWITCH: "true", "ACCELERATE_OFFLOAD_CHUNK_SIZE": "1KiB", "ACCELERATE_USE_CPU": "true"},
    )
    counts = [int(count) for count in re.findall(r"offloaded: (\d+)", done.stdout)]
    assert len(counts) == num_processes
    assert all(count >= num_optimizers for count in counts), counts
    assert "WARNING: ACCELERATE_OFFLOAD" not in done.stderr
