"""A parameter with more state than a chunk holds is updated in parts, where that is exact.

On a CPU it is updated whole, since torch's kernels round the tail of a tensor in their own way.
They do not for fp32 without ``fused``, so these tests cut there as well.
"""

from __future__ import annotations

import copy
import io

import pytest
import torch
from test_optimizers import OPTIMIZERS, Noisy, flavours
from training import assert_same, fail_at_chunk, late, make_params, set_grads, train

from torch_offload import OffloadConfig, offload, offload_stats, refusals, shard

SHAPES = ((1003, 37), (600, 36), (70,), (), (0, 5), (61, 3, 5), (1, 4000), (2, 2), (3, 3))
MATRICES = tuple(shape for shape in SHAPES if len(shape) == 2 and 0 not in shape)
CONFIG = OffloadConfig(chunk_size=6_000)
ELEMENTWISE = [name for name in OPTIMIZERS if name not in ("Adafactor", "Muon")]


@pytest.fixture(autouse=True)
def cut_everywhere(monkeypatch):
    monkeypatch.setattr(shard, "cuts_on", lambda device: True)


def num_parts(optimizer: torch.optim.Optimizer) -> int:
    return max(len(home.parts) for home in optimizer._offload_core.planner.layout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "flavour"),
    [(name, flavour) for name in ELEMENTWISE for flavour in flavours(name)],
    ids=str,
)
def test_same_bits_as_plain(device, name, flavour, dtype):
    if device.type == "cpu" and (dtype is not torch.float32 or flavour.get("fused")):
        pytest.skip("torch's CPU kernels round the tail of a tensor in another way")
    kind, settings, _ = OPTIMIZERS[name]
    kwargs = {"optimizer_class": kind, "dtype": dtype, "shapes": SHAPES, **settings, **flavour}
    if name == "SGD momentum" and flavour.get("fused"):
        kwargs["has_grad"] = None  # torch's own fails where one parameter has no buffer yet
    try:
        plain = train(device, config=None, **kwargs)
    except RuntimeError as error:  # Adagrad's fused kernel is for the CPU only in some versions
        if not flavour.get("fused"):
            raise
        pytest.skip(f"plain torch refuses: {error}")
    assert_same(plain, train(device, config=None, **kwargs))  # the control
    offloaded = train(device, config=CONFIG, **kwargs)
    assert_same(plain, offloaded)
    if name != "SGD":
        assert num_parts(offloaded[1]) > 9


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_what_is_not_elementwise_is_updated_whole(device, name):
    kind, settings, _ = OPTIMIZERS[name]
    kwargs = {"optimizer_class": kind, "shapes": MATRICES, **settings}
    plain = train(device, config=None, **kwargs)
    offloaded = train(device, config=CONFIG, **kwargs)
    assert_same(plain, offloaded)
    assert num_parts(offloaded[1]) == 0


def test_staging_never_exceeds_the_slots(device):
    params = make_params(device, shapes=SHAPES)
    optimizer = offload(torch.optim.AdamW(params), CONFIG)
    for step in range(3):
        set_grads(params, step)
        optimizer.step()
        stats = offload_stats(optimizer)
        assert stats.staging_bytes <= CONFIG.num_slots * CONFIG.chunk_bytes
        assert stats.num_chunks > 60


def test_rows_longer_than_a_chunk_are_cut_too(device):
    def run(config):
        params = make_params(device, shapes=((5, 4000), (3, 2, 2000)))
        params[1] = torch.nn.Parameter(params[1].detach().transpose(0, 1))
        optimizer = torch.optim.AdamW(params, lr=0.1, foreach=True)
        if config is not None:
            offload(optimizer, config)
        for step in range(3):
            set_grads(params, step)
            optimizer.step()
        return params, optimizer

    offloaded = run(CONFIG)
    assert_same(run(None), offloaded)
    assert offload_stats(offloaded[1]).num_chunks == 5 * 6 + 6 * 3
    assert offload_stats(offloaded[1]).staging_bytes <= 3 * CONFIG.chunk_bytes


