"""Lightning on a GPU: the bits of plain in every precision, and state that stays on the host."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning_cases as cases
import pytest
import torch

from torch_offload import is_offloaded, offload_stats

pytestmark = [pytest.mark.gpu, *cases.QUIET]

MIB = 2**20
CHUNK = 4 * MIB
GPU = {"accelerator": "gpu", "devices": [0]}


@pytest.fixture(autouse=True)
def deterministic_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A bitwise comparison of two runs needs kernels that add in the same order."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def pl(request: pytest.FixtureRequest) -> Any:
    return importlib.import_module(request.param)


def offload_strategy(pl: Any, overlap: str = "auto") -> Any:
    name = pl.__name__.split(".")[0]
    module = importlib.import_module(f"lightning_offload.trainer_{name}")
    return module.OffloadOptimizerStrategy(chunk_size=CHUNK, overlap=overlap)


def fit(pl: Any, strategy: Any, *, flavour: dict[str, bool] | None = None, **options: Any) -> Any:
    def build(net: torch.nn.Module) -> torch.optim.Optimizer:
        return cases.make_optimizer(net, **(flavour or {}))

    module = cases.make_module(pl, cases.make_deep_net(), optimizer=build)
    return cases.fit(pl, strategy, 2, module=module, **(GPU | options))


def assert_pinned(optimizer: torch.optim.Optimizer) -> None:
    """Fail unless every moment is in page-locked host memory of its own."""
    moments = [
        (key, tensor)
        for state in optimizer.state.values()
        for key, tensor in state.items()
        if key != "step"
    ]
    assert moments
    for key, tensor in moments:
        assert tensor.device.type == "cpu", key
        assert tensor.is_pinned(), key


class SaveFirstEpoch:
    """Mix-in of a callback: write a checkpoint after three of six steps."""

    path: Path

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def save_first_epoch(pl: Any, path: Path) -> Any:
    callback = type("Save", (SaveFirstEpoch, pl.Callback), {"path": path})
    return callback()


@pytest.mark.parametrize(
    ("precision", "flavour"),
    [
        ("32-true", {}),
        ("32-true", {"fused": True}),
        ("bf16-mixed", {}),
        ("bf16-mixed", {"fused": True}),
        ("bf16-true", {}),
        ("bf16-true", {"fused": True}),
        pytest.param(
            "16-mixed",
            {},
            # plain says so too, when the scaler skips the first step
            marks=pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step"),
        ),
    ],
    ids=str,
)
def test_a_fit_with_schedule_clipping_and_accumulation_has_the_bits_of_plain(
    precision: str, flavour: dict[str, bool]
) -> None:
    pl = importlib.import_module("lightning.pytorch")
    # Lightning refuses to clip for an optimizer that could unscale gradients by itself
    clip = None if flavour and precision.endswith("mixed") else 0.05
    plain, control, ours = (
        fit(pl, strategy, flavour=flavour, precision=precision, gradient_clip_val=clip)
        for strategy in ("auto", "auto", offload_strategy(pl))
    )
    cases.assert_same(cases.training_state(plain), cases.training_state(control))
    assert is_offloaded(ours.optimizers[0])
    assert offload_stats(ours.optimizers[0]).num_chunks > 2
    cases.assert_same(cases.training_state(plain), cases.training_state(ours))
    assert_pinned(ours.optimizers[0])


def test_the_name_trains_on_the_gpu(pl: Any) -> None:
    """Lightning's own single-device strategy, given by name, would stay on the CPU and fail."""
    seen: list[Any] = []

    class Look(pl.Callback):  # type: ignore[misc,name-defined]
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            seen.extend(p.device for p in module.parameters())
            if trainer.global_step:
                assert_pinned(trainer.optimizers[0])

    fit(pl, "offload_optimizer", callbacks=[Look()])
    assert set(seen) == {torch.device("cuda", 0)}


@pytest.mark.multigpu
def test_devices_1_is_the_second_gpu() -> None:
    pl = importlib.import_module("lightning.pytorch")
    seen: list[Any] = []

    class Look(pl.Callback):  # type: ignore[misc,name-defined]
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            seen.extend(p.device for p in module.parameters())

    fit(pl, "offload_optimizer", callbacks=[Look()], devices=[1])
    assert set(seen) == {torch.device("cuda", 1)}


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("resumed_with", ["plain", "offload"])
@pytest.mark.parametrize("saved_with", ["plain", "offload"])
def test_a_checkpoint_continues_bit_exactly(
    tmp_path: Path, saved_with: str, resumed_with: str, precision: str
) -> None:
    pl = importlib.import_module("lightning.pytorch")

    def strategy(kind: str) -> Any:
        return "auto" if kind == "plain" else offload_strategy(pl)

    path = tmp_path / "epoch=0.ckpt"
    whole = fit(
        pl, strategy(saved_with), precision=precision, callbacks=[save_first_epoch(pl, path)]
    )
    resumed = fit(pl, strategy(resumed_with), precision=precision, ckpt_path=path)
    cases.assert_same(cases.training_state(whole), cases.training_state(resumed))
    if resumed_with == "offload":
        assert_pinned(resumed.optimizers[0])


