"""Writes docs/coverage.md: how much of torch_offload runs without a GPU, and what needs one.

python tests/coverage_page.py report.json     # what `coverage json` wrote

Exits with 1 where less than LEAST percent was reached.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

PAGE = Path(__file__).parent.parent / "docs" / "coverage.md"
LEAST = 95
STREAMS = "a CPU has no streams, so nothing is recorded and nobody waits"
DRIVER = "locks memory with the driver"

#: File and function of what only a GPU reaches, and why.
REASONS = {
    "streams.py CopyStreams.create": STREAMS,
    "streams.py caller_stream": STREAMS,
    "streams.py on": STREAMS,
    "recording.py _stamp": STREAMS,
    "recording.py _seconds": STREAMS,
    "pipeline.py Pipeline.synchronize": STREAMS,
    "forward.py _Ticket.wait": STREAMS,
    "planner.py Planner.keep_what_fits": "only a GPU has memory of its own",
    "notices.py Notices.kept": "only a GPU has memory of its own",
    "pipeline.py Pipeline._allocate": "a CPU has memory for all slots",
    "host.py _Piece._hold": DRIVER,
    "streams.py Handoff.take": STREAMS,
    "streams.py Handoff.take_on_cpu": STREAMS,
    "stats.py StepClock.seconds": STREAMS,
    "stats.py _timestamp": STREAMS,
    "host.py _Piece.register": DRIVER,
    "host.py _unregister": DRIVER,
    "host.py HostStore._prepare": DRIVER,
    "refusals.py check_not_capturing": "only a GPU captures graphs",
    "core.py OffloadCore.after_failure": "a CPU is done with its work when it returns",
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
        reason = REASONS.get(f"{file} {function}", "no test takes this way")
        lines.append(f"| {file} | `{function}` | {num_lines} | {num_branches} | {reason} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    report = json.loads(Path(sys.argv[1]).read_text())
    PAGE.write_text(render(report))
    percent = report["totals"]["percent_covered"]
    if percent < LEAST:
        print(f"{percent:.1f} % was reached, which is less than {LEAST} %.", file=sys.stderr)
    return percent < LEAST


if __name__ == "__main__":
    sys.exit(main())
