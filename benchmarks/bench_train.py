"""Time whole training steps of a transformer under every mode of offload, in one run.

A *mode* is none, step, backward or forward (when the state is updated), with `+clip` for gradient
clipping and `+50%` or `+8GiB` for state that stays on the GPU: `forward+clip+50%`. Each mode trains
the same model on the same tokens, for each number of tokens in turn, and is freed before the next.
So all must have the same losses and end with the same bits as plain AdamW (`none`, or `none+clip`).
The first of these two is run twice, as a control: kernels that are not deterministic show there.

Steps are not waited for one by one: a step is what lies between the ends of two on the stream that
computes, so that what one step leaves to the next is counted where it is waited for.

Writes one JSON record, anew after each mode, and prints a table.
"""

from __future__ import annotations

import inspect
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import timeline_plot
import torch_offload
from live_gradients import live_gradients
from measuring import COPY_BYTES, Hash, Laps, free, link_samples, memory, reset_peak, synchronize
from record import Record, commit, environment, write
from torch_offload import offload, offload_stats
from torch_offload.recording import Timeline
from train_modes import Mode, UnsupportedError, make_config
from train_plan import Batch, Plan, parse
from train_tables import bounds, compare, gib, table
from transformer import build

ADAMW: dict[str, Any] = {"lr": 3e-4, "weight_decay": 0.1, "fused": True}
MAX_NORM = 1.0
Say = Callable[[str], None]
Wrap = Callable[[nn.Module], nn.Module]


class Training:
    """A model and its optimizer under one mode.

    Args:
        plan: what every mode is measured with.
        mode: this one.
        device: where the model is.
        wrap: distributes the model, if anything does.

    Raises:
        UnsupportedError: the library does not have the mode, yet.
    """

    def __init__(
        self, plan: Plan, mode: Mode, device: torch.device, wrap: Wrap = lambda model: model
    ) -> None:
        self.plan, self.mode, self.device = plan, mode, device
        config = make_config(mode, plan.sizes) if mode.overlap else None
        model_too = mode.overlap in ("backward", "forward")
        if model_too and "model" not in inspect.signature(offload).parameters:
            raise UnsupportedError("offload() takes no model.")
        self.last_microbatch: Callable[[Any], Any] = nullcontext
        if mode.overlap == "backward" and plan.accumulation > 1:
            self.last_microbatch = getattr(torch_offload, "last_microbatch", None)
            if self.last_microbatch is None:
                raise UnsupportedError("torch_offload has no last_microbatch().")
        self.settings = {} if config is None else asdict(config)
        began = time.perf_counter()
        self.model = wrap(build(plan.size, plan.sequence, device, plan.seed))
        self.params = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.params, **ADAMW)
        synchronize(device)
        self.build_s = time.perf_counter() - began
        if config is not None:
            offload(self.optimizer, config, **({"model": self.model} if model_too else {}))
        self.convert_s = time.perf_counter() - began - self.build_s

    def step(self, batch: Batch, laps: Laps, recorded: Timeline | None = None) -> Tensor:
        """Issue one training step and return its loss, on the device."""

        def computing() -> AbstractContextManager[None]:
            return nullcontext() if recorded is None else recorded.span("compute", self.device)

        self.optimizer.zero_grad()
        loss = torch.zeros((), device=self.device)
        for number, (tokens, targets) in enumerate(batch, 1):
            # Each weight is used once in a forward: a cache of bf16 copies would only hold memory.
            autocast = torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)
            with autocast, computing():
                part = self.model(tokens, targets) / len(batch)
            laps.mark("forward")
            last = number == len(batch)
            with self.last_microbatch(self.optimizer) if last else nullcontext(), computing():
                part.backward()
            loss += part.detach()
            laps.mark("backward")
        if self.mode.clip:
            clip_grad_norm_(self.params, MAX_NORM)
            laps.mark("clip")
        self.optimizer.step()
        laps.mark("optimizer")
        return loss

    def numbers(self) -> list[Tensor]:
        """Return the parameters whose bits are compared."""
        return self.params

    def measure(self, tokens: int, hashed: Hash) -> Record:
        """Train for the warm-up and the timed steps. Returns seconds, bytes, losses and bits."""
        device, plan = self.device, self.plan
        batches = plan.batches(tokens, device)
        free(device)
        reset_peak(device)
        began = time.perf_counter()
        warm_up = Laps(device)
        losses = [self.step(batches[0], warm_up)]
        warm_up.wait()
        first_step_s = time.perf_counter() - began
        losses += [self.step(batch, warm_up) for batch in batches[1 : plan.warmup]]
        warm_up.wait()
        warm = memory(device)
        reset_peak(device)
        laps = Laps(device)
        # What the last step of the warm-up left to the next is in the block, as what the last one
        # of the block leaves is not: every step is charged for one.
        laps.mark("optimizer")
        laps.wait()
        began = time.perf_counter()
        losses += [self.step(batch, laps) for batch in batches[plan.warmup :]]
        laps.wait()
        block_s = time.perf_counter() - began
        synchronize(device)
        drain_s = time.perf_counter() - began - block_s
        steady = memory(device)
        steps = laps.steps("optimizer")
        seconds = {name: _seconds(steps, name) for name in ("forward", "backward", "clip")}
        seconds["optimizer"] = _seconds(steps, "optimizer")
        step_s = [laps[-1][2] for laps in steps]
        stats = None
        if self.mode.overlap:
            torch_offload.synchronize(self.optimizer)
            stats = asdict(offload_stats(self.optimizer))
        return {
            "step_s": step_s,
            "median_step_s": statistics.median(step_s),
            "min_step_s": min(step_s),
            "block_s": block_s,
            "block_step_s": block_s / plan.steps,
            "drain_s": drain_s,
            "tokens_per_s": tokens * plan.steps / block_s,
            **{f"{name}_s": samples for name, samples in seconds.items()},
            **{f"median_{name}_s": statistics.median(s) for name, s in seconds.items()},
            "first_step_s": first_step_s,
            "peak_allocated_bytes": steady["peak_allocated_bytes"],
            "peak_reserved_bytes": steady["peak_reserved_bytes"],
            "warm_up_peak_allocated_bytes": warm["peak_allocated_bytes"],
            "warm_up_peak_reserved_bytes": warm["peak_reserved_bytes"],
            "host_bytes": stats["host_bytes"] if stats else 0,
            "setup_s": stats["setup_s"] if stats else 0.0,
            "stats": stats,
            "losses": [loss.item() for loss in losses],
            "params_sha256": hashed(self.numbers()),
            "lanes": self._lanes(batches[-1]) if plan.timeline else None,
            "gradients": self._gradients(batches[-1]),
        }

    def _gradients(self, batch: Batch) -> dict[str, int] | None:
        """Take one more step, in every mode, and see how many bytes of gradients live at once."""
        if len(batch) > 1:
            return None
        with live_gradients(self.params) as found:
            self.step(batch, Laps(self.device))
        return {"most_live_bytes": found.most_bytes, "all_bytes": found.all_bytes}

    def _lanes(self, batch: Batch) -> dict[str, Any]:
        """Take a step that fills the streams, and record the next one. In forward mode record two:
        beside the second one run the updates that the first has left."""
        self.step(batch, Laps(self.device))
        recording: AbstractContextManager[Timeline] = nullcontext(Timeline([self.device]))
        if self.mode.overlap:
            recording = torch_offload.timeline(self.optimizer)
        with recording as recorded:
            for _ in range(2 if self.mode.overlap == "forward" else 1):
                self.step(batch, Laps(self.device), recorded)
        return recorded.lanes()


