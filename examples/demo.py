"""The demo: the same training four times, plain and offloaded, in Lightning and in Accelerate.

Each run is a process of its own and writes a JSON report. An offloaded run must end with the
bits of the plain run of its framework: every loss and every parameter. If not, this exits with 1.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from decoder import SIZES

_HERE = Path(__file__).resolve().parent
_WARM_UP_STEPS = 2
Report = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One training: what it is called, how it is started and whether its state is offloaded."""

    name: str
    command: tuple[str, ...]
    offloaded: bool

    @property
    def framework(self) -> str:
        """The word before the comma: runs of one framework must agree."""
        return self.name.split(",")[0]


def runs() -> list[Run]:
    """Return the four runs, the plain one of a framework before its offloaded one."""
    lightning = ("python", "train_lightning.py")
    launch = ("accelerate", "launch", "--config_file", "accelerate.yaml")
    script = ("train_accelerate.py",)
    return [
        Run("Lightning, plain", (*lightning, "--strategy", "auto"), False),
        Run("Lightning, offloaded", (*lightning, "--strategy", "offload_optimizer"), True),
        Run("Accelerate, plain", (*launch, *script), False),
        Run("Accelerate, offloaded", (*launch, "--offload_optimizer", *script), True),
    ]


def start(run: Run, size: str, path: Path) -> Report:
    """Run it to its end and return its report.

    Raises:
        SystemExit: the run failed.
    """
    program, *arguments = (*run.command, "--size", size, "--report", str(path))
    # The console script of this interpreter, whichever environment the shell has on its path.
    script = Path(sys.executable).with_name("accelerate")
    launcher = [str(script)] if script.exists() else ["-m", "accelerate.commands.accelerate_cli"]
    prefix = [sys.executable] if program == "python" else [sys.executable, *launcher]
    path.unlink(missing_ok=True)
    done = subprocess.run([*prefix, *arguments], cwd=_HERE, check=False)
    if done.returncode or not path.exists():
        raise SystemExit(
            f"{run.name}: `{shlex.join(run.command)}` in {_HERE.name}/ failed "
            f"(exit status {done.returncode}). Its own messages are above."
        )
    report: Report = json.loads(path.read_text())
    return report


def problems(reports: dict[Run, Report]) -> list[str]:
    """Return what is wrong, one line each; nothing when every offloaded run kept its promise."""
    found = []
    plain: dict[str, Report] = {}
    for run, report in reports.items():
        if report["optimizer"].startswith("Offloaded") != run.offloaded:
            found.append(f"{run.name}: the optimizer was a {report['optimizer']}.")
        if run.offloaded and report["state_gpu_bytes"] > 0.01 * report["state_host_bytes"]:
            found.append(f"{run.name}: {report['state_gpu_bytes']} bytes of state on the GPU.")
        if not run.offloaded:
            plain[run.framework] = report
            continue
        reference = plain[run.framework]
        if reference["losses"] != report["losses"]:
            pairs = enumerate(zip_longest(reference["losses"], report["losses"]))
            step, (a, b) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
            found.append(f"{run.name}: the loss of step {step} is {b!r}, plain it is {a!r}.")
        elif reference["params_checksum"] != report["params_checksum"]:
            found.append(f"{run.name}: equal losses, but the parameters differ at the end.")
    return found


def table(reports: dict[Run, Report]) -> Table:
    """Return the comparison, one row a run."""
    gpu = next(iter(reports.values()))["peak_gpu_bytes"] is not None

    def size(num_bytes: int) -> str:
        return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**26 else f"{num_bytes / 1e6:.1f} MB"

    result = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    result.add_column("run", no_wrap=True)
    for name in ("final loss", "step", "GPU state", "host state", "peak GPU"):
        result.add_column(name, justify="right", no_wrap=True)
    for run, report in reports.items():
        result.add_row(
            run.name,
            f"{report['losses'][-1]:.9g}",  # the digits that tell two float32 apart
            f"{1e3 * statistics.median(report['step_s'][_WARM_UP_STEPS:]):.0f} ms",
            size(report["state_gpu_bytes"]) if gpu else "n/a",
            size(report["state_host_bytes"]),
            size(report["peak_gpu_bytes"]) if gpu else "n/a",
        )
    return result


def main() -> None:
    """Run the four, compare them and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="small", help=f"one of {', '.join(SIZES)}")
    parser.add_argument("--out", type=Path, default=Path(".demo"), help="folder of the reports")
    args = parser.parse_args()
    if args.size not in SIZES:
        raise SystemExit(f"SIZE={args.size}: there is no such size. Use one of {', '.join(SIZES)}.")
    size = SIZES[args.size]
    if size.gpu_gib and not torch.cuda.is_available():
        raise SystemExit(
            f"SIZE={args.size} needs a GPU with {size.gpu_gib} GiB, and torch sees none here. "
            "SIZE=small runs on a CPU."
        )
    console = Console(highlight=False, soft_wrap=True)
    began = time.perf_counter()
    reports: dict[Run, Report] = {}
    for number, run in enumerate(runs(), start=1):
        console.print(f"\n[bold]\\[{number}/4] {run.name}[/bold]  {shlex.join(run.command)}")
        path = (args.out / f"{run.name.replace(', ', '-').lower()}.json").resolve()
        reports[run] = start(run, args.size, path)
    first = next(iter(reports.values()))
    console.print(f"\n{first['num_params']:,} parameters, {size.steps} steps on {first['device']}")
    console.print(table(reports))
    if found := problems(reports):
        raise SystemExit("The runs do not agree:\n" + "\n".join(f"  {line}" for line in found))
    same = len({(report["params_checksum"], *report["losses"]) for report in reports.values()}) == 1
    console.print(
        ("All four runs agree" if same else "Each offloaded run agrees with its plain run")
        + f" to the last bit: {size.steps} losses and every parameter. "
        f"({time.perf_counter() - began:.0f} s)"
    )
    if first["peak_gpu_bytes"] is None:
        console.print(
            "Without a GPU there is no memory to save; `make demo SIZE=1b` on one shows it."
        )


if __name__ == "__main__":
    main()
