"""Every class of torch.optim by flavour and dtype: the bits of plain, or refused with a reason.

What is found goes into the record that docs/optimizers.md is made from (outcomes.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import outcomes
import pytest
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from training import late, make_params, set_grads

from torch_offload import OffloadConfig, offload, offload_stats

CONFIG = OffloadConfig(chunk_size=2_000)
CPU = torch.device("cpu")
SHAPES = ((30, 70), (70,), (), (0, 5), (1,), (3, 5, 7), (29, 65), (100,), (7, 1, 9))
NO_SCALARS = ((30, 70), (70,), (5,), (3, 5), (1,), (3, 5, 7), (29, 65), (100,), (7, 1, 9))
MATRICES = ((30, 7), (7, 4), (16, 9), (14, 15), (5, 5), (9, 3), (40, 2))
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64)

#: class: settings that choose its code besides those of ``IMPLEMENTATIONS``.
OPTIONS: dict[type[Optimizer], dict[str, dict[str, Any]]] = {
    torch.optim.Adadelta: {"maximize": {"maximize": True}},
    torch.optim.Adafactor: {"maximize": {"maximize": True}},
    torch.optim.Adagrad: {
        "maximize": {"maximize": True},
        "initial_accumulator_value, lr_decay": {"initial_accumulator_value": 0.1, "lr_decay": 0.1},
    },
    torch.optim.Adam: {"amsgrad": {"amsgrad": True}, "maximize": {"maximize": True}},
    torch.optim.AdamW: {"amsgrad": {"amsgrad": True}, "maximize": {"maximize": True}},
    torch.optim.Adamax: {"maximize": {"maximize": True}},
    torch.optim.ASGD: {"t0": {"t0": 2.0}, "maximize": {"maximize": True}},
    torch.optim.LBFGS: {},
    torch.optim.Muon: {"adjust_lr_fn": {"adjust_lr_fn": "match_rms_adamw"}},
    torch.optim.NAdam: {
        "decoupled_weight_decay": {"decoupled_weight_decay": True},
        "maximize": {"maximize": True},
    },
    torch.optim.RAdam: {
        "decoupled_weight_decay": {"decoupled_weight_decay": True},
        "maximize": {"maximize": True},
    },
    torch.optim.RMSprop: {
        "momentum": {"momentum": 0.9},
        "centered": {"centered": True},
        "maximize": {"maximize": True},
    },
    torch.optim.Rprop: {"maximize": {"maximize": True}},
    torch.optim.SGD: {
        "momentum": {"momentum": 0.9},
        "nesterov": {"momentum": 0.9, "nesterov": True},
        "dampening, maximize": {"momentum": 0.9, "dampening": 0.1, "maximize": True},
    },
    torch.optim.SparseAdam: {"maximize": {"maximize": True}},
}
IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "capturable": {"capturable": True},
    "differentiable": {"differentiable": True},
}
UNDEFINED = "two plain runs differ: the CPU kernel reads uninitialised memory for 16-bit types"


def flavours(kind: type[Optimizer]) -> dict[str, dict[str, Any]]:
    """Return the flavours of a class: name to settings. Learning rates that are tensors are made
    anew for each run."""
    known = kind([torch.nn.Parameter(torch.ones(2, 2))]).defaults
    found = {name: own for name, own in IMPLEMENTATIONS.items() if own.keys() <= known.keys()}
    bases = {"": {}, **({", fused": {"fused": True}} if "fused" in known else {})}
    for suffix, base in bases.items():
        found[f"tensor lr{suffix}"] = {"lr": torch.tensor(0.01), **base}
        for name, own in OPTIONS[kind].items():
            found[f"{name}{suffix}"] = {**own, **base}
    return found


CASES = [(kind, name) for kind in OPTIONS for name in flavours(kind)]


def groups_of(kind: type[Optimizer], params: list[torch.Tensor], lr: Any) -> list[dict[str, Any]]:
    if kind is torch.optim.LBFGS:  # takes one
        return [{"params": params}]
    half = len(params) // 2
    groups: list[dict[str, Any]] = [{"params": params[:half]}, {"params": params[half:]}]
    if "weight_decay" in inspect.signature(kind).parameters:
        groups[0]["weight_decay"] = 0.1
    groups[1]["lr"] = lr * 0.3
    return groups


def train(
    device: torch.device,
    kind: type[Optimizer],
    settings: dict[str, Any],
    dtype: torch.dtype,
    config: OffloadConfig | None,
) -> tuple[list[torch.Tensor], Optimizer]:
    sparse = kind is torch.optim.SparseAdam
    matrices = sparse or kind is torch.optim.Muon
    no_scalars = kind is torch.optim.Adafactor
    params: list[torch.Tensor] = list(
        make_params(device, dtype, MATRICES if matrices else NO_SCALARS if no_scalars else SHAPES)
    )
    if settings.get("differentiable"):  # or torch refuses to update them in place
        params = [p.detach() for p in params]
    lr = settings.get("lr", 0.01)
    if isinstance(lr, torch.Tensor):
        lr = lr.clone()
    optimizer = kind(groups_of(kind, params, lr), **{**settings, "lr": lr})
    if config is not None:
        offload(optimizer, config)
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    # torch's fused SGD fails where one parameter has a buffer and another one has none.
    together = kind is torch.optim.SGD and settings.get("fused") and settings.get("momentum")
    closure = (torch.ones(()).clone,) if kind is torch.optim.LBFGS else ()
    for step in range(5):
        set_grads(params, step, None if together else late)
        for param in params:
            if param.grad is not None and sparse:
                param.grad = param.grad.to_sparse(1)
        optimizer.step(*closure)
        schedule.step()
    return params, optimizer


def bits(value: Any) -> Any:
    """What can be compared with ``==``: of a tensor its dtype, shape and bytes, since a NaN (fp16
    may overflow) must be the same NaN."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
        return value.dtype, value.shape, flat.tolist()
    if isinstance(value, (list, tuple)):
        return [bits(item) for item in value]
    return value


