"""Time offload on every GPU of a host at once, one process each: all share the host's memory.

Parts: *probe*, copies alone in each direction and in both at once, by one GPU and by all; *step*,
AdamW's step with its state resident and offloaded, in step mode, with each `--budgets`; *train*,
training steps under DDP and FSDP2 in each of the `--modes` of bench_train.py.

A step's *limit* is the bytes that travel over the median bandwidth of copies alone, both ways at
once, on all GPUs at once, in the same run. What is not offloaded comes first and twice, as a
control; all others must have its bits on each rank: parameters, and losses where there are any.

Parameters of the step part are as many as let the state of all ranks fit into 70 % of the host
memory that is available. Writes one JSON record, anew after each measurement, and prints tables.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import multi_parts
from measuring import COPY_BYTES
from multi_ranks import RankError, Ranks
from multi_tables import compare, limit_s, markdown
from record import RESULTS, Record, commit, write
from schemes import STATE_BYTES_PER_PARAM
from torch_offload import OffloadConfig
from train_modes import Mode
from train_plan import Plan
from train_plan import parse as parse_plan

PARTS = ("probe", "step", "train")
HOST_SHARE = 0.7
#: Less is not worth to begin something with: ranks need that long to start.
_LEAST_S = 20.0


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, Plan, list[Mode]]:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    gpus = torch.cuda.device_count()
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if gpus else "cpu")
    parser.add_argument("--ranks", type=int, help="default: as there are GPUs; 2 on a CPU")
    parser.add_argument("--params", type=_count, help="of the step part, on each rank; default 4e9")
    parser.add_argument("--hidden", type=int, default=4096, help="width of its layers")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of the step part")
    parser.add_argument("--budgets", nargs="+", default=["0", "50%"], help="gpu_budget each")
    parser.add_argument("--kinds", nargs="+", choices=list(multi_parts.WRAPS))
    parser.add_argument("--modes", nargs="+", default=["none", "step", "backward", "forward"])
    parser.add_argument("--train-params", help="preset of bench_train.py; default 3.1e9")
    parser.add_argument("--tokens", type=int, default=16384, help="of a training step, each rank")
    parser.add_argument("--seq", type=int, default=4096, help="tokens of one sequence")
    parser.add_argument("--train-steps", type=int, default=3, help="timed steps of the train part")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--chunk-size", default=OffloadConfig().chunk_size)
    parser.add_argument("--num-slots", type=int, default=OffloadConfig().num_slots)
    parser.add_argument("--limit-s", type=float, default=300.0, help="of the whole program")
    parser.add_argument("--call-limit-s", type=float, default=90.0, help="of one measurement")
    parser.add_argument("--out", type=Path, default=RESULTS, help="record: a .json, or its folder")
    parser.add_argument("--commit", help="what is measured; else TORCH_OFFLOAD_COMMIT, else git")
    args = parser.parse_args(argv)
    gpu = args.device == "cuda"
    args.ranks = args.ranks or (gpus if gpu else 2)
    if args.ranks < 1 or (gpu and args.ranks > gpus):
        parser.error(f"ranks={args.ranks}, and there are {gpus} GPUs. Use 1 to {gpus}.")
    args.params = args.params or (4_000_000_000 if gpu else 4_000_000)
    args.kinds = args.kinds or list(multi_parts.WRAPS)
    sizes = {"chunk_size": args.chunk_size, "num_slots": args.num_slots}
    try:
        args.configs = [
            OffloadConfig(**sizes, gpu_budget=int(budget) if budget.isdecimal() else budget)
            for budget in args.budgets
        ]
    except ValueError as error:
        parser.error(str(error))
    given = {
        "--device": args.device,
        "--params": args.train_params,
        "--tokens": args.tokens,
        "--seq": args.seq,
        "--steps": args.train_steps,
        "--warmup": args.warmup,
        "--chunk-size": args.chunk_size,
        "--num-slots": args.num_slots,
    }
    passed = [text for name, value in given.items() if value for text in (name, str(value))]
    _, plan, modes = parse_plan([*passed, "--modes", *args.modes])
    return args, plan, modes


class Bench:
    """Runs measurements one after the other, and keeps the record.

    Args:
        args: the command line.
        say: tells how it goes on.
    """

    def __init__(self, args: argparse.Namespace, say: Callable[[str], None]) -> None:
        self.args, self.say = args, say
        self.began = time.monotonic()
        self.ranks = Ranks(args.ranks, args.device)
        self.record: Record = {"benchmark": "bench_multi", "commit": commit(), "complete": False}

    def run(self, what: str, function: Callable[..., Any], *args: Any) -> Record:
        """Run something on all ranks. What goes wrong is its outcome."""
        left = self.args.limit_s - (time.monotonic() - self.began)
        if left < _LEAST_S:
            self.say(f"{what}: skipped, {left:.0f} s are left")
            reason = f"The program may take {self.args.limit_s:.0f} s."
            return {"outcome": "skipped", "reason": reason, "wall_s": 0.0, "ranks": []}
        self.say(what)
        began = time.monotonic()
        outcome, reason, answers = "ok", None, []
        try:
            answers = self.ranks(min(left, self.args.call_limit_s), function, *args)
        except RankError as error:
            outcome, reason = "error", str(error)
            self.say(f"{what}: {reason.partition(chr(10))[0]}")
        wall_s = time.monotonic() - began
        return {"outcome": outcome, "reason": reason, "wall_s": wall_s, "ranks": answers}

    def save(self) -> Path:
        """Write the record."""
        self.record["wall_s"] = time.monotonic() - self.began
        return write(self.record, self.args.out)

    def host_memory(self, plan: Plan) -> None:
        """Choose the parameters of the step part by the memory that there is, for all ranks."""
        args = self.args
        asked = STATE_BYTES_PER_PARAM * args.params if "step" in args.parts else 0
        trained = plan.state_bytes if "train" in args.parts and "DDP" in args.kinds else 0
        wanted = int(args.ranks * max(asked, trained) / HOST_SHARE)
        grown = self.run("host memory", multi_parts.grow, wanted)
        rooms = [room for room in grown["ranks"] if room is not None]
        fit = int(min(rooms) * HOST_SHARE) // (STATE_BYTES_PER_PARAM * args.ranks) if rooms else 0
        args.params = min(args.params, fit) if rooms else args.params
        self.record["host"] = {"wanted_bytes": wanted, "available_bytes": min(rooms, default=None)}
        self.record["host"] |= {"share": HOST_SHARE, "wall_s": grown["wall_s"]}

    def probe(self) -> None:
        """Measure the link, again where it was measured before: samples of both times count."""
        known = self.record.setdefault("probe", {"copy_bytes": COPY_BYTES, "runs": []})
        alone = self.run("link of one alone", multi_parts.probe_alone, 0)
        together = self.run("links of all", multi_parts.probe_together)
        known["runs"].append({"alone": alone, "together": together})
        for name, answers in (("alone", alone["ranks"][:1]), ("together", together["ranks"])):
            for rank, samples in enumerate(answers):
                sums = known.setdefault(name, [{} for _ in answers])[rank]
                for kind, values in samples.items():
                    sums[kind] = sums.get(kind, []) + values

    def step(self) -> None:
        """Time the optimizer's step."""
        args = self.args
        rows = self.record["step"] = []
        plain: list[tuple[str, OffloadConfig | None]] = [("none (control)", None), ("none", None)]
        for name, config in [*plain, *((f"step+{c.gpu_budget}", c) for c in args.configs)]:
            args_of_it = (args.params, args.hidden, config, args.steps)
            result = self.run(f"step: {name}", multi_parts.step, *args_of_it)
            settings = {} if config is None else asdict(config)
            rows.append({"name": name, "control": name != "none" and config is None, **result})
            rows[-1] |= {"settings": settings}
            self._summarise(rows)

    def train(self, plan: Plan, modes: Sequence[Mode]) -> None:
        """Time training steps."""
        self.record["train"] = {}
        for kind in self.args.kinds:
            rows = self.record["train"][kind] = []
            for mode in modes:
                result = self.run(
                    f"train: {kind}, {mode.label}", multi_parts.train, plan, kind, mode
                )
                rows.append({"name": mode.label, "control": mode.control, "clip": mode.clip})
                rows[-1] |= result
                self._summarise(rows)

    def _summarise(self, rows: list[Record]) -> None:
        """Add to the last row what its ranks came to, and say in each whether bits are equal."""
        row = rows[-1]
        if row["outcome"] == "ok":
            # One step ends when it has ended on all ranks.
            row["step_s"] = [max(s) for s in zip(*(r["step_s"] for r in row["ranks"]), strict=True)]
            row["median_step_s"] = statistics.median(row["step_s"])
            self.say(f"{row['median_step_s']:.3f} s a step")
        compare(rows)
        self.save()


