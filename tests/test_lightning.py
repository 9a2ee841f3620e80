"""The Trainer with `strategy="offload_optimizer"` does what it does without, bit for bit (CPU)."""

from __future__ import annotations

import importlib
import inspect
import pickle
from dataclasses import fields
from pathlib import Path
from typing import Any

import lightning_cases as cases
import pytest
import torch

import lightning_offload.strategy
import lightning_offload.trainer
from torch_offload import OffloadConfig, is_offloaded, offload, offload_stats

pytestmark = cases.QUIET


@pytest.fixture(params=cases.TRAINERS)
def pl(request: pytest.FixtureRequest) -> Any:
    return importlib.import_module(request.param)


@pytest.fixture
def strategy_class(pl: Any) -> Any:
    name = pl.__name__.split(".")[0]
    return importlib.import_module(f"lightning_offload.trainer_{name}").OffloadOptimizerStrategy


def plain_trainer(pl: Any, max_epochs: int = 2, **options: Any) -> Any:
    return cases.fit(pl, "auto", max_epochs, **options)


@pytest.mark.parametrize("flavour", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_a_fit_with_schedule_clipping_and_accumulation_has_the_bits_of_plain(
    pl: Any, strategy_class: Any, flavour: dict[str, bool]
) -> None:
    def build(net: Any) -> Any:
        return cases.make_optimizer(net, **flavour)

    plain = plain_trainer(pl, module=cases.make_module(pl, optimizer=build))
    strategy = strategy_class(chunk_size=cases.CHUNK, num_slots=2)
    ours = cases.fit(pl, strategy, 2, module=cases.make_module(pl, optimizer=build))

    (optimizer,) = ours.optimizers
    assert is_offloaded(optimizer)
    assert isinstance(optimizer, torch.optim.AdamW)
    # the last step went through the core although the scheduler was built on the plain optimizer
    assert offload_stats(optimizer).num_chunks > 2
    cases.assert_same(cases.training_state(plain), cases.training_state(ours))


def test_the_comparison_sees_another_number_of_steps(pl: Any) -> None:
    one, two = plain_trainer(pl, 1), plain_trainer(pl, 2)
    with pytest.raises(AssertionError):
        cases.assert_same(cases.training_state(one), cases.training_state(two))


def test_the_string_builds_the_class_with_default_configuration(
    pl: Any, strategy_class: Any
) -> None:
    trainer = cases.make_trainer(pl, "offload_optimizer")
    assert type(trainer.strategy) is strategy_class
    assert trainer.strategy.offload_config == OffloadConfig(overlap="auto")
    assert trainer.strategy.root_device == torch.device("cpu")
    assert trainer.world_size == 1


def test_the_environment_variable_builds_the_class(
    pl: Any, strategy_class: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PL_TRAINER_STRATEGY", "offload_optimizer")
    assert type(pl.Trainer(accelerator="cpu", logger=False).strategy) is strategy_class


@pytest.mark.parametrize("resumed_with", ["plain", "offload"])
@pytest.mark.parametrize("saved_with", ["plain", "offload"])
def test_a_checkpoint_continues_bit_exactly(
    pl: Any, strategy_class: Any, tmp_path: Path, saved_with: str, resumed_with: str
) -> None:
    def strategy(kind: str) -> Any:
        return "auto" if kind == "plain" else strategy_class(chunk_size=cases.CHUNK)

    class SaveFirstEpoch(pl.Callback):  # type: ignore[misc,name-defined]
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            if trainer.current_epoch == 0:
                assert trainer.global_step == 3
                trainer.save_checkpoint(tmp_path / "epoch=0.ckpt")

    whole = cases.fit(pl, strategy(saved_with), 2, callbacks=[SaveFirstEpoch()])
    resumed = cases.fit(pl, strategy(resumed_with), 2, ckpt_path=tmp_path / "epoch=0.ckpt")

    assert is_offloaded(resumed.optimizers[0]) is (resumed_with == "offload")
    cases.assert_same(cases.training_state(whole), cases.training_state(resumed))
    cases.assert_same(cases.training_state(plain_trainer(pl)), cases.training_state(resumed))


def test_a_checkpoint_file_is_plain_and_not_larger(
    pl: Any, strategy_class: Any, tmp_path: Path
) -> None:
    plain_trainer(pl).save_checkpoint(tmp_path / "plain.ckpt")
    ours = cases.fit(pl, strategy_class(chunk_size=cases.CHUNK), 2)
    ours.save_checkpoint(tmp_path / "ours.ckpt")

    sizes = [(tmp_path / f"{name}.ckpt").stat().st_size for name in ("plain", "ours")]
    assert abs(sizes[1] - sizes[0]) <= 0.01 * sizes[0]
    for key in ("state_dict", "optimizer_states", "lr_schedulers"):
        plain, loaded = (
            torch.load(tmp_path / f"{name}.ckpt", weights_only=True)[key]
            for name in ("plain", "ours")
        )
        cases.assert_same(plain, loaded)


def test_checkpoints_written_during_a_fit_are_those_of_their_step(
    pl: Any, strategy_class: Any, tmp_path: Path
) -> None:
    for name, strategy in (("plain", "auto"), ("ours", strategy_class(chunk_size=cases.CHUNK))):
        callback = pl.callbacks.ModelCheckpoint(
            tmp_path / name, filename="{step}", every_n_train_steps=2, save_top_k=-1
        )
        cases.fit(pl, strategy, 2, enable_checkpointing=True, callbacks=[callback])
    names = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert names == ["step=2.ckpt", "step=4.ckpt", "step=6.ckpt"]
    for name in names:
        plain, ours = (torch.load(tmp_path / side / name) for side in ("plain", "ours"))
        cases.assert_same(plain["optimizer_states"], ours["optimizer_states"])
        cases.assert_same(plain["state_dict"], ours["state_dict"])


# Where Lightning moves state. "meta" stands for the GPU: a tensor moved there has lost its data.


@pytest.fixture
def used_optimizer() -> torch.optim.Optimizer:
    net = cases.make_net()
    optimizer = cases.make_optimizer(net)
    net(cases.make_batches(1)[0]).mean().backward()
    optimizer.step()
    return optimizer


def connect(pl: Any, strategy: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Return a Trainer whose strategy has `optimizer`'s module and the root device "meta"."""
    trainer = cases.make_trainer(pl, strategy)
    module = cases.make_module(pl, optimizer=lambda net: [optimizer])
    module.trainer = trainer
    trainer.state.fn = pl.trainer.states.TrainerFn.FITTING
    trainer.strategy.connect(module)
    trainer.strategy._root_device = torch.device("meta")
    return trainer


def state_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{index}.{key}": value
        for index, state in optimizer.state_dict()["state"].items()
        for key, value in state.items()
        if key != "step"
    }


def test_setup_moves_the_state_of_a_plain_strategy(
    pl: Any, used_optimizer: torch.optim.Optimizer
) -> None:
    trainer = connect(pl, pl.strategies.SingleDeviceStrategy("cpu"), used_optimizer)
    trainer.strategy.setup(trainer)
    assert {t.device.type for t in state_tensors(used_optimizer).values()} == {"meta"}


@pytest.mark.parametrize("converted_before", [False, True])
def test_setup_leaves_present_state_where_it_is(
    pl: Any,
    strategy_class: Any,
    used_optimizer: torch.optim.Optimizer,
    converted_before: bool,
) -> None:
    strategy = strategy_class(chunk_size=cases.CHUNK)
    values = {k: t.clone() for k, t in state_tensors(used_optimizer).items()}
    if converted_before:
        offload(used_optimizer, strategy.offload_config)
    before = state_tensors(used_optimizer)
    trainer = connect(pl, strategy, used_optimizer)
    trainer.strategy.setup(trainer)

    after = state_tensors(used_optimizer)
    cases.assert_same(values, after)
    if converted_before:
        assert all(after[key] is before[key] for key in before)


def test_loading_fills_host_state_in_place(
    pl: Any, strategy_class: Any, used_optimizer: torch.optim.Optimizer
) -> None:
    trainer = connect(pl, strategy_class(chunk_size=cases.CHUNK), used_optimizer)
    trainer.strategy.setup(trainer)
    before = {key: tensor.data_ptr() for key, tensor in state_tensors(used_optimizer).items()}
    wanted = {key: torch.full_like(t, 0.25) for key, t in state_tensors(used_optimizer).items()}
    checkpoint = used_optimizer.state_dict()
    for index, state in checkpoint["state"].items():
        checkpoint["state"][index] = {k: wanted.get(f"{index}.{k}", v) for k, v in state.items()}
    trainer.strategy.load_optimizer_state_dict({"optimizer_states": [checkpoint]})

    after = state_tensors(used_optimizer)
    cases.assert_same(wanted, after)
    assert {key: tensor.data_ptr() for key, tensor in after.items()} == before


def test_teardown_waits_before_the_model_leaves_and_moves_nothing(
    pl: Any,
    strategy_class: Any,
    used_optimizer: torch.optim.Optimizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = connect(pl, strategy_class(chunk_size=cases.CHUNK), used_optimizer)
    trainer.strategy.setup(trainer)
    before = state_tensors(used_optimizer)
    events: list[Any] = []
    monkeypatch.setattr(lightning_offload.trainer, "finish", events.append)
    monkeypatch.setattr(trainer.lightning_module, "cpu", lambda: events.append("cpu"))
    trainer.strategy.teardown()

    assert events == [used_optimizer, "cpu"]
    after = state_tensors(used_optimizer)
    assert all(after[key] is before[key] for key in before)


# Ways to drive an optimizer


@pytest.mark.parametrize("use_pl_optimizer", [False, True])
def test_manual_optimization_goes_through_the_core(
    pl: Any, strategy_class: Any, use_pl_optimizer: bool
) -> None:
    def module() -> Any:
        base = type(cases.make_module(pl))

        class Manual(base):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.automatic_optimization = False

            def configure_optimizers(self) -> Any:
                first, second = self.net[:3], self.net[3:]
                return torch.optim.AdamW(first.parameters()), torch.optim.Adam(second.parameters())

            def training_step(self, batch: torch.Tensor, batch_index: int) -> None:
                optimizers = self.optimizers(use_pl_optimizer=use_pl_optimizer)
                loss = super().training_step(batch, batch_index)
                self.manual_backward(loss)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()

        return Manual()

    states = []
    for strategy in ("auto", strategy_class(chunk_size=cases.CHUNK)):
        trainer = cases.fit(
            pl, strategy, 1, module=module(), gradient_clip_val=None, accumulate_grad_batches=1
        )
        states.append(cases.training_state(trainer))
    assert all(offload_stats(o).num_chunks > 0 for o in trainer.optimizers)
    assert [type(o).__name__ for o in trainer.optimizers] == ["OffloadedAdamW", "OffloadedAdam"]
    cases.assert_same(*states)


def test_a_second_fit_goes_on_with_the_same_optimizer(pl: Any, strategy_class: Any) -> None:
    states = []
    for strategy in ("auto", strategy_class(chunk_size=cases.CHUNK)):
        net = cases.make_net()
        optimizer = cases.make_optimizer(net)
        module = cases.make_module(pl, net, optimizer=lambda _, built=optimizer: built)
        trainer = cases.fit(pl, strategy, 1, module=module)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, cases.make_loader())
        assert trainer.global_step == 6
        assert trainer.optimizers == [optimizer]
        states.append(cases.training_state(trainer))
    assert is_offloaded(optimizer)
    cases.assert_same(*states)


def test_lightnings_wrapper_shows_the_state(pl: Any, strategy_class: Any) -> None:
    seen: list[Any] = []

    class Look(pl.Callback):  # type: ignore[misc,name-defined]
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            wrapper = module.optimizers()
            assert wrapper.optimizer is trainer.optimizers[0]
            assert wrapper.param_groups is trainer.optimizers[0].param_groups
            seen.append({t for s in wrapper.state.values() for t in s})
            assert isinstance(wrapper, torch.optim.AdamW)

    cases.fit(
        pl, strategy_class(chunk_size=cases.CHUNK), 1, callbacks=[Look()], accumulate_grad_batches=1
    )
    assert seen == [{"step", "exp_avg", "exp_avg_sq"}] * 6


def test_a_module_without_optimizer_and_a_test_run_need_no_conversion(
    pl: Any, tmp_path: Path
) -> None:
    module = cases.make_module(pl, optimizer=lambda net: None)
    module.test_step = module.training_step
    with pytest.warns(UserWarning, match="this fit will run with no optimizer"):
        trainer = cases.fit(pl, "offload_optimizer", 1, module=module, gradient_clip_val=None)
    trainer.save_checkpoint(tmp_path / "none.ckpt")
    trainer.test(module, cases.make_loader(), verbose=False)


def test_one_line_says_that_offload_is_active(
    pl: Any, strategy_class: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(lightning_offload.strategy, "rank_zero_info", lines.append)
    cases.fit(pl, strategy_class(chunk_size="1MiB"), 1)
    assert lines == [
        "offload_optimizer: AdamW, overlap='forward' (gradient_clip_val=0.05 clips gradients). "
        "Parameters are on cpu, whose memory is the host's: offload is a pass-through there and "
        "saves nothing."
    ]


# Devices


def mocked_gpus(pl: Any, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    fabric = "lightning.fabric" if pl.__name__.startswith("lightning.") else "lightning_fabric"
    cuda = importlib.import_module(f"{fabric}.accelerators.cuda")
    monkeypatch.setattr(cuda, "num_cuda_devices", lambda: count)
    monkeypatch.setattr(cuda.CUDAAccelerator, "is_available", staticmethod(lambda: count > 0))
    trainer_cuda = importlib.import_module(f"{pl.__name__}.accelerators.cuda")
    monkeypatch.setattr(trainer_cuda, "num_cuda_devices", lambda: count)
    monkeypatch.setattr(
        trainer_cuda.CUDAAccelerator, "is_available", staticmethod(lambda: count > 0)
    )
    mps = importlib.import_module(f"{pl.__name__}.accelerators.mps")
    monkeypatch.setattr(mps.MPSAccelerator, "is_available", staticmethod(lambda: False))


@pytest.mark.parametrize(("devices", "index"), [([1], 1), ([0], 0), (1, 0), ("1,", 1)], ids=str)
def test_the_root_device_is_the_one_asked_for(
    pl: Any, monkeypatch: pytest.MonkeyPatch, devices: Any, index: int
) -> None:
    mocked_gpus(pl, monkeypatch, 2)
    trainer = pl.Trainer(
        strategy="offload_optimizer", accelerator="gpu", devices=devices, logger=False
    )
    assert trainer.strategy.root_device == torch.device("cuda", index)
    assert trainer.num_devices == 1


def test_every_trainer_gives_a_strategy_its_device(
    pl: Any, strategy_class: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mocked_gpus(pl, monkeypatch, 2)
    strategy = strategy_class()
    for index in (1, 0):
        pl.Trainer(strategy=strategy, accelerator="auto", devices=[index], logger=False)
        assert strategy.root_device == torch.device("cuda", index)


@pytest.mark.parametrize(
    ("options", "num_nodes"),
    [({"devices": 2}, 1), ({"devices": "auto"}, 1), ({"devices": [0, 1]}, 1), ({"devices": 1}, 2)],
    ids=str,
)
@pytest.mark.parametrize("given", ["name", "object"])
def test_with_several_devices_or_nodes_it_is_the_one_for_ddp(
    pl: Any,
    strategy_class: Any,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    num_nodes: int,
    given: str,
) -> None:
    mocked_gpus(pl, monkeypatch, 2)
    strategy = strategy_class(num_slots=4) if given == "object" else "offload_optimizer"
    options = {"accelerator": "gpu", "logger": False, "num_nodes": num_nodes, **options}
    trainer, plain = (
        pl.Trainer(strategy=kind, precision="bf16-mixed", **options) for kind in (strategy, "auto")
    )
    ours = trainer.strategy
    assert type(ours) is strategy_class.parallel_class
    assert isinstance(ours, pl.strategies.DDPStrategy)
    assert ours.offload_config == OffloadConfig(
        num_slots=4 if given == "object" else 3, overlap="auto"
    )
    assert trainer.world_size == plain.world_size == 2
    for name in ("parallel_devices", "num_nodes", "root_device", "_start_method"):
        assert getattr(ours, name) == getattr(plain.strategy, name), name
    assert type(ours.launcher) is type(plain.strategy.launcher)
    assert type(ours.cluster_environment) is type(plain.strategy.cluster_environment)
    assert type(ours.precision_plugin) is type(plain.strategy.precision_plugin)
    assert ours.precision_plugin is trainer.precision_plugin
    assert ours.accelerator is trainer.accelerator
    assert trainer._accelerator_connector.is_distributed


def test_at_a_prompt_processes_are_forked(
    pl: Any, strategy_class: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.ps1", ">>> ", raising=False)
    trainer = cases.make_trainer(pl, "offload_optimizer", devices=2)
    assert trainer.strategy._start_method == "fork"


def test_sync_batchnorm_is_handed_on(pl: Any) -> None:
    trainer = cases.make_trainer(pl, "offload_optimizer", devices=2, sync_batchnorm=True)
    assert type(trainer.strategy._layer_sync).__name__ == "TorchSyncBatchNorm"


# Bad input


def test_an_unsupported_optimizer_is_refused_at_setup(pl: Any) -> None:
    module = cases.make_module(pl, optimizer=lambda net: torch.optim.LBFGS(net.parameters()))
    with pytest.raises(NotImplementedError, match=r"LBFGS.step needs a closure"):
        cases.fit(pl, "offload_optimizer", 1, module=module)


def test_constructor_arguments_are_the_fields_of_the_configuration(strategy_class: Any) -> None:
    parameters = inspect.signature(strategy_class).parameters.values()
    assert {p.name: p.default for p in parameters} == {
        f.name: f.default for f in fields(OffloadConfig)
    } | {"overlap": "auto"}
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters)


def test_bad_arguments_name_themselves(strategy_class: Any) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'chunk_sise'"):
        strategy_class(chunk_sise="1MiB")
    with pytest.raises(ValueError, match="chunk_size='12 bananas' is not a size"):
        strategy_class(chunk_size="12 bananas")
    with pytest.raises(ValueError, match="num_slots=1"):
        strategy_class(num_slots=1)


def test_strategies_pickle(strategy_class: Any) -> None:
    strategy = pickle.loads(pickle.dumps(strategy_class(num_slots=4, overlap="step")))
    assert type(strategy) is strategy_class
    assert strategy.offload_config == OffloadConfig(num_slots=4)
