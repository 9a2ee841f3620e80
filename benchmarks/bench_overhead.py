"""Time what hooks and waiting parameters cost the CPU, a parameter and step.

Many tiny layers, so that the CPU is what a step waits for: what a mode takes beyond ``step`` is the
cost of hooks, of parameters that wait for themselves, and of what is compared. Writes one JSON
record and prints a table.
"""

from __future__ import annotations

import argparse
import gc
import logging
import statistics
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from measuring import synchronize
from record import RESULTS, Record, commit, environment, write
from torch_offload import OffloadConfig, offload

MODES = ("none", "step", "backward", "forward")
WARM_UP_STEPS = 5


def seconds_per_param(mode: str, num_params: int, steps: int, device: torch.device) -> list[float]:
    """Train layers of 4 x 4 without bias, and return what each step took, over their number."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, 4, bias=False) for _ in range(num_params)]
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    if mode != "none":
        offload(optimizer, OffloadConfig(overlap=mode), model=model)
    x = torch.randn(2, 4, device=device)
    samples = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(WARM_UP_STEPS + steps):
            synchronize(device)
            began = time.perf_counter()
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            samples.append((time.perf_counter() - began) / num_params)
    finally:
        gc.enable()
    return samples[WARM_UP_STEPS:]


def main(argv: list[str] | None = None) -> None:
    """Measure, write the record and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=int, default=1000, help="number of parameters (tensors)")
    parser.add_argument("--steps", type=int, default=30, help="timed steps of each round")
    parser.add_argument("--rounds", type=int, default=3, help="each has all modes in turn")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=RESULTS, help="record: a .json, or its folder")
    args = parser.parse_args(argv)
    head = commit()
    device = torch.device(args.device)
    logging.getLogger("torch_offload").setLevel(logging.ERROR)  # it knows that this saves nothing
    samples: dict[str, list[float]] = {mode: [] for mode in MODES}
    for _ in range(args.rounds):
        for mode in MODES:
            samples[mode] += seconds_per_param(mode, args.params, args.steps, device)
    medians = {mode: statistics.median(values) for mode, values in samples.items()}
    beyond = {mode: medians[mode] - medians["step"] for mode in ("backward", "forward")}
    record: Record = {
        "benchmark": "bench_overhead",
        "commit": head,
        **environment(device),
        "config": {"num_params": args.params, "steps": args.steps, "rounds": args.rounds},
        "seconds_per_param": samples,
        "median_seconds_per_param": medians,
        "seconds_per_param_beyond_step": beyond,
    }
    path = write(record, args.out)
    table = Table("mode", "us a parameter", "beyond step")
    for mode, median in medians.items():
        more = f"{beyond[mode] * 1e6:.1f}" if mode in beyond else ""
        table.add_row(mode, f"{median * 1e6:.1f}", more)
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    console.print(f"Record: {path}")


if __name__ == "__main__":
    main()
