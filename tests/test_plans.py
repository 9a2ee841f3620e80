"""The pure part: chunks, runs and schedules, for any sizes. No device."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_offload.chunk import (
    ALIGNMENT,
    LEAST_PART_BYTES,
    VECTOR,
    Run,
    TensorSpec,
    align,
    cut_parts,
    in_whole_vectors,
    merge_runs,
    plan_chunks,
    split_runs,
)
from torch_offload.schedule import Job, Schedule, plan_schedule

DEVICES = [torch.device("cuda", 0), torch.device("cuda", 1)]
DTYPES = [torch.float32, torch.bfloat16, torch.complex128, torch.uint8]

tensors = st.tuples(st.integers(0, 5000), st.sampled_from(DTYPES)).map(
    lambda drawn: TensorSpec("x", (drawn[0],), (1,), drawn[1])
)
states = st.lists(st.tuples(st.sampled_from(DEVICES), st.lists(tensors, max_size=3)), max_size=30)


@given(states, st.integers(1, 50_000))
def test_chunks_cover_everything_once_in_order(states, chunk_bytes):
    chunks = plan_chunks(states, chunk_bytes)
    assert [s.param for c in chunks for s in c.places] == list(range(len(states)))
    for chunk in chunks:
        assert all(states[s.param][0] == chunk.device for s in chunk.places)
        end = 0
        for place in chunk.places:
            assert place.start == end
            for spec, offset in zip(place.tensors, place.offsets, strict=True):
                assert offset == end
                assert offset % ALIGNMENT == 0
                end += align(spec.num_bytes)
            assert place.stop == end
        assert chunk.num_bytes == end
        filled = [s for s in chunk.places if s.stop > s.start]
        assert chunk.num_bytes <= chunk_bytes or len(filled) == 1


@given(states, st.integers(1, 50_000))
def test_chunks_are_as_full_as_order_and_devices_allow(states, chunk_bytes):
    chunks = plan_chunks(states, chunk_bytes)
    for chunk, following in pairwise(chunks):
        first = following.places[0]
        fits = chunk.num_bytes + (first.stop - first.start) <= chunk_bytes
        assert not (fits and chunk.device == following.device)


@given(st.lists(st.tuples(st.integers(0, 100), st.booleans()), max_size=40))
def test_runs_are_the_fewest_that_cover_the_active_bytes(sizes):
    runs, wanted, position = [], set(), 0
    for size, active in sizes:
        if active:
            runs.append(Run(position, position, size))
            wanted.update(range(position, position + size))
        position += size
    merged = merge_runs(runs)
    covered = [byte for run in merged for byte in range(run.host, run.host + run.num_bytes)]
    assert covered == sorted(wanted)
    assert all(run.host == run.slot for run in merged)
    assert all(a.host + a.num_bytes < b.host for a, b in pairwise(merged))


def test_runs_that_are_apart_on_one_side_stay_apart():
    assert merge_runs([Run(0, 0, 4), Run(4, 64, 4)]) == (Run(0, 0, 4), Run(4, 64, 4))
    assert merge_runs([Run(0, 0, 4), Run(4, 4, 4)]) == (Run(0, 0, 8),)


permuted = st.lists(st.integers(0, 24), min_size=1, max_size=4).flatmap(
    lambda shape: st.tuples(st.just(shape), st.permutations(range(len(shape))))
)


@settings(deadline=None)
@given(permuted, st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3), st.integers(1, 30_000))
def test_parts_cover_a_parameter_once_and_keep_to_the_chunk(drawn, dtypes, chunk_bytes):
    shape, order = drawn
    tensor = torch.empty(shape).permute(order)
    specs = [
        TensorSpec(str(number), tuple(tensor.shape), tensor.stride(), dtype)
        for number, dtype in enumerate(dtypes)
    ]
    (chunk,) = plan_chunks([(DEVICES[0], specs)], chunk_bytes)
    place = chunk.places[0]
    parts = cut_parts(specs, tuple(tensor.shape), chunk_bytes)
    bound = max(chunk_bytes, LEAST_PART_BYTES + ALIGNMENT * len(specs))
    if not parts:
        assert chunk.num_bytes <= bound
        return
    assert [part.is_first for part in parts] == [True] + [False] * (len(parts) - 1)
    seen: list[int] = []
    for part in parts:
        packed, runs = place.packed(part), place.runs(part)
        assert packed.stop <= bound
        for spec, offset, run in zip(packed.tensors, packed.offsets, runs, strict=True):
            own = part.of(tensor)
            assert spec.shape == own.shape
            assert spec.stride == own.stride()
            assert own.numel() == 1 or torch.empty_like(own).stride() == own.stride()
            assert (run.slot, run.num_bytes) == (offset, spec.num_bytes)
            assert offset % ALIGNMENT == 0
        seen += [byte for run in runs for byte in range(run.host, run.host + run.num_bytes)]
        first = part.of(tensor).storage_offset()
        assert runs[0].host == place.offsets[0] + first * dtypes[0].itemsize
    wanted = [
        byte
        for spec, offset in zip(specs, place.offsets, strict=True)
        for byte in range(offset, offset + spec.num_bytes)
    ]
    assert sorted(seen) == wanted


@settings(deadline=None)
@given(permuted, st.sampled_from(DTYPES), st.integers(1, 30_000))
def test_parts_that_suit_fused_kernels_are_whole_vectors(drawn, dtype, chunk_bytes):
    shape, order = drawn
    tensor = torch.empty(shape).permute(order)
    specs = [TensorSpec("x", tuple(tensor.shape), tensor.stride(), dtype)]
    parts = cut_parts(specs, tuple(tensor.shape), chunk_bytes)
    whole = [part.of(tensor) for part in parts]
    suits = tensor.numel() % VECTOR == 0 and all(
        part.numel() % VECTOR == 0 and part.storage_offset() % VECTOR == 0 for part in whole
    )
    assert in_whole_vectors(parts, specs) == (suits or not parts)


def test_rows_of_odd_lengths_are_cut_in_whole_vectors():
    specs = [TensorSpec("x", (300, 70), (70, 1), torch.float32)]
    for chunk_bytes in (5000, 9000, 50_000):
        parts = cut_parts(specs, (300, 70), chunk_bytes)
        assert len(parts) > 1
        assert in_whole_vectors(parts, specs)


def test_tensors_with_gaps_or_other_orders_are_not_cut():
    specs = [
        TensorSpec("a", (400, 60), (60, 1), torch.float32),
        TensorSpec("b", (400, 60), (1, 400), torch.float32),
    ]
    assert cut_parts(specs, (400, 60), 64) == ()
    assert len(cut_parts(specs[:1], (400, 60), 64)) > 9
    assert cut_parts(specs[:1], (400, 70), 64) == ()
    assert cut_parts([TensorSpec("c", (400, 60), (61, 1), torch.float32)], (400, 60), 64) == ()
    assert cut_parts([TensorSpec("a", (), (), torch.float64)], (), 1) == ()


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


@given(st.data(), st.integers(1, 5), st.integers(0, 20))
def test_chunks_may_come_in_any_order_or_not_at_all(data, num_slots, num_chunks):
    """Each update finds its own chunk in its slot, copied in since the slot was last filled."""
    schedule = Schedule(num_slots)
    first = data.draw(st.integers(0, num_chunks))
    ops = schedule.expect(range(first)) + schedule.expect(range(first, num_chunks))
    come = data.draw(st.permutations(range(num_chunks)))
    come = come[: data.draw(st.integers(0, num_chunks))]
    content: dict[int, int] = {}
    for chunk in [None, *come]:
        ops += [] if chunk is None else schedule.update(chunk)
        jobs = [(op.job, op.chunk) for op in ops if op.job is not Job.COPY_IN]
        assert jobs == ([] if chunk is None else [(Job.UPDATE, chunk), (Job.COPY_OUT, chunk)])
        for op in ops:
            assert 0 <= op.slot < num_slots
            if op.job is Job.COPY_IN:
                content[op.slot] = op.chunk
            else:
                assert content[op.slot] == op.chunk
        ops = []
    rest = set(range(num_chunks)) - set(come)
    assert set(schedule.loaded) <= rest
    if come == list(range(len(come))):  # in order: the next ones are in the slots
        assert schedule.loaded == tuple(sorted(rest))[:num_slots]


def test_each_chunk_is_copied_in_once_though_two_of_them_never_come():
    schedule = Schedule(3)
    ops = schedule.expect(range(10))
    for chunk in [1, 2, 3, 5, 6, 7, 8, 9]:
        ops += schedule.update(chunk)
    copied_in = [op.chunk for op in ops if op.job is Job.COPY_IN]
    assert sorted(copied_in) == list(range(10))


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(1, 200)), max_size=5),
    st.lists(st.integers(1, 900), max_size=6, unique=True).map(sorted),
)
def test_no_run_crosses_a_seam_and_each_byte_travels_once(gaps, seams):
    runs, host, slot = [], 0, 0
    for before, beside, num_bytes in gaps:
        host, slot = host + before, slot + beside
        runs.append(Run(host, slot, num_bytes))
        host, slot = host + num_bytes, slot + num_bytes

    def moved(found: tuple[Run, ...] | list[Run]) -> list[tuple[int, int]]:
        return [(run.host + i, run.slot + i) for run in found for i in range(run.num_bytes)]

    split = split_runs(runs, seams)
    assert moved(split) == moved(runs)
    for run in split:
        assert run.num_bytes
        assert not any(run.host < seam < run.host + run.num_bytes for seam in seams)
    met = sum(run.host < seam < run.host + run.num_bytes for run in runs for seam in seams)
    assert len(split) == len(runs) + met


def test_the_second_of_two_large_tensors_starts_at_a_page():
    """So that the one can be registered with the driver without the other."""
    gib = 2**30
    shape = (gib // 4 + 1,)
    specs = [TensorSpec(key, shape, (1,), torch.float32) for key in "ab"]
    cpu = torch.device("cpu")
    (chunk,) = plan_chunks([(cpu, specs)], gib)
    assert chunk.places[0].offsets == (0, gib + 2**16)


def test_parts_of_large_tensors_fit_with_their_padding():
    chunk_bytes = 3 * 2**30 + 2**16
    least_padding = 2 * (ALIGNMENT - 1)
    shape = (2 * ((chunk_bytes - least_padding) // 8),)
    specs = [TensorSpec(key, shape, (1,), torch.float32) for key in "ab"]
    (chunk,) = plan_chunks([(torch.device("cpu"), specs)], chunk_bytes)
    parts = cut_parts(specs, shape, chunk_bytes)
    assert max(chunk.places[0].packed(part).stop for part in parts) <= chunk_bytes
