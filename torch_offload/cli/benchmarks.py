"""Runs a benchmark of the repository in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

#: The scripts by the names that the command takes.
SCRIPTS = {"step": "bench_step.py", "train": "bench_train.py", "peers": "bench_peers.py"}
FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def run(name: str, arguments: Sequence[str], folder: Path = FOLDER) -> int:
    """Run it with these arguments and return its exit code.

    Raises:
        ValueError: the benchmarks are not here.
    """
    script = folder / SCRIPTS[name]
    if not script.is_file():
        raise ValueError(
            f"{script.name} is not in {folder}: the benchmarks are part of the repository, not of "
            "the package. Clone it and run this there."
        )
    return subprocess.run([sys.executable, str(script), *arguments], check=False).returncode
