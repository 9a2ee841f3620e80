"""Time training steps through Lightning's Trainer, plain and with strategies of ours, in one run.

Each way trains the model of bench_train.py on the same batches and is freed before the next; the
Trainer differs in its `strategy` alone. The plain one is run twice, as a control. All must have the
same losses and end with the same bits. Only the block of timed steps is measured, as a whole.

Writes one JSON record, anew after each way, and prints a table.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader

from bench_train import ADAMW, make_deterministic
from measuring import Hash, free, memory, reset_peak, synchronize
from record import RESULTS, Record, commit, environment, write
from transformer import SIZES, Size, build, num_params

WAYS = ("plain", "plain", "offload_optimizer")


class Module(pl.LightningModule):
    """The model, its loss and AdamW; knows nothing of offload.

    Args:
        size: of the model.
        sequence: tokens of one sequence.
        device: where it is made, since moving it would take twice the memory.
    """

    def __init__(self, size: Size, sequence: int, device: torch.device) -> None:
        super().__init__()
        self.model = build(size, sequence, device)
        self.losses: list[Tensor] = []

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        """Return the loss of a batch of tokens and targets, int64 of (sequences, tokens)."""
        loss: Tensor = self.model(*batch)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), **ADAMW)


class Clock(pl.Callback):
    """Measures the steps after the warm-up.

    Args:
        warmup: steps that are not timed.
        device: waited for before and after.
    """

    def __init__(self, warmup: int, device: torch.device) -> None:
        self.warmup, self.device = warmup, device
        self.began = self.seconds = 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """Begin after the last step of the warm-up, and end after the last one."""
        if trainer.global_step == self.warmup:
            synchronize(self.device)
            reset_peak(self.device)
            self.began = time.perf_counter()
        elif trainer.global_step == trainer.max_steps:
            synchronize(self.device)
            self.seconds = time.perf_counter() - self.began


def measure(way: str, args: argparse.Namespace, device: torch.device, hashed: Hash) -> Record:
    """Train with one strategy and return what was measured."""
    module = Module(SIZES[args.params], args.seq, device)
    generator = torch.Generator().manual_seed(0)
    shape = (args.tokens // args.seq, args.seq + 1)
    vocabulary = SIZES[args.params].vocabulary
    drawn = [
        torch.randint(vocabulary, shape, generator=generator)
        for _ in range(args.warmup + args.steps)
    ]
    batches = [(d[:, :-1].contiguous(), d[:, 1:].contiguous()) for d in drawn]
    clock = Clock(args.warmup, device)
    trainer = pl.Trainer(
        strategy="auto" if way == "plain" else way,
        accelerator=device.type if device.type == "cpu" else "gpu",
        devices=1,
        precision="bf16-mixed",
        max_steps=args.warmup + args.steps,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    choice = getattr(trainer.strategy, "_choice", None)
    return {
        "way": way,
        "overlap": None if choice is None else choice.overlap,
        "block_s": clock.seconds,
        "step_s": clock.seconds / args.steps,
        "tokens_per_s": args.tokens * args.steps / clock.seconds,
        **memory(device),
        "losses": [loss.item() for loss in module.losses],
        "params_sha256": hashed(module.model.parameters()),
    }


def compare(ways: list[Record]) -> None:
    """Put into each whether it has the losses and bits of the first, and its share of the speed of
    the fastest plain one."""
    first = ways[0]
    fastest = max(way["tokens_per_s"] for way in ways if way["way"] == "plain")
    for way in ways:
        same = ("losses", "params_sha256")
        way["equal"] = all(way[key] == first[key] for key in same)
        way["of_plain"] = way["tokens_per_s"] / fastest


def main(argv: list[str] | None = None) -> None:
    """Measure, write the record and print the table."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", default="3.1e9" if on_gpu else "1e5", choices=SIZES)
    parser.add_argument("--tokens", type=int, default=16384 if on_gpu else 64)
    parser.add_argument("--seq", type=int, default=4096 if on_gpu else 16)
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them")
    parser.add_argument("--device", default="cuda:0" if on_gpu else "cpu")
    parser.add_argument("--out", type=Path, default=RESULTS, help="record: a .json, or its folder")
    args = parser.parse_args(argv)
    head = commit()
    make_deterministic()
    for name in ("lightning.pytorch", "torch_offload"):
        logging.getLogger(name).setLevel(logging.WARNING)
    device = torch.device(args.device)
    record: Record = {"benchmark": "bench_lightning", "commit": head, **environment(device)}
    record["versions"] |= {"lightning": importlib.metadata.version("lightning")}
    record["config"] = {key: value for key, value in vars(args).items() if key != "out"}
    record |= {"num_params": num_params(SIZES[args.params]), "complete": False, "ways": []}
    hashed = Hash(device)
    console = Console(highlight=False, soft_wrap=True)
    for number, way in enumerate(WAYS, 1):
        free(device)
        record["ways"].append(measure(way, args, device, hashed))
        compare(record["ways"])
        record["complete"] = number == len(WAYS)
        path = write(record, args.out)
        console.print(f"{way}: {record['ways'][-1]['step_s']:.3f} s a step")
    shown = Table("strategy", "overlap", "s a step", "tokens/s", "of plain", "peak GPU", "bits")
    for way in record["ways"]:
        peak = way["peak_allocated_bytes"]
        shown.add_row(
            way["way"],
            way["overlap"] or "",
            f"{way['step_s']:.3f}",
            f"{way['tokens_per_s']:,.0f}",
            f"{way['of_plain']:.1%}",
            f"{peak / 2**30:.1f} GiB" if peak else "",
            "equal" if way["equal"] else "DIFFERENT",
        )
    console.print(shown)
    console.print(f"Record: {path}")
    wrong = [way["way"] for way in record["ways"] if not way["equal"]]
    if wrong:
        raise SystemExit(f"Not the losses and weights of the first run: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
