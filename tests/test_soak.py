"""2,000 steps of everything at once: the bits of plain at the end, and nothing has grown."""

from __future__ import annotations

import ctypes
import gc
import io
import random
import sys
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from training import FLAVOURS, assert_same, make_params

from torch_offload import OffloadConfig, offload, offload_stats

NUM_STEPS = 2_000
#: Until then caches fill and every parameter got its state.
WARM_UP = 600
SHAPES = [(33, 7), (64,), (), (16, 16), (5,), (128, 3)]
CONFIG = OffloadConfig(chunk_size=2_048)


@dataclass(frozen=True)
class Step:
    """What happens in one step, the same for both trainings."""

    grads: list[int | None]  # a seed each
    frozen: set[int]
    set_to_none: bool
    lr: float
    save: bool
    load: bool


def plan(seed: int) -> Iterator[Step]:
    """Draw what happens, step by step."""
    rng = random.Random(seed)
    frozen: set[int] = set()
    saved = False
    for number in range(NUM_STEPS):
        if rng.random() < 0.05:
            frozen ^= {rng.randrange(len(SHAPES))}
        save = rng.random() < 0.02
        load = not save and saved and rng.random() < 0.02
        saved |= save
        yield Step(
            grads=[
                rng.randrange(2**31) if rng.random() < 0.7 else None for _ in range(len(SHAPES))
            ],
            frozen=set(frozen),
            # No gradient is left where memory is measured.
            set_to_none=rng.random() < 0.5 or number % 100 == 0,
            lr=10 ** rng.uniform(-4, -1),
            save=save,
            load=load,
        )


class _MallocInfo(ctypes.Structure):
    """``struct mallinfo2`` of the GNU C library."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def malloc_bytes() -> int | None:
    """Bytes that are allocated from the C library, where it tells."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return None
    mallinfo2.restype = _MallocInfo
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


@dataclass
class Growth:
    """What a process, the device and the optimizer hold, sampled now and then."""

    samples: list[dict[str, int]] = field(default_factory=list)

    def sample(self, device: torch.device, optimizer: torch.optim.Optimizer) -> None:
        gc.collect()
        stats = offload_stats(optimizer)
        found = {"host_bytes": stats.host_bytes, "pinned_bytes": stats.pinned_bytes}
        found["python_blocks"] = sys.getallocatedblocks()
        malloced = malloc_bytes() if sys.platform == "linux" else None
        if malloced is not None:
            found["malloc_bytes"] = malloced
        if sys.platform == "linux":
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            found["rss_bytes"] = pages * 4096
            found["num_mappings"] = len(Path("/proc/self/maps").read_text().splitlines())
        if device.type == "cuda":
            torch.cuda.synchronize()
            found["allocated_bytes"] = torch.cuda.memory_allocated()
            found["reserved_bytes"] = torch.cuda.memory_reserved()
        self.samples.append(found)

    def since(self, key: str) -> int:
        """How much more there is at the end than there was after the warm-up."""
        values = [sample[key] for sample in self.samples if key in sample]
        return values[-1] - values[0] if values else 0


def train(
    device: torch.device, config: OffloadConfig | None, growth: Growth | None, **kwargs: Any
) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer, array[int]]:
    """Return what was trained, and a checksum of a parameter after each step."""
    params = make_params(device, shapes=SHAPES)
    groups = [{"params": params[:3]}, {"params": params[3:], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, **kwargs)
    if config is not None:
        offload(optimizer, config)
    generator = torch.Generator()
    saved = b""
    seen = array("L", [0]) * NUM_STEPS  # of its full size now, so that it does not grow
    for number, step in enumerate(plan(seed=7)):
        for index, (param, seed) in enumerate(zip(params, step.grads, strict=True)):
            param.requires_grad_(index not in step.frozen)
            if seed is None or not param.requires_grad:
                if step.set_to_none:
                    param.grad = None
                continue  # else a gradient of zeros from the last zero_grad()
            values = torch.randn(param.shape, generator=generator.manual_seed(seed)).to(device)
            param.grad = values if param.grad is None else param.grad.add_(values)
        for group in optimizer.param_groups:
            group["lr"] = step.lr
        optimizer.step()
        param = params[number % len(params)]
        seen[number] = zlib.crc32(param.detach().cpu().numpy().tobytes())
        optimizer.zero_grad(set_to_none=step.set_to_none)
        if step.save:
            buffer = io.BytesIO()
            torch.save([optimizer.state_dict(), [p.detach() for p in params]], buffer)
            saved = buffer.getvalue()
        if step.load:
            state, values = torch.load(io.BytesIO(saved), weights_only=True)
            optimizer.load_state_dict(state)
            with torch.no_grad():
                for param, value in zip(params, values, strict=True):
                    param.copy_(value)
        if growth is not None and number >= WARM_UP and number % 100 == 0:
            growth.sample(device, optimizer)
    return params, optimizer, seen


@pytest.mark.slow
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_2000_steps(device, flavour):
    if device.type == "cpu" and flavour == "fused":
        pytest.skip("its threads make it slow there with small tensors, and nothing else differs")
    growth = Growth()
    *plain, expected = train(device, None, None, **FLAVOURS[flavour])
    *offloaded, seen = train(device, CONFIG, growth, **FLAVOURS[flavour])
    assert_same(plain, offloaded)
    # A load would heal what was wrong before it.
    assert [n for n, (a, b) in enumerate(zip(expected, seen, strict=True)) if a != b] == []
    assert offload_stats(offloaded[1]).num_chunks > 1

    for key in ("host_bytes", "pinned_bytes", "allocated_bytes", "reserved_bytes"):
        assert growth.since(key) == 0, (key, growth.samples)
    # What is free inside of a process hides small leaks from its size, so that the allocators are
    # asked; they come and go a little, and so does what a driver keeps.
    slack = 1 if device.type == "cpu" else 8
    assert growth.since("python_blocks") <= slack * 1_000, growth.samples
    assert growth.since("malloc_bytes") <= slack * 2**18, growth.samples
    assert growth.since("num_mappings") <= slack * 4, growth.samples
    assert growth.since("rss_bytes") <= slack * 8 * 2**20, growth.samples
