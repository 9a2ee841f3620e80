"""What GPUs can do at best, by name, and how much of it a training step was seen to reach. Pure.

The figures are those of the vendors' data sheets. They stand in where nothing was measured.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

#: Shares of the data sheets' figures. Each is fitted to one point of a record, and checked at
#: others (`tests/test_cli_forecast.py`).
#: Forward and backward at 8,192 tokens, bench_train-nvidia-h200-20261130T095200.
FLOPS_SHARE = 0.428
#: The update of resident state there.
MEMORY_SHARE = 0.717
#: Pinned copies in both directions at once, in that run.
LINK_SHARE = 0.697

PCIE_4_X16, PCIE_5_X16 = 32e9, 64e9


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU.

    Attributes:
        name: whole words of the name that the driver gives.
        memory_bytes: what the driver gives in all.
        flops: dense bf16 operations a second, with fp32 sums.
        memory_bytes_per_s: to and from its own memory.
        link_bytes_per_s: of its link to the host, each way, before any protocol.
    """

    name: str
    memory_bytes: int
    flops: float
    memory_bytes_per_s: float
    link_bytes_per_s: float

    @property
    def likely_link_bytes_per_s(self) -> float:
        """Bytes a second each way, in pinned copies in both directions at once."""
        return LINK_SHARE * self.link_bytes_per_s


#: Names that contain another one stand before it. "GH200" and "GB200" are none of these: their link
#: to the host is another.
GPUS = (
    Gpu("B200", 191_500_000_000, 2250e12, 8.0e12, PCIE_5_X16),
    Gpu("H200", 150_109_880_320, 989e12, 4.8e12, PCIE_5_X16),
    Gpu("H100 PCIe", 85_000_000_000, 756e12, 2.0e12, PCIE_5_X16),
    Gpu("H100", 85_000_000_000, 989e12, 3.35e12, PCIE_5_X16),
    Gpu("A100-SXM4-40GB", 42_400_000_000, 312e12, 1.555e12, PCIE_4_X16),
    Gpu("A100-PCIE-40GB", 42_400_000_000, 312e12, 1.555e12, PCIE_4_X16),
    Gpu("A100 80GB PCIe", 85_000_000_000, 312e12, 1.935e12, PCIE_4_X16),
    Gpu("A100", 85_000_000_000, 312e12, 2.039e12, PCIE_4_X16),
    Gpu("L40S", 47_600_000_000, 362e12, 0.864e12, PCIE_4_X16),
    Gpu("L40", 47_600_000_000, 181e12, 0.864e12, PCIE_4_X16),
    Gpu("L4", 23_600_000_000, 121e12, 0.3e12, PCIE_4_X16),
    Gpu("RTX 4090", 25_300_000_000, 165e12, 1.008e12, PCIE_4_X16),
    Gpu("RTX 3090", 25_300_000_000, 71e12, 0.936e12, PCIE_4_X16),
)


def find(name: str) -> Gpu | None:
    """Return the kind whose name is in ``name`` as words of their own, whatever the case."""
    return next((gpu for gpu in GPUS if re.search(rf"\b{gpu.name}\b", name, re.IGNORECASE)), None)


def known() -> str:
    """Return the names, for messages."""
    return ", ".join(gpu.name for gpu in GPUS)
