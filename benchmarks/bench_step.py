"""Time AdamW's step under every scheme, in one run, beside the limit of the link.

The *limit* is the state's bytes over the median bandwidth of a copy in each direction at once.
Parameters and gradients are the same for every scheme (drawn anew from one seed before each), so
all schemes must end with the same bits. Writes one JSON record; `tables.py` makes the table.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from measuring import COPY_BYTES, free, link_samples, memory, reset_peak, synchronize, timed
from record import RESULTS, Record, commit, environment, write
from schemes import (
    STATE_BYTES_PER_PARAM,
    ChunkedPerTensor,
    HostState,
    MoveAll,
    Ours,
    Resident,
    Scheme,
    pinned_state,
)
from tables import rich_table, same_bits
from torch_offload import OffloadConfig, offload_stats

WARM_UP_STEPS = 2  # the first is reported by itself
CHECK_STEPS = 6


@dataclass
class Case:
    """Parameters shaped like a decoder's layers, and their gradients, all fp32 on one device."""

    num_params: int
    hidden: int
    device: torch.device
    params: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        h = self.hidden
        layer = [(h, h)] * 4 + [(4 * h, h), (h, 4 * h), (h,), (h,)]
        shapes: list[tuple[int, ...]] = []
        rest = self.num_params
        for shape in itertools.cycle(layer):
            numel = torch.Size(shape).numel()
            if numel >= rest:  # the last one is cut to size
                shapes.append((rest // h, h) if rest >= h else (rest,))
                break
            shapes.append(shape)
            rest -= numel
        self.params = [torch.empty(s, device=self.device, requires_grad=True) for s in shapes]
        self.num_params = sum(p.numel() for p in self.params)
        for p in self.params:
            p.grad = torch.empty_like(p)
        self.draw()

    @property
    def state_bytes(self) -> int:
        """Bytes of both moments."""
        return STATE_BYTES_PER_PARAM * self.num_params

    @torch.no_grad()
    def draw(self, seed: int = 0, *, grads_only: bool = False) -> None:
        """Draw the same numbers for the same seed."""
        generator = torch.Generator(self.device).manual_seed(seed)
        for p in self.params:
            if not grads_only:
                p.normal_(generator=generator)
            assert p.grad is not None
            p.grad.normal_(generator=generator)

    def checksum(self) -> int:
        """Return the parameters' bits, added up as integers."""
        return sum(int(p.detach().view(torch.int32).sum(dtype=torch.int64)) for p in self.params)


@dataclass(frozen=True)
class Variant:
    """One row: how the scheme is built for a case. `host` says that it needs pinned host memory."""

    name: str
    build: Callable[[Case, HostState], Scheme]
    host: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


def ours(config: OffloadConfig) -> Variant:
    """Return this project's row."""
    return Variant("ours", lambda case, _: Ours(case.params, config), settings=asdict(config))


def variants(configs: list[OffloadConfig], *, reference_chunk_bytes: int) -> list[Variant]:
    """Return all schemes, the ones that share torch's pinned memory side by side."""
    reference = {"chunk_size": reference_chunk_bytes, "num_slots": 2}
    return [
        Variant("resident", lambda case, _: Resident(case.params)),
        Variant("move-all", lambda case, host: MoveAll(case.params, host), host=True),
        Variant(
            "per-tensor",
            lambda case, host: ChunkedPerTensor(
                case.params, host, chunk_bytes=reference_chunk_bytes
            ),
            host=True,
            settings=reference,
        ),
        *(ours(config) for config in configs),
    ]


def measure(
    variant: Variant, case: Case, host: HostState, steps: int, tick: Callable[[], None]
) -> Record:
    """Time one scheme. Returns raw samples in seconds, and bytes."""
    device = case.device
    case.draw()
    free(device)
    before = memory(device)
    reset_peak(device)
    scheme = variant.build(case, host)
    first_step_s = timed(device, scheme.step)
    first = memory(device)
    tick()
    for _ in range(WARM_UP_STEPS - 1):
        scheme.step()
    synchronize(device)
    warm = memory(device)
    reset_peak(device)
    step_s = []
    for _ in range(steps):
        step_s.append(timed(device, scheme.step))
        tick()
    steady = memory(device)
    stats = asdict(offload_stats(scheme.optimizer)) if isinstance(scheme, Ours) else None
    pinned_bytes = stats["pinned_bytes"] if stats else case.state_bytes if variant.host else 0
    del scheme
    free(device)
    return {
        "name": variant.name,
        "settings": variant.settings,
        "step_s": step_s,
        "median_step_s": statistics.median(step_s),
        "first_step_s": first_step_s,
        "first_step_peak_allocated_bytes": first["peak_allocated_bytes"],
        "peak_allocated_bytes": steady["peak_allocated_bytes"],
        "peak_reserved_bytes": steady["peak_reserved_bytes"],
        "reserved_after_first_step_bytes": first["reserved_bytes"],
        "reserved_after_warm_up_bytes": warm["reserved_bytes"],
        "reserved_at_end_bytes": steady["reserved_bytes"],
        "allocated_before_bytes": before["allocated_bytes"],
        "allocated_after_bytes": memory(device)["allocated_bytes"],
        "pinned_bytes": pinned_bytes,
        "stats": stats,
        "params_checksum": case.checksum(),
    }


def check_bits(
    configs: list[OffloadConfig], num_params: int, hidden: int, device: torch.device
) -> Record:
    """Run every scheme for six steps with new gradients each, and compare with resident, bitwise.

    Compares the parameters, both moments and the step counts. The per-tensor scheme gets four
    chunks, so that its slots are used again.
    """
    case = Case(num_params, hidden, device)
    host = pinned_state(case.params)
    differing: dict[str, list[str]] = {}
    expected: list[dict[str, Tensor]] = []
    for variant in variants(configs, reference_chunk_bytes=case.state_bytes // 4):
        case.draw()
        scheme = variant.build(case, host)
        for step in range(CHECK_STEPS):
            case.draw(seed=1 + step, grads_only=True)
            scheme.step()
        synchronize(device)
        found = [
            {"param": p.detach().cpu().clone()} | {k: v.cpu().clone() for k, v in state.items()}
            for p, state in zip(case.params, scheme.state(), strict=True)
        ]
        expected = expected or found
        label = " ".join([variant.name, *(f"{k}={v}" for k, v in variant.settings.items())])
        differing[label] = sorted(
            {
                name
                for ours, reference in zip(found, expected, strict=True)
                for name in ours.keys() | reference.keys()
                if name not in ours
                or name not in reference
                or not torch.equal(ours[name], reference[name])
            }
        )
        del scheme
        free(device)
    return {
        "num_params": case.num_params,
        "steps": CHECK_STEPS,
        "differing": differing,
        "equal": not any(differing.values()),
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=lambda text: int(float(text)), help="default 4.0e9")
    parser.add_argument("--hidden", type=int, default=4096, help="width of the decoder's layers")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each scheme")
    parser.add_argument("--chunk-size", nargs="+", default=[OffloadConfig().chunk_size])
    parser.add_argument("--num-slots", nargs="+", type=int, default=[OffloadConfig().num_slots])
    parser.add_argument("--reference-chunk-size", default="1GiB")
    parser.add_argument("--check-params", type=lambda text: int(float(text)), help="default 2e8")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record")
    args = parser.parse_args(argv)
    gpu = args.device.startswith("cuda")
    args.params = args.params or (4_000_000_000 if gpu else 4_000_000)
    args.check_params = args.check_params or min(args.params, 200_000_000)
    return args


def main(argv: list[str] | None = None) -> None:
    """Measure, print the table and write the record."""
    args = parse(argv)
    head = commit()  # refuses before anything takes time
    device = torch.device(args.device)
    configs = [
        OffloadConfig(chunk_size=chunk_size, num_slots=num_slots)
        for chunk_size, num_slots in itertools.product(args.chunk_size, args.num_slots)
    ]
    reference = OffloadConfig(chunk_size=args.reference_chunk_size)
    everything = variants(configs, reference_chunk_bytes=int(reference.chunk_size))
    console = Console(highlight=False)
    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    # No refresh from a thread of its own: it would compete with the loop that issues work.
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        bar = progress.add_task("", total=4 + len(everything) * (1 + args.steps))

        def phase(text: str) -> None:
            progress.update(bar, description=text, refresh=True)
            if not console.is_terminal:
                console.print(text)

        def tick() -> None:
            progress.update(bar, advance=1, refresh=True)

        phase("compare the bits")
        check = check_bits(configs, args.check_params, args.hidden, device)
        tick()
        phase("parameters and gradients")
        case = Case(args.params, args.hidden, device)
        # A virtual machine may hand out its memory on first use. Whoever comes first would pay.
        torch.empty(case.state_bytes, dtype=torch.uint8).fill_(1)
        tick()
        phase("bandwidth of the link")
        bandwidth = link_samples(device)["duplex"]
        tick()
        results, pin_s, host = [], None, HostState()
        for variant in everything:
            if variant.host and not host:
                phase("torch.empty(pin_memory=True)")
                free(device)  # or blocks in torch's cache would make it look faster
                began = time.perf_counter()
                host = pinned_state(case.params)
                pin_s = time.perf_counter() - began
            elif not variant.host and host:
                host = []
            phase(variant.name)
            results.append(measure(variant, case, host, args.steps, tick))
        phase("bandwidth of the link, again")
        bandwidth += link_samples(device)["duplex"]
        tick()
    median = statistics.median(bandwidth) if bandwidth else None
    record = {
        "benchmark": "bench_step",
        "commit": head,
        **environment(device),
        "config": {
            "num_params": case.num_params,
            "hidden": args.hidden,
            "num_tensors": len(case.params),
            "param_dtype": "float32",
            "optimizer": "AdamW(fused=True)",
            "steps": args.steps,
            "warm_up_steps": WARM_UP_STEPS,
        },
        "state_bytes": case.state_bytes,
        "params_and_grads_bytes": 2 * 4 * case.num_params,
        "duplex_copy_bytes": COPY_BYTES,
        "duplex_bytes_per_s": bandwidth,
        "limit_s": case.state_bytes / median if median else None,
        "torch_pin_s": pin_s,
        "check": check,
        "variants": results,
    }
    path = write(record, args.out)
    Console(highlight=False, width=max(console.width, 132)).print(rich_table(record))
    console.print(f"Record: {path}")
    if not same_bits(record):
        wrong = {label: names for label, names in check["differing"].items() if names}
        raise SystemExit(f"Not the bits of the resident state: {wrong or 'see params_checksum'}")


if __name__ == "__main__":
    main()
