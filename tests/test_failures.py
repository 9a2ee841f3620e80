"""A step that raises: everything is readable, no torn state is trained on, a checkpoint heals it.

After any failure an optimizer is in one of three states: as before the step (which may then be
repeated), as after the whole step, or refusing steps until a checkpoint is loaded.
"""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import re
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from interrupts import Lines, Operations, picked
from test_races_gpu import slow_down
from training import assert_same, fail_at_chunk, make_params, set_grads, train

from torch_offload import (
    OffloadConfig,
    chunk,
    host,
    is_offloaded,
    offload,
    offload_stats,
    pipeline,
    probe,
    shard,
    stepper,
    unoffload,
)
from torch_offload.failure import UNFINISHED

CPU = torch.device("cpu")
#: Some parameters are larger than a chunk (and cut into parts), some share one.
SHAPES = [(16, 16), (7,), (12, 8), (1,), (32,)]
CONFIG = OffloadConfig(chunk_size=512)

#: name: (steps before the one that fails, which parameters have gradients in them)
SCENARIOS: dict[str, tuple[int, Callable[[int, int], bool] | None]] = {
    "first": (0, None),
    "later": (2, None),
    "mixed": (2, lambda index, step: index % 2 == 0),  # half of the state is born in the last one
}
OPTIMIZERS = {
    "AdamW foreach": (torch.optim.AdamW, {"foreach": True}),
    "AdamW for-loop": (torch.optim.AdamW, {"foreach": False}),
    "AdamW fused": (torch.optim.AdamW, {"fused": True}),
    "SGD momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "SGD": (torch.optim.SGD, {}),
    "Adafactor": (torch.optim.Adafactor, {}),
    "NAdam": (torch.optim.NAdam, {}),
}


@pytest.fixture(autouse=True)
def cut_everywhere(monkeypatch):
    monkeypatch.setattr(shard, "cuts_on", lambda device: True)
    monkeypatch.setattr(chunk, "LEAST_PART_BYTES", 64)