def measure_mode(
    plan: Plan,
    mode: Mode,
    device: torch.device,
    hashed: Hash,
    say: Say = print,
    make: Callable[[Plan, Mode, torch.device], Training] = Training,
) -> Record:
    """Train under one mode with each number of tokens, and free everything.

    What goes wrong is the outcome of its point, and the larger ones are not tried. What ``make``
    builds is trained; how much memory others than ours need is not known beforehand.
    """
    began = time.perf_counter()
    free(device)
    before = memory(device)["allocated_bytes"]
    is_known = device.type == "cuda" and make is Training
    room = torch.cuda.mem_get_info(device)[0] if is_known else None
    result: Record = {**asdict(mode), "label": mode.label, "settings": {}}
    points: list[Record] = []
    outcome = reason = None
    try:
        _train(plan, mode, device, hashed, say, room, result, points, make)
    except (UnsupportedError, NotImplementedError) as error:
        outcome, reason = "unsupported", str(error)
    except (torch.OutOfMemoryError, MemoryError) as error:
        outcome, reason = "out of memory", str(error)
    except Exception as error:
        outcome, reason = "error", f"{type(error).__name__}: {error}"
    # Only here, when the exception is gone with the frames that hold the model.
    free(device)
    after = memory(device)["allocated_bytes"]
    for tokens in plan.tokens[len(points) :]:
        points.append({"tokens": tokens, "outcome": outcome, "reason": reason})
        say(f"{mode.label}, {tokens} tokens: {outcome}: {_first_line(reason)}")
        if outcome != "unsupported":
            outcome, reason = "skipped", f"The mode ended with {tokens} tokens."
    freed = None if before is None else after == before
    if freed is False:
        say(f"{mode.label}: {after - before} bytes of GPU memory are still allocated")
    return result | {
        "wall_s": time.perf_counter() - began,
        "allocated_before_bytes": before,
        "allocated_after_bytes": after,
        "freed": freed,
        "points": points,
    }


