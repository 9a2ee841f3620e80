"""torch.distributed.checkpoint in one process: no hidden step, and resuming bit for bit.

What needs several processes is in test_fsdp.py.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from small_net import make_batches, make_net
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.staging import (
    BlockingAsyncStager,
    DefaultStager,
    StagingOptions,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from training import FLAVOURS, assert_same, fail_at_chunk

from torch_offload import OffloadConfig, offload, offload_stats
from torch_offload import dcp as ours
from torch_offload import optimizer as optimizer_module

pytestmark = pytest.mark.filterwarnings(  # one process is what is meant here
    "ignore:torch.distributed is disabled, unavailable or uninitialized"
)

CONFIG = OffloadConfig(chunk_size=2000)


class Anchored(torch.optim.Optimizer):
    """State that starts as a copy of the parameter, that matrices have, that decay makes."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["step"] = 0
                    state["anchor"] = torch.clone(param, memory_format=torch.preserve_format)
                    if group["weight_decay"]:
                        state["decayed"] = torch.zeros_like(param)
                    rows = param.dim() == 2 and len(param) > 1
                    state["rows" if rows else "all"] = torch.zeros_like(
                        param.sum(1) if rows else param
                    )
                state["step"] += 1
                grad = param.grad + group["weight_decay"] * param
                if "rows" in state:
                    state["rows"].lerp_(grad.square().mean(1), 0.1)
                else:
                    state["all"].lerp_(grad.square(), 0.1)
                if "decayed" in state:
                    state["decayed"].add_(param, alpha=group["weight_decay"])
                state["anchor"].sub_(grad, alpha=group["lr"])
                param.lerp_(state["anchor"], 0.5)


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    **{f"AdamW {name}": (torch.optim.AdamW, kwargs) for name, kwargs in FLAVOURS.items()},
    "Adam amsgrad": (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    "SGD": (torch.optim.SGD, {}),
    "SGD momentum": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "SGD dampening": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adagrad": (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}),
    "Adamax": (torch.optim.Adamax, {"weight_decay": 0.1}),
    "ASGD": (torch.optim.ASGD, {}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    "Rprop": (torch.optim.Rprop, {}),
    "Adafactor": (torch.optim.Adafactor, {}),
    "Muon": (torch.optim.Muon, {}),
    "Anchored": (Anchored, {}),
    "Anchored, decay": (Anchored, {}),
}
#: Those of which no values of the state stand for a state that has not stepped: the first update
#: sets them, or torch's step leaves more in them than `step`.
FIRST_UPDATE_MATTERS = {"SGD dampening", "ASGD", "NAdam", "Anchored, decay"}
OPTIONS = {
    "sharded": StateDictOptions(),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
    "full": StateDictOptions(full_state_dict=True),
    "cpu": StateDictOptions(cpu_offload=True),
    "full cpu": StateDictOptions(full_state_dict=True, cpu_offload=True),
}

Training = tuple[nn.Module, torch.optim.Optimizer]


def make(
    device: torch.device, name: str, config: OffloadConfig | None, *, scalar: bool = False
) -> Training:
    """Return a new net and its optimizer of two groups, that no step was made with."""
    optimizer_class, kwargs = OPTIMIZERS[name]
    net = make_net()
    if scalar:
        net.register_parameter("scale", nn.Parameter(torch.tensor(0.5)))
    net.to(device)
    matrices = [p for p in net.parameters() if p.dim() > 1]
    vectors = [p for p in net.parameters() if p.dim() <= 1]
    if optimizer_class is torch.optim.Muon:
        matrices, vectors = matrices[:1], matrices[1:]
    decay = {} if name in ("Rprop", "Anchored") else {"weight_decay": 0.01}
    groups = [{"params": matrices, **decay}, {"params": vectors, "lr": 3e-3}]
    optimizer = optimizer_class(groups, lr=1e-2, **kwargs)
    return net, optimizer if config is None else offload(optimizer, config)


def steps(training: Training, first: int = 0, last: int = 3) -> Training:
    net, optimizer = training
    device = next(net.parameters()).device
    for data in make_batches(last)[first:]:
        loss = net(data.to(device)).square().mean()
        if hasattr(net, "scale"):
            loss = loss * net.scale
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return training


def same(plain: Training, other: Training) -> None:
    assert_same((list(plain[0].parameters()), plain[1]), (list(other[0].parameters()), other[1]))


def flat(state: Any) -> dict[str, Any]:
    """Flatten nested dicts and lists: path to leaf."""
    if isinstance(state, dict):
        return {f"{k}/{p}": v for k, s in state.items() for p, v in flat(s).items()}
    if isinstance(state, list):
        return flat(dict(enumerate(state)))
    return {"": state}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("options", ["sharded", "flat"])
def test_asking_before_the_first_step_changes_nothing(device, name, options):
    def run(asked: bool) -> Training:
        net, optimizer = make(device, name, CONFIG, scalar=name != "Muon")
        for _ in range(2 if asked else 0):
            get_optimizer_state_dict(net, optimizer, options=OPTIONS[options])
            get_state_dict(net, optimizer, options=OPTIONS[options])
        if name != "Adagrad":  # makes its state when it is made
            assert len(optimizer.state) == 0
            assert optimizer.state_dict()["state"] == {}
        return steps((net, optimizer))

    same(run(False), run(True))


def test_it_does_in_plain_torch():
    """The control: were it not so, nothing here would be needed."""
    cpu = torch.device("cpu")
    net, optimizer = make(cpu, "AdamW foreach", None)
    get_optimizer_state_dict(net, optimizer)
    asked = steps((net, optimizer))
    with pytest.raises(AssertionError):
        same(steps(make(cpu, "AdamW foreach", None)), asked)


@pytest.mark.parametrize("name", ["AdamW fused", "SGD"])
def test_asking_leaves_no_trace(device, name):
    net, optimizer = make(device, name, CONFIG)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    fired = []
    optimizer.register_step_pre_hook(lambda *_: fired.append("pre"))
    optimizer.register_step_post_hook(lambda *_: fired.append("post"))
    for param in net.parameters():
        param.register_hook(lambda _: fired.append("grad"))
    params = copy.deepcopy(list(net.parameters()))
    groups = copy.deepcopy(optimizer.state_dict()["param_groups"])
    random = torch.get_rng_state()
    versions = [param._version for param in net.parameters()]

    sd = get_optimizer_state_dict(net, optimizer)
    set_optimizer_state_dict(net, optimizer, copy.deepcopy(sd))

    assert fired == []
    assert not hasattr(optimizer, "_opt_called")
    assert schedule._step_count == 1
    assert optimizer.state_dict()["param_groups"] == groups
    assert torch.equal(torch.get_rng_state(), random)
    assert [param._version for param in net.parameters()] == versions
    for param, kept in zip(net.parameters(), params, strict=True):
        assert torch.equal(param, kept)
        assert param.grad is None


@pytest.mark.gpu
def test_asking_needs_no_gpu_memory():
    device = torch.device("cuda")
    net = nn.Linear(4096, 4096, device=device)
    optimizer = offload(torch.optim.AdamW(net.parameters(), fused=True))
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    state = get_optimizer_state_dict(net, optimizer)["state"]["weight"]
    set_optimizer_state_dict(net, optimizer, get_optimizer_state_dict(net, optimizer))
    assert torch.cuda.max_memory_allocated() - base < 2**16
    assert state["exp_avg"].is_pinned()
    assert state["step"].is_cuda
    assert state["step"].dtype == torch.float32


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("options", ["sharded", "flat"])
def test_template_has_the_tensors_that_plain_makes(device, name, options):
    def ask(config: OffloadConfig | None) -> dict[str, Any]:
        training = make(device, name, config, scalar=name != "Muon")
        return flat(get_optimizer_state_dict(*training, options=OPTIONS[options]))

    plain, other = ask(None), ask(CONFIG)
    assert list(other) == list(plain)
    for path, value in plain.items():
        found = other[path]
        assert type(found) is type(value), path
        if not isinstance(value, torch.Tensor):
            assert found == value or path.endswith(("lr/", "step/"))
            continue
        assert found.shape == value.shape, path
        assert found.dtype == value.dtype, path
        assert found.stride() == value.stride(), path
        if value.dim() == 0:
            assert found.device == value.device, path
        else:
            assert found.device.type == "cpu", path
            assert found.untyped_storage().nbytes() == value.numel() * value.element_size()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_checkpoint_from_before_the_first_step_resumes_as_a_new_start(device, name, tmp_path):
    net, optimizer = make(device, name, CONFIG, scalar=name != "Muon")
    save(tmp_path, net, optimizer, OPTIONS["sharded"])
    resumed = make(device, name, CONFIG, scalar=name != "Muon")
    load(tmp_path, *resumed, OPTIONS["sharded"])
    if name not in ("SGD", "Adagrad"):
        assert all("step" not in s or s["step"] == 0 for s in resumed[1].state.values())
    if name in FIRST_UPDATE_MATTERS:
        steps(resumed)
    else:
        same(steps((net, optimizer)), steps(resumed))


def save(
    path: Path, net: nn.Module, optimizer: torch.optim.Optimizer, options: StateDictOptions
) -> None:
    model, state = get_state_dict(net, optimizer, options=options)
    dcp.save({"net": model, "optimizer": state}, checkpoint_id=path, no_dist=True)


def load(
    path: Path,
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    options: StateDictOptions,
    planner: Any = None,
) -> None:
    """Load as torch's documentation says: ask for a template, load into it, set it."""
    model, state = get_state_dict(net, optimizer, options=options)
    both = {"net": model, "optimizer": state}
    dcp.load(both, checkpoint_id=path, no_dist=True, planner=planner)
    set_state_dict(
        net,
        optimizer,
        model_state_dict=both["net"],
        optim_state_dict=both["optimizer"],
        options=options,
    )


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("saved", [None, CONFIG], ids=["from plain", "from offloaded"])
@pytest.mark.parametrize("loaded", [None, CONFIG], ids=["to plain", "to offloaded"])
@pytest.mark.parametrize("fresh", [True, False], ids=["new", "in use"])
def test_resumes_bit_exactly(device, tmp_path, options, saved, loaded, fresh):
    if options.startswith("full") or options == "cpu":
        fused = [name for name in OPTIMIZERS if name == "AdamW foreach"]
    else:
        fused = ["AdamW fused", "SGD momentum", "NAdam", "Adafactor"]
    for name in fused:
        path = tmp_path / name.replace(" ", "_")
        save(path, *steps(make(device, name, saved)), OPTIONS[options])
        resumed = make(device, name, loaded)
        if not fresh:
            steps(resumed, 0, 1)
        load(path, *resumed, OPTIONS[options])
        same(steps(make(device, name, None), 0, 6), steps(resumed, 3, 6))


def test_loading_is_in_place(device, tmp_path):
    """One copy of the state in host memory, from the template to the steps after the load."""
    save(tmp_path, *steps(make(device, "AdamW foreach", CONFIG)), OPTIONS["sharded"])
    net, optimizer = make(device, "AdamW foreach", CONFIG)
    template = get_optimizer_state_dict(net, optimizer)["state"]["0.weight"]["exp_avg"]
    host_bytes = offload_stats(optimizer).host_bytes
    assert host_bytes > 0
    load(tmp_path, net, optimizer, OPTIONS["sharded"])
    assert optimizer.state[net[0].weight]["exp_avg"] is template
    steps((net, optimizer), 3, 4)
    assert optimizer.state[net[0].weight]["exp_avg"] is template
    assert offload_stats(optimizer).host_bytes == host_bytes


@pytest.mark.parametrize("options", ["sharded", "flat"])
@pytest.mark.parametrize("name", ["AdamW foreach", "SGD momentum"])
def test_loaded_into_the_template_and_never_set(device, tmp_path, options, name):
    """In plain torch the tensors that one asks for are the state."""
    save(tmp_path, *steps(make(device, name, CONFIG)), OPTIONS[options])

    def run(config: OffloadConfig | None) -> Training:
        net, optimizer = make(device, name, config)
        model, state = get_state_dict(net, optimizer, options=OPTIONS[options])
        dcp.load({"net": model, "optimizer": state}, checkpoint_id=tmp_path, no_dist=True)
        return steps((net, optimizer), 3, 6)

    same(run(None), run(CONFIG))


def with_idle_parts(
    device: torch.device, config: OffloadConfig | None
) -> tuple[Training, Callable[[int, int], None]]:
    """A net of which one part never gets a gradient and one parameter is frozen."""
    net = make_net().to(device)
    net.unused = nn.Linear(3, 3, device=device)
    net.register_parameter("frozen", nn.Parameter(torch.tensor(1.0, device=device), False))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    if config is not None:
        offload(optimizer, config)

    def run(first: int, last: int) -> None:
        for data in make_batches(last)[first:]:
            net[:5](data.to(device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return (net, optimizer), run


@pytest.mark.parametrize("options", ["sharded", "full"])
def test_parameters_that_never_had_a_gradient(device, options):
    """Their entries are missing in what is saved. When it is set they stay missing, unless torch
    is to gather or distribute, which fills in the template: then as at a new start."""
    lenient = StateDictOptions(**{**vars(OPTIONS[options]), "strict": False})

    def resume(config: OffloadConfig | None) -> tuple[Training, set[str]]:
        (net, optimizer), run = with_idle_parts(device, config)
        run(0, 3)
        saved = copy.deepcopy(get_state_dict(net, optimizer, options=lenient))
        assert not any("unused" in p or "frozen" in p for p in flat(saved[1]) if "state" in p)
        training, run = with_idle_parts(device, config)
        set_state_dict(
            *training, model_state_dict=saved[0], optim_state_dict=saved[1], options=lenient
        )
        state = training[1].state
        present = {name for name, p in training[0].named_parameters() if state.get(p)}
        for param in training[0].unused.parameters():
            state.pop(param, None)
        run(3, 6)
        return training, present

    plain, other = resume(None), resume(CONFIG)
    assert ("unused.weight" in other[1]) == (options == "full")
    assert other[1] == plain[1]
    same(plain[0], other[0])


def test_frozen_parameters_have_no_template(device):
    def names(config: OffloadConfig | None) -> set[str]:
        training, _ = with_idle_parts(device, config)
        training[0][1].requires_grad_(False)
        return set(get_optimizer_state_dict(*training)["state"])

    assert names(CONFIG) == names(None)
    assert not {"frozen", "1.weight"} & names(CONFIG)


def test_a_checkpoint_that_lacks_entries(device, tmp_path):
    """Refused as in plain torch; loaded in part, the others start anew at their first gradient."""
    (net, optimizer), run = with_idle_parts(device, CONFIG)
    run(0, 3)
    save(tmp_path, net, optimizer, OPTIONS["sharded"])
    for config in (None, CONFIG):
        training, _ = with_idle_parts(device, config)
        with pytest.raises(CheckpointException, match=r"Missing key in .*unused\.weight\.step"):
            load(tmp_path, *training, OPTIONS["sharded"])
    resumed, run_resumed = with_idle_parts(device, CONFIG)
    planner = DefaultLoadPlanner(allow_partial_load=True)
    load(tmp_path, *resumed, OPTIONS["sharded"], planner)
    for part in (net, resumed[0]):
        for param in part.unused.parameters():
            param.grad = torch.full_like(param, 0.1)
    run(3, 6)
    run_resumed(3, 6)
    same((net, optimizer), resumed)


def test_a_checkpoint_that_does_not_fit_leaves_no_state(device):
    net, optimizer = make(device, "AdamW foreach", CONFIG)
    sd = copy.deepcopy(get_optimizer_state_dict(net, optimizer))
    sd["param_groups"][0]["params"].append("nobody")
    del sd["state"]["0.weight"]
    with pytest.raises(RuntimeError, match=r"Missing optimizer state for parameter '0\.weight'"):
        set_optimizer_state_dict(net, optimizer, sd)
    assert len(optimizer.state) == 0
    same(steps(make(device, "AdamW foreach", None)), steps((net, optimizer)))


class Curious(Anchored):
    """Looks at values before it makes state, so that nobody knows which before it has stepped."""

    def step(self, closure: Any = None) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        if any(float(param.grad.sum()) > 1e30 for param in params if param.grad is not None):
            raise OverflowError("too large")
        super().step()


def test_where_only_a_step_can_tell_it_is_made(device, tmp_path):
    """As in plain torch. So what is loaded is not lost."""

    def new(config: OffloadConfig | None) -> Training:
        net = make_net().to(device)
        optimizer = Curious(net.parameters(), lr=1e-2, weight_decay=0.1)
        return net, optimizer if config is None else offload(optimizer, config)

    def run(config: OffloadConfig | None, options: str) -> Training:
        path = tmp_path / f"{options} {config is None}"
        save(path, *steps(new(config)), OPTIONS[options])
        training = new(config)
        load(path, *training, OPTIONS[options])
        assert training[1].state[training[0][0].weight]["step"] == 3
        return steps(training, 3, 6)

    for options in ("sharded", "flat"):
        same(run(None, options), run(CONFIG, options))


def test_a_class_for_sparse_gradients(device):
    for config in (None, CONFIG):
        net = nn.Embedding(5, 3, sparse=True, device=device)
        optimizer = torch.optim.SparseAdam(net.parameters())
        if config is not None:
            offload(optimizer, config)
        with pytest.raises(RuntimeError, match="does not support dense gradients"):
            get_optimizer_state_dict(net, optimizer)


def test_others_that_call_the_hidden_step_get_it(device):
    """There are libraries that import torch's private function and want state afterwards."""

    def run(config: OffloadConfig | None) -> Training:
        training = make(device, "AdamW foreach", config)
        get_optimizer_state_dict(*training)
        training[1].state.clear()
        torch_state_dict._init_optim_state(training[1])
        assert training[1].state[training[0][0].weight]["step"] == 1
        return steps(training)

    same(run(None), run(CONFIG))


def test_with_gradients_there_is_no_template(device):
    """Torch makes no hidden step then, and shows the state that there is: none."""

    def ask(config: OffloadConfig | None) -> Any:
        net, optimizer = make(device, "AdamW foreach", config)
        net(make_batches(1)[0].to(device)).mean().backward()
        return get_optimizer_state_dict(net, optimizer)

    assert ask(CONFIG) == ask(None)
    assert ask(CONFIG)["state"] == {}


def test_two_optimizers_of_which_one_is_plain(device):
    """A plain one is stepped by torch, as ever."""
    net = make_net().to(device)
    plain = torch.optim.AdamW(net[0].parameters())
    offloaded = offload(torch.optim.AdamW(list(net.parameters())[2:]), CONFIG)
    sd = get_optimizer_state_dict(net, [plain, offloaded])
    assert sd["state"]["0.weight"]["step"] == 1
    assert sd["state"]["3.weight"]["step"] == 0
    assert len(plain.state) == 2
    assert len(offloaded.state) == 0
    set_optimizer_state_dict(net, [plain, offloaded], sd)
    assert len(offloaded.state) == 6


def test_asked_in_inference_mode(device):
    """Lightning saves there; the tensors must be of use afterwards."""
    net, optimizer = make(device, "AdamW foreach", CONFIG)
    with torch.inference_mode():
        get_optimizer_state_dict(net, optimizer)
    same(steps(make(device, "AdamW foreach", None)), steps((net, optimizer)))


def test_state_that_was_cleared(device):
    """A template after steps does not show what the steps left."""
    net, optimizer = make(device, "Rprop", CONFIG)
    get_optimizer_state_dict(net, optimizer)
    steps((net, optimizer))
    optimizer.state.clear()
    shown = get_optimizer_state_dict(net, optimizer)["state"]["0.weight"]
    assert torch.count_nonzero(shown["prev"]) == 0
    assert torch.equal(shown["step_size"], torch.full_like(shown["step_size"], 1e-2))


def test_another_torch_keeps_its_own_behaviour(monkeypatch, device):
    """Where torch has other private functions, there is a hidden step, but nothing fails."""
    assert ours.install(optimizer_module._find_core) is True
    real = {name: getattr(torch_state_dict, name) for name in ours._ARGUMENT}
    for name, function in real.items():
        monkeypatch.setattr(torch_state_dict, name, function.__wrapped__)
    for broken in (None, lambda model, others: None):
        with monkeypatch.context() as other:
            other.setattr(torch_state_dict, "_init_optim_state", broken)
            assert ours.install.__wrapped__(optimizer_module._find_core) is False
            assert torch_state_dict._init_optim_state is broken
    with monkeypatch.context() as other:
        other.setattr(ours, "_MODULE", "torch.distributed.no_such_module")
        assert ours.install.__wrapped__(optimizer_module._find_core) is False

    def run(config: OffloadConfig | None) -> Training:
        net, optimizer = make(device, "AdamW foreach", config)
        set_optimizer_state_dict(net, optimizer, get_optimizer_state_dict(net, optimizer))
        return steps((net, optimizer))

    same(run(None), run(CONFIG))


def test_the_optimizer_itself_can_be_saved(device, tmp_path):
    """It is a `Stateful`: torch asks it for its `state_dict()`, and loads into that."""
    net, optimizer = steps(make(device, "AdamW foreach", CONFIG))
    dcp.save({"optimizer": optimizer}, checkpoint_id=tmp_path, no_dist=True)
    steps((net, optimizer), 3, 5)
    dcp.load({"optimizer": optimizer}, checkpoint_id=tmp_path, no_dist=True)
    same_state = steps(make(device, "AdamW foreach", None))[1].state_dict()["state"]
    for index, values in optimizer.state_dict()["state"].items():
        for key, value in values.items():
            assert torch.equal(value, same_state[index][key].to(value.device))


@pytest.mark.parametrize("options", ["sharded", "flat"])
def test_loading_in_place_heals_a_step_that_stopped_half_way(
    device, tmp_path, monkeypatch, options
):
    training = steps(make(device, "AdamW foreach", CONFIG))
    save(tmp_path, *training, OPTIONS[options])
    with monkeypatch.context() as patch:
        fail_at_chunk(patch, 2)
        with pytest.raises(RuntimeError, match="boom"):
            steps(training, 3, 4)
    training[1].zero_grad()
    with pytest.warns(UserWarning, match="not that of a whole step"):
        model, state = get_state_dict(*training, options=OPTIONS[options])
    both = {"net": model, "optimizer": state}

    def put() -> None:
        set_state_dict(
            *training,
            model_state_dict=model,
            optim_state_dict=both["optimizer"],
            options=OPTIONS[options],
        )

    put()  # nothing was loaded
    with pytest.raises(RuntimeError, match="stopped half-way"):
        steps(training, 3, 4)
    training[1].zero_grad()
    dcp.load(both, checkpoint_id=tmp_path, no_dist=True)
    put()
    same(steps(make(device, "AdamW foreach", None), 0, 6), steps(training, 3, 6))


class SlowWriter(dcp.FileSystemWriter):
    """Writes when it is told to."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.go = threading.Event()

    def write_data(self, plan: Any, planner: Any) -> Any:
        assert self.go.wait(60)
        return super().write_data(plan, planner)


@pytest.mark.parametrize("stager", ["default", "blocking", "pinned"])
def test_async_save_holds_the_values_of_its_call(device, tmp_path, stager):
    """Later steps write the same host memory, while the writer waits."""
    made = {
        "default": lambda: None,
        "blocking": lambda: BlockingAsyncStager(),
        "pinned": lambda: DefaultStager(StagingOptions(device.type == "cuda", True, False, False)),
    }[stager]()
    net, optimizer = steps(make(device, "AdamW fused", CONFIG))
    writer = SlowWriter(tmp_path)
    model, state = get_state_dict(net, optimizer)
    kept = copy.deepcopy(flat(state))
    future = dcp.async_save(
        {"net": model, "optimizer": state}, storage_writer=writer, async_stager=made, no_dist=True
    )
    steps((net, optimizer), 3, 6)
    now = flat(get_optimizer_state_dict(net, optimizer))
    path = "state/0.weight/exp_avg/"
    assert not torch.equal(now[path], kept[path])
    writer.go.set()
    future.result()
    if made is not None:
        made.close()

    resumed = make(device, "AdamW fused", CONFIG)
    load(tmp_path, *resumed, OPTIONS["sharded"])
    for path, value in flat(get_optimizer_state_dict(*resumed)).items():
        assert torch.equal(value, kept[path]) if torch.is_tensor(value) else value == kept[path]
    same(steps(make(device, "AdamW fused", None), 0, 6), steps(resumed, 3, 6))