def test_a_parameter_of_another_shape_is_refused_as_torch_does(device):
    def run(config):
        (param,) = make_params(device, shapes=((300, 30),))
        optimizer = torch.optim.AdamW([param], lr=0.1)
        if config is not None:
            offload(optimizer, config)
        set_grads([param], 0)
        optimizer.step()
        param.data = torch.zeros(400, 30, device=device)
        param.grad = torch.ones(400, 30, device=device)
        with pytest.raises(RuntimeError, match=r"size of tensor|must match|same size|same shape"):
            optimizer.step()
        return param

    assert torch.equal(run(None), run(CONFIG))


def test_layouts_that_are_not_row_major(device):
    def run(config):
        params = make_params(device, shapes=((90, 40), (30, 8, 5, 5), (64, 64)))
        params[0] = torch.nn.Parameter(params[0].detach().t())
        params[1] = torch.nn.Parameter(params[1].detach().to(memory_format=torch.channels_last))
        params[2] = torch.nn.Parameter(params[2].detach().repeat(1, 2)[:, ::2])  # not dense
        optimizer = torch.optim.AdamW(params, lr=0.01, amsgrad=True, foreach=True)
        if config is not None:
            offload(optimizer, config)
        for step in range(4):
            set_grads(params, step)
            if step == 2:
                for param in params:
                    param.grad = torch.empty_like(param).copy_(param.grad)
            optimizer.step()
        return params, optimizer

    plain, offloaded = run(None), run(CONFIG)
    assert_same(plain, offloaded)
    assert num_parts(offloaded[1]) > 9


def test_state_that_appears_later(device):
    def run(config):
        params = make_params(device, shapes=((300, 20), (5,)))
        optimizer = torch.optim.RMSprop(params, lr=0.01)
        if config is not None:
            offload(optimizer, config)
        for step in range(5):
            if step == 2:
                for param in params:
                    if optimizer.state.get(param):
                        optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)
                optimizer.param_groups[0]["momentum"] = 0.9
            set_grads(params, step)
            optimizer.step()
        return params, optimizer

    assert_same(run(None), run(CONFIG))


