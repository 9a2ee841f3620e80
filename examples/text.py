"""The demo's text: the source code of Python's standard library, which every machine has."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

_TEXT_BYTES = 8_000_000
_SEED = 0


class StdlibBytes(Dataset[Tensor]):
    """`num_samples` windows of `context + 1` bytes of the standard library, as int64.

    The windows are a fixed draw, so item `i` is the same in every run and under any loader.
    """

    def __init__(self, *, context: int, num_samples: int) -> None:
        text = bytearray()
        root = Path(sysconfig.get_paths()["stdlib"])
        for path in sorted(root.rglob("*.py")):
            if not {"site-packages", "dist-packages", "test", "tests"} & set(path.parts):
                text += path.read_bytes()
            if len(text) >= _TEXT_BYTES:
                break
        self.window = context + 1
        self.text = torch.frombuffer(text, dtype=torch.uint8)
        draw = torch.Generator().manual_seed(_SEED)
        self.starts = torch.randint(len(text) - context, (num_samples,), generator=draw).tolist()

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Tensor:
        start = self.starts[index]
        return self.text[start : start + self.window].long()