def _train(
    plan: Plan,
    mode: Mode,
    device: torch.device,
    hashed: Hash,
    say: Say,
    room: int | None,
    result: Record,
    points: list[Record],
    make: Callable[[Plan, Mode, torch.device], Training],
) -> None:
    """Append the points to ``points``. Nothing outside holds the model, so that it dies here."""
    training = None
    for tokens in plan.tokens:
        least = plan.least_bytes(mode, tokens)
        if room is not None and least > room:
            reason = f"Needs {gib(least)} at least, and {gib(room)} of GPU memory are free."
            points.append({"tokens": tokens, "outcome": "skipped", "reason": reason})
            say(f"{mode.label}, {tokens} tokens: skipped: {reason}")
            continue
        if training is None:
            training = make(plan, mode, device)
            result |= {
                "settings": training.settings,
                "build_s": training.build_s,
                "convert_s": training.convert_s,
            }
        point = training.measure(tokens, hashed)
        points.append({"tokens": tokens, "outcome": "ok", "reason": None, **point})
        peak = point["peak_allocated_bytes"]
        say(
            f"{mode.label}, {tokens} tokens: {point['median_step_s']:.3f} s a step "
            f"(least {point['min_step_s']:.3f})" + (f", peak {gib(peak)}" if peak else "")
        )
        if plan.timeline and not mode.control:
            name = f"{plan.timeline.stem}-{mode.name.replace('%', 'percent')}-{tokens}.png"
            title = f"{mode.name}, {tokens} tokens"
            timeline_plot.plot(point["lanes"], plan.timeline.with_name(name), title)


def make_deterministic(*, warn_only: bool = False) -> None:
    """Let two runs on the same device have the same bits, or warn where a kernel cannot."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    # Filling all new memory is for code that reads it uninitialised, and takes time.
    torch.utils.deterministic.fill_uninitialized_memory = False


def main(argv: list[str] | None = None) -> None:
    """Measure, write the record and print the table."""
    args, plan, modes = parse(argv, __doc__)
    if args.commit:
        os.environ["TORCH_OFFLOAD_COMMIT"] = args.commit
    head = commit()  # refuses before anything takes time
    make_deterministic()
    device = torch.device(args.device)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    began = time.perf_counter()

    def say(text: str) -> None:
        console.print(f"[{time.perf_counter() - began:6.1f} s] {text}")

    if device.type == "cuda":
        say("bandwidth of the link")
    link = link_samples(device, ("h2d", "d2h", "duplex"))
    duplex = statistics.median(link["duplex"]) if link["duplex"] else None
    config = asdict(plan) | {
        "preset": args.params,
        "sizes": plan.sizes,
        "timeline": plan.timeline.name if plan.timeline else None,
        "modes": [mode.name for mode in modes if not mode.control],
        "param_dtype": "float32",
        "autocast_dtype": "bfloat16",
        "optimizer": "AdamW(fused=True)",
        "max_norm": MAX_NORM,
        "cublas_workspace_config": os.environ["CUBLAS_WORKSPACE_CONFIG"],
    }
    record: Record = {
        "benchmark": "bench_train",
        "commit": head,
        **environment(device),
        "config": config,
        "state_bytes": plan.state_bytes,
        "link_copy_bytes": COPY_BYTES,
        "link_bytes_per_s": link,
        "complete": False,
        "modes": [],
    }
    hashed = Hash(device)
    for mode in modes:
        say(f"{mode.label} begins")
        record["modes"].append(measure_mode(plan, mode, device, hashed, say))
        record["deterministic"] = compare(record["modes"])
        record["bounds"] = bounds(record["modes"], plan.state_bytes, duplex)
        record["complete"] = len(record["modes"]) == len(modes)
        record["wall_s"] = time.perf_counter() - began
        path = write(record, args.out)
    Console(highlight=False, width=max(console.width, 160)).print(table(record))
    console.print(f"Record: {path}")
    if record["deterministic"] is False:
        raise SystemExit("The control differs from its reference: `equal` says nothing.")
    wrong = [
        f"{mode['label']} at {point['tokens']} tokens"
        for mode in record["modes"]
        for point in mode["points"]
        if point["equal"] is False
    ]
    failed = [
        f"{mode['label']} at {point['tokens']} tokens"
        for mode in record["modes"]
        for point in mode["points"]
        if point["outcome"] == "error"
    ]
    if wrong:
        raise SystemExit(f"Not the bits of plain AdamW: {', '.join(wrong)}")
    if failed:
        raise SystemExit(f"Ended in an error, see the record: {', '.join(failed)}")


def _seconds(steps: Sequence[Sequence[tuple[str, float, float]]], name: str) -> list[float]:
    """Return how long all laps of that name took together, in each step."""
    return [sum(end - start for lap, start, end in laps if lap == name) for laps in steps]


def _first_line(text: str | None) -> str:
    return (text or "").partition("\n")[0]


if __name__ == "__main__":
    main()
