"""Optimizers of other packages: bit for bit those of plain, or refused with the reason.

Four small packages come with the extra ``third-party``. Others are tried out where they are found:
    pip install torchao==0.18.0 bitsandbytes==0.50.2 heavyball==3.2.1
    python -m pytest tests/test_third_party.py
"""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import io

import outcomes
import pytest
import torch
from training import late, make_params, set_grads

from torch_offload import OffloadConfig, offload, offload_stats
from torch_offload.values import same

# Some packages warn when they are imported or stepped.
pytestmark = pytest.mark.filterwarnings("ignore")

CPU = torch.device("cpu")
#: About one parameter in a chunk.
CONFIG = OffloadConfig(chunk_size=5_000)
SHAPES = ((30, 7), (70,), (9, 3), (64, 40), (5, 5), (17,), (3, 4, 3, 3))
MATRICES = ((30, 7), (9, 3), (64, 40), (5, 5), (16, 33))


def load(path):
    """Import ``package.module:Class``; skip the test where the package is missing."""
    package, _, name = path.partition(":")
    pytest.importorskip(package, exc_type=ImportError)
    return getattr(importlib.import_module(package), name)


def row_of(kind, flavour=""):
    """Return what a row of docs/optimizers.md says of a class; its package with the version."""
    package = kind.__module__.partition(".")[0].replace("_", "-")
    return {
        "package": f"{package} {importlib.metadata.version(package)}",
        "optimizer": kind.__name__,
        "flavour": flavour or "default",
        "dtype": torch.float32,
    }


def build(kind, params, settings, config):
    half = len(params) // 2
    groups = [{"params": params[:half]}, {"params": params[half:], "lr": settings["lr"] / 3}]
    settings = dict(settings)
    rate = settings.pop("then lr", None)
    optimizer = kind(groups, **settings)
    if hasattr(optimizer, "train"):
        optimizer.train()
    if rate is not None:
        for group in optimizer.param_groups:
            group["lr"] = rate
    if config is not None:
        offload(optimizer, config)
    return optimizer