@pytest.fixture(autouse=True)
def one_thread():
    """Several take longer to start than these tensors take to be updated."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


Trained = tuple[list[torch.nn.Parameter], torch.optim.Optimizer]


def spread(numbers: Sequence[int], most: int) -> list[int]:
    """Take at most so many of the numbers, the first and the last ones among them."""
    if len(numbers) <= most:
        return list(numbers)
    return [numbers[round(i * (len(numbers) - 1) / (most - 1))] for i in range(most)]


#: Some are tested always, the rest by `make test-all`.
HOW_MANY = pytest.mark.parametrize(
    "most", [25, pytest.param(10**6, marks=pytest.mark.exhaustive)], ids=["some", "all"]
)


class Case:
    """An optimizer right before the step that will fail, and what plain torch has there."""

    def __init__(self, device: torch.device, scenario: str, name: str = "AdamW foreach") -> None:
        self.device = device
        self.steps, self.has_grad = SCENARIOS[scenario]
        self.kind, self.kwargs = OPTIMIZERS[name]
        self.config = OffloadConfig(chunk_size=128) if name == "Adafactor" else CONFIG
        self.before = self._train(None)
        self.after = self._train(None)
        self.after[1].step()
        self._offloaded = self._train(self.config)
        self.checkpoint = copy.deepcopy(self._offloaded[1].state_dict())
        self.values = [param.detach().clone() for param in self._offloaded[0]]

    def _train(self, config: OffloadConfig | None) -> Trained:
        params = make_params(self.device, shapes=SHAPES)
        groups = [{"params": params[:2]}, {"params": params[2:], "lr": 3e-3}]
        optimizer = self.kind(groups, lr=1e-2, **self.kwargs)
        if config is not None:
            offload(optimizer, config)
        for step in range(self.steps):
            set_grads(params, step, self.has_grad)
            optimizer.step()
        set_grads(params, self.steps)
        return params, optimizer

    def fresh(self) -> Trained:
        """Return one more that is offloaded and has its gradients."""
        params, optimizer = copy.deepcopy(self._offloaded)
        # Copies lack it, and on a GPU torch then asks groups for "capturable", which not all have.
        optimizer._warned_capturable_if_run_uncaptured = True
        set_grads(params, self.steps)
        return params, optimizer

    def heal(self, params: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        """Load the checkpoint from before the step, and take the step."""
        optimizer.load_state_dict(self.checkpoint)
        with torch.no_grad():
            for param, value in zip(params, self.values, strict=True):
                param.copy_(value)
        optimizer.step()
        assert_same(self.after, (params, optimizer))

    def verdict(self, params: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> str:
        """Check the state after a failed step and go on. Returns which of the three it was in."""
        refusal = optimizer._offload_core.failure
        if refusal is None:
            if is_same(self.before, (params, optimizer)):
                optimizer.step()
                assert_same(self.after, (params, optimizer))
                return "repeated"
            assert_same(self.after, (params, optimizer))
            return "whole"
        changed = {
            index
            for index, (param, value) in enumerate(zip(params, self.values, strict=True))
            if not torch.equal(param, value)
        }
        if refusal.reason != UNFINISHED:
            assert changed <= set(said_to_be_updated(refusal.reason)), refusal.reason
        with pytest.raises(RuntimeError, match=re.escape(refusal.reason)):
            optimizer.step()
        with pytest.warns(UserWarning, match="not that of a whole step"):
            own = optimizer.state_dict()
        values = [v for state in own["state"].values() for v in state.values()]
        assert all(value.isfinite().all() for value in values)
        if values:  # else it may be the checkpoint of a new start
            optimizer.load_state_dict(own)
            with pytest.raises(RuntimeError, match=re.escape(refusal.reason)):
                optimizer.step()
        self.heal(params, optimizer)
        return "refused"


def is_same(plain: Trained, other: Trained) -> bool:
    try:
        assert_same(plain, other)
    except AssertionError:
        return False
    return True


def said_to_be_updated(failure: str) -> list[int]:
    """Read the parameters' numbers in a message."""
    found = re.search(r"parameters ([\d, -]+) \(counted as in state_dict\(\)\)", failure)
    assert found, failure
    ranges = [part.split("-") for part in found.group(1).split(", ")]
    return [number for ends in ranges for number in range(int(ends[0]), int(ends[-1]) + 1)]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("scenario", SCENARIOS)
@HOW_MANY
def test_before_every_operation_on_tensors(device, scenario, name, most):
    """Copies of each run, each operation of the update, views and allocations."""
    case = Case(device, scenario, name)
    params, optimizer = case.fresh()
    with Operations() as operations:
        optimizer.step()
    assert_same(case.after, (params, optimizer))
    assert offload_stats(optimizer).num_chunks > (0 if name == "SGD" else 3)
    verdicts: Counter[str] = Counter()
    for number in spread(range(1, operations.count + 1), most):
        params, optimizer = case.fresh()
        kind = (RuntimeError, KeyboardInterrupt)[number % 2]
        try:
            with Operations(number, kind("boom")):
                optimizer.step()
        except kind as error:
            if str(error) != "boom":
                raise
        else:  # in the trial on meta tensors, which may fail
            assert kind is RuntimeError
            assert_same(case.after, (params, optimizer))
            continue
        verdicts[case.verdict(params, optimizer)] += 1
    assert verdicts["repeated"] > 0
    assert verdicts["refused"] > 0


