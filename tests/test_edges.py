"""What seldom happens: as in the plain optimizer, or undone without a trace."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from training import assert_same, make_params, set_grads, train

from torch_offload import OffloadConfig, host, is_offloaded, offload, offload_stats, unoffload

CONFIG = OffloadConfig(chunk_size=500)
CPU = torch.device("cpu")
SHAPES = [(30, 3), (7,), ()]


def both(run: Callable[[OffloadConfig | None], Any]) -> Any:
    """Run plain and offloaded; parameters and state must have the same bits."""
    plain, offloaded = run(None), run(CONFIG)
    assert_same(plain, offloaded)
    return plain, offloaded


def go_on(params: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> Any:
    for step in range(20, 23):
        set_grads(params, step)
        optimizer.step()
    return params, optimizer


def test_a_checkpoint_with_state_of_nobody(device):
    """State under a name that no group lists is kept, as plain torch keeps it."""

    def run(config: OffloadConfig | None) -> Any:
        params, optimizer = train(device, config=config)
        saved = copy.deepcopy(optimizer.state_dict())
        saved["state"]["scale"] = {"value": 3}
        optimizer.load_state_dict(saved)
        assert optimizer.state["scale"] == {"value": 3}
        return go_on(params, optimizer)

    both(run)


def test_a_load_without_enough_host_memory_can_be_repeated(device, monkeypatch):
    params, plain = train(device, config=None)
    saved = copy.deepcopy(plain.state_dict())
    groups = [{"params": group["params"]} for group in plain.param_groups]
    optimizer = offload(torch.optim.AdamW(groups), CONFIG)
    monkeypatch.setattr(host, "available_host_bytes", lambda: 0)
    with pytest.raises(MemoryError):
        optimizer.load_state_dict(saved)
    assert len(optimizer.state) == 0
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the state is that of a whole step
        optimizer.state_dict()
    optimizer.load_state_dict(saved)
    assert_same((params, plain), (params, optimizer))


@pytest.mark.parametrize("names_in_checkpoint", [False, True])
def test_named_parameters(device, names_in_checkpoint):
    def run(config: OffloadConfig | None) -> Any:
        params = make_params(device, shapes=SHAPES)
        named = [(f"p{index}", param) for index, param in enumerate(params)]
        optimizer = torch.optim.AdamW(named, lr=0.1)
        if config:
            offload(optimizer, config)
        go_on(params, optimizer)
        saved = copy.deepcopy(optimizer.state_dict())
        if not names_in_checkpoint:
            del saved["param_groups"][0]["param_names"]
        optimizer.load_state_dict(saved)
        return go_on(params, optimizer)

    plain, offloaded = both(run)
    names = [run[1].param_groups[0].get("param_names") for run in (plain, offloaded)]
    assert names[0] == names[1] == ["p0", "p1", "p2"]


def test_state_given_before_the_first_step(device):
    def run(config: OffloadConfig | None) -> Any:
        params, donor = train(device, config=None, shapes=SHAPES * 3, has_grad=None)
        optimizer = torch.optim.AdamW(params, lr=0.1)
        if config:
            offload(optimizer, config)
        optimizer.state.update(copy.deepcopy(dict(donor.state)))  # under copies of the parameters
        for param in params:
            optimizer.state[param] = {k: v.clone() for k, v in donor.state[param].items()}
        return go_on(params, optimizer)

    _, (params, optimizer) = both(run)
    assert optimizer.state[params[0]]["exp_avg"].device == CPU


def test_state_replaced_as_a_whole(device):
    def run(config: OffloadConfig | None) -> Any:
        params, optimizer = train(device, config=config, shapes=SHAPES * 3, has_grad=None)
        optimizer.state = defaultdict(dict)
        return go_on(params, optimizer)

    _, (params, optimizer) = both(run)
    assert optimizer.state[params[0]]["step"] == 3


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9}])
def test_gradients_of_a_wider_dtype(device, settings):
    """Gradients that are accumulated in fp32 beside bf16 parameters."""

    def run(config: OffloadConfig | None) -> Any:
        params = make_params(device, torch.bfloat16, SHAPES)
        optimizer = torch.optim.SGD(params, lr=0.1, foreach=False, **settings)
        if config:
            offload(optimizer, config)
        wide = make_params(device, torch.float32, SHAPES)
        for step in range(4):
            set_grads(wide, step)
            for param, other in zip(params, wide, strict=True):
                param.grad_dtype = torch.float32
                param.grad = other.grad
            optimizer.step()
        return params, optimizer

    both(run)


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_conversion_that_is_interrupted_leaves_no_trace(device, monkeypatch, scheduled):
    params, optimizer = train(device, config=None, shapes=SHAPES * 3, has_grad=None)
    if not scheduled:
        unoffload(offload(optimizer))
        optimizer.__dict__.pop("step")
    before = dict(optimizer.__dict__)
    state = {param: dict(values) for param, values in optimizer.state.items()}

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.optim.Optimizer, "register_step_pre_hook", interrupted)
    with pytest.raises(KeyboardInterrupt):
        offload(optimizer)
    monkeypatch.undo()
    assert not is_offloaded(optimizer)
    assert optimizer.__dict__ == before
    for param, values in state.items():
        assert all(optimizer.state[param][key] is value for key, value in values.items())
    go_on(params, offload(optimizer, CONFIG))


class Mine(OffloadConfig):
    """A front end's configuration."""


