"""When chunks are updated under a Trainer: what it knows decides; a wrong choice is an error."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import lightning_cases as cases
import pytest
import torch
from lightning_rank_cases import class_of

import lightning_offload.strategy
from lightning_offload.overlap import Choice, Loop, Reader, choose
from torch_offload import offload_stats

pytestmark = cases.QUIET

CLIPS = Reader("it clips", True)
MAY_READ = Reader("it may read")


@pytest.fixture(params=cases.TRAINERS)
def pl(request: pytest.FixtureRequest) -> Any:
    return importlib.import_module(request.param)


# The decision alone


@pytest.mark.parametrize(
    ("wanted", "loop", "overlap", "reason"),
    [
        ("auto", Loop(), "backward", "nothing uses gradients"),
        ("auto", Loop((MAY_READ, CLIPS)), "forward", "it may read"),
        ("auto", Loop((CLIPS,)), "forward", "it clips"),
        ("auto", Loop((CLIPS,), is_compiled=True), "step", "it clips, and training_step is comp"),
        ("auto", Loop(is_compiled=True), "backward", "nothing uses gradients"),
        ("auto", Loop(is_manual=True), "step", "manual optimization"),
        ("step", Loop((CLIPS,)), "step", "as asked for"),
        ("forward", Loop((CLIPS,)), "forward", "as asked for"),
        ("backward", Loop((MAY_READ,)), "backward", "as asked for"),
        ("backward", Loop(is_manual=True), "backward", "as asked for"),
        ("forward", Loop(is_manual=True), "forward", "as asked for"),
    ],
    ids=str,
)
def test_choices(wanted: str, loop: Loop, overlap: str, reason: str) -> None:
    choice = choose(wanted, loop)
    assert choice.overlap == overlap
    assert choice.reason.startswith(reason)


@pytest.mark.parametrize(
    ("wanted", "loop", "message"),
    [
        ("backward", Loop((MAY_READ, CLIPS)), 'overlap="backward" cannot be used here: it clips'),
        ("forward", Loop(is_compiled=True), 'overlap="forward" cannot.*training_step is compiled'),
    ],
)
def test_what_cannot_be_is_an_error(wanted: str, loop: Loop, message: str) -> None:
    with pytest.raises(ValueError, match=message + '.*Use overlap="auto", or "step"'):
        choose(wanted, loop)


# What a Trainer knows. Each case: options of the Trainer, what is put on the module, callbacks.


class Case:
    """One way to use gradients before a step, or not to.

    Args:
        options: of the Trainer.
        hooks: methods of the LightningModule.
        callback: methods of a callback.
        build: makes options with the package.
    """

    def __init__(
        self,
        options: dict[str, Any] | None = None,
        hooks: dict[str, Any] | None = None,
        callback: dict[str, Any] | None = None,
        build: Callable[[Any], dict[str, Any]] | None = None,
    ) -> None:
        self.options = options or {}
        self.hooks, self.callback, self.build = hooks or {}, callback, build

    def module(self, pl: Any) -> Any:
        return type("Net", (type(cases.make_module(pl)),), self.hooks)()

    def trainer_options(self, pl: Any) -> dict[str, Any]:
        callbacks = [type("Reads", (pl.Callback,), self.callback)()] if self.callback else []
        more = self.build(pl) if self.build else {}
        base = {"gradient_clip_val": None, "accumulate_grad_batches": 1, "callbacks": callbacks}
        return {**base, **self.options, **more}


def halve(self: Any, *args: Any) -> None:
    """As a hook of a module: change gradients where parameters have them."""
    for param in self.parameters():
        if param.grad is not None:
            param.grad.mul_(0.5)


def halve_of(self: Any, trainer: Any, module: Any, *args: Any) -> None:
    """As a hook of a callback."""
    halve(module)


def clip_by_hand(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
    torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)


def step_every_other(
    self: Any, epoch: int, batch_index: int, optimizer: Any, closure: Any = None
) -> None:
    """As `optimizer_step` of a module: the closure runs always, the step sometimes."""
    if batch_index % 2:
        closure()
    else:
        optimizer.step(closure=closure)


def backward_twice(self: Any, loss: torch.Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


def keep_zeros(self: Any, epoch: int, batch_index: int, optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=False)


def own_precision(pl: Any) -> dict[str, Any]:
    class Mine(pl.plugins.precision.Precision):  # type: ignore[misc,name-defined]
        pass

    return {"plugins": Mine()}


def sum_of_gradients(self: Any, trainer: Any, module: Any, *args: Any) -> None:
    for param in module.parameters():
        if param.grad is not None:
            param.grad.sum().item()


FORWARD = {
    "gradient_clip_val": (Case({"gradient_clip_val": 0.05}), "gradient_clip_val=0.05 clips"),
    "clip by value": (
        Case({"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
        "gradient_clip_val=0.01 clips",
    ),
    "configure_gradient_clipping": (
        Case(hooks={"configure_gradient_clipping": clip_by_hand}),
        "Net has a configure_gradient_clipping of its own",
    ),
    "on_before_optimizer_step": (
        Case(hooks={"on_before_optimizer_step": halve}),
        "Net has a on_before_optimizer_step of its own",
    ),
    "on_after_backward": (
        Case(hooks={"on_after_backward": halve}),
        "Net has a on_after_backward of its own",
    ),
    "optimizer_step": (
        Case(hooks={"optimizer_step": step_every_other}),
        "Net has a optimizer_step of its own",
    ),
    "optimizer_zero_grad": (
        Case(hooks={"optimizer_zero_grad": keep_zeros}),
        "Net has a optimizer_zero_grad of its own",
    ),
    "backward": (Case(hooks={"backward": backward_twice}), "Net has a backward of its own"),
    "callback on_before_optimizer_step": (
        Case(callback={"on_before_optimizer_step": halve_of}),
        "Reads has on_before_optimizer_step",
    ),
    "callback on_after_backward": (
        Case(callback={"on_after_backward": halve_of}),
        "Reads has on_after_backward",
    ),
    "callback on_before_zero_grad": (
        Case(callback={"on_before_zero_grad": sum_of_gradients}),
        "Reads has on_before_zero_grad",
    ),
    "own precision plugin": (Case(build=own_precision), "Mine may use gradients"),
}
BACKWARD = {
    "nothing": Case(),
    "clip by zero": Case({"gradient_clip_val": 0}),
    "accumulation": Case({"accumulate_grad_batches": 4}),
    "bf16-mixed": Case({"precision": "bf16-mixed"}),
    "bf16-true": Case({"precision": "bf16-true"}),
    "reads nothing": Case(
        hooks={"on_train_batch_end": lambda self, *_: None},
        callback={"on_train_epoch_end": lambda self, *_: None},
    ),
}


def losses_and_state(pl: Any, strategy: Any, case: Case) -> tuple[Any, Any, list[int]]:
    early: list[int] = []
    losses: list[Any] = []

    class Note(pl.Callback):  # type: ignore[misc,name-defined]
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            losses.append(outputs["loss"])
            if hasattr(trainer.optimizers[0], "_offload_core"):
                early.append(offload_stats(trainer.optimizers[0]).num_early_chunks)

    options = case.trainer_options(pl)
    options["callbacks"] = [*options["callbacks"], Note()]
    trainer = cases.fit(pl, strategy, 3, module=case.module(pl), **options)
    return trainer, losses, early


def compare(pl: Any, case: Case, overlap: str = "auto") -> tuple[Any, list[int]]:
    plain, expected, _ = losses_and_state(pl, "auto", case)
    strategy = class_of(pl.__name__, "")(chunk_size=cases.CHUNK, overlap=overlap)
    ours, found, early = losses_and_state(pl, strategy, case)
    cases.assert_same(expected, found)
    cases.assert_same(cases.training_state(plain), cases.training_state(ours))
    return strategy, early


@pytest.mark.parametrize("name", FORWARD)
def test_beside_forward_where_something_uses_gradients(
    pl: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(lightning_offload.strategy, "rank_zero_info", lines.append)
    case, reason = FORWARD[name]
    strategy, early = compare(pl, case)
    assert strategy._choice.overlap == "forward"
    (line,) = lines
    assert f"overlap='forward' ({reason}" in line
    assert not any(early)


@pytest.mark.parametrize("name", BACKWARD)
def test_beside_backward_where_nothing_does(
    pl: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(lightning_offload.strategy, "rank_zero_info", lines.append)
    strategy, early = compare(pl, BACKWARD[name])
    assert strategy._choice.overlap == "backward"
    (line,) = lines
    assert "overlap='backward' (nothing uses gradients between backward and step)" in line
    assert early[-1] > 0


@pytest.mark.parametrize("overlap", ["step", "backward", "forward"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_each_overlap_can_be_asked_for(pl: Any, overlap: str, accumulate: int) -> None:
    # four of six batches, then two: the number that accumulates is not always the same
    strategy, early = compare(pl, Case({"accumulate_grad_batches": accumulate}), overlap)
    assert strategy._choice == Choice(overlap, "as asked for")
    assert (early[-1] > 0) == (overlap == "backward")


def test_a_schedule_of_accumulation(pl: Any) -> None:
    callback = pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 3, 2: 2})
    case = Case({"callbacks": [callback]})
    strategy, early = compare(pl, case)
    assert strategy._choice.overlap == "backward"
    assert early[-1] > 0


def test_manual_optimization_updates_in_the_step(pl: Any) -> None:
    def init(self: Any) -> None:
        super(type(self), self).__init__()
        self.automatic_optimization = False

    def training_step(self: Any, batch: torch.Tensor, batch_index: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            self.manual_backward(self.net(batch).square().mean())
        halve(self)
        optimizer.step()
        optimizer.zero_grad()

    case = Case(hooks={"__init__": init, "training_step": training_step})
    states = []
    for strategy in ("auto", class_of(pl.__name__, "")(chunk_size=cases.CHUNK)):
        trainer = cases.fit(pl, strategy, 2, module=case.module(pl), **case.trainer_options(pl))
        states.append(cases.training_state(trainer))
    cases.assert_same(*states)
    assert strategy._choice.overlap == "step"


@pytest.mark.parametrize("overlap", ["backward"])
def test_a_choice_that_cannot_be_is_an_error_before_the_fit(pl: Any, overlap: str) -> None:
    module = cases.make_module(pl)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    strategy = class_of(pl.__name__, "")(overlap=overlap)
    message = r'overlap="backward" cannot be used here: gradient_clip_val=0.05 clips gradients'
    with pytest.raises(ValueError, match=message):
        cases.fit(pl, strategy, 1, module=module)
    cases.assert_same(before, dict(module.state_dict()))


def test_a_comm_hook_and_a_scaler_are_no_place_for_backward(pl: Any) -> None:
    from lightning_offload.overlap import look

    strategy = class_of(pl.__name__, "DDP")(ddp_comm_hook=print)
    trainer = cases.make_trainer(pl, strategy, gradient_clip_val=None)
    loop = look(trainer, cases.make_module(pl), strategy)
    assert loop.readers == (Reader("ddp_comm_hook takes the one place for such a hook", True),)

    plugin = pl.plugins.precision.MixedPrecision("16-mixed", "cuda", scaler=object())
    strategy = class_of(pl.__name__, "")()
    trainer = cases.make_trainer(pl, strategy, gradient_clip_val=None, plugins=plugin)
    loop = look(trainer, cases.make_module(pl), strategy)
    assert loop.readers == (Reader("precision 16-mixed unscales gradients", True),)


def test_slurm_and_the_finder_of_batch_sizes_want_whole_steps(
    pl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning_offload.overlap import look

    fabric = "lightning.fabric" if pl.__name__ == "lightning.pytorch" else "lightning_fabric"
    environments = importlib.import_module(f"{fabric}.plugins.environments")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NODEID", "0")
    finder = pl.callbacks.BatchSizeFinder()
    strategy = class_of(pl.__name__, "")()
    trainer = cases.make_trainer(
        pl,
        strategy,
        gradient_clip_val=None,
        callbacks=[finder],
        plugins=environments.SLURMEnvironment(auto_requeue=True),
    )
    texts = [reader.text for reader in look(trainer, cases.make_module(pl), strategy).readers]
    assert texts == [
        "BatchSizeFinder goes on after a backward that ran out of memory",
        "SLURM may ask for a checkpoint in the middle of a backward",
    ]


def test_gradients_are_used_all_the_same_where_backward_was_asked_for(pl: Any) -> None:
    """Who asks for it vouches for the hooks; the core does not let them see used gradients."""
    case = Case(hooks={"on_after_backward": halve})
    strategy = class_of(pl.__name__, "")(chunk_size=cases.CHUNK, overlap="backward")
    with pytest.raises(RuntimeError, match="this gradient was used by the update during backward"):
        cases.fit(pl, strategy, 3, module=case.module(pl), **case.trainer_options(pl))
