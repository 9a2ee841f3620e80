"""On which NUMA node the host memory of a GPU should lie, and the system call that asks for it.

A copy to or from the memory of another processor's node crosses the link between the two. Whatever
is missing here (nodes, PCI slot, permission, system call), pages lie where the system puts them.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_ROOT = Path("/")
#: System calls by machine: mbind, get_mempolicy.
_CALLS = {"x86_64": (237, 239), "aarch64": (235, 236)}
_DEFAULT, _PREFERRED = 0, 1
_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def node_of(device: torch.device, root: Path = _ROOT) -> int | None:
    """Return the node that ``device`` is attached to, or ``None`` where there is no choice.

    Args:
        device: a device of the machine.
        root: where ``sys`` is; for tests.
    """
    slot = _pci_slot(device)
    folder = root / "sys/devices/system/node"
    nodes = {path.name for path in folder.glob("node[0-9]*")}
    if slot is None or len(nodes) < 2:
        return None
    try:
        node = int((root / "sys/bus/pci/devices" / slot / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if f"node{node}" in nodes else None  # -1: the firmware does not say


def prefer(address: int, num_bytes: int, node: int) -> bool:
    """Ask for pages on ``node`` when they are touched; others are taken where it has none left.

    Args:
        address: start of a mapping, a multiple of the page size, not touched yet.
        num_bytes: its size.
        node: from :func:`node_of`.

    Returns:
        Whether the system took the wish. A policy that the user set for the process stays.
    """
    call = _syscall()
    numbers = _CALLS.get(platform.machine())
    if call is None or numbers is None or not num_bytes:
        return False
    mbind, get_mempolicy = numbers
    policy = ctypes.c_int(_DEFAULT)
    if call(get_mempolicy, ctypes.byref(policy), None, 0, None, 0) or policy.value != _DEFAULT:
        return False  # numactl was used, or a sandbox allows neither call
    mask = (ctypes.c_ulong * (node // _BITS + 1))()
    mask[node // _BITS] = 1 << node % _BITS
    # The kernel reads one bit less than it is told.
    return call(mbind, address, num_bytes, _PREFERRED, mask, len(mask) * _BITS + 1, 0) == 0


def _pci_slot(device: torch.device) -> str | None:
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    properties: Any = torch.cuda.get_device_properties(device)
    try:
        domain, bus, slot = (
            properties.pci_domain_id,
            properties.pci_bus_id,
            properties.pci_device_id,
        )
    except AttributeError:  # an older torch
        return None
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def _syscall() -> Callable[..., int] | None:
    """Return the C library's ``syscall`` for 64-bit Linux."""
    if sys.platform != "linux" or sys.maxsize < 2**32:
        return None
    call = ctypes.CDLL(None).syscall
    call.restype = ctypes.c_long

    def typed(number: int, *values: Any) -> int:
        # Integers would be passed as 32 bits.
        wide = [ctypes.c_ulong(v) if isinstance(v, int) else v for v in values]
        return int(call(ctypes.c_long(number), *wide))

    return typed
