"""What an installed package must do: run by a Python that has it, and not this repository.

python tests/smoke.py
"""

from __future__ import annotations

import sys
from importlib.metadata import entry_points, requires, version
from pathlib import Path

import torch

import torch_offload


def train(offloaded: bool) -> list[torch.Tensor]:
    """Return parameters and state after three steps."""
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    if offloaded:
        torch_offload.offload(optimizer, torch_offload.OffloadConfig(chunk_size=512))
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 16)).square().sum().backward()
        optimizer.step()
    state = [value for p in model.parameters() for value in optimizer.state[p].values()]
    return [*model.parameters(), *state]


def main() -> None:
    """Fail with the reason, or print what was seen."""
    here = Path(__file__).resolve().parent.parent
    found = Path(torch_offload.__file__).resolve()
    assert found.parent != here / "torch_offload", (
        f"{found} is the repository, not what was installed"
    )
    (backend,) = entry_points(group="torch.backends", name="torch_offload")
    backend.load()
    (command,) = entry_points(group="console_scripts", name="torch-offload")
    command.load()
    for package in ("torch_offload", "lightning_offload", "accelerate_offload"):
        assert (found.parent.parent / package / "py.typed").is_file(), package
    needed = [text for text in requires("torch-offload") or [] if "extra ==" not in text]
    assert [text.partition(">")[0] for text in needed] == ["torch"], needed
    for plain, offloaded in zip(train(False), train(True), strict=True):
        assert torch.equal(plain, offloaded)
    print(f"torch-offload {version('torch-offload')} in {found.parent.parent}: same bits", end="")
    print(f" (Python {sys.version.split()[0]}, torch {torch.__version__})")


if __name__ == "__main__":
    main()
