"""OffloadCallback: transformers' Trainer logs what offload does, as ``offload/*``."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from .figures import offload_metrics


class OffloadCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Adds the figures of the last step to everything that Trainer logs while it trains.

    ``Trainer(..., callbacks=[OffloadCallback()])``. Trackers, the progress bar and
    ``state.log_history`` all have them. Without offload nothing is added.
    """

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: dict[str, Any] | None = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Add to the logs of a training step; those of an evaluation stay as they are."""
        if logs is None or "loss" not in logs:
            return
        figures = offload_metrics(optimizer)
        logs.update(figures)
        if state.log_history:
            state.log_history[-1].update(figures)