#: Where an error is raised: class or module, function, what it does.
STAGES = {
    "slots": (pipeline, "allocate_slot"),
    "h2d": (pipeline.Pipeline, "copy_in"),
    "update": (stepper, "step_detached"),
    "d2h": (pipeline.Pipeline, "copy_out"),
    "d2h of new state": (pipeline.Pipeline, "_copy_born"),
    "handoff": (pipeline.Handoff, "take"),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_at_every_operation_of_the_schedule(device, monkeypatch, scenario, stage, when):
    case = Case(device, scenario)
    where, function = STAGES[stage]
    real = getattr(where, function)
    calls: list[int] = []
    target = 0

    def patched(*args):
        calls.append(1)
        if when == "before" and len(calls) == target:
            raise KeyboardInterrupt
        result = real(*args)
        if when == "after" and len(calls) == target:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(where, function, patched)
    case.fresh()[1].step()
    count = len(calls)
    if stage in ("slots", "h2d", "d2h") and scenario == "first":
        assert count == 0
    elif stage == "d2h of new state" and scenario == "later":
        assert count == 0
    else:
        assert count > 0
    for number in range(1, count + 1):
        params, optimizer = case.fresh()
        calls.clear()
        target = number
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        target = 0
        verdict = case.verdict(params, optimizer)
        if stage in ("slots", "h2d") and scenario == "later":
            assert verdict == "repeated" or stage == "h2d"


@pytest.mark.parametrize("scenario", [*SCENARIOS, "unknown sizes"])
@HOW_MANY
def test_at_every_line_of_the_package(monkeypatch, scenario, most):
    """Ctrl-C between any two lines, in the step's own cleaning up as well."""
    if scenario == "unknown sizes":  # host memory is only allocated after the first update
        monkeypatch.setattr(probe.StateProbe, "specs", lambda *_: None)
        scenario = "first"
    case = Case(CPU, scenario)
    params, optimizer = case.fresh()
    with Lines() as run:
        optimizer.step()
    assert_same(case.after, (params, optimizer))
    verdicts: Counter[str] = Counter()
    for spot in spread(picked(run.spots), most):
        params, optimizer = case.fresh()
        with Lines(stop_at=spot) as run:
            optimizer.step()
        verdicts[case.verdict(params, optimizer)] += run.stopped
    assert min(verdicts[name] for name in ("repeated", "refused", "whole")) > 0


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("number", [1, 3])
@HOW_MANY
def test_ctrl_c_while_an_error_is_handled(monkeypatch, scenario, number, most):
    """The second exception finds the first one's cleaning up half done."""
    case = Case(CPU, scenario)
    real = stepper.step_detached
    run: Lines
    calls: list[int] = []

    def step_detached(*args):
        calls.append(len(run.spots))
        if len(calls) >= number:
            raise RuntimeError("boom")
        return real(*args)

    monkeypatch.setattr(stepper, "step_detached", step_detached)
    for _ in range(2):  # what is cached is there from the second time on
        calls.clear()
        _, optimizer = case.fresh()
        with pytest.raises(RuntimeError, match="boom"), (run := Lines()):
            optimizer.step()
    handling = run.spots[calls[number - 1] :]
    assert len(handling) > 10
    verdicts: Counter[str] = Counter()
    # A mode of torch is entered and left by lines of Python that must not be torn apart.
    for spot in spread([s for s in handling if "replay" not in s.line[0]], most):
        params, optimizer = case.fresh()
        calls.clear()
        with (run := Lines(stop_at=spot)):
            optimizer.step()
        assert run.stopped
        with monkeypatch.context() as patch:
            patch.setattr(stepper, "step_detached", real)
            verdicts[case.verdict(params, optimizer)] += 1
    assert verdicts["refused"] > 0
    assert verdicts.keys() <= {"refused", "repeated"}


@HOW_MANY
def test_ctrl_c_while_exchanged_states_go_home(most):
    """Each one's place is where the other one's values are."""

    def start(config):
        params = make_params(CPU, shapes=[(8, 8)] * 3)
        optimizer = torch.optim.AdamW(params, lr=0.1)
        if config is not None:
            offload(optimizer, config)
        for step in range(2):
            set_grads(params, step)
            optimizer.step()
        state = optimizer.state
        state[params[0]], state[params[1]] = state[params[1]], state[params[0]]
        set_grads(params, 2)
        return params, optimizer

    plain = start(None)
    plain[1].step()
    params, optimizer = start(CONFIG)
    with Lines() as run:
        optimizer.step()
    assert_same(plain, (params, optimizer))
    spots = [spot for spot in picked(run.spots) if spot.line[2] in ("adopt", "receive")]
    assert len(spots) > 20
    for spot in spread(spots, most):
        params, optimizer = start(CONFIG)
        with Lines(stop_at=spot) as run:
            optimizer.step()
        assert run.stopped
        optimizer.step()
        assert_same(plain, (params, optimizer))


@pytest.mark.parametrize("place", ["pre-hook", "post-hook", "closure"])
def test_user_code_around_the_update_raises_as_in_plain(device, place):
    def run(config):
        params = make_params(device, shapes=SHAPES)
        optimizer = torch.optim.AdamW(params, lr=0.1)
        if config is not None:
            offload(optimizer, config)
        angry = True

        def raise_once(*_):
            nonlocal angry
            if angry:
                angry = False
                raise KeyboardInterrupt("boom")

        for step in range(4):
            set_grads(params, step)
            closure = None
            if step == 2:
                if place == "pre-hook":
                    optimizer.register_step_pre_hook(raise_once)
                elif place == "post-hook":
                    optimizer.register_step_post_hook(raise_once)
                else:
                    closure = raise_once
                with pytest.raises(KeyboardInterrupt, match="boom"):
                    optimizer.step(closure)
            optimizer.step()
        return params, optimizer

    assert_same(run(None), run(CONFIG))


@pytest.mark.parametrize("name", ["AdamW foreach", "AdamW for-loop", "AdamW fused"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_error_that_comes_again_and_again(device, monkeypatch, name, when):
    """The kind of error alone does not tell whether something had changed before it."""
    case = Case(device, "later", name)
    params, optimizer = case.fresh()
    real = stepper.step_detached

    def step_detached(*args):
        if when == "after":
            real(*args)
        raise ValueError("boom")

    with monkeypatch.context() as patch:
        patch.setattr(stepper, "step_detached", step_detached)
        with pytest.raises(ValueError, match="boom"):
            optimizer.step()
    assert case.verdict(params, optimizer) == ("repeated" if when == "before" else "refused")


@pytest.mark.parametrize("number", [1, 2, 5, 8])
def test_no_memory_for_new_state(device, monkeypatch, number):
    """The optimizer itself asks for it: harmless in the first chunk, half-way in later ones."""
    case = Case(device, "first")
    params, optimizer = case.fresh()
    real, calls = torch.zeros_like, []

    def zeros_like(source, **kwargs):
        if source.device.type == device.type and source.dim() > 0:
            calls.append(tuple(source.shape))
            if len(calls) >= number:
                raise torch.OutOfMemoryError("boom")
        return real(source, **kwargs)

    monkeypatch.setattr(torch, "zeros_like", zeros_like)
    with pytest.raises(torch.OutOfMemoryError, match="boom"):
        optimizer.step()
    monkeypatch.setattr(torch, "zeros_like", real)
    refusal = optimizer._offload_core.failure
    assert (refusal is None) == (number <= 2)
    if refusal:
        advice = "A smaller chunk_size or num_slots needs less memory on the device."
        assert advice in refusal.reason
    assert case.verdict(params, optimizer) == ("repeated" if number <= 2 else "refused")


def test_no_host_memory_for_new_state(monkeypatch):
    case = Case(CPU, "first")
    monkeypatch.setattr(probe.StateProbe, "specs", lambda *_: None)
    real, calls = host.HostStore.allocate, []

    def allocate(self, *args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise MemoryError("boom")
        return real(self, *args, **kwargs)

    params, optimizer = case.fresh()
    monkeypatch.setattr(host.HostStore, "allocate", allocate)
    with pytest.raises(MemoryError, match="boom"):
        optimizer.step()
    assert case.verdict(params, optimizer) == "refused"


def torn(case: Case, monkeypatch: pytest.MonkeyPatch, number: int = 3) -> Trained:
    params, optimizer = case.fresh()
    with monkeypatch.context() as patch:
        fail_at_chunk(patch, number)
        with pytest.raises(RuntimeError, match="boom"):
            optimizer.step()
    return params, optimizer


def test_the_message_tells_which_parameters(monkeypatch):
    params = make_params(CPU, shapes=[(4,)] * 8)
    optimizer = offload(torch.optim.AdamW(params), OffloadConfig(chunk_size=128))  # one each
    set_grads(params, 0, lambda index, _: index not in (2, 5))
    optimizer.step()
    fail_at_chunk(monkeypatch, 5)
    set_grads(params, 1, lambda index, _: index != 3)
    with pytest.raises(RuntimeError, match="boom"):
        optimizer.step()
    # New state first, so 2 and 5; then 0, 1 and 4, which may have been updated in part.
    message = (
        "an earlier optimizer step stopped half-way (RuntimeError: boom): parameters 0-2, 4-5 "
        "(counted as in state_dict()) were updated, those of the last chunk perhaps in part, and "
        "the others were not. Load a checkpoint of parameters and optimizer to go on."
    )
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    assert str(caught.value) == message


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_what_can_be_done_to_a_torn_optimizer(device, monkeypatch, scenario):
    case = Case(device, scenario)
    refused = {"match": r"stopped half-way \(RuntimeError: boom\)"}
    params, optimizer = torn(case, monkeypatch)
    warned = "not that of a whole step"

    # Nothing in flight: host state does not change any more.
    if device.type == "cuda":
        assert torch.cuda.current_stream().query()
    assert offload_stats(optimizer).step_s == 0.0
    optimizer.zero_grad()
    assert offload(optimizer, CONFIG) is optimizer
    set_grads(params, case.steps)
    with pytest.raises(RuntimeError, **refused):
        optimizer.step()

    clone_params, clone = copy.deepcopy((params, optimizer))
    set_grads(clone_params, case.steps)
    with pytest.raises(RuntimeError, **refused):
        clone.step()
    case.heal(clone_params, clone)

    with pytest.warns(UserWarning, match=warned):
        pickled = pickle.dumps(optimizer)
    assert type(pickle.loads(pickled)) is case.kind
    with pytest.warns(UserWarning, match=warned):
        torch.save(optimizer.state_dict(), io.BytesIO())

    # A load that is refused changes nothing, one that is not heals.
    with pytest.raises(ValueError, match="parameter groups"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    with pytest.raises(RuntimeError, **refused):
        optimizer.step()
    case.heal(params, optimizer)

    params, optimizer = torn(case, monkeypatch)
    with pytest.warns(UserWarning, match=warned):
        unoffload(optimizer)
    case.heal(params, optimizer)
    assert not is_offloaded(optimizer)

    params, optimizer = torn(case, monkeypatch)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3, device=device))]})
    with pytest.raises(RuntimeError, **refused):
        optimizer.step()


