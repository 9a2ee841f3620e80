"""The pure part: chunks, runs and schedules, for any sizes. No device."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_offload.chunk import ALIGNMENT, TensorSpec, align, merge_runs, plan_chunks
from torch_offload.schedule import Job, plan_schedule

DEVICES = [torch.device("cuda", 0), torch.device("cuda", 1)]
DTYPES = [torch.float32, torch.bfloat16, torch.complex128, torch.uint8]

tensors = st.tuples(st.integers(0, 5000), st.sampled_from(DTYPES)).map(
    lambda drawn: TensorSpec("x", (drawn[0],), (1,), drawn[1])
)
states = st.lists(st.tuples(st.sampled_from(DEVICES), st.lists(tensors, max_size=3)), max_size=30)


@given(states, st.integers(1, 50_000))
def test_chunks_cover_everything_once_in_order(states, chunk_bytes):
    chunks = plan_chunks(states, chunk_bytes)
    assert [s.param for c in chunks for s in c.shards] == list(range(len(states)))
    for chunk in chunks:
        assert all(states[s.param][0] == chunk.device for s in chunk.shards)
        end = 0
        for shard in chunk.shards:
            assert shard.start == end
            for spec, offset in zip(shard.tensors, shard.offsets, strict=True):
                assert offset == end
                assert offset % ALIGNMENT == 0
                end += align(spec.num_bytes)
            assert shard.stop == end
        assert chunk.num_bytes == end
        filled = [s for s in chunk.shards if s.stop > s.start]
        assert chunk.num_bytes <= chunk_bytes or len(filled) == 1


@given(states, st.integers(1, 50_000))
def test_chunks_are_as_full_as_order_and_devices_allow(states, chunk_bytes):
    chunks = plan_chunks(states, chunk_bytes)
    for chunk, following in pairwise(chunks):
        first = following.shards[0]
        fits = chunk.num_bytes + (first.stop - first.start) <= chunk_bytes
        assert not (fits and chunk.device == following.device)


@given(st.lists(st.tuples(st.integers(0, 100), st.booleans()), max_size=40))
def test_runs_are_the_fewest_that_cover_the_active_bytes(sizes):
    ranges, wanted, position = [], set(), 0
    for size, active in sizes:
        if active:
            ranges.append((position, position + size))
            wanted.update(range(position, position + size))
        position += size
    runs = merge_runs(ranges)
    covered = [byte for start, stop in runs for byte in range(start, stop)]
    assert covered == sorted(wanted)
    assert all(a[1] < b[0] for a, b in pairwise(runs))


@given(st.integers(0, 60), st.integers(2, 6), st.booleans())
def test_schedule_is_safe_and_complete(num_chunks, num_slots, copy_in):
    jobs = [Job.COPY_IN, Job.UPDATE, Job.COPY_OUT] if copy_in else [Job.UPDATE, Job.COPY_OUT]
    owner: dict[int, int] = {}
    done: dict[int, list[Job]] = {}
    most = 0
    for op in plan_schedule(num_chunks, num_slots, copy_in=copy_in):
        history = done.setdefault(op.chunk, [])
        if not history:
            assert op.slot not in owner, "a slot is refilled before its chunk was copied out"
            owner[op.slot] = op.chunk
        assert owner[op.slot] == op.chunk
        history.append(op.job)
        most = max(most, len(owner))
        if op.job is Job.COPY_OUT:
            del owner[op.slot]
    assert list(done.values()) == [jobs] * num_chunks
    assert list(done) == list(range(num_chunks))
    assert most <= num_slots


def test_copies_run_ahead_of_updates():
    order = [(op.job.value, op.chunk) for op in plan_schedule(4, 3)]
    assert order[:4] == [("h2d", 0), ("h2d", 1), ("h2d", 2), ("update", 0)]
    assert order.index(("h2d", 3)) < order.index(("update", 1))