class Grows(torch.optim.SGD):
    """Makes a second tensor of state in its third step, and counts in the state."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                state["calls"] = state.get("calls", 0) + 1
                state.setdefault("seen", torch.zeros((), dtype=torch.float64)).add_(1)
                state["sum"] = state.get("sum", torch.zeros_like(param)) + param.grad
                if state["calls"] == 3:
                    state["square"] = param.grad.double().square()
                if state["calls"] == 5:
                    del state["seen"]
                    state["sum"] = state["sum"].double()
                update = state["square"].to(param.dtype) if "square" in state else param.grad
                with torch.no_grad():
                    param.sub_(group["lr"] * update + 0.01 * state["sum"].to(param.dtype))


def test_state_that_a_class_adds_replaces_and_drops(device, monkeypatch):
    monkeypatch.setattr(refusals, "_PACKAGES", ("",), raising=False)

    def run(config):
        params = make_params(device, shapes=((300, 20), (5,)))
        optimizer = Grows(params, lr=0.01)
        if config is not None:
            offload(optimizer, config)
        for step in range(7):
            set_grads(params, step)
            optimizer.step()
            for state in optimizer.state.values():
                assert config is None or step != 4 or state["sum"].shape in ((300, 20), (5,))
        return params, optimizer

    plain, offloaded = run(None), run(CONFIG)
    assert_same(plain, offloaded)
    assert num_parts(offloaded[1]) > 9


def test_checkpoints_are_the_whole_parameters(device):
    plain = train(device, config=None, shapes=SHAPES)
    offloaded = train(device, config=CONFIG, shapes=SHAPES)
    buffer = io.BytesIO()
    torch.save(offloaded[1].state_dict(), buffer)
    size = len(buffer.getvalue())
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    reference = io.BytesIO()
    torch.save(plain[1].state_dict(), reference)
    assert size == pytest.approx(len(reference.getvalue()), rel=0.01)

    ends = []
    for first, second, state_dict in (
        (None, None, copy.deepcopy(plain[1].state_dict())),
        (None, CONFIG, copy.deepcopy(plain[1].state_dict())),
        (CONFIG, None, copy.deepcopy(saved)),
        (CONFIG, OffloadConfig(chunk_size=9_000), saved),
    ):
        source = plain if first is None else offloaded
        params = [torch.nn.Parameter(p.detach().clone()) for p in source[0]]
        ends.append(
            train(
                device,
                config=second,
                params=params,
                state_dict=state_dict,
                first_step=6,
                steps=3,
                shapes=SHAPES,
            )
        )
    for end in ends[1:]:
        assert_same(ends[0], end)


@pytest.mark.parametrize("chunk", [1, 2, 40, 50])
def test_a_step_that_stops_between_two_parts(device, monkeypatch, chunk):
    plain = train(device, config=None, shapes=SHAPES, steps=4)
    params, optimizer = train(device, config=CONFIG, shapes=SHAPES, steps=2)
    saved = copy.deepcopy(optimizer.state_dict())
    weights = [param.detach().clone() for param in params]
    set_grads(params, 2, late)
    with monkeypatch.context() as patch:
        fail_at_chunk(patch, chunk)
        with pytest.raises(RuntimeError, match="boom"):
            optimizer.step()
    if chunk > 1:
        with pytest.raises(RuntimeError, match=r"stopped half-way .* were updated"):
            optimizer.step()
    with torch.no_grad():
        for param, weight in zip(params, weights, strict=True):
            param.copy_(weight)
    optimizer.load_state_dict(saved)
    for step, factor in ((2, 1.0 / 3), (3, 1.0 / 4)):
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        set_grads(params, step, late)
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
    for p, q in zip(plain[0], params, strict=True):
        assert torch.equal(p, q)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fused", "foreach"])
def test_an_embedding_with_4_gib_of_state(kind):
    """128 Ki rows of 4096 fp32 numbers, at the default chunk size: no step has more than the slots
    (and, for foreach, the temporaries of one part) on the device."""
    device = torch.device("cuda", 0)

    def run(config):
        generator = torch.Generator(device).manual_seed(0)
        param = torch.nn.Parameter(torch.randn(131_072, 4096, device=device, generator=generator))
        other = torch.nn.Parameter(torch.randn(1000, 1000, device=device, generator=generator))
        optimizer = torch.optim.AdamW([param, other], lr=0.1, **{kind: True})
        if config is not None:
            offload(optimizer, config)
        peaks = []
        for _ in range(3):
            param.grad = torch.randn(param.shape, device=device, generator=generator)
            other.grad = torch.randn(other.shape, device=device, generator=generator)
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            optimizer.step()
            peaks.append(torch.cuda.max_memory_allocated() - before)
        return [param, other], optimizer, peaks

    offloaded = run(OffloadConfig())
    slots = 3 * 512 * 2**20
    assert max(offloaded[2]) <= slots + (16 if kind == "fused" else 600) * 2**20
    assert offload_stats(offloaded[1]).staging_bytes <= slots
    plain = run(None)
    assert plain[2][0] > 4 * 2**30
    assert_same(plain[:2], offloaded[:2])


def test_random_numbers_are_drawn_for_the_whole_parameter(device, monkeypatch):
    monkeypatch.setattr(refusals, "_PACKAGES", ("",), raising=False)

    def run(config):
        params = make_params(device, shapes=((300, 20), (5,)))
        optimizer = Noisy(params, lr=0.1)
        if config is not None:
            offload(optimizer, config)
        torch.manual_seed(3)
        for step in range(4):
            set_grads(params, step)
            optimizer.step()
        return params, optimizer

    offloaded = run(CONFIG)
    assert_same(run(None), offloaded)
    assert num_parts(offloaded[1]) == 0