def main(argv: list[str] | None = None) -> None:
    """Measure, write the record and print the tables."""
    args, plan, modes = parse(argv)
    if args.commit:
        os.environ["TORCH_OFFLOAD_COMMIT"] = args.commit
    began = time.monotonic()
    console = Console(highlight=False, markup=False, soft_wrap=True)
    bench = Bench(args, lambda text: console.print(f"[{time.monotonic() - began:6.1f} s] {text}"))
    try:
        about = bench.run("start", multi_parts.about)
        if about["outcome"] != "ok":
            raise SystemExit(f"The ranks did not start. {about['reason']}")
        record = bench.record
        record |= about["ranks"][0]
        record |= {"gpu": record["device"], "device": f"{args.ranks} x {record['device']}"}
        record["num_ranks"] = args.ranks
        asked = args.params
        bench.host_memory(plan)
        record["config"] = {
            "parts": args.parts,
            "asked_params": asked,
            "num_params": args.params,
            "hidden": args.hidden,
            "steps": args.steps,
            "warm_up_steps": multi_parts.WARM_UP_STEPS,
            "train": asdict(plan),
            "optimizer": "AdamW(fused=True)",
        }
        record["state_bytes"] = STATE_BYTES_PER_PARAM * args.params
        if "probe" in args.parts:
            bench.probe()
        if "step" in args.parts:
            bench.step()
            if "probe" in args.parts:
                bench.probe()
            for row in record["step"]:
                row["limit_s"] = limit_s(record, row)
        if "train" in args.parts:
            bench.train(plan, modes)
        record["complete"] = True
        path = bench.save()
    finally:
        bench.ranks.stop()
    console.print(markdown([(path.name, record)]))
    console.print(f"Record: {path}")
    rows = [
        *record.get("step", []),
        *(r for rows in record.get("train", {}).values() for r in rows),
    ]
    for row in rows:
        if row["equal"] is False:
            what = "control" if row["control"] else "mode"
            raise SystemExit(f"Not the bits of plain AdamW: the {what} {row['name']}")
    if any(row["outcome"] != "ok" for row in rows):
        raise SystemExit("Not everything was measured: see `outcome` in the record.")


def _count(text: str) -> int:
    return int(float(text))


if __name__ == "__main__":
    main()
