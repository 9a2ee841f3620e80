"""A tensor whose update is in flight waits for itself before its first use, and only then."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.testing._internal.two_tensor import TwoTensor

from torch_offload.waiting import hold, is_held, release


class Update:
    """A ticket: the update that it waits for is done by the first wait, not before."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.memory = [tensor.detach() for tensor in tensors]
        self.num_waits = 0

    def wait(self) -> None:
        self.num_waits += 1
        while self.memory:
            self.memory.pop().fill_(7.0)


class Marked(nn.Parameter):
    """A subclass that changes nothing."""


class Tagged(nn.Parameter):
    """A subclass with a ``__torch_function__`` of its own: it counts and doubles sums."""

    calls: list[Any] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        assert not any("_own" in vars(kind) for kind in types)
        cls.calls.append(func)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return 2 * result if func is torch.Tensor.sum else result


MAKERS: dict[str, Callable[[], torch.Tensor]] = {
    "parameter": lambda: nn.Parameter(torch.zeros(4, 4)),
    "frozen": lambda: nn.Parameter(torch.zeros(4, 4), requires_grad=False),
    "subclass": lambda: Marked(torch.zeros(4, 4)),
    "own function": lambda: Tagged(torch.zeros(4, 4)),
    "tensor": lambda: torch.zeros(4, 4),
}


def make_held(kind: str = "parameter") -> tuple[Any, Update]:
    tensor = MAKERS[kind]()
    update = Update(tensor)
    hold(tensor, update)
    return tensor, update