def assert_same_bits(plain: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    for p, q in zip(plain[0], other[0], strict=True):
        assert bits(p) == bits(q), f"a parameter of shape {tuple(p.shape)}"
        expected, found = plain[1].state.get(p, {}), other[1].state.get(q, {})
        assert list(expected) == list(found)
        for key, value in expected.items():
            assert bits(value) == bits(found[key]), f"{key!r} of shape {tuple(p.shape)}"


def attempt(run: Callable[[], Any]) -> tuple[Any, str]:
    """Return what ``run`` returns, or the error that it raises, in a line."""
    try:
        return run(), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"


def test_no_class_of_torch_is_missing():
    classes = {
        kind
        for kind in vars(torch.optim).values()
        if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer
    }
    assert classes <= OPTIONS.keys()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("kind", "flavour"), CASES, ids=lambda value: getattr(value, "__name__", value)
)
def test_bits_of_plain_or_refused(device, record_outcome, kind, flavour, dtype):
    settings = flavours(kind)[flavour]
    case = {"optimizer": kind.__name__, "flavour": flavour, "dtype": dtype}
    if (
        device.type == "cpu"
        and kind is torch.optim.SGD
        and settings.get("fused")
        and settings.get("momentum")
        and dtype in (torch.bfloat16, torch.float16)
    ):
        record_outcome(**case, outcome=outcomes.UNDEFINED, reason=UNDEFINED)
        return

    plain, error = attempt(lambda: train(device, kind, settings, dtype, None))
    if plain is None:
        record_outcome(**case, outcome=outcomes.PLAIN_REFUSES, reason=error)
        with pytest.raises(Exception, match=r"."):
            train(device, kind, settings, dtype, CONFIG)
        return
    assert_same_bits(plain, train(device, kind, settings, dtype, None))  # the control
    try:
        offloaded = train(device, kind, settings, dtype, CONFIG)
    except NotImplementedError as refusal:
        record_outcome(**case, outcome=outcomes.REFUSED, reason=str(refusal))
        return
    assert_same_bits(plain, offloaded)
    assert all(torch.isfinite(p).float().mean() > 0.9 for p in plain[0] if p.numel() > 1)
    has_state = any(
        value.dim() > 0
        for state in offloaded[1].state.values()
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and key != "step"
    )
    assert has_state == (offload_stats(offloaded[1]).d2h_bytes > 0)
    record_outcome(**case, outcome=outcomes.EQUAL)
