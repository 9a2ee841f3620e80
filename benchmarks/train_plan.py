"""What bench_train.py is asked to measure: its command line, and the batches of every step."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import timeline_plot
from record import RESULTS, Record
from torch_offload import OffloadConfig
from train_modes import Mode, parse_mode, with_control
from transformer import SIZES, Size, num_params

STATE_BYTES_PER_PARAM = 8  # two fp32 moments
Batch = list[tuple[Tensor, Tensor]]  # micro-batches of tokens and targets


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What every mode is measured with."""

    size: Size
    num_params: int
    sequence: int
    tokens: tuple[int, ...]  # of one step, ascending
    accumulation: int
    warmup: int
    steps: int
    sizes: Record  # chunk_size and num_slots, where given
    seed: int
    timeline: Path | None

    @property
    def state_bytes(self) -> int:
        """Bytes of both moments."""
        return STATE_BYTES_PER_PARAM * self.num_params

    def batches(self, tokens: int, device: torch.device) -> list[Batch]:
        """Draw the batches of all steps, warm-up included: the same ones for the same tokens."""
        generator = torch.Generator().manual_seed(self.seed + tokens)
        shape = (tokens // self.sequence // self.accumulation, self.sequence + 1)
        batches = []
        for _ in range(self.warmup + self.steps):
            drawn = [
                torch.randint(self.size.vocabulary, shape, generator=generator).to(device)
                for _ in range(self.accumulation)
            ]
            batches.append([(d[:, :-1].contiguous(), d[:, 1:].contiguous()) for d in drawn])
        return batches

    def least_bytes(self, mode: Mode, tokens: int) -> int:
        """Return bytes of GPU memory that a mode needs at least; its activations are extra.

        At the end of forward the inputs of all layers are kept, at the end of backward all
        gradients, unless they are freed meanwhile.
        """
        inputs = 4 * self.size.layers * self.size.hidden * tokens // self.accumulation
        freed = mode.overlap == "backward" and self.accumulation == 1
        grads = 0 if freed else 4 * self.num_params
        state = self.state_bytes if mode.overlap is None else 0
        return 4 * self.num_params + state + max(inputs, grads)


def parse(
    argv: list[str] | None, description: str | None = None
) -> tuple[argparse.Namespace, Plan, list[Mode]]:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    config = OffloadConfig()
    parser.add_argument("--params", help=f"{', '.join(SIZES)}; default 3.1e9 on a GPU, else 1e5")
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192, 16384, 32768])
    parser.add_argument("--seq", type=int, default=4096, help="tokens of one sequence")
    parser.add_argument("--modes", nargs="+", default=["none", "step"])
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each point")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--chunk-size", help=f"default {config.chunk_size} bytes")
    parser.add_argument("--num-slots", type=int, help=f"default {config.num_slots}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=RESULTS, help="record: a .json, or its folder")
    parser.add_argument("--commit", help="what is measured; else TORCH_OFFLOAD_COMMIT, else git")
    parser.add_argument(
        "--timeline", type=Path, help="PNG; the names of mode and tokens are put into its name"
    )
    args = parser.parse_args(argv)

    for name in ("seq", "steps", "warmup", "accumulation"):
        if getattr(args, name) < 1:
            parser.error(f"{name}={getattr(args, name)} is too small. Use 1 or more.")
    params = args.params or ("3.1e9" if args.device.startswith("cuda") else "1e5")
    try:
        preset = next((name for name in SIZES if float(name) == float(params)), None)
    except ValueError:
        preset = None
    if preset is None:
        parser.error(f"params={params!r} is no preset. Use one of {', '.join(SIZES)}.")
    args.params = preset
    multiple = args.seq * args.accumulation
    for tokens in args.tokens:
        if tokens < 1 or tokens % multiple:
            parser.error(
                f"tokens={tokens} is not a multiple of seq x accumulation = {multiple}. "
                f"Use {max(1, round(tokens / multiple)) * multiple}."
            )
    try:
        modes = [parse_mode(text) for text in args.modes]
        sizes = {"chunk_size": args.chunk_size, "num_slots": args.num_slots}
        sizes = {name: value for name, value in sizes.items() if value is not None}
        OffloadConfig(**sizes)
    except ValueError as error:
        parser.error(str(error))
    names = [mode.name for mode in modes]
    for name in names:
        if names.count(name) > 1:
            parser.error(f"modes={' '.join(names)!r} has {name!r} twice. Give it once.")
    if args.timeline:
        if args.timeline.suffix != ".png":
            parser.error(
                f"timeline={str(args.timeline)!r} is no PNG. Give a name that ends in .png."
            )
        try:
            timeline_plot.figure_class()
        except ImportError as error:
            parser.error(str(error))
    plan = Plan(
        size=SIZES[preset],
        num_params=num_params(SIZES[preset]),
        sequence=args.seq,
        tokens=tuple(sorted(set(args.tokens))),
        accumulation=args.accumulation,
        warmup=args.warmup,
        steps=args.steps,
        sizes=sizes,
        seed=args.seed,
        timeline=args.timeline,
    )
    return args, plan, with_control(modes)
