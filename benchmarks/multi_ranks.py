"""The processes of bench_multi.py, one for each GPU: started, told what to run, and ended in time.

A *rank* is one of them. A rank that fails leaves the others waiting, so that all are ended then.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bench_train import make_deterministic
from measuring import Hash

#: How long others are waited for once one has failed: they may be in a collective with it.
_GRACE_S = 5.0


class RankError(RuntimeError):
    """A rank raised, died, or took too long."""


@dataclass(frozen=True)
class Here:
    """What a function that runs on a rank is given first."""

    rank: int
    num_ranks: int
    device: torch.device

    def barrier(self) -> None:
        """Wait for the CPUs of all ranks; no GPU is involved."""
        dist.all_reduce(torch.zeros(()))

    @cached_property
    def hashed(self) -> Hash:
        """Made once, since it pins memory."""
        return Hash(self.device)


class Ranks:
    """The processes. They start with the first call, and anew after a failure.

    Args:
        num_ranks: how many.
        device: "cuda" for one GPU each, joined by NCCL; "cpu" for gloo alone.
    """

    def __init__(self, num_ranks: int, device: str) -> None:
        self.num_ranks = num_ranks
        self.device = device
        self._workers: list[tuple[Any, Connection]] = []

    def __call__(self, limit_s: float, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``function(here, *args)`` on all ranks and return what each returned.

        Args:
            limit_s: how long that may take, starting the ranks included.
            function: of a module that the ranks can import.
            args: picklable.

        Raises:
            RankError: it did not work on a rank, or not in time. The ranks are ended.
        """
        ends = time.monotonic() + limit_s
        if not self._workers:
            self._start()
        answers: dict[int, Any] = {}
        reason = ""
        pending: dict[Any, int] = {}
        for rank, (_, pipe) in enumerate(self._workers):
            pending[pipe] = rank
            try:
                pipe.send((function, args))
            except OSError:
                reason = f"rank {rank}: the process died"
        while pending and time.monotonic() < ends:
            if reason:
                ends = min(ends, time.monotonic() + _GRACE_S)
            for pipe in wait(list(pending), max(0.0, ends - time.monotonic())):
                rank = pending.pop(pipe)
                try:
                    worked, answer = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    worked, answer = False, "the process died"
                if worked:
                    answers[rank] = answer
                else:
                    reason = reason or f"rank {rank}: {answer}"
        if pending and not reason:
            reason = f"ranks {sorted(pending.values())} took over {limit_s:.0f} s"
        if reason:
            self.stop()
            raise RankError(reason)
        return [answers[rank] for rank in range(self.num_ranks)]

    def stop(self) -> None:
        """End all processes."""
        for _, pipe in self._workers:
            pipe.close()
        for process, _ in self._workers:
            process.join(1.0)
            if process.is_alive():
                process.kill()
                process.join(10.0)
        self._workers = []

    def _start(self) -> None:
        context = mp.get_context("spawn")
        meeting_point = tempfile.mktemp(prefix="bench_multi_")
        for rank in range(self.num_ranks):
            ours, theirs = context.Pipe()
            place = (rank, self.num_ranks, self.device, meeting_point, theirs)
            process = context.Process(target=_serve, args=place)
            process.start()
            theirs.close()
            self._workers.append((process, ours))


def _serve(rank: int, num_ranks: int, device: str, meeting_point: str, pipe: Connection) -> None:
    gpu = device == "cuda"
    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = str(rank), str(num_ranks)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_ranks))
    make_deterministic()
    if gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if gpu else "gloo",
        init_method=f"file://{meeting_point}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=120),
    )
    here = Here(rank, num_ranks, torch.device("cuda", rank) if gpu else torch.device("cpu"))
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:  # the parent is done, or gone
            dist.destroy_process_group()
            return
        try:
            pipe.send((True, function(here, *args)))
        except Exception as error:
            pipe.send((False, f"{type(error).__name__}: {error}"))
