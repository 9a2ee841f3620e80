"""A benchmark's record: one JSON file with raw samples and everything needed to judge them."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
Record = dict[str, Any]


def commit() -> str:
    """Return the measured commit, with ``+dirty`` when the tree differs from it.

    The variable TORCH_OFFLOAD_COMMIT wins: it is for copies of the tree that have no ``.git``.

    Raises:
        SystemExit: it cannot be told. A number that belongs to no commit is worth nothing.
    """
    named = os.environ.get("TORCH_OFFLOAD_COMMIT", "").strip()
    if named:
        if not re.fullmatch(r"[0-9a-f]{7,40}(\+dirty)?", named):
            raise SystemExit(
                f"TORCH_OFFLOAD_COMMIT={named!r} is not a commit. Give what `git rev-parse HEAD` "
                "prints, with +dirty appended when the tree differs from it."
            )
        return named
    if (ROOT / ".git").exists():
        head = _output("git", "-C", str(ROOT), "rev-parse", "--verify", "--quiet", "HEAD")
        # Records of earlier runs and the table made from them do not change what is measured.
        paths = [":/", ":!/benchmarks/results", ":!/README.md"]
        status = _output("git", "-C", str(ROOT), "status", "--porcelain", "--", *paths)
        if head and status is not None:
            return head + ("+dirty" if status else "")
    raise SystemExit(
        "The commit that is measured cannot be read from git. "
        'Set TORCH_OFFLOAD_COMMIT="$(git rev-parse HEAD)", where there is a repository.'
    )


def environment(device: torch.device) -> Record:
    """Return the GPU, its driver, the versions and the date."""
    import torch  # only here: making a table from records needs no torch

    gpu = device.type == "cuda"
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    drivers = (_output(*query) or "").splitlines() if gpu else []
    return {
        "device": torch.cuda.get_device_name(device) if gpu else "CPU",
        "device_type": device.type,
        "device_bytes": torch.cuda.get_device_properties(device).total_memory if gpu else None,
        "driver": drivers[0] if drivers else None,
        "cpu_cores": os.cpu_count(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "kernel": platform.release(),
        },
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def write(record: Record, out: Path) -> Path:
    """Write the record and return its path.

    ``out`` is that path where it ends in ``.json``, else a folder: the name is then made of
    benchmark, device and date.
    """
    device = re.sub(r"[^a-z0-9]+", "-", record["device"].lower()).strip("-")
    date = re.sub(r"[^0-9T]", "", record["date"].split("+")[0])
    path = out if out.suffix == ".json" else out / f"{record['benchmark']}-{device}-{date}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
