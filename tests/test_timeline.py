"""timeline(): when copies and updates ran, and that it changes nothing."""

from __future__ import annotations

import pytest
import torch
from test_overlap import CHUNK, model_of, simple
from test_overlap import train as train_net
from training import assert_same

from torch_offload import OffloadConfig, offload, offload_stats, timeline


@pytest.mark.parametrize("overlap", ["step", "backward", "forward"])
def test_every_copy_and_update_of_a_step_is_there(device, overlap):
    plain = train_net(device, None, steps=4)
    params, optimizer = train_net(device, None, steps=0)
    model = model_of[optimizer]
    offload(optimizer, OffloadConfig(chunk_size=CHUNK, overlap=overlap), model=model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    with timeline(optimizer) as nothing:  # before the first step
        pass
    assert nothing.lanes() == {}
    for step in range(4):
        if step == 3:
            with timeline(optimizer) as recorded, recorded.span("compute"):
                simple(model, optimizer, step)
        else:
            simple(model, optimizer, step)
        schedule.step()
    assert_same(plain, (params, optimizer))
    lanes = recorded.lanes()
    assert set(lanes) == {"h2d", "step", "d2h", "compute"}
    chunks = offload_stats(optimizer).num_chunks
    assert len(lanes["step"]) == len(lanes["d2h"]) == chunks
    # In backward mode those of the next step are copied in ahead, and those of this one were. One
    # that turns out to have no gradient is copied for nothing.
    assert chunks <= len(lanes["h2d"]) <= chunks + 3 * (overlap == "backward")
    for intervals in lanes.values():
        assert all(0 <= start <= end < 60 for start, end in intervals)
    if device.type == "cpu":  # one after the other
        assert all(a[1] <= b[0] for a, b in zip(lanes["step"], lanes["step"][1:], strict=False))
    before = [len(spans) for spans in recorded.lanes().values()]
    simple(model, optimizer, 4)
    assert [len(spans) for spans in recorded.lanes().values()] == before


def test_errors_are_not_hidden(device):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(4, device=device))])
    with pytest.raises(ValueError, match="is not offloaded"), timeline(optimizer):
        pass
    offload(optimizer)
    with pytest.raises(KeyError), timeline(optimizer):
        raise KeyError
