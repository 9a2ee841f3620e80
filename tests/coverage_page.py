"""Writes docs/coverage.md: how much of torch_offload runs without a GPU, and what needs one.

python tests/coverage_page.py report.json     # what `coverage json` wrote

Exits with 1 where something was not reached and no reason is known.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

PAGE = Path(__file__).parent.parent / "docs" / "coverage.md"
STREAMS = "a CPU has no streams, so nothing is recorded and nobody waits"
DRIVER = "locks memory with the driver"

#: file and function, and why a run without a GPU leaves part of it out.
REASONS = {
    "streams.py CopyStreams.create": STREAMS,
    "streams.py caller_stream": STREAMS,
    "streams.py Handoff.take": STREAMS,
    "streams.py Handoff.take_on_cpu": STREAMS,
    "stats.py StepClock.seconds": STREAMS,
    "stats.py _timestamp": STREAMS,
    "host.py _Piece.register": DRIVER,
    "host.py _unregister": DRIVER,
    "host.py HostStore._prepare": DRIVER,
    "refusals.py check_not_capturing": "only a GPU captures graphs",
    "core.py OffloadCore._after_failure": "a CPU is done with its work when it returns",
}


def missed(report: dict[str, Any]) -> list[tuple[str, str, int, int]]:
    """Return what was not reached: file, function, number of lines, number of branches."""
    found = []
    for path, values in report["files"].items():
        for name, function in values["functions"].items():
            lines, branches = function["missing_lines"], function["missing_branches"]
            if lines or branches:
                found.append((Path(path).name, name or "(module)", len(lines), len(branches)))
    return sorted(found)


def render(report: dict[str, Any]) -> str:
    """Return the page."""
    lines = [
        "# Coverage",
        "",
        "Lines and branches of `torch_offload` that its own tests reach without a GPU (those of "
        "the front ends are left out), and what they leave to the GPU tests. Written by "
        f"`make coverage` with torch {torch.__version__.partition('+')[0]}; do not edit.",
        "",
        "| file | lines | branches | covered |",
        "|---|---:|---:|---:|",
    ]
    rows = {Path(path).name: values["summary"] for path, values in report["files"].items()}
    for name, summary in [*sorted(rows.items()), ("all", report["totals"])]:
        lines.append(
            f"| {name} | {summary['covered_lines']} of {summary['num_statements']} | "
            f"{summary['covered_branches']} of {summary['num_branches']} | "
            f"{summary['percent_covered']:.1f} % |"
        )
    lines += [
        "",
        "Not reached without a GPU:",
        "",
        "| file | function | lines | branches | reason |",
        "|---|---|---:|---:|---|",
    ]
    for file, function, num_lines, num_branches in missed(report):
        reason = REASONS.get(f"{file} {function}", "**not known**")
        lines.append(f"| {file} | `{function}` | {num_lines} | {num_branches} | {reason} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    report = json.loads(Path(sys.argv[1]).read_text())
    PAGE.write_text(render(report))
    unknown = [
        f"{file} {function}"
        for file, function, _, _ in missed(report)
        if f"{file} {function}" not in REASONS
    ]
    if unknown:
        print("Not reached, and no reason is known: " + ", ".join(unknown), file=sys.stderr)
    return bool(unknown)


if __name__ == "__main__":
    sys.exit(main())