@pytest.mark.gpu
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("stage", ["h2d", "update", "d2h", "d2h of new state"])
def test_ctrl_c_with_copies_in_flight(monkeypatch, scenario, stage):
    """Each copy takes 10 ms, so that those issued before are still under way."""
    case = Case(torch.device("cuda"), scenario)
    where, function = STAGES[stage]
    verdicts: Counter[str] = Counter()
    for number in itertools.count(1):
        params, optimizer = case.fresh()
        torch.cuda.synchronize()
        with monkeypatch.context() as patch:
            slow_down(patch, "h2d", "d2h")
            slowed, calls = getattr(where, function), []

            def stop(*args, slowed=slowed, calls=calls, number=number):
                result = slowed(*args)
                calls.append(1)
                if len(calls) == number:
                    raise KeyboardInterrupt
                return result

            patch.setattr(where, function, stop)
            try:
                optimizer.step()
            except KeyboardInterrupt:
                pass
            else:
                break
            # All is still, and what the next allocations get is not written by anybody.
            before = [v.clone() for s in optimizer.state.values() for v in s.values()]
            scratch = [torch.full((512,), 7, dtype=torch.uint8, device="cuda") for _ in range(64)]
            torch.cuda.synchronize()
            after = [v for s in optimizer.state.values() for v in s.values()]
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
            assert all((t == 7).all() for t in scratch)
        verdicts[case.verdict(params, optimizer)] += 1
    stages = {"h2d", "update", "d2h"} if scenario == "later" else {"update", "d2h of new state"}
    assert bool(verdicts) == (stage in stages or scenario == "mixed")


