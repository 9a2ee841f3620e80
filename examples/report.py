"""What every demo run shares: its arguments, the settings that make it repeatable, its report."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from decoder import SIZES

_SEED = 0


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the arguments that every run takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--report", type=Path, help="where to write the JSON report")
    return parser


def make_repeatable() -> None:
    """Fix the seed, the kernels and the threads. Call it before anything touches the GPU.

    Two runs can only be compared bit by bit when the model's own kernels are deterministic.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    # Otherwise every torch.empty is filled with NaN, which only costs time here.
    torch.utils.deterministic.fill_uninitialized_memory = False
    # CPU reductions depend on the number of threads, and launchers set different ones. When the
    # cores are busy, one thread is ten times faster than two at this size.
    torch.set_num_threads(1)
    torch.manual_seed(_SEED)


class Meter:
    """Collects one run's losses and step times, and writes the report."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.step_s: list[float] = []
        self.last = time.perf_counter()

    def step(self, loss: Tensor) -> None:
        """Note a step that has been issued. Waits for its loss, as a progress bar would."""
        self.losses.append(loss.item())
        now = time.perf_counter()
        self.step_s.append(now - self.last)
        self.last = now

    def write(self, path: Path | None, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Write the report to `path`; without a path do nothing."""
        if path is None:
            return
        gpu = torch.cuda.is_available()
        peak_gpu_bytes = torch.cuda.max_memory_allocated() if gpu else None
        state_bytes = {"gpu": 0, "host": 0}
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    state_bytes["gpu" if value.is_cuda else "host"] += value.nbytes
        # Exact: the parameters' bits, added up as integers.
        checksum = sum(
            int(p.detach().view(torch.int32).sum(dtype=torch.int64)) for p in model.parameters()
        )
        report = {
            "device": torch.cuda.get_device_name() if gpu else "CPU",
            "num_params": sum(p.numel() for p in model.parameters()),
            # The class below any wrapper: it says whether the state was offloaded.
            "optimizer": type(getattr(optimizer, "optimizer", optimizer)).__name__,
            "losses": self.losses,
            "params_checksum": checksum,
            "step_s": self.step_s,
            "state_gpu_bytes": state_bytes["gpu"],
            "state_host_bytes": state_bytes["host"],
            "peak_gpu_bytes": peak_gpu_bytes,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")
