"""At the size that offload is for: 4.0e9 fp32 parameters, 32 GB of AdamW state, 200 steps."""

from __future__ import annotations

import gc
import itertools
import warnings

import pytest
import torch

from torch_offload import OffloadConfig, offload, offload_stats
from torch_offload.memory import available_host_bytes

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(600)]

GIB = 2**30
NUM_PARAMS = 4_000_000_000
HIDDEN = 4096


def decoder_shapes() -> list[tuple[int, ...]]:
    """The matrices and norms of a decoder's layers, until there are enough."""
    layer = [(HIDDEN, HIDDEN)] * 4 + [(4 * HIDDEN, HIDDEN), (HIDDEN, 4 * HIDDEN), (HIDDEN,)]
    shapes: list[tuple[int, ...]] = []
    count = 0
    for shape in itertools.cycle(layer):
        if count >= NUM_PARAMS:
            return shapes
        shapes.append(shape)
        count += torch.Size(shape).numel()
    raise AssertionError


def test_memory_and_steadiness_over_200_steps():
    device = torch.device("cuda", 0)
    if torch.cuda.mem_get_info(device)[0] < 40 * GIB or (available_host_bytes() or 0) < 40 * GIB:
        pytest.skip("needs 40 GiB of free memory on the GPU and on the host")
    config = OffloadConfig()
    # Earlier tests of this process leave cuBLAS workspaces (32 MiB a thread), and cycles.
    gc.collect()
    torch.cuda.empty_cache()
    before_bytes = torch.cuda.memory_allocated()
    params = [torch.nn.Parameter(torch.empty(s, device=device)) for s in decoder_shapes()]
    for param in params:
        torch.nn.init.normal_(param)
        param.grad = torch.randn_like(param)
    num_params = sum(param.numel() for param in params)
    optimizer = offload(torch.optim.AdamW(params, lr=1e-4, fused=True), config)
    torch.cuda.synchronize()
    params_and_grads_bytes = torch.cuda.memory_allocated()
    assert params_and_grads_bytes - before_bytes < 8 * num_params * 1.001
    bound = config.num_slots * config.chunk_bytes + GIB // 16

    reserved = []
    for step in range(200):
        if step == 3:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # setting the mode warns that it is a prototype
                torch.cuda.set_sync_debug_mode("error")
        torch.cuda.reset_peak_memory_stats()
        try:
            optimizer.step()
        except BaseException:
            torch.cuda.set_sync_debug_mode("default")
            raise
        peak = torch.cuda.max_memory_allocated() - params_and_grads_bytes
        assert peak <= bound, f"step {step}: {peak / GIB:.2f} GiB"
        reserved.append(torch.cuda.memory_reserved())
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()

    assert reserved[-1] == max(reserved) == reserved[1], sorted(set(reserved))
    stats = offload_stats(optimizer)
    assert 8 * num_params <= stats.pinned_bytes == stats.host_bytes <= 8 * num_params * 1.01
    assert stats.h2d_bytes == stats.d2h_bytes
    assert optimizer.state[params[0]]["step"].item() == 200
    assert all(torch.isfinite(param).all() for param in params)
