"""Bad input: the message names the field, the value and the remedy, and nothing is lost."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from training import assert_same, fail_at_chunk, make_params, set_grads, train

from torch_offload import (
    OffloadConfig,
    host,
    is_offloaded,
    offload,
    offload_stats,
    synchronize,
    unoffload,
    values,
)
from torch_offload.values import overlap

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"chunk_size": "12 bananas"}, "chunk_size='12 bananas' is not a size"),
        ({"chunk_size": "MiB"}, "chunk_size='MiB' is not a size"),
        ({"chunk_size": ""}, "chunk_size='' is not a size"),
        ({"chunk_size": -5}, "chunk_size=-5 is -5 bytes. It must be at least 1"),
        ({"chunk_size": 0}, "chunk_size=0 is 0 bytes"),
        ({"chunk_size": True}, "chunk_size=True is not a size"),
        ({"chunk_size": 1.5}, "chunk_size=1.5 is not a size"),
        ({"num_slots": 1}, "num_slots=1 leaves no second buffer.*Use 2 or more"),
        ({"num_slots": "3"}, "num_slots='3' is not an int"),
        ({"num_slots": True}, "num_slots=True is not an int"),
        ({"pin_memory": "yes"}, "pin_memory='yes' is not a bool"),
    ],
)
def test_config_out_of_range(kwargs, message):
    with pytest.raises(ValueError, match=message):
        OffloadConfig(**kwargs)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("512MiB", 2**29), ("1.5 GB", 1_500_000_000), ("7", 7), (" 1gib ", 2**30), (9, 9)],
)
def test_config_sizes(text, num_bytes):
    assert OffloadConfig(chunk_size=text).chunk_bytes == num_bytes
    assert OffloadConfig(chunk_size=text) == OffloadConfig(chunk_size=num_bytes)


def test_config_from_text():
    config = OffloadConfig.from_text(
        {"chunk_size": "1MiB", "num_slots": "4", "pin_memory": "false"}
    )
    assert config == OffloadConfig(chunk_size=2**20, num_slots=4, pin_memory=False)
    assert OffloadConfig.from_text({"chunk_size": "", "num_slots": None}) == OffloadConfig()
    with pytest.raises(
        ValueError, match=r"no field 'bananas' .*Fields: chunk_size, gpu_budget, num_slots, overlap"
    ):
        OffloadConfig.from_text({"bananas": "3"})
    with pytest.raises(ValueError, match="num_slots='two' is not an int"):
        OffloadConfig.from_text({"num_slots": "two"})
    with pytest.raises(ValueError, match="pin_memory='maybe' is not a truth value"):
        OffloadConfig.from_text({"pin_memory": "maybe"})


def test_not_an_optimizer():
    with pytest.raises(TypeError, match=r"takes a torch.optim.Optimizer, not Linear"):
        offload(torch.nn.Linear(2, 2))


def test_no_parameters():
    optimizer = torch.optim.AdamW([{"params": []}])
    with pytest.raises(ValueError, match="AdamW has no parameters"):
        offload(optimizer)


def test_already_offloaded_with_another_config():
    optimizer = offload(torch.optim.AdamW(make_params(CPU)), OffloadConfig(num_slots=2))
    with pytest.raises(ValueError, match=r"already offloaded with .*num_slots=2.*num_slots=4"):
        offload(optimizer, OffloadConfig(num_slots=4))
    assert is_offloaded(optimizer)


@pytest.mark.parametrize("function", [synchronize, offload_stats, unoffload])
def test_not_offloaded(function):
    with pytest.raises(ValueError, match=r"AdamW is not offloaded. Call offload"):
        function(torch.optim.AdamW(make_params(CPU)))


def test_differentiable_is_refused():
    with pytest.raises(NotImplementedError, match="differentiable=True in group 0"):
        offload(torch.optim.AdamW(make_params(CPU), differentiable=True))


def test_replaced_step_is_refused():
    optimizer = torch.optim.AdamW(make_params(CPU))
    optimizer.step = lambda closure=None: None
    with pytest.raises(ValueError, match="step method of this AdamW was replaced"):
        offload(optimizer)


def test_sparse_gradient_is_refused_before_anything_changes():
    params = make_params(CPU, shapes=[(5, 3), (4, 2)])
    optimizer = offload(torch.optim.AdamW(params))
    set_grads(params, 0)
    params[1].grad = params[1].grad.to_sparse()
    before = [p.detach().clone() for p in params]
    with pytest.raises(NotImplementedError, match=r"layout torch.sparse_coo"):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
    set_grads(params, 0)
    optimizer.step()


def in_inference_mode():
    with torch.inference_mode():
        return torch.nn.Parameter(torch.ones(4))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.nn.LazyLinear(4).weight, "not initialized yet.*Run the model once"),
        (lambda: torch.nn.Parameter(torch.eye(4).to_sparse()), "layout torch.sparse_coo.*to_dense"),
        (lambda: torch.ones(3, 3).to_mkldnn().requires_grad_(), "layout torch._mkldnn"),
        (in_inference_mode, "made under torch.inference_mode"),
    ],
    ids=["lazy", "sparse", "mkldnn", "inference"],
)
def test_parameters_without_ordinary_memory(make, message):
    params = [*make_params(CPU), make()]
    with pytest.raises(NotImplementedError, match=message):
        offload(torch.optim.SGD(params, lr=0.1))
    optimizer = offload(torch.optim.SGD(params[:-1], lr=0.1))
    optimizer.param_groups[0]["params"].append(params[-1])
    with pytest.raises(NotImplementedError, match=message):
        optimizer.step()


def test_parameters_without_values():
    with torch.device("meta"):
        params = list(torch.nn.Linear(4, 4).parameters())
    optimizer = offload(torch.optim.AdamW(params))
    for param in params:
        param.grad = torch.zeros_like(param)
    with pytest.raises(NotImplementedError, match=r"meta device.*no values.*to_empty"):
        optimizer.step()
    with FakeTensorMode():
        fake = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))])
        with pytest.raises(NotImplementedError, match="under FakeTensorMode"):
            offload(fake)
        with pytest.raises(NotImplementedError, match="under FakeTensorMode"):
            offload(torch.optim.AdamW(make_params(CPU)))
    with pytest.raises(NotImplementedError, match="under FakeTensorMode"):
        offload(fake)


def test_a_parameter_without_a_name_among_others_that_have_one():
    params = make_params(CPU)
    named = [(f"p{index}", param) for index, param in enumerate(params[1:])]
    optimizer = offload(torch.optim.SGD(named, lr=0.1))
    optimizer.param_groups[0]["params"].append(params[0])
    set_grads(params, 0)
    with pytest.raises(ValueError, match="names in 'param_names' for"):
        optimizer.step()


def test_columns_share_no_element(device):
    base = torch.arange(24.0, device=device).view(8, 3)
    columns = [torch.nn.Parameter(base[:, index]) for index in range(3)]
    set_grads(columns, 0)
    expected = [torch.nn.Parameter(column.detach().clone()) for column in columns]
    set_grads(expected, 0)
    offload(torch.optim.AdamW(columns)).step()
    torch.optim.AdamW(expected).step()
    assert all(torch.equal(a, b) for a, b in zip(columns, expected, strict=True))


def test_what_has_memory_in_common(monkeypatch):
    base = torch.zeros(12, 12)
    other = torch.zeros(4)
    rows, columns = [base[i] for i in range(12)], [base[:, i] for i in range(12)]
    tiles = [base[::2, ::2], base[::2, 1::2], base[1::2]]
    for apart in (rows, columns, tiles, [base[:0], base], [base.to("meta")] * 2, [other, base]):
        assert overlap(apart) is None
        assert overlap(apart[::-1]) is None
    assert overlap([other, *rows[2:], columns[3]]) in ((1, 11), (11, 1))
    assert overlap([*tiles, base[3:4, 5:6]]) in ((2, 3), (3, 2))
    assert overlap([base[:, :1].expand(12, 5), columns[1], columns[0]]) in ((0, 2), (2, 0))
    halves = base.view(torch.float16)
    assert overlap([base[:, 1], halves[:, 0], halves[:, 1]]) is None
    assert set(overlap([base[:, 1], halves[:, 0], halves[:, 3]])) == {0, 2}
    monkeypatch.setattr(values, "_MAX_MARKS", 20)
    assert overlap(columns) is not None, "so many bytes are not gone through"
    assert overlap(rows) is None


def test_not_enough_host_memory_is_said_before_allocating(device, monkeypatch):
    monkeypatch.setattr(host, "available_host_bytes", lambda: 10_000)
    monkeypatch.setattr(host.mmap, "mmap", None)  # any allocation would fail loudly
    params = make_params(device, shapes=[(1000, 10)])
    optimizer = offload(torch.optim.AdamW(params))
    set_grads(params, 0)
    with pytest.raises(MemoryError, match=r"needs 81,920 bytes of host memory, 10,000 bytes are"):
        optimizer.step()
    assert optimizer.state_dict()["state"] == {}
    monkeypatch.undo()
    optimizer.step()
    assert torch.equal(optimizer.state[params[0]]["step"].cpu(), torch.tensor(1.0))


@pytest.mark.gpu
def test_pinning_refused_is_a_warning_and_still_correct(monkeypatch):
    device = torch.device("cuda")
    plain = train(device, config=None)
    monkeypatch.setattr(host._Piece, "register", lambda *_: "refused for the test")
    with pytest.warns(UserWarning, match="could not be pinned .*refused for the test.*ulimit -l"):
        params, optimizer = train(device, config=OffloadConfig(chunk_size=50_000))
    assert not optimizer.state[params[0]]["exp_avg"].is_pinned()
    assert offload_stats(optimizer).pinned_bytes == 0
    assert_same(plain, (params, optimizer))


@pytest.mark.gpu
def test_a_real_refusal_of_the_driver_leaves_no_error_behind():
    piece = host._Piece(2**20)
    piece.touch(0, 2**20)
    store = host.HostStore(torch.device("cuda"), True, lambda: None)
    assert piece.register(torch.device("cuda"), lambda: None) is None
    with pytest.warns(UserWarning, match="could not be pinned"):
        store._register([piece])  # the same pages twice: the driver refuses
    torch.zeros(4, device="cuda").add_(1)
    torch.cuda.synchronize()


def test_pin_memory_false(device):
    plain = train(device, config=None)
    params, optimizer = train(device, config=OffloadConfig(pin_memory=False, chunk_size=50_000))
    assert_same(plain, (params, optimizer))
    assert offload_stats(optimizer).pinned_bytes == 0


def test_failure_half_way_keeps_state_readable_and_stops(device, monkeypatch):
    params, optimizer = train(device, config=OffloadConfig(chunk_size=1), has_grad=None)
    checkpoint = {
        "optimizer": copy.deepcopy(optimizer.state_dict()),
        "params": [p.detach().clone() for p in params],
    }
    fail_at_chunk(monkeypatch, 3)
    set_grads(params, 7)
    with pytest.raises(RuntimeError, match="boom"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=re.escape("stopped half-way (RuntimeError: boom)")):
        optimizer.step()
    with pytest.warns(UserWarning, match="not that of a whole step"):
        state = optimizer.state_dict()
    assert all(torch.isfinite(v["exp_avg"]).all() for v in state["state"].values())
    assert state["state"][0]["step"] == 7  # chunk 0 was updated
    assert state["state"][8]["step"] == 6  # the last one was not

    monkeypatch.undo()
    optimizer.load_state_dict(checkpoint["optimizer"])
    with torch.no_grad():
        for param, value in zip(params, checkpoint["params"], strict=True):
            param.copy_(value)
    set_grads(params, 6)
    optimizer.step()
    plain_params, plain = train(device, config=None, has_grad=None)
    set_grads(plain_params, 6)
    plain.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"]
    plain.step()
    assert_same((plain_params, plain), (params, optimizer))


def test_too_little_host_memory_is_not_taken_for_too_little_gpu_memory():
    """Batch-size finders retry with a smaller batch on the latter, which would not help."""
    from accelerate.utils.memory import should_reduce_batch_size
    from lightning.pytorch.utilities.memory import is_oom_error

    with pytest.raises(MemoryError, match="bytes are available") as caught:
        host.HostStore(CPU, False, lambda: None).allocate([2**35] * 64)
    assert not is_oom_error(caught.value)
    assert not should_reduce_batch_size(caught.value)
