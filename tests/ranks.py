"""Processes joined by gloo or NCCL, started once, that run a function of a test at the same time.

A *rank* is one of the processes. What a function returns comes back through ``torch.save``;
what it raises comes back with its traceback. A rank that fails leaves the others waiting in a
collective, so that all are ended then and the next call starts new ones.
"""

from __future__ import annotations

import atexit
import io
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


class Ranks:
    """The processes.

    Args:
        device: "cpu", or "cuda" for one GPU each, which NCCL joins.
        timeout_s: how long one call may take before all are ended and it fails.
        num_ranks: how many; one call of the test runs on all of them.
    """

    def __init__(self, device: str = "cpu", timeout_s: float = 120.0, num_ranks: int = 2) -> None:
        self.device = device
        self.num_ranks = num_ranks
        self._timeout_s = timeout_s
        atexit.register(self.stop)
        self._workers: list[tuple[Any, Connection]] = []

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run ``function`` of a test module on all ranks, and return what each returned.

        Raises:
            AssertionError: it raised on a rank, or a rank died or did not come back in time.
        """
        if not self._workers:
            self._start()
        for _, pipe in self._workers:
            pipe.send((function, args, kwargs))
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        ends = time.monotonic() + self._timeout_s
        pending = {pipe: rank for rank, (_, pipe) in enumerate(self._workers)}
        while pending and time.monotonic() < ends:
            # One that failed does not come to the next collective: no use waiting long for others.
            ready = wait(list(pending), 2.0 if failures else ends - time.monotonic())
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = pending.pop(pipe)
                try:
                    worked, answer = pipe.recv()
                except EOFError:
                    worked, answer = False, "the process died\n"
                if worked:
                    answers[rank] = torch.load(io.BytesIO(answer), weights_only=False)
                else:
                    failures[rank] = answer
        if failures or pending:
            for rank in pending.values():
                reason = "was still waiting" if failures else f"took over {self._timeout_s} s"
                failures[rank] = f"{reason}\n"
            self.stop()
            raise AssertionError(
                "\n".join(f"rank {rank}: {failures[rank]}" for rank in sorted(failures))
            )
        return [answers[rank] for rank in range(self.num_ranks)]

    def stop(self) -> None:
        """End all processes."""
        for _, pipe in self._workers:
            pipe.close()
        for process, _ in self._workers:
            process.join(0.2)
            if process.is_alive():
                process.kill()
            process.join(10)
        self._workers = []

    def _start(self) -> None:
        if self.device == "cuda":
            found = torch.cuda.device_count()
            assert found >= self.num_ranks > 1, f"{self.num_ranks} ranks and {found} GPUs"
        context = mp.get_context("spawn")
        meeting_point = tempfile.mktemp(prefix="ranks_")
        for rank in range(self.num_ranks):
            ours, theirs = context.Pipe()
            # No daemon: torch's checkpoint process is a child of it.
            process = context.Process(
                target=_serve, args=(rank, self.num_ranks, self.device, meeting_point, theirs)
            )
            process.start()
            theirs.close()
            self._workers.append((process, ours))


def _serve(rank: int, num_ranks: int, device: str, meeting_point: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = str(num_ranks)  # as launchers do
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        init_method=f"file://{meeting_point}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=30),
    )
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:  # the parent is done, or gone
            dist.destroy_process_group()
            return
        torch.manual_seed(0)
        try:
            buffer = io.BytesIO()
            torch.save(function(*args, **kwargs), buffer)
            pipe.send((True, buffer.getvalue()))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
