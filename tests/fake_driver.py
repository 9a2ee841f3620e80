"""A CUDA runtime that only takes notes, for tests of host memory without a GPU."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch

from torch_offload import host

CUDA = torch.device("cuda", 0)
PAGE = mmap.PAGESIZE


class Driver:
    """Stands in for the CUDA runtime: notes what is registered, refuses what it is told to."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.refuse: Callable[[int], bool] = lambda num_bytes: False
        self.calls: list[str] = []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert flags == 1  # portable: every device of the process may copy
        assert num_bytes > 0
        assert address % PAGE == 0
        self.calls.append("register")
        if self.refuse(num_bytes):
            return 1
        for start, size in self.registered.items():
            assert address + num_bytes <= start or start + size <= address, "overlap"
        self.registered[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append("unregister")
        del self.registered[address]
        return 0

    cudaError = staticmethod(int)

    def cudaGetErrorString(self, code: int) -> str:
        return f"error {code}"

    @staticmethod
    def install(monkeypatch: pytest.MonkeyPatch) -> Driver:
        """Put one in the place of the real runtime, for as long as a test lasts."""
        driver = Driver()
        monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        monkeypatch.setattr(host, "node_of", lambda device: None)
        return driver
