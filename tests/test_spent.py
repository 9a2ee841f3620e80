"""What stands in ``param.grad`` after an update during backward refuses its use, and no more."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import re
import tempfile
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from torch_offload.spent import is_spent, spend

REFUSED = re.escape("used by the update during backward (overlap='backward') and freed.") + (
    ".*overlap='step' or overlap='forward'.*last_microbatch.*zero_grad()"
)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with tempfile.NamedTemporaryFile(prefix="spent_") as meeting_point:
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting_point.name}", rank=0, world_size=1
        )
        yield init_device_mesh("cpu", (1,))
        dist.destroy_process_group()


PLAIN: dict[str, Callable[[], torch.Tensor]] = {
    "matrix": lambda: torch.ones(4, 3),
    "transposed": lambda: torch.ones(4, 3).t(),
    "channels_last": lambda: torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "bf16": lambda: torch.ones(5, dtype=torch.bfloat16),
    "complex": lambda: torch.ones(3, dtype=torch.complex64),
    "0-dim": lambda: torch.tensor(2.0),
    "empty": lambda: torch.ones(0, 3),
}
KINDS = [*PLAIN, "dtensor"]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "dtensor":
        request.getfixturevalue("mesh")
    return request.param


def make_param(kind: str) -> nn.Parameter:
    """A parameter with a gradient."""
    if kind == "dtensor":
        mesh = init_device_mesh("cpu", (1,))
        param = nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]))
    else:
        param = nn.Parameter(PLAIN[kind]())
    backward(param)
    return param


def backward(*params: torch.Tensor, **kwargs: Any) -> None:
    for param in params:
        loss = (param * param).abs().sum()
        (loss.full_tensor() if isinstance(loss, DTensor) else loss).backward(**kwargs)


class Owner:
    """Finds parameters, and counts who was refused."""

    def __init__(self, find) -> None:
        self.find, self.num_refused = find, 0

    def refused(self) -> None:
        self.num_refused += 1


#: Parameters that are alive, by their ids.
KNOWN: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()


def spend_all(*params: torch.Tensor) -> list[torch.Tensor]:
    """Spend the gradients, with a lookup that does not keep the parameters alive."""
    for param in params:
        KNOWN[id(param)] = param
        spend(param, Owner(KNOWN.get))
    return [param.grad for param in params]


def create_graph(param: nn.Parameter) -> None:
    backward(param, create_graph=True)


def scaler_unscale(param: nn.Parameter) -> None:
    optimizer = torch.optim.SGD([param])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


def non_finite_check(param: nn.Parameter) -> None:
    torch._amp_foreach_non_finite_check_and_unscale_([param.grad], torch.zeros(()), torch.ones(()))


REFUSED_USES: dict[str, Callable[[nn.Parameter], Any]] = {
    "clip_grad_norm_": lambda p: nn.utils.clip_grad_norm_([p], 1.0),
    "clip_grad_norm_ foreach": lambda p: nn.utils.clip_grad_norm_([p], 1.0, foreach=True),
    "clip_grad_norm_ for-loop": lambda p: nn.utils.clip_grad_norm_([p], 1.0, foreach=False),
    "clip_grad_value_": lambda p: nn.utils.clip_grad_value_([p], 1.0),
    "clip_grad_value_ for-loop": lambda p: nn.utils.clip_grad_value_([p], 1.0, foreach=False),
    "get_total_norm": lambda p: nn.utils.get_total_norm([p.grad]),
    "mul_": lambda p: p.grad.mul_(2),
    "div_": lambda p: p.grad.div_(2),
    "augmented": lambda p: exec("p.grad += 1", {"p": p}),
    "copy_": lambda p: p.grad.copy_(p),
    "set item": lambda p: p.grad.__setitem__(..., 0),
    "fill_": lambda p: p.grad.fill_(0),
    "add": lambda p: p.grad + 1,
    "other operand": lambda p: p + p.grad,
    "compare": lambda p: p.grad == 0,
    "all finite": lambda p: torch.isfinite(p.grad),
    "norm": lambda p: p.grad.norm(),
    "_foreach_norm": lambda p: torch._foreach_norm([p.grad]),
    "_foreach_mul_": lambda p: torch._foreach_mul_([torch.ones(2), p.grad], 2.0),
    "non-finite check": non_finite_check,
    "GradScaler.unscale_": scaler_unscale,
    "second backward": backward,
    "second backward, create_graph": create_graph,
    "optimizer step": lambda p: torch.optim.SGD([p]).step(),
    "optimizer step foreach": lambda p: torch.optim.Adam([p], foreach=True).step(),
    "optimizer step for-loop": lambda p: torch.optim.Adam([p], foreach=False).step(),
    "data": lambda p: p.grad.data,
    "detach": lambda p: p.grad.detach(),
    "clone": lambda p: p.grad.clone(),
    "to": lambda p: p.grad.to(torch.float64),
    "to itself": lambda p: p.grad.to(p.grad.dtype),
    "cpu": lambda p: p.grad.cpu(),
    "contiguous": lambda p: p.grad.contiguous(),
    "item": lambda p: p.grad.item(),
    "tolist": lambda p: p.grad.tolist(),
    "numpy": lambda p: p.grad.numpy(),
    "data_ptr": lambda p: p.grad.data_ptr(),
    "storage": lambda p: p.grad.untyped_storage(),
    "formatted value": lambda p: f"{p.grad:.2f}",
    "bool": lambda p: bool(p.grad),
    "view": lambda p: p.grad.view(-1),
    "unbind": lambda p: p.grad.unbind(),
    "index": lambda p: p.grad[..., 0],
    "dlpack": lambda p: torch.from_dlpack(p.grad),
    "pickle": lambda p: pickle.dumps(p.grad),
    "torch.save": lambda p: torch.save(p.grad, io.BytesIO()),
    "share memory": lambda p: p.grad.share_memory_(),
    "in C++": lambda p: torch.ops.aten.mul_.Tensor(p.grad, p),
}


@pytest.mark.parametrize("name", REFUSED_USES)
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_a_use_is_refused_with_what_to_do_instead(name, kind):
    param = make_param(kind)
    before = copy.deepcopy(param.data)
    spend_all(param)
    with pytest.raises(RuntimeError, match=REFUSED):
        REFUSED_USES[name](param)
    assert is_spent(param.grad)
    assert torch.equal(param, before)


def test_one_spent_gradient_among_others_is_enough_to_refuse(kind):
    params = [make_param(kind), make_param(kind)]
    grad = copy.deepcopy(params[0].grad)
    spend_all(params[1])
    with pytest.raises(RuntimeError, match=REFUSED):
        nn.utils.clip_grad_norm_(params, 1e-3)
    assert torch.equal(params[0].grad, grad)


def test_it_looks_like_the_gradient(kind):
    param = make_param(kind)
    grad = param.grad
    (spent,) = spend_all(param)
    assert param.grad is spent
    assert is_spent(spent)
    assert not is_spent(grad)
    assert not is_spent(None)
    for name in (
        "shape",
        "dtype",
        "device",
        "layout",
        "requires_grad",
        "is_leaf",
        "grad_fn",
        "ndim",
    ):
        assert getattr(spent, name) == getattr(grad, name), name
    for name in ("grad_fn", "is_sparse", "is_cuda", "is_cpu", "is_meta", "itemsize", "nbytes"):
        assert getattr(spent, name) == getattr(grad, name), name
    for name in ("size", "stride", "numel", "dim", "is_floating_point", "is_complex"):
        assert getattr(spent, name)() == getattr(grad, name)(), name
    assert spent is not None
    assert spent.requires_grad_(False) is spent
    assert hash(spent) == id(spent)
    assert isinstance(spent, DTensor) == isinstance(grad, DTensor)
    if isinstance(grad, DTensor):
        assert (spent.placements, spent.device_mesh) == (grad.placements, grad.device_mesh)
    assert "shape" in dir(spent)


def test_it_can_be_printed_but_shows_no_values(kind):
    (spent,) = spend_all(make_param(kind))
    text = f"<spent gradient: shape {tuple(spent.shape)}, {spent.dtype}, cpu>"
    assert repr(spent) == str(spent) == f"{spent}" == text
    assert text in repr([spent])


def test_it_has_no_memory():
    param = nn.Parameter(torch.ones(1000))
    param.grad = torch.ones(1000)
    memory = weakref.ref(param.grad)
    spend_all(param)
    assert memory() is None
    assert param.grad.nbytes == 4000
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(RuntimeError, match="data pointer"):
        param.grad.untyped_storage().data_ptr()


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("foreach", [True, False, None])
@pytest.mark.parametrize("class_", [torch.optim.AdamW, torch.optim.SGD])
def test_zero_grad_of_the_optimizer(class_, foreach, set_to_none, kind):
    check_zeroed(
        kind,
        lambda params: class_(params, foreach=foreach).zero_grad(set_to_none=set_to_none),
        None if set_to_none else 0,
    )


def detach_and_zero(params: list[nn.Parameter]) -> None:
    for param in params:
        param.grad.detach_()
        param.grad.zero_()


ZEROING: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "module": lambda params: nn.ParameterList(params).zero_grad(set_to_none=False),
    "loop": detach_and_zero,
    "function": lambda params: [torch.zero_(param.grad) for param in params],
    "foreach": lambda params: torch._foreach_zero_([param.grad for param in params]),
}


@pytest.mark.parametrize("name", ZEROING)
def test_zeroed_gradients_are_real_zeros(name, kind):
    check_zeroed(kind, ZEROING[name], 0)


def test_gradients_set_to_none_by_the_module(kind):
    check_zeroed(kind, lambda params: nn.ParameterList(params).zero_grad(), None)


def check_zeroed(kind: str, zero: Callable[[list[nn.Parameter]], Any], value: int | None) -> None:
    """Against plain parameters: the gradients, and where a backward and a step lead from there."""
    params = [make_param(kind) for _ in range(3)]
    plain = [make_param(kind) for _ in range(3)]
    spend_all(params[0], params[2])
    kept = params[1].grad
    zero(params)
    zero(plain)
    for param, other in zip(params, plain, strict=True):
        if value is None:
            assert param.grad is other.grad is None
            continue
        assert type(param.grad) is type(other.grad)
        assert not is_spent(param.grad)
        assert param.grad.stride() == other.grad.stride()
        assert torch.equal(param.grad, other.grad)
    assert value is None or params[1].grad is kept
    for either in (params, plain):
        optimizer = torch.optim.AdamW(either, weight_decay=0.5, lr=0.1)
        optimizer.step()
        backward(*either)
        optimizer.step()
    for param, other in zip(params, plain, strict=True):
        assert torch.equal(param, other)
        assert torch.equal(param.grad, other.grad)


def test_zeros_need_the_parameter(kind):
    param = make_param(kind)
    spend(param, Owner(lambda param_id: None))
    with pytest.raises(RuntimeError, match=r"nothing that could be set to zero.*grad to None"):
        param.grad.zero_()
    (spent,) = spend_all(param)
    backward_of_another = make_param(kind).grad
    param.grad = backward_of_another
    with pytest.raises(RuntimeError, match="no longer its parameter's"):
        spent.zero_()
    assert param.grad is backward_of_another


def test_the_lookup_is_asked_by_id():
    param = make_param("matrix")
    asked = []
    spend(param, Owner(lambda param_id: asked.append(param_id) or param))
    assert asked == []
    param.grad.zero_()
    assert asked == [id(param)]


def test_a_parameter_without_a_gradient_is_refused():
    with pytest.raises(ValueError, match=r"a parameter of shape \(2, 3\) has no gradient to spend"):
        spend(nn.Parameter(torch.ones(2, 3)), Owner(lambda param_id: None))


def test_spent_again_is_spent(kind):
    param = make_param(kind)
    spend_all(param)
    spend_all(param)
    assert is_spent(param.grad)
    param.grad.zero_()
    assert not is_spent(param.grad)


def test_copies_have_spent_gradients_where_torch_copies_gradients(kind):
    param = make_param(kind)
    plain = copy.deepcopy(param)
    spend_all(param)
    copied = copy.deepcopy({"param": param, "grad": param.grad})
    assert torch.equal(copied["param"], param)
    assert (copied["param"].grad is None) == (plain.grad is None)
    assert copied["param"].grad is None or is_spent(copied["param"].grad)
    assert is_spent(copied["grad"])
    assert copied["grad"].stride() == param.grad.stride()
    assert type(copied["grad"]) is type(param.grad)
    with pytest.raises(RuntimeError, match="it is a copy's"):
        copied["grad"].zero_()
    assert is_spent(param.grad)


def test_a_copied_leaf_has_a_spent_gradient_of_its_own():
    leaf = torch.ones(3, requires_grad=True)
    leaf.sum().backward()
    spend_all(leaf)
    copied = copy.deepcopy(leaf)
    assert is_spent(copied.grad)
    assert copied.grad is not leaf.grad
    torch.optim.SGD([copied]).zero_grad()
    assert copied.grad is None


def test_models_are_saved_and_loaded():
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    net(torch.ones(1, 3)).sum().backward()
    spend_all(*net.parameters())
    for value in (net.state_dict(), net):
        buffer = io.BytesIO()
        torch.save(value, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        state = loaded if isinstance(loaded, dict) else loaded.state_dict()
        assert all(torch.equal(state[key], value) for key, value in net.state_dict().items())
    net.load_state_dict(net.state_dict())
    assert all(is_spent(param.grad) for param in net.parameters())


def test_nothing_is_kept_alive(kind):
    gc.collect()
    gc.disable()
    try:
        param = make_param(kind)
        spend_all(param)
        dead = [weakref.ref(param), weakref.ref(param.grad)]
        del param
        assert [ref() for ref in dead] == [None, None]
        param = make_param(kind)
        (spent,) = spend_all(param)
        del param.grad
        assert param.grad is None
        param_alive = weakref.ref(param)
        del param
        assert param_alive() is None
        with pytest.raises(RuntimeError, match="no longer its parameter's"):
            spent.zero_()
    finally:
        gc.enable()


def test_parameters_can_be_swapped():
    params = {}
    param, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2))
    params[id(param)] = param
    backward(param)
    spend(param, Owner(params.get))
    torch.utils.swap_tensors(param, other)
    assert torch.equal(param, torch.zeros(2))
    assert param.grad is None
    assert is_spent(other.grad)
    with pytest.raises(RuntimeError, match="no longer its parameter's"):
        other.grad.zero_()


def test_gradients_spent_in_a_hook_during_backward():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    for param in net.parameters():
        param.register_post_accumulate_grad_hook(lambda param: spend_all(param) and None)
    net(torch.ones(1, 3)).sum().backward()
    assert all(is_spent(param.grad) for param in net.parameters())
    with pytest.raises(RuntimeError, match=REFUSED):
        net(torch.ones(1, 3)).sum().backward()
    net.zero_grad(set_to_none=False)
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    assert all(is_spent(param.grad) for param in net.parameters())


def test_fsdp(mesh):
    """Two runs, one with spent gradients between steps: the same gradients in the next backward."""
    nets = []
    for _ in range(2):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        fully_shard(net[1], mesh=mesh)
        nets.append(fully_shard(net, mesh=mesh))
        nets[-1](torch.ones(2, 3)).sum().backward()
    spend_all(*nets[0].parameters())
    assert all(is_spent(p.grad) and isinstance(p.grad, DTensor) for p in nets[0].parameters())
    with pytest.raises(RuntimeError, match=REFUSED):
        nn.utils.clip_grad_norm_(nets[0].parameters(), 1.0)
    with pytest.raises(RuntimeError, match=REFUSED):
        next(nets[0].parameters()).grad.full_tensor()
    nets[0].zero_grad()
    nets[1].zero_grad()
    for net in nets:
        net(torch.ones(2, 3)).sum().backward()
    for param, plain in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(param.grad, plain.grad)


def test_fsdp_refuses_a_second_backward(mesh):
    net = fully_shard(nn.Linear(3, 4), mesh=mesh)
    net(torch.ones(2, 3)).sum().backward()
    spend_all(*net.parameters())
    with pytest.raises(RuntimeError, match=REFUSED):
        net(torch.ones(2, 3)).sum().backward()
