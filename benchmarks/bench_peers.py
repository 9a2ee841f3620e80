"""Time whole training steps by this library and by its peers: same model, same tokens, same run.

Each way of training has a process of its own, so that one cannot spoil the next: no offload
(twice, as a control), ours in some modes (as `bench_train.py` names them), and the peers that are
installed. Those that are not, or cannot run here, stay in the table with the reason. So do losses.

Ends within `--limit` seconds: what was not begun then is skipped, and says so. Writes one JSON
record, anew after each, and prints a table.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console

from bench_train import ADAMW, make_deterministic, measure_mode
from measuring import COPY_BYTES, Hash, link_samples
from peer_tables import table
from peers import PEERS, Counted, versions
from record import RESULTS, Record, commit, environment, write
from torch_offload import OffloadConfig
from train_modes import Mode, parse_mode, with_control
from train_plan import Plan
from train_tables import compare
from transformer import SIZES, num_params

DEFAULT = ("none", "step", "backward", *PEERS)


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, Plan, list[Mode]]:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--params", help=f"{', '.join(SIZES)}; default 1e9 on a GPU, else 1e5")
    parser.add_argument("--tokens", nargs="+", type=int, default=[16384], help="of one step")
    parser.add_argument("--seq", type=int, default=4096, help="tokens of one sequence")
    parser.add_argument(
        "--ways", nargs="+", default=list(DEFAULT), help=f"bench_train's modes, {', '.join(PEERS)}"
    )
    parser.add_argument("--steps", type=int, default=4, help="timed steps of each point")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--limit", type=float, default=230, help="seconds for everything")
    parser.add_argument("--way-limit", type=float, default=100, help="seconds for each way")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=RESULTS, help="record: a .json, or its folder")
    parser.add_argument("--commit", help="what is measured; else TORCH_OFFLOAD_COMMIT, else git")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # in a process of its own: this way
    parser.add_argument("--control", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)

    for name in ("seq", "steps", "warmup", "limit", "way_limit"):
        if getattr(args, name) < 1:
            parser.error(f"{name}={getattr(args, name)} is too small. Use 1 or more.")
    params = args.params or ("1e9" if args.device.startswith("cuda") else "1e5")
    if params not in SIZES:
        parser.error(f"params={params!r} is no preset. Use one of {', '.join(SIZES)}.")
    args.params = params
    for tokens in args.tokens:
        if tokens < 1 or tokens % args.seq:
            parser.error(
                f"tokens={tokens} is not a multiple of seq={args.seq}. "
                f"Use {max(1, round(tokens / args.seq)) * args.seq}."
            )
    try:
        modes = [way_of(name) for name in dict.fromkeys(args.ways)]
    except ValueError as error:
        parser.error(str(error))
    plan = Plan(
        size=SIZES[params],
        num_params=num_params(SIZES[params]),
        sequence=args.seq,
        tokens=tuple(sorted(set(args.tokens))),
        accumulation=1,
        warmup=args.warmup,
        steps=args.steps,
        sizes={},
        seed=args.seed,
        timeline=None,
    )
    plain = [mode for mode in modes if mode.name not in PEERS]
    controls = [mode for mode in with_control(plain) if mode.control]
    return args, plan, [*controls, *modes]


def way_of(name: str) -> Mode:
    """Return the mode of a way of training: one of ours, or a peer's under its name.

    Raises:
        ValueError: it is neither.
    """
    if name in PEERS:
        return Mode(name=name, overlap=None)
    try:
        return parse_mode(name)
    except ValueError:
        raise ValueError(
            f"ways={name!r} is not known. Use none, step, backward or forward as bench_train.py "
            f"does, or one of {', '.join(PEERS)}."
        ) from None


def measure_here(plan: Plan, mode: Mode, device: torch.device) -> Record:
    """Train in one way, in this process."""
    peer = PEERS.get(mode.name)
    make_deterministic(warn_only=peer is not None)
    if device.type == "cuda":
        torch.zeros(1, device=device)  # the driver's own host memory is nobody's
    return measure_mode(plan, mode, device, Hash(device), make=peer or Counted)


def measure_apart(mode: Mode, plan: Plan, argv: list[str], folder: Path, seconds: float) -> Record:
    """Train in one way, in a process of its own that has so many seconds.

    A process that dies is the outcome of its points.
    """
    out = folder / "way.json"
    out.unlink(missing_ok=True)
    command = [sys.executable, __file__, *argv, "--only", mode.name, "--out", str(out)]
    command += ["--control"] if mode.control else []
    began = time.perf_counter()
    outcome, reason = "error", ""
    try:
        code, text = run_group(command, seconds, {"TORCH_EXTENSIONS_DIR": str(folder)})
        if out.exists():
            return dict(json.loads(out.read_text()))
        lines = text.strip().splitlines() or ["no message"]
        reason = f"The process ended with {code}: {lines[-1]}"
    except subprocess.TimeoutExpired:
        outcome, reason = "skipped", f"It took more than {seconds:.0f} s."
    return _nothing(plan, mode, outcome, reason) | {"wall_s": time.perf_counter() - began}


def run_group(command: list[str], seconds: float, variables: dict[str, str]) -> tuple[int, str]:
    """Run it, and return its exit code and what it printed. Its own children end with it.

    Raises:
        subprocess.TimeoutExpired: it did not end in time.
    """
    with tempfile.TemporaryFile("w+") as printed:
        process = subprocess.Popen(
            command,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | variables,
        )
        try:
            process.wait(timeout=seconds)
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)  # compilers that it has started
            except ProcessLookupError:
                pass
            process.wait()
        printed.seek(0)
        return process.returncode, printed.read()


def _nothing(plan: Plan, mode: Mode, outcome: str, reason: str) -> Record:
    points = [{"tokens": n, "outcome": outcome, "reason": reason} for n in plan.tokens]
    return {
        "name": mode.name,
        "label": mode.label,
        "overlap": mode.overlap,
        "budget": mode.budget,
        "clip": mode.clip,
        "control": mode.control,
        "settings": {},
        "points": points,
    }


def main(argv: list[str] | None = None) -> None:
    """Measure, write the record and print the table."""
    argv = list(sys.argv[1:] if argv is None else argv)
    args, plan, modes = parse(argv)
    device = torch.device(args.device)
    if args.only is not None:
        mode = next(m for m in modes if m.name == args.only and m.control == args.control)
        args.out.write_text(json.dumps(measure_here(plan, mode, device)))
        return
    if args.commit:
        os.environ["TORCH_OFFLOAD_COMMIT"] = args.commit
    head = commit()  # refuses before anything takes time
    console = Console(highlight=False, markup=False, soft_wrap=True)
    began = time.perf_counter()
    link = link_samples(device, ("h2d", "d2h", "duplex"), repeats=5)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()
    record: Record = {
        "benchmark": "bench_peers",
        "commit": head,
        **environment(device),
        "config": {
            "size": vars(plan.size),
            "preset": args.params,
            "num_params": plan.num_params,
            "sequence": plan.sequence,
            "tokens": list(plan.tokens),
            "warmup": plan.warmup,
            "steps": plan.steps,
            "seed": plan.seed,
            "optimizer": f"AdamW({', '.join(f'{k}={v}' for k, v in ADAMW.items())})",
            "defaults": {k: str(v) for k, v in vars(OffloadConfig()).items()},
            "limit_s": args.limit,
        },
        "state_bytes": plan.state_bytes,
        "link_copy_bytes": COPY_BYTES,
        "link_bytes_per_s": link,
        "complete": False,
        "modes": [],
    }
    record["versions"] |= versions()
    with tempfile.TemporaryDirectory() as folder:
        for mode in modes:
            left = args.limit - (time.perf_counter() - began)
            if left > 0:
                console.print(f"[{time.perf_counter() - began:6.1f} s] {mode.label}")
                seconds = min(left, args.way_limit)
                result = measure_apart(mode, plan, argv, Path(folder), seconds)
            else:
                reason = f"limit={args.limit:g} s had passed. Raise --limit, or name fewer --ways."
                result = _nothing(plan, mode, "skipped", reason)
            record["modes"].append(result)
            record["deterministic"] = compare(record["modes"])
            record["complete"] = len(record["modes"]) == len(modes)
            record["wall_s"] = time.perf_counter() - began
            path = write(record, args.out)
    Console(highlight=False, width=max(console.width, 140)).print(table(record))
    console.print(f"Record: {path}")
    wrong = [
        f"{mode['label']} at {point['tokens']} tokens"
        for mode in record["modes"]
        for point in mode["points"]
        if point["equal"] is False and mode["name"] not in PEERS
    ]
    if wrong:
        raise SystemExit(f"Not the bits of plain AdamW: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
