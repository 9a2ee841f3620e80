"""Run an unmodified script with transformers' Trainer through `accelerate launch`, and compare.

Runs, each a launch of its own: plain, plain once more (the control), offloaded with each overlap,
and offloaded again from a checkpoint that the last of these saved. All must have the same losses
and end with the same weights, to the last bit. Gradients are clipped (max_grad_norm=1.0), as
Trainer does by default.

Writes one JSON record and prints a table. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from record import RESULTS, ROOT, Record, commit, environment, write

SCRIPT = Path(__file__).with_name("trainer_script.py")
#: What offload says on stderr: that it is active, and what ``overlap="auto"`` has chosen.
_SAID = re.compile(r"^(accelerate_offload: .*|\w+: overlap=.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Run:
    """One launch.

    Attributes:
        name: in the record and the table.
        overlap: of the offload; None for a plain run.
        saves: whether it saves a checkpoint.
        resumes: whether it starts from the checkpoint that an earlier run saved.
    """

    name: str
    overlap: str | None = None
    saves: bool = False
    resumes: bool = False


RUNS = (
    Run("plain"),
    Run("plain again"),
    Run("step", "step"),
    Run("auto", "auto", saves=True),
    Run("auto, resumed", "auto", resumes=True),
)


def command(run: Run, arguments: list[str], chunk_size: str | None) -> list[str]:
    """Return the launch. Where torch finds no entry point of ours, the shim stands for the flag."""
    launch = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
    launch += ["--num_processes", "1", "--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    launch += [] if torch.cuda.is_available() else ["--cpu"]
    options: list[str] = []
    if run.overlap is not None:
        options = ["--offload_overlap", run.overlap]
        options += ["--offload_chunk_size", chunk_size] if chunk_size else []
        own = way() == "--offload_optimizer"
        options = [way(), *options] if own else ["-m", "accelerate_offload", *options]
    return [*launch, *options, str(SCRIPT), *arguments]


def way() -> str:
    """Return how offload is asked for here."""
    found = importlib.metadata.entry_points(group="torch.backends")
    has_flag = any(entry.name == "torch_offload" for entry in found)
    return "--offload_optimizer" if has_flag else "-m accelerate_offload"


def launch(run: Run, folder: Path, args: argparse.Namespace) -> Record:
    """Run one of them, and return what it found."""
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    own = {"out": folder / "checkpoints", "result": result, "size": args.size}
    own |= {"batch": args.batch, "length": args.length, "steps": args.steps}
    own |= {"first_timed": args.first_timed}
    if run.saves:
        own["save_at"] = args.save_at
    if run.resumes:
        own["resume"] = folder / "checkpoints" / f"checkpoint-{args.save_at}"
    arguments = [word for key, value in own.items() for word in (f"--{key}", str(value))]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    env = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")}
    env |= {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")}
    env |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder)}
    began = time.perf_counter()
    done = subprocess.run(
        command(run, arguments, args.chunk_size), capture_output=True, text=True, env=env
    )
    found: Record = {"name": run.name, "overlap": run.overlap, "resumed": run.resumes}
    found["wall_s"] = time.perf_counter() - began
    found["said"] = _SAID.findall(done.stderr)
    if done.returncode or not result.exists():
        return found | {"outcome": "error", "reason": done.stderr[-3000:]}
    if (run.overlap is not None) != any("offload is active" in line for line in found["said"]):
        return found | {"outcome": "error", "reason": f"not as asked for: {found['said']}"}
    return found | {"outcome": "ok", "reason": None} | json.loads(result.read_text())


def compare(runs: list[Record]) -> None:
    """Put into each run whether it has the losses and weights of the first."""
    first = runs[0]
    for run in runs:
        run["equal"] = None
        if "ok" == run["outcome"] == first["outcome"]:
            losses = first["losses"][-len(run["losses"]) :]
            same = run["losses"] == losses and len(losses) > 0
            run["equal"] = same and run["params_sha256"] == first["params_sha256"]


def table(record: Record) -> Table:
    """Return what was measured, one row a run."""
    num_params, tokens = record["num_params"] or 0, record["config"]["tokens"]
    shown = Table(title=f"{num_params:,} parameters, {tokens:,} tokens a step")
    for name in ("run", "s a step", "tokens/s", "peak, training", "peak, before it", "bits"):
        shown.add_column(name, justify="left" if name in ("run", "bits") else "right")
    for run in record["runs"]:
        if run["outcome"] != "ok":
            shown.add_row(run["name"], run["outcome"])
            continue
        peaks = run["peak_bytes"]
        most = max(peaks.get("warm_up", 0), peaks.get("steady", 0))
        gib = [f"{value / 2**30:.1f} GiB" for value in (most, peaks.get("setup", 0))]
        bits = "equal" if run["equal"] else "DIFFERENT"
        row = (f"{run['step_s']:.3f}", f"{run['tokens_per_s']:,.0f}")
        shown.add_row(run["name"], *row, *gib, bits)
    return shown


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="1b", choices=("tiny", "1b"), help="of the model")
    parser.add_argument("--batch", type=int, default=8, help="sequences a step")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--first_timed", type=int, default=6, help="steps that are not timed")
    parser.add_argument("--save_at", type=int, default=4, help="step of the checkpoint")
    parser.add_argument("--chunk_size", default=None, help='such as "256MiB"')
    parser.add_argument("--out", type=Path, default=RESULTS, help="record, or its folder")
    args = parser.parse_args(argv)
    if not 0 < args.save_at < args.first_timed < args.steps:
        parser.error(
            f"--save_at={args.save_at} --first_timed={args.first_timed} --steps={args.steps}: "
            "each must be larger than the one before, so that saving is not timed."
        )
    return args


def main(argv: list[str] | None = None) -> None:
    """Run all of them, write the record and print the table."""
    args = parse(argv)
    head = commit()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    record: Record = {"benchmark": "bench_trainer", "commit": head, **environment(device)}
    record["versions"] |= {
        name: importlib.metadata.version(name) for name in ("accelerate", "transformers")
    }
    record["config"] = {
        **{key: value for key, value in vars(args).items() if key != "out"},
        "tokens": args.batch * args.length,
        "way": way(),
        "max_grad_norm": 1.0,
        "optimizer": "adamw_torch_fused",
        "autocast_dtype": "bfloat16" if device.type == "cuda" else None,
    }
    record |= {"num_params": None, "complete": False, "runs": []}
    console = Console(highlight=False, markup=False, soft_wrap=True)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for run in RUNS:
            record["runs"].append(launch(run, Path(folder), args))
            last = record["runs"][-1]
            record["num_params"] = record["num_params"] or last.get("num_params")
            compare(record["runs"])
            record["complete"] = len(record["runs"]) == len(RUNS)
            record["wall_s"] = time.perf_counter() - began
            path = write(record, args.out)
            console.print(
                f"[{record['wall_s']:6.1f} s] {run.name}: {last['outcome']} {last['reason'] or ''}"
            )
            for line in last["said"]:
                console.print(f"           {line}")
    Console(highlight=False, width=max(console.width, 120)).print(table(record))
    console.print(f"Record: {path}")
    wrong = [run["name"] for run in record["runs"] if not run["equal"]]
    if wrong:
        raise SystemExit(f"Not the losses and weights of the plain run: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