class Weighted(nn.Module):
    """Uses a weight that is given to it, as a functional call of another module's does."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight)


def in_module(use: Callable[[Weighted], Any]) -> Callable[[torch.Tensor], Any]:
    return lambda tensor: use(Weighted(tensor))


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 3 * x

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad


def saved(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def out_of(tensor: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(4, 4)
    torch.add(torch.zeros(4, 4), tensor.requires_grad_(False), out=out)
    return out


def in_place(change: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    def use(tensor: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            change(tensor)
        return torch.ones(1) if is_held(tensor) else tensor.detach().clone()

    return use


def averaged(module: nn.Module) -> Any:
    average = AveragedModel(nn.Linear(4, 4, bias=False), multi_avg_fn=get_ema_multi_avg_fn(0.5))
    average.update_parameters(module)
    average.update_parameters(module)
    return average.module.weight


def functional(tensor: torch.Tensor) -> Any:
    weights = {"weight": tensor}
    return torch.func.functional_call(nn.Linear(4, 4, bias=False), weights, torch.ones(2, 4))


def parametrized(module: nn.Module) -> Any:
    nn.utils.parametrizations.weight_norm(module)
    return module(torch.ones(2, 4))


def optimized(module: nn.Module) -> Any:
    module(torch.ones(2, 4)).sum().backward()
    torch.optim.SGD(module.parameters(), lr=0.5, foreach=True).step()
    return module.weight.detach()


USES: dict[str, Callable[[Any], Any]] = {
    "operator": lambda t: t + 1,
    "reflected operator": lambda t: torch.ones(4, 4) @ t,
    "method": lambda t: t.sum(),
    "function": lambda t: torch.mul(t, 2),
    "operator of torch.ops": lambda t: torch.ops.aten.add.Tensor(t, 1),
    "keyword": lambda t: torch.add(input=t, other=t),
    "list": lambda t: torch.cat([torch.ones(1, 4), t]),
    "nested": lambda t: torch.block_diag(torch.ones(1), t),
    "out": out_of,
    "foreach": lambda t: torch._foreach_mul([torch.ones(2), t], 2.0),
    "foreach second list": lambda t: torch._foreach_add([torch.ones(4, 4)], [t]),
    "index": lambda t: t[1, 2],
    "assigned to a slice": lambda t: torch.zeros(2, 4, 4).index_put_((torch.tensor(0),), t),
    "data": lambda t: t.data,
    "detach": lambda t: t.detach(),
    "clone": lambda t: t.clone(),
    "view": lambda t: t.view(16),
    "to": lambda t: t.to(torch.float64),
    "item": lambda t: t[0, 0].item(),
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.detach().numpy(),
    "asarray": lambda t: np.asarray(t.requires_grad_(False)),
    "print": lambda t: str(t),
    "repr": lambda t: repr(t),
    "format": lambda t: f"{t}",
    "iterate": lambda t: [row.sum() for row in t],
    "bool": lambda t: bool((t == 7).all()),
    "dlpack": lambda t: torch.from_dlpack(t.requires_grad_(False)).clone(),
    "storage": lambda t: t.untyped_storage().tolist(),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "torch.save": saved,
    "copy_": in_place(lambda t: t.copy_(torch.ones(4, 4))),
    "add_": in_place(lambda t: t.add_(1)),
    "zero_": in_place(lambda t: t.zero_()),
    "set item": in_place(lambda t: t.__setitem__(0, 1.0)),
    "init": in_place(lambda t: nn.init.constant_(t, 2.0)),
    "autograd function": Scale.apply,
    "autograd.grad": lambda t: torch.autograd.grad((t.requires_grad_() * 2).sum(), [t])[0],
    "buffer of it": lambda t: nn.Buffer(t),
    "functional": lambda t: nn.functional.linear(torch.ones(2, 4), t),
    "functional_call": functional,
    "parameters_to_vector": lambda t: nn.utils.parameters_to_vector([t, t]),
}
MODULE_USES: dict[str, Callable[[Any], Any]] = {
    "forward": lambda m: m(torch.ones(2, 4)),
    "state_dict": lambda m: m.state_dict(),
    "load_state_dict": lambda m: (m.load_state_dict({"weight": torch.ones(4, 4)}), m.weight.data),
    "deepcopy": lambda m: copy.deepcopy(m).weight,
    "torch.save": lambda m: saved(m).weight,
    "half": lambda m: m.half().weight,
    "to": lambda m: m.to(torch.float64).weight,
    "ema": averaged,
    "weight_norm": parametrized,
    "vector_to_parameters": lambda m: (
        nn.utils.vector_to_parameters(torch.ones(16), m.parameters()),
        m.weight.data,
    ),
    "another optimizer": optimized,
}


def same(a: Any, b: Any) -> bool:
    """Whether two results are of the same class, attributes and bits."""
    if isinstance(a, torch.Tensor):
        assert not is_held(a)
        assert vars(a) == vars(b)
        return type(a) is type(b) and a.requires_grad == b.requires_grad and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return bool((a == b).all())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("name", USES)
@pytest.mark.filterwarnings("ignore:.*requires_grad=True to a scalar")
def test_a_use_sees_what_it_would_see_after_the_update(name, kind):
    tensor, update = make_held(kind)
    plain = MAKERS[kind]()
    plain.detach().fill_(7.0)
    own = type(plain)
    assert same(USES[name](tensor), USES[name](plain))
    assert update.num_waits == 1
    assert not is_held(tensor)
    assert type(tensor) is own
    assert vars(tensor) == {}


@pytest.mark.parametrize("name", MODULE_USES)
def test_a_use_of_the_module_sees_what_it_would_see_after_the_update(name):
    tensor, update = make_held()
    plain = nn.Parameter(torch.full((4, 4), 7.0))
    assert same(in_module(MODULE_USES[name])(tensor), in_module(MODULE_USES[name])(plain))
    assert update.num_waits == 1
    assert not is_held(tensor)


READS: dict[str, Callable[[Any], Any]] = {
    "shape": lambda t: t.shape,
    "size": lambda t: (t.size(), t.size(0)),
    "dtype": lambda t: t.dtype,
    "device": lambda t: (t.device, t.is_cuda, t.is_cpu, t.is_meta, t.get_device()),
    "layout": lambda t: (t.layout, t.is_sparse, t.is_quantized),
    "requires_grad": lambda t: t.requires_grad,
    "is_leaf": lambda t: (t.is_leaf, t.grad_fn),
    "counts": lambda t: (t.numel(), t.nelement(), torch.numel(t), t.dim(), t.ndim, len(t)),
    "bytes": lambda t: (t.element_size(), t.itemsize, t.nbytes),
    "stride": lambda t: (t.stride(), t.storage_offset(), t.is_contiguous()),
    "kind": lambda t: (t.is_floating_point(), t.is_complex(), torch.is_floating_point(t)),
    "version": lambda t: t._version,
    "grad": lambda t: t.grad,
    "set grad": lambda t: setattr(t, "grad", torch.ones(4, 4)),
    "grad = None": lambda t: setattr(t, "grad", None),
    "del grad": lambda t: delattr(t, "grad"),
    "hash": lambda t: (hash(t) == id(t), t in {t: 1}, t in [t]),
    "isinstance": lambda t: (isinstance(t, nn.Parameter), isinstance(t, torch.Tensor)),
    "class": lambda t: repr(type(t)),
    "attribute": lambda t: hasattr(t, "tag"),
    "zero_grad": lambda t: torch.optim.SGD([t]).zero_grad(),
}
MODULE_READS: dict[str, Callable[[Any], Any]] = {
    "parameters": lambda m: [id(p) == id(m.weight) for p in m.parameters()],
    "named_parameters": lambda m: [(n, p is m.weight) for n, p in m.named_parameters()],
    "register": lambda m: m.register_parameter("other", m.weight),
    "assign": lambda m: setattr(nn.Linear(4, 4), "weight", m.weight),
    "ParameterList": lambda m: repr(nn.ParameterList([m.weight])),
    "zero_grad": lambda m: m.zero_grad(),
    "requires_grad_": lambda m: m.requires_grad_(False).weight.requires_grad,
    "train": lambda m: repr(m.train().eval()),
}


@pytest.mark.parametrize("kind", ["parameter", "subclass", "own function"])
@pytest.mark.parametrize("name", [*READS, *MODULE_READS])
def test_what_needs_no_values_does_not_wait(name, kind):
    read = READS[name] if name in READS else in_module(MODULE_READS[name])
    tensor, update = make_held(kind)
    assert read(tensor) == read(MAKERS[kind]())
    assert update.num_waits == 0
    assert is_held(tensor)


def test_a_class_of_the_users_own_is_asked_as_before():
    tensor, update = make_held("own function")
    Tagged.calls.clear()
    assert tensor.shape == (4, 4)
    assert tensor.sum() == 2 * 7 * 16
    assert Tagged.calls == [torch.Tensor.shape.__get__, torch.Tensor.sum]
    assert update.num_waits == 1


def test_another_operand_of_the_users_own_class_is_asked_as_before():
    tensor, update = make_held()
    Tagged.calls.clear()
    other = Tagged(torch.ones(4, 4))
    assert torch.equal(torch.add(tensor, other), torch.full((4, 4), 8.0))
    assert Tagged.calls[0] is torch.add
    assert update.num_waits == 1


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_parameter_can_be_made_of_a_held_one(requires_grad):
    tensor, update = make_held()
    made = nn.Parameter(tensor, requires_grad)
    assert type(made) is nn.Parameter
    assert made.requires_grad is requires_grad
    assert made.is_leaf
    assert made.data_ptr() == tensor.data_ptr()
    assert torch.equal(saved(made), torch.full((4, 4), 7.0))
    assert update.num_waits == 1
    assert type(tensor.detach()) is torch.Tensor


def test_all_arguments_are_waited_for_and_others_with_their_ticket_are_not():
    seen = []
    tensors = [nn.Parameter(torch.zeros(2)) for _ in range(3)]

    class Ticket:
        def wait(self) -> None:
            seen.append([is_held(tensor) for tensor in tensors])

    ticket = Ticket()
    for tensor in tensors:
        hold(tensor, ticket)
    torch.stack([tensors[0], tensors[1]])
    assert seen == [[True, True, True], [False, True, True]]
    assert is_held(tensors[2])
    tensors[2].sum()
    assert len(seen) == 3


def test_a_parameter_of_a_held_one_of_another_class_fails_as_before():
    for tensor in (Marked(torch.ones(2)), make_held("subclass")[0]):
        with pytest.raises(RuntimeError, match="from an instance of type Marked requires that"):
            nn.Parameter(tensor)


@pytest.mark.parametrize("kind", MAKERS)
def test_a_pickle_has_no_trace_of_it(kind):
    tensor, _ = make_held(kind)
    for mine, plain in zip(tensor.__reduce_ex__(2), MAKERS[kind]().__reduce_ex__(2), strict=True):
        assert callable(plain) == callable(mine)
        assert mine is plain if callable(plain) else len(mine) == len(plain)


def test_a_wait_that_fails_leaves_the_tensor_held():
    class Broken:
        def wait(self) -> None:
            raise RuntimeError("boom")

    tensor = nn.Parameter(torch.zeros(2))
    hold(tensor, Broken())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="boom"):
            tensor.sum()
    assert is_held(tensor)


@pytest.mark.parametrize("kind", MAKERS)
def test_released_is_what_it_was_and_nobody_waits(kind):
    tensor, update = make_held(kind)
    own = type(MAKERS[kind]())
    assert isinstance(tensor, own)
    release(tensor)
    release(tensor)
    assert type(tensor) is own
    assert not is_held(tensor)
    assert vars(tensor) == {}
    tensor.sum()
    assert update.num_waits == 0


def test_attributes_stay():
    tensor = nn.Parameter(torch.zeros(2))
    tensor.tag = "user's"
    hold(tensor, Update(tensor))
    assert tensor.tag == "user's"
    tensor.late = 1
    assert vars(copy.copy(tensor)) == {"tag": "user's", "late": 1}
    assert vars(tensor) == {"tag": "user's", "late": 1}


def test_held_again_waits_for_the_later_update_only():
    tensor, first = make_held()
    second = Update(tensor.detach())
    first.num_waits = 0
    hold(tensor, first)
    hold(tensor, second)
    assert torch.equal(tensor + 0, torch.full((4, 4), 7.0))
    assert (first.num_waits, second.num_waits) == (0, 1)


def test_a_new_value_for_data_waits_for_the_old_memory():
    tensor, update = make_held()
    tensor.data = torch.ones(4, 4)
    assert update.num_waits == 1
    assert torch.equal(tensor, torch.ones(4, 4))


def test_a_step_of_backward_needs_no_value_of_a_held_gradient_s_parameter():
    """As after ``step()`` of an optimizer whose gradients are still read."""
    param = nn.Parameter(torch.ones(3))
    (2 * param).sum().backward()
    update = Update(param.grad)
    hold(param.grad, update)
    gc.collect()
    assert is_held(param.grad)  # the object, with its class, lives as long as the gradient
    assert param.grad.norm() == torch.full((3,), 7.0).norm()
    assert update.num_waits == 1
    hold(param.grad, update)
    torch.optim.SGD([param]).zero_grad(set_to_none=False)
    assert update.num_waits == 2
    assert torch.equal(param.grad, torch.zeros(3))


def test_swapped_tensors_keep_what_they_wait_for():
    tensor, update = make_held()
    other = nn.Parameter(torch.ones(4, 4))
    torch.utils.swap_tensors(tensor, other)
    assert torch.equal(tensor, torch.ones(4, 4))
    assert torch.equal(other, torch.full((4, 4), 7.0))
    assert update.num_waits == 1
    assert not is_held(tensor)
    assert not is_held(other)


@pytest.mark.parametrize("swap", [False, True])
def test_a_module_that_is_converted_keeps_the_new_values(swap):
    tensor, update = make_held()
    module = Weighted(tensor)
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        module.to(torch.bfloat16)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    assert module.weight is tensor
    assert torch.equal(tensor, torch.full((4, 4), 7.0, dtype=torch.bfloat16))
    assert update.num_waits == 1


def test_a_tensor_made_by_the_class_of_a_held_one_is_ordinary():
    tensor, update = make_held()
    made = type(tensor)(torch.ones(2))
    assert torch.equal(made + 1, torch.full((2,), 2.0))
    assert type(made) is nn.Parameter
    assert is_held(tensor)
    assert update.num_waits == 0


def test_memory_cannot_be_had_without_a_function():
    tensor, _ = make_held()
    assert not hasattr(type(tensor), "__dlpack_c_exchange_api__")


def test_threads_that_come_together_have_all_waited():
    num_threads = 4
    waiting = threading.Barrier(num_threads, timeout=60)
    waited = []

    class Ticket:
        def wait(self) -> None:
            waiting.wait()  # all are in here at once: nobody may have released before
            waited.append(threading.get_ident())

    tensor = nn.Parameter(torch.ones(3))
    hold(tensor, Ticket())
    sums = []
    threads = [
        threading.Thread(target=lambda: sums.append(tensor.sum().item()))
        for _ in range(num_threads)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(waited)) == num_threads
    assert sums == [3.0] * num_threads
    assert not is_held(tensor)
    assert vars(tensor) == {}


def test_a_late_waiter_does_not_release_a_later_hold():
    tensor = nn.Parameter(torch.ones(3))
    later = Update(tensor)

    class Late:
        def wait(self) -> None:
            hold(tensor, later)  # another thread's next step, while this one waits

    hold(tensor, Late())
    assert torch.equal(tensor + 0, torch.full((3,), 7.0))  # seen again, and waited for
    assert later.num_waits == 1


@pytest.mark.parametrize("used", [False, True])
def test_held_tensors_and_tickets_die_by_reference_counts(used):
    gc.collect()
    gc.disable()
    try:
        module = nn.Linear(3, 3)
        ticket = Update()
        for param in module.parameters():
            hold(param, ticket)
        if used:
            module(torch.ones(1, 3))
        dead = [weakref.ref(module.weight), weakref.ref(ticket)]
        del module, ticket, param
        assert [ref() for ref in dead] == [None, None]
    finally:
        gc.enable()


def test_classes_are_made_once_and_die_with_the_class_of_the_user():
    def make() -> tuple[list[Any], weakref.ref[type]]:
        class Local(nn.Parameter):
            pass

        tensors = [Local(torch.ones(1)), Local(torch.ones(1))]
        for tensor in tensors:
            hold(tensor, Update())
        assert type(tensors[0]) is type(tensors[1])
        return tensors, weakref.ref(Local)

    tensors, local = make()
    gc.collect()
    assert local() is not None
    release(tensors[0])
    hold(tensors[0], Update())
    assert type(tensors[0]) is type(tensors[1])
    del tensors
    gc.collect()  # our class, which takes its entry with it
    gc.collect()
    assert local() is None


def test_a_class_that_registers_its_subclasses_does_not_see_ours():
    class Registering(nn.Parameter):
        def __init_subclass__(cls, *, key: str) -> None:
            raise AssertionError("called")

    tensor = Registering(torch.ones(2))
    hold(tensor, Update(tensor))
    assert tensor.sum() == 14


def test_a_tensor_made_of_others_is_refused():
    tensor = TwoTensor(torch.ones(2), torch.ones(2))
    with pytest.raises(NotImplementedError, match=r"a TwoTensor \(shape \(2,\)\) is made of other"):
        hold(tensor, Update())
    assert type(tensor) is TwoTensor
    assert vars(tensor).keys() == {"a", "b"}
