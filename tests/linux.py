"""What Linux tells about the memory of this process, and forks of it."""

from __future__ import annotations

import ctypes
import os
import platform
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from torch_offload import numa


def forked(work: Callable[[], None]) -> None:
    """Run ``work`` in a forked child, where it raises if something is wrong."""
    child = os.fork()
    if child == 0:
        code = 1
        torch.set_num_threads(1)  # the threads of a pool are not there any more
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def flags(address: int) -> list[str]:
    """Return the kernel's flags of the mapping at an address; none where nothing is mapped."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if "-" in name and not name.endswith(":"):
            start, stop = (int(edge, 16) for edge in name.split("-"))
            inside = start <= address < stop
        elif inside and name == "VmFlags:":
            return rest.split()
    return []


def system_call(*values: int) -> int:
    call = ctypes.CDLL(None).syscall
    call.argtypes = [ctypes.c_long] * len(values)
    return int(call(*values))


def policy_at(address: int) -> tuple[int, int]:
    """Ask the kernel for mode and nodes of the mapping at an address, or of this thread for 0."""
    mode, mask = ctypes.c_int(-1), (ctypes.c_ulong * 16)()
    of_an_address = 2 if address else 0
    where = (ctypes.addressof(mode), ctypes.addressof(mask), 1024, address, of_an_address)
    if system_call(numa._CALLS[platform.machine()][1], *where):
        pytest.skip("this system does not tell NUMA policies")
    return mode.value, mask[0]