def measured(run: Any) -> int:
    """Return the peak of GPU bytes that `run` allocates on top of what was there."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_a_resume_takes_no_more_memory_than_a_fresh_start_and_less_than_plain(
    tmp_path: Path,
) -> None:
    pl = importlib.import_module("lightning.pytorch")
    path = tmp_path / "epoch=0.ckpt"
    fit(pl, "auto", callbacks=[save_first_epoch(pl, path)])  # and workspaces are allocated now

    fresh = measured(lambda: fit(pl, offload_strategy(pl)))
    resumed = measured(lambda: fit(pl, offload_strategy(pl), ckpt_path=path))
    plain = measured(lambda: fit(pl, "auto"))
    assert resumed <= fresh
    # parameters, gradients and three slots of 4 MiB against four times the parameters (17 MiB)
    num_bytes = sum(p.numel() * 4 for p in cases.make_deep_net().parameters())
    assert fresh < plain - num_bytes, (fresh / MIB, plain / MIB, num_bytes / MIB)


def test_a_second_fit_leaves_the_state_of_the_first_on_the_host() -> None:
    pl = importlib.import_module("lightning.pytorch")

    def two_fits(strategy: Any, check: Any) -> dict[str, Any]:
        net = cases.make_deep_net()
        optimizer = cases.make_optimizer(net)
        module = cases.make_module(pl, net, optimizer=lambda _: optimizer)
        trainer = cases.fit(pl, strategy, 1, module=module, **GPU)
        check(optimizer)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, cases.make_loader())
        check(optimizer)
        return cases.training_state(trainer)

    addresses: list[list[int]] = []

    def on_host(optimizer: torch.optim.Optimizer) -> None:
        assert_pinned(optimizer)
        addresses.append([s["exp_avg"].data_ptr() for s in optimizer.state.values()])

    plain = two_fits("auto", lambda _: None)
    ours = two_fits(offload_strategy(pl), on_host)
    cases.assert_same(plain, ours)
    assert addresses[0] == addresses[1]


@pytest.mark.parametrize("overlap", ["step", "backward", "forward"])
def test_the_gpu_memory_is_given_back(overlap: str) -> None:
    pl = importlib.import_module("lightning.pytorch")
    fit(pl, offload_strategy(pl, overlap), gradient_clip_val=None)  # workspaces stay
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    trainer = fit(pl, offload_strategy(pl, overlap), gradient_clip_val=None)
    # Already while the Trainer and its optimizer live: teardown moves the model away.
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before
    del trainer
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_fabric_has_the_bits_of_plain_and_resumes(tmp_path: Path, precision: str) -> None:
    package = importlib.import_module("lightning.fabric")
    module = importlib.import_module("lightning_offload.fabric_lightning")

    def fresh(kind: str) -> dict[str, Any]:
        strategy = (
            "auto" if kind == "plain" else module.OffloadOptimizerFabricStrategy(chunk_size=CHUNK)
        )
        net = cases.make_deep_net()
        return cases.start_fabric(package, strategy, net=net, precision=precision, **GPU)

    def saved(run: dict[str, Any]) -> dict[str, Any]:
        return {key: run[key] for key in ("module", "optimizer", "schedule")}

    plain = cases.train_fabric(fresh("plain"), 6)
    control = cases.train_fabric(fresh("plain"), 6)
    ours = cases.train_fabric(fresh("offload"), 6)
    cases.assert_same(cases.fabric_state(plain), cases.fabric_state(control))
    cases.assert_same(cases.fabric_state(plain), cases.fabric_state(ours))
    assert_pinned(ours["user_optimizer"])

    for saved_with, resumed_with in (("plain", "offload"), ("offload", "plain")):
        first = cases.train_fabric(fresh(saved_with), 3)
        first["fabric"].save(tmp_path / "x.ckpt", saved(first))
        second = fresh(resumed_with)
        second["fabric"].load(tmp_path / "x.ckpt", saved(second))
        cases.train_fabric(second, 3, first=3)
        cases.assert_same(cases.fabric_state(plain), cases.fabric_state(second))
        if resumed_with == "offload":
            assert_pinned(second["user_optimizer"])
