"""OffloadMonitor: figures of the offload in the progress bar and in every logger."""

from __future__ import annotations

import time
from typing import Any

import torch

from torch_offload import is_offloaded, offload_stats

# Mixed into the Callback of either mirror; for the type checker it could be any class.
_Callback: Any = object


class MonitorMixin(_Callback):  # type: ignore[misc]
    """Logs what the offload does. Reading the figures waits for the device, so not at every step.

    Logged, each as ``offload/<name>``: ``step_s``, seconds of a whole training step since the last
    figures; ``exposed_s``, seconds that ``step()`` kept the device from other work in the last one;
    ``h2d_bytes`` and ``d2h_bytes`` of it; ``h2d_gb_per_s`` and ``d2h_gb_per_s``, these divided by
    ``step_s``; ``host_bytes`` that hold state; ``early_chunks``, the share of chunks that were
    updated before ``step()``; with an accelerator ``peak_gpu_bytes``, most bytes allocated so far.
    Several optimizers are added up.

    Args:
        every_n_steps: steps between two figures; the Trainer's ``log_every_n_steps`` by default.
        prog_bar: show ``step_s`` and ``exposed_s`` in the progress bar.

    Raises:
        ValueError: ``every_n_steps`` is not positive.
    """

    def __init__(self, every_n_steps: int | None = None, prog_bar: bool = True) -> None:
        super().__init__()
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"every_n_steps={every_n_steps} is not positive. Use 1 or more.")
        self._every_n_steps = every_n_steps
        self._prog_bar = prog_bar
        self._last: tuple[int, float] | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to count."""
        self._last = (trainer.global_step, time.perf_counter())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        """Log, if a step has ended and it is its turn."""
        before, since = self._last or (trainer.global_step, time.perf_counter())
        optimizers = [o for o in trainer.strategy.optimizers if is_offloaded(o)]
        every = self._every_n_steps or trainer.log_every_n_steps or 1
        num_steps = trainer.global_step - before
        if not optimizers or num_steps < every:
            return
        stats = [offload_stats(optimizer) for optimizer in optimizers]
        now = time.perf_counter()
        self._last = (trainer.global_step, now)
        step_s = (now - since) / num_steps
        moved = {name: sum(getattr(s, name) for s in stats) for name in ("h2d_bytes", "d2h_bytes")}
        shown = {"step_s": step_s, "exposed_s": sum(s.step_s for s in stats)}
        hidden = {
            **moved,
            **{f"{name[:3]}_gb_per_s": size / step_s / 1e9 for name, size in moved.items()},
            "host_bytes": sum(s.host_bytes for s in stats),
            "early_chunks": sum(s.num_early_chunks for s in stats)
            / max(sum(s.num_chunks for s in stats), 1),
        }
        device = trainer.strategy.root_device
        if device.type not in ("cpu", "mps"):
            hidden["peak_gpu_bytes"] = torch.accelerator.max_memory_allocated(device)
        figures = {f"offload/{name}": float(value) for name, value in (shown | hidden).items()}
        # Directly, as Lightning's own monitors do: `log` would repeat old figures in between.
        for logger in trainer.loggers:
            logger.log_metrics(figures, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
        trainer.callback_metrics.update(
            {name: torch.tensor(value, dtype=torch.float64) for name, value in figures.items()}
        )
        if self._prog_bar:
            seconds = {f"offload/{name}": float(value) for name, value in shown.items()}
            pl_module.log_dict(seconds, prog_bar=True, logger=False, batch_size=1)
