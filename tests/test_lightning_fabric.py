"""Fabric with `strategy="offload_optimizer"` does what it does without, bit for bit (CPU)."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import lightning_cases as cases
import pytest
import torch

import lightning_offload.strategy
from torch_offload import OffloadConfig, is_offloaded, offload_stats

pytestmark = cases.QUIET


@pytest.fixture(params=cases.FABRICS)
def package(request: pytest.FixtureRequest) -> Any:
    return importlib.import_module(request.param)


@pytest.fixture
def strategy_class(package: Any) -> Any:
    suffix = "lightning" if package.__name__ == "lightning.fabric" else "lightning_fabric"
    module = importlib.import_module(f"lightning_offload.fabric_{suffix}")
    return module.OffloadOptimizerFabricStrategy


@pytest.mark.parametrize("jointly", [True, False])
def test_a_loop_with_schedule_clipping_and_accumulation_has_the_bits_of_plain(
    package: Any, strategy_class: Any, jointly: bool
) -> None:
    plain = cases.train_fabric(cases.start_fabric(package, "auto", jointly=jointly), 6)
    strategy = strategy_class(chunk_size=cases.CHUNK, num_slots=2)
    ours = cases.train_fabric(cases.start_fabric(package, strategy, jointly=jointly), 6)

    assert is_offloaded(ours["optimizer"])
    assert offload_stats(ours["optimizer"]).num_chunks > 2
    cases.assert_same(cases.fabric_state(plain), cases.fabric_state(ours))


def test_the_users_object_is_converted_and_wrapped_as_ever(
    package: Any, strategy_class: Any
) -> None:
    run = cases.train_fabric(cases.start_fabric(package, strategy_class(chunk_size=cases.CHUNK)), 1)
    wrapper, optimizer = run["optimizer"], run["user_optimizer"]
    assert wrapper.optimizer is optimizer
    assert run["schedule"].optimizer is optimizer
    assert isinstance(wrapper, torch.optim.AdamW)
    assert wrapper.param_groups is optimizer.param_groups
    assert {key for s in wrapper.state.values() for key in s} == {"step", "exp_avg", "exp_avg_sq"}


def test_a_closure_runs_once(package: Any, strategy_class: Any) -> None:
    losses = []
    for strategy in ("auto", strategy_class(chunk_size=cases.CHUNK)):
        run = cases.start_fabric(package, strategy)
        (batch,) = cases.make_batches(1)

        def closure(run: dict[str, Any] = run, batch: torch.Tensor = batch) -> torch.Tensor:
            loss = run["module"](batch).square().mean()
            run["fabric"].backward(loss)
            return loss

        losses.append([run["optimizer"].step(closure), cases.fabric_state(run)])
    cases.assert_same(*losses)


@pytest.mark.parametrize("resumed_with", ["plain", "offload"])
@pytest.mark.parametrize("saved_with", ["plain", "offload"])
def test_a_checkpoint_continues_bit_exactly(
    package: Any, strategy_class: Any, tmp_path: Path, saved_with: str, resumed_with: str
) -> None:
    def fresh(kind: str) -> dict[str, Any]:
        return cases.start_fabric(
            package, "auto" if kind == "plain" else strategy_class(chunk_size=cases.CHUNK)
        )

    def saved(run: dict[str, Any]) -> dict[str, Any]:
        return {key: run[key] for key in ("module", "optimizer", "schedule")}

    first = cases.train_fabric(fresh(saved_with), 3)
    first["fabric"].save(tmp_path / "x.ckpt", saved(first))
    second = fresh(resumed_with)
    second["fabric"].load(tmp_path / "x.ckpt", saved(second))
    cases.train_fabric(second, 3, first=3)

    assert is_offloaded(second["optimizer"]) is (resumed_with == "offload")
    cases.assert_same(
        cases.fabric_state(cases.train_fabric(fresh("plain"), 6)), cases.fabric_state(second)
    )


def test_a_checkpoint_file_is_not_larger(package: Any, strategy_class: Any, tmp_path: Path) -> None:
    sizes = []
    for strategy in ("auto", strategy_class(chunk_size=cases.CHUNK)):
        run = cases.train_fabric(cases.start_fabric(package, strategy), 1)
        run["fabric"].save(tmp_path / "x.ckpt", {"optimizer": run["optimizer"]})
        sizes.append((tmp_path / "x.ckpt").stat().st_size)
    assert abs(sizes[1] - sizes[0]) <= 0.01 * sizes[0]


def test_the_string_and_the_environment_variable_build_the_class(
    package: Any, strategy_class: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = cases.start_fabric(package, "offload_optimizer")
    assert type(run["fabric"].strategy) is strategy_class
    assert run["fabric"].strategy.offload_config == OffloadConfig(overlap="auto")
    monkeypatch.setenv("LT_STRATEGY", "offload_optimizer")
    assert type(package.Fabric(accelerator="cpu", devices=1).strategy) is strategy_class


def test_one_line_says_that_offload_is_active(
    package: Any, strategy_class: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(lightning_offload.strategy, "rank_zero_info", lines.append)
    run = cases.start_fabric(package, strategy_class(chunk_size="1MiB"))
    run["fabric"].setup_optimizers(cases.make_optimizer(cases.make_net()))
    assert lines == [
        "offload_optimizer: AdamW, overlap='step' (Fabric does not know the loop; \"forward\" and "
        '"backward" can be asked for). Parameters are on cpu, whose memory is the host\'s: offload '
        "is a pass-through there and saves nothing."
    ]


def mocked_gpus(package: Any, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    cuda = importlib.import_module(f"{package.__name__}.accelerators.cuda")
    monkeypatch.setattr(cuda, "num_cuda_devices", lambda: count)
    monkeypatch.setattr(cuda.CUDAAccelerator, "is_available", staticmethod(lambda: count > 0))


@pytest.mark.parametrize(("devices", "index"), [([1], 1), (1, 0)], ids=str)
def test_the_root_device_is_the_one_asked_for(
    package: Any, monkeypatch: pytest.MonkeyPatch, devices: Any, index: int
) -> None:
    mocked_gpus(package, monkeypatch, 2)
    fabric = package.Fabric(strategy="offload_optimizer", accelerator="cuda", devices=devices)
    assert fabric.device == torch.device("cuda", index)


@pytest.mark.parametrize(
    "options", [{"devices": 2}, {"devices": "auto"}, {"devices": 1, "num_nodes": 2}], ids=str
)
def test_with_several_devices_or_nodes_it_is_the_one_for_ddp(
    package: Any, strategy_class: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    mocked_gpus(package, monkeypatch, 2)
    fabric, plain = (
        package.Fabric(strategy=kind, accelerator="cuda", precision="bf16-mixed", **options)
        for kind in ("offload_optimizer", "ddp")
    )
    ours = fabric.strategy
    assert type(ours) is strategy_class.parallel_class
    assert ours.offload_config == OffloadConfig(overlap="auto")
    assert fabric.world_size == plain.world_size == 2
    for name in ("parallel_devices", "num_nodes", "root_device", "_start_method"):
        assert getattr(ours, name) == getattr(plain.strategy, name), name
    for name in ("launcher", "cluster_environment", "precision", "accelerator"):
        assert type(getattr(ours, name)) is type(getattr(plain.strategy, name)), name


def test_an_unsupported_optimizer_is_refused_at_setup(package: Any) -> None:
    fabric = package.Fabric(accelerator="cpu", devices=1, strategy="offload_optimizer")
    net = cases.make_net()
    with pytest.raises(NotImplementedError, match=r"LBFGS.step needs a closure"):
        fabric.setup(net, torch.optim.LBFGS(net.parameters()))