def test_a_front_ends_configuration_is_an_ordinary_one():
    optimizer = torch.optim.AdamW(make_params(CPU))
    offload(optimizer, Mine(chunk_size=77))
    offload(optimizer, OffloadConfig(chunk_size=77))
    offload(optimizer, Mine(chunk_size=77))
    with pytest.raises(ValueError, match="already offloaded"):
        offload(optimizer, Mine(chunk_size=78))


def test_a_framework_wrapper_and_the_step_that_it_kept(device):
    class Wrapper:
        """What Accelerate's does under a gradient scaler."""

        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer
            self.__setstate__({})

        def __setstate__(self, state: dict[str, Any]) -> None:
            self._optimizer_original_step_method = self.optimizer.step

    Wrapper.__module__ = "accelerate.optimizer"
    params = make_params(device, shapes=SHAPES)
    wrapper = Wrapper(torch.optim.AdamW(params))
    assert not is_offloaded(wrapper)
    assert offload(wrapper, CONFIG) is wrapper
    assert is_offloaded(wrapper)
    set_grads(params, 0)
    wrapper._optimizer_original_step_method()
    assert offload_stats(wrapper).d2h_bytes > 0
    unoffload(wrapper)
    assert not is_offloaded(wrapper)
    wrapper._optimizer_original_step_method()

    empty = Wrapper.__new__(Wrapper)
    empty.optimizer = None
    assert not is_offloaded(empty)
    with pytest.raises(TypeError, match="not Wrapper"):
        offload(empty)


class Pair(torch.Tensor):
    """A tensor made of two others, as quantised weights are."""

    @staticmethod
    def __new__(cls, a: torch.Tensor, b: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype, device=a.device)

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self.a, self.b = a, b

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["a", "b"], None

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return Pair(args[0].a, args[0].b)
        raise NotImplementedError(func)


def test_weights_made_of_other_tensors_are_refused_before_anything_changes():
    plain = make_params(CPU, shapes=[(5, 3)])
    paired = torch.nn.Parameter(Pair(torch.ones(4), torch.ones(4)))
    optimizer = torch.optim.SGD([*plain, paired], lr=0.1)
    offload(optimizer, CONFIG)
    set_grads(plain, 0)
    before = plain[0].detach().clone()
    with pytest.raises(NotImplementedError, match=r"class Pair \(shape \(4,\)\)"):
        optimizer.step()
    assert torch.equal(plain[0], before)


def test_configuration_in_words():
    assert "chunk_size='1001'" in repr(OffloadConfig(chunk_size=1001))
    assert "chunk_size='3KiB'" in repr(OffloadConfig(chunk_size=3072))
    assert OffloadConfig.from_text({"chunk_size": "77", "pin_memory": True}).chunk_size == 77
    assert OffloadConfig.from_text({"pin_memory": " YES "}).pin_memory
    assert not OffloadConfig.from_text({"pin_memory": "off"}).pin_memory


@pytest.mark.parametrize("since", ["the start", "a checkpoint", "a later step"])
def test_parameters_over_the_same_memory(since):
    """Whoever has state already is looked at as well."""
    memory = torch.randn(64)
    params = [torch.nn.Parameter(memory[:40]), torch.nn.Parameter(memory[20:])]
    if since == "a later step":
        params[1] = torch.nn.Parameter(torch.randn(40))
    optimizer = torch.optim.AdamW(params, foreach=True)
    set_grads(params, 0)
    optimizer.step()
    checkpoint = copy.deepcopy(optimizer.state_dict())
    if since == "a checkpoint":
        optimizer = torch.optim.AdamW(params, foreach=True)
        offload(optimizer).load_state_dict(checkpoint)
    else:
        offload(optimizer)
    if since == "a later step":
        optimizer.step()
        params[1].data = params[0].data
    with pytest.raises(NotImplementedError, match="share memory"):
        optimizer.step()