@pytest.fixture(autouse=True)
def one_thread():
    """Several threads are of no use for such small tensors."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def train(kind, settings, configs, device=CPU, shapes=SHAPES, steps=6, has_grad=late):
    """Train; between two configs, save and load into a new optimizer."""
    torch.manual_seed(0)
    params = make_params(device, shapes=shapes)
    optimizer = build(kind, params, settings, configs[0])
    for part, config in enumerate(configs):
        if part:
            buffer = io.BytesIO()
            torch.save(optimizer.state_dict(), buffer)
            buffer.seek(0)
            optimizer = build(kind, params, settings, config)
            optimizer.load_state_dict(torch.load(buffer, weights_only=True))
        for step in range(part * steps, (part + 1) * steps):
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
            set_grads(params, step, has_grad)
            optimizer.step()
    return params, optimizer


def assert_same_training(plain, other):
    for index, (p, q) in enumerate(zip(plain[0], other[0], strict=True)):
        a, b = plain[1].state.get(p, {}), other[1].state.get(q, {})
        on_host = {k: v.to(CPU) if torch.is_tensor(v) else v for k, v in a.items()}
        assert same(p.detach(), q.detach()), f"parameter {index}"
        assert same(p.grad, q.grad), f"gradient {index}"
        assert list(a) == list(b), f"state of parameter {index}"
        for key, value in on_host.items():
            found = b[key].to(CPU) if torch.is_tensor(b[key]) else b[key]
            assert same(value, found), f"{key} of parameter {index}"
    settings = [
        [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        for _, optimizer in (plain, other)
    ]
    assert same(*settings)


EXACT = {
    "schedulefree:AdamWScheduleFree": {"lr": 0.02, "warmup_steps": 3},
    "schedulefree:AdamWScheduleFree foreach": {"lr": 0.02, "foreach": True},
    "schedulefree:AdamWScheduleFree for-loop": {"lr": 0.02, "foreach": False},
    "schedulefree:SGDScheduleFree": {"lr": 0.1, "weight_decay": 0.1},
    "schedulefree:RAdamScheduleFree": {"lr": 0.02},
    "schedulefree:AdamWScheduleFreeReference": {"lr": 0.02},
    "lion_pytorch:Lion": {"lr": 1e-3, "weight_decay": 0.1},
    "lion_pytorch:Lion without decay": {"lr": 1e-3, "decoupled_weight_decay": True},
    "pytorch_optimizer:AdaBelief": {"lr": 0.01, "rectify": True},
    "pytorch_optimizer:Adan": {"lr": 0.01},
    "pytorch_optimizer:ADOPT": {"lr": 0.01},
    "pytorch_optimizer:CAME": {"lr": 0.01},
    "pytorch_optimizer:Gravity": {"lr": 0.01},
    "pytorch_optimizer:Lamb": {"lr": 0.01},
    "pytorch_optimizer:LaProp": {"lr": 0.01},
    "pytorch_optimizer:Lion": {"lr": 0.01},
    "pytorch_optimizer:Ranger": {"lr": 0.01},
    "pytorch_optimizer:ScheduleFreeAdamW": {"lr": 0.01},
    "pytorch_optimizer:Shampoo": {"lr": 0.01},
    "pytorch_optimizer:StableAdamW": {"lr": 0.01},
    "pytorch_optimizer:Tiger": {"lr": 0.01},
    "torchao.optim:_AdamW": {"lr": 0.01},
}


@pytest.mark.parametrize("name", EXACT)
def test_same_bits_and_checkpoints_as_plain(device, record_outcome, name):
    path, _, flavour = name.partition(" ")
    kind, settings = load(path), EXACT[name]
    plain = train(kind, settings, [None, None], device)
    for configs in ([CONFIG, CONFIG], [CONFIG, None], [None, CONFIG]):
        other = train(kind, settings, configs, device)
        assert_same_training(plain, other)
        if configs[-1]:
            state = [v for s in other[1].state.values() for v in s.values() if torch.is_tensor(v)]
            assert all(v.device == CPU for v in state if v.dim())
            assert offload_stats(other[1]).num_chunks > 2
    record_outcome(**row_of(kind, flavour), outcome=outcomes.EQUAL)


REFUSED = {
    "prodigyopt:Prodigy": ({"lr": 1.0}, "couples its parameters"),
    "prodigyopt:Prodigy before a warm-up": ({"lr": 1.0, "then lr": 0.0}, "couples its parameters"),
    "prodigyopt:Prodigy with slices": ({"lr": 1.0, "slice_p": 11}, "couples its parameters"),
    "pytorch_optimizer:AdaGC": ({"lr": 0.01}, "couples its parameters"),
    "pytorch_optimizer:AggMo": ({"lr": 0.01}, "keeps tensors inside of a dict in 'momentum_buffer"),
    "pytorch_optimizer:DAdaptAdam": ({"lr": 1.0}, "couples its parameters"),
    "pytorch_optimizer:Prodigy": ({"lr": 1.0}, "couples its parameters"),
    "pytorch_optimizer:MADGRAD": ({"lr": 0.01}, "keeps state under 'k', which is no parameter"),
    "pytorch_optimizer:SOAP": ({"lr": 0.01}, "keeps tensors inside of a list in 'GG' of its state"),
    "torchao.optim:AdamW8bit": ({"lr": 0.01}, "a tensor made of other tensors"),
    "torchao.optim:AdamW4bit": ({"lr": 0.01}, "a tensor made of other tensors"),
    "torchao.optim:AdamWFp8": ({"lr": 0.01}, "a tensor made of other tensors"),
    "bitsandbytes.optim:AdamW8bit": ({"lr": 0.01}, "AdamW8bit"),
    "bitsandbytes.optim:PagedAdamW8bit": ({"lr": 0.01}, "PagedAdamW8bit"),
    "heavyball:AdamW": ({"lr": 0.01}, "AdamW"),
    "heavyball:Muon": ({"lr": 0.01}, "Muon"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(record_outcome, name):
    path, _, flavour = name.partition(" ")
    kind, (settings, message) = load(path), REFUSED[name]
    params = make_params(CPU, shapes=SHAPES)
    optimizer = build(kind, params, settings, None)
    before = copy.deepcopy(optimizer.param_groups[0]["lr"])
    with pytest.raises(NotImplementedError, match=message) as refusal:
        offload(optimizer)
    record_outcome(**row_of(kind, flavour), outcome=outcomes.REFUSED, reason=str(refusal.value))
    assert type(optimizer) is kind
    assert same(before, optimizer.param_groups[0]["lr"])
    assert all(same(p, q) for p, q in zip(params, make_params(CPU, shapes=SHAPES), strict=True))


@pytest.mark.parametrize(
    ("name", "inner"),
    [("Lookahead", "optimizer"), ("SAM", "base_optimizer"), ("OrthoGrad", "optimizer")],
)
def test_wrappers_of_optimizers_are_refused_with_the_remedy(record_outcome, name, inner):
    kind = load(f"pytorch_optimizer:{name}")
    params = make_params(CPU, shapes=SHAPES)
    if name == "SAM":
        wrapper = kind(params, torch.optim.AdamW, lr=0.01)
    else:
        wrapper = kind(torch.optim.AdamW(params, lr=0.01))
    remedy = r"Give offload\(\) (that one|the optimizer in)"
    with pytest.raises(NotImplementedError, match=remedy) as refusal:
        offload(wrapper)
    record_outcome(**row_of(kind), outcome=outcomes.REFUSED, reason=str(refusal.value))
    assert isinstance(getattr(wrapper, inner), torch.optim.AdamW)


def test_a_schedule_free_optimizer_switches_while_it_is_offloaded(device):
    kind = load("schedulefree:AdamWScheduleFree")
    results = []
    for config in (None, CONFIG):
        params = make_params(device, shapes=SHAPES)
        optimizer = build(kind, params, {"lr": 0.02}, config)
        averages = []
        for step in range(6):
            optimizer.train()
            set_grads(params, step, late)
            optimizer.step()
            optimizer.eval()
            averages.append([p.detach().clone() for p in params])
        results.append((params, optimizer, averages))
    assert_same_training(results[0][:2], results[1][:2])
    assert same(results[0][2], results[1][2])


def test_a_schedule_free_optimizer_must_be_in_training_mode():
    optimizer = load("schedulefree:AdamWScheduleFree")(make_params(CPU, shapes=SHAPES))
    optimizer.eval()
    with pytest.raises(NotImplementedError, match=r"training mode, call its train\(\) before"):
        offload(optimizer)
    optimizer.train()
    offload(optimizer)


def muon(groups, **settings):
    kind = load("pytorch_optimizer:Muon")
    return kind([{"use_muon": bool(index), **g} for index, g in enumerate(groups)], **settings)


def test_muon_with_another_flavour_for_one_group():
    plain = train(muon, {"lr": 0.01}, [None, None], shapes=MATRICES)
    assert_same_training(plain, train(muon, {"lr": 0.01}, [CONFIG, CONFIG], shapes=MATRICES))


#: Of the classes below, these take too long to step (a minute each) or need other arguments.
_LEFT_OUT = frozenset({"kron"})


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_class_of_a_large_package_differs_silently(record_outcome):
    package = pytest.importorskip("pytorch_optimizer")
    done = {load(name) for name in [*EXACT, *REFUSED] if name.startswith("pytorch_optimizer:")}
    counts = {outcomes.EQUAL: 0, outcomes.REFUSED: 0, "not trained": 0}
    for name in package.get_supported_optimizers():
        if name in _LEFT_OUT:
            continue
        kind, settings = package.load_optimizer(name), {"lr": 0.01}
        try:
            plain = train(kind, settings, [None], steps=4)
        except Exception:  # it needs other arguments, a closure, or a graph of the gradients
            counts["not trained"] += 1
            continue
        try:
            other = train(kind, settings, [CONFIG], steps=4)
        except NotImplementedError as refusal:
            found, reason = outcomes.REFUSED, str(refusal)
        else:
            assert_same_training(plain, other)
            found, reason = outcomes.EQUAL, ""
        counts[found] += 1
        if kind not in done and kind.__module__.startswith("pytorch_optimizer"):
            done.add(kind)
            record_outcome(**row_of(kind), outcome=found, reason=reason)
    print(counts)
    assert counts[outcomes.EQUAL] > 70
    assert counts[outcomes.EQUAL] + counts[outcomes.REFUSED] > 90