@pytest.mark.gpu
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_host_reads_after_ctrl_c_twice(monkeypatch, scenario):
    """The second one comes before the first one's end has waited for the copies in flight."""
    case = Case(torch.device("cuda"), scenario)
    params, optimizer = case.fresh()
    torch.cuda.synchronize()

    calls: list[int] = []
    real_step, real_take = stepper.step_detached, pipeline.Handoff.take

    def step_detached(*args):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("boom")
        return real_step(*args)

    def take(self, stream):
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real_take(self, stream)

    def synchronize(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        slow_down(patch, "h2d", "d2h")
        patch.setattr(stepper, "step_detached", step_detached)
        patch.setattr(pipeline.Handoff, "take", take)
        patch.setattr(torch.accelerator, "synchronize", synchronize)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    early = [v.clone() for s in optimizer.state.values() for v in s.values()]
    torch.cuda.synchronize()
    late = [v for s in optimizer.state.values() for v in s.values()]
    assert all(torch.equal(a, b) for a, b in zip(early, late, strict=True))
    assert case.verdict(params, optimizer) == "refused"


def test_a_torn_optimizer_may_die(device, monkeypatch):
    case = Case(device, "mixed")
    for number in range(1, 5):
        _, optimizer = torn(case, monkeypatch, number)
        del optimizer


def next_step(trained: Trained) -> Trained:
    params, optimizer = trained
    set_grads(params, 9)
    optimizer.step()
    return params, optimizer


@pytest.mark.parametrize("from_disk", [True, False])
@HOW_MANY
def test_a_load_stops_at_every_line(from_disk, most):
    """Another checkpoint is loaded into a trained optimizer: the old state, the new, or refused."""
    case, other = Case(CPU, "later"), Case(CPU, "mixed")
    new = {"state_dict": other.checkpoint, "values": other.values}
    if from_disk:
        buffer = io.BytesIO()
        torch.save(new, buffer)
        buffer.seek(0)
        new = torch.load(buffer)

    def take(params):
        with torch.no_grad():
            for param, value in zip(params, new["values"], strict=True):
                param.copy_(value)

    old = next_step(case.before)
    loaded = next_step(other.before)
    params, optimizer = case.fresh()
    with Lines() as run:
        optimizer.load_state_dict(new["state_dict"])
    take(params)
    assert_same(loaded, next_step((params, optimizer)))
    verdicts: Counter[str] = Counter()
    for spot in spread(picked(run.spots), most):
        params, optimizer = case.fresh()
        with Lines(stop_at=spot) as run:
            optimizer.load_state_dict(new["state_dict"])
        assert run.stopped
        if optimizer._offload_core.failure is None:
            copied = copy.deepcopy((params, optimizer))
            if is_same(old, next_step(copied)):
                verdicts["old"] += 1
                continue
            verdicts["new"] += 1
        else:
            with pytest.raises(RuntimeError, match="Load a checkpoint"):
                optimizer.step()
            verdicts["refused"] += 1
            optimizer.load_state_dict(new["state_dict"])
        take(params)
        assert_same(loaded, next_step((params, optimizer)))
    assert min(verdicts[name] for name in ("old", "refused")) > 0


@pytest.mark.parametrize("function", [offload, unoffload, copy.deepcopy])
@HOW_MANY
def test_a_conversion_stops_at_every_line(function, most):
    """Converted or not, or in part: the numbers of the next steps are the same."""
    kwargs = {"steps": 2, "clip": None, "has_grad": None, "shapes": SHAPES}
    config = None if function is offload else CONFIG

    def step(params, optimizer):
        set_grads(params, 9)
        optimizer.step()
        return params, optimizer

    plain = step(*train(CPU, config=None, **kwargs))
    for _ in range(2):  # the trial of the class is remembered from the first to the second time
        optimizer = train(CPU, config=config, **kwargs)[1]
        with Lines() as run:
            function(optimizer)
    for spot in spread(picked(run.spots), most):
        params, optimizer = train(CPU, config=config, **kwargs)
        with Lines(stop_at=spot) as run:
            function(optimizer)
        assert run.stopped
        assert_same(plain, step(params, optimizer))
        # What was left in part can be done, and undone.
        for again in (offload, unoffload):
            again(optimizer)
        set_grads(params, 10)
        optimizer.step()
        assert optimizer.state[params[0]]["step"] == 4
        assert type(optimizer) is torch.optim.AdamW
