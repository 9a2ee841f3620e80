"""The demo's decoder under a Trainer on GPUs: each name and overlap has the bits of plain.

In between there are a validation, a checkpoint and a resume.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning_cases as cases
import pytest
import torch
from lightning_place_cases import SaveFirstEpoch
from lightning_rank_cases import PLAIN_FSDP, assert_equal, fit
from ranks import Ranks

from lightning_offload import (
    OffloadMonitor,
    OffloadOptimizerDDPStrategy,
    OffloadOptimizerFSDPStrategy,
    OffloadOptimizerStrategy,
)
from torch_offload import is_offloaded, offload_stats

pytestmark = [
    pytest.mark.gpu,
    *cases.QUIET,
    # Plain DDP under a Trainer that validates first, with torch 2.11.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match"),
]

MIB = 2**20
CHUNK = 2 * MIB


@pytest.fixture(autouse=True)
def deterministic_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A bitwise comparison of two runs needs kernels that add in the same order."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(autouse=True)
def no_group_stays() -> Iterator[None]:
    """Strategies for several devices make a process group, also for one."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(cases.ROOT / "examples"))
    yield importlib.import_module("decoder")
    sys.modules.pop("decoder", None)


def make_module(pl: Any, decoder: Any, *, shard: bool = False) -> Any:
    size = decoder.Size(
        hidden=256, layers=4, heads=4, context=64, batch=4, steps=0, lr=1e-3, checkpointing=True
    )

    class Lit(pl.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.model = decoder.Decoder(size)
            self.losses: list[torch.Tensor] = []

        def configure_model(self) -> None:
            from torch.distributed.fsdp import fully_shard

            if shard and not hasattr(self.model.head.weight, "to_local"):
                for block in self.model.blocks:
                    fully_shard(block, mesh=self.device_mesh["data_parallel"])
                fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: torch.Tensor, batch_index: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(batch)
            self.losses.append(loss.detach())
            return loss

        def validation_step(self, batch: torch.Tensor, batch_index: int) -> None:
            self.losses.append(self.model(batch).detach())

        def configure_optimizers(self) -> Any:
            built = torch.optim.AdamW(self.parameters(), lr=size.lr)
            return {"optimizer": built, "lr_scheduler": cases.make_scheduler(built)}

    return Lit()


def run(
    decoder: Any,
    strategy: Any,
    *,
    shard: bool = False,
    save: Path | None = None,
    load: Path | None = None,
    **options: Any,
) -> tuple[Any, dict[str, Any]]:
    """Train two epochs of six batches; return the Trainer and all that must be equal."""
    pl = importlib.import_module("lightning.pytorch")
    generator = torch.Generator().manual_seed(2)
    batches = [torch.randint(256, (4, 65), generator=generator) for _ in range(6)]
    loader = torch.utils.data.DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    callbacks = [SaveFirstEpoch(save)] if save else []
    defaults: dict[str, Any] = {
        "accelerator": "gpu",
        "devices": 1,
        "precision": "bf16-mixed",
        "gradient_clip_val": None,
        "callbacks": [*callbacks, *options.pop("callbacks", [])],
        "val_check_interval": 3,
        "use_distributed_sampler": False,  # it shuffles, in another order after a resume
    }
    trainer = cases.make_trainer(pl, strategy, 2, **(defaults | options))
    module = make_module(pl, decoder, shard=shard)
    trainer.fit(module, loader, loader, ckpt_path=load)
    (optimizer,) = trainer.optimizers
    found = {
        "losses": torch.stack(module.losses).cpu(),
        "params": [own(p) for p in module.parameters()],
        "state": [{k: own(v) for k, v in s.items()} for s in optimizer.state.values()],
    }
    return trainer, found


def own(tensor: torch.Tensor) -> torch.Tensor:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach().cpu().clone()


def assert_pinned(optimizer: Any) -> None:
    for state in optimizer.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            moment = state[key]
            local = moment.to_local() if hasattr(moment, "to_local") else moment
            assert local.is_pinned()


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_each_overlap_has_the_bits_of_plain(
    decoder: Any, accumulate: int, clip: float | None
) -> None:
    options = {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip}
    _, plain = run(decoder, "auto", **options)
    _, control = run(decoder, "auto", **options)
    cases.assert_same(plain, control)
    modes = ["auto", "step", "forward"] if clip else ["auto", "step", "forward", "backward"]
    for overlap in modes:
        strategy = OffloadOptimizerStrategy(chunk_size=CHUNK, overlap=overlap)
        trainer, found = run(decoder, strategy, **options)
        cases.assert_same(plain, found, overlap)
        assert_pinned(trainer.optimizers[0])
        stats = offload_stats(trainer.optimizers[0])
        chosen = strategy._choice.overlap
        assert chosen == (overlap if overlap != "auto" else "forward" if clip else "backward")
        assert stats.num_chunks > 2
        assert (stats.num_early_chunks > 0) == (chosen == "backward")


NAMES: dict[str, tuple[Any, bool]] = {
    "offload_optimizer": ("auto", False),
    "offload_optimizer_ddp": ("ddp", False),
    "offload_optimizer_fsdp": (None, True),
}


@pytest.mark.parametrize("name", NAMES)
def test_each_name_has_the_bits_of_plain_with_a_resume(
    decoder: Any, name: str, tmp_path: Path
) -> None:
    from lightning.pytorch.strategies import ModelParallelStrategy

    plain_strategy, shard = NAMES[name]

    def plain() -> Any:
        return plain_strategy or ModelParallelStrategy(1, 1)

    _, expected = run(decoder, plain(), shard=shard, save=tmp_path / "plain.ckpt")
    _, control = run(decoder, plain(), shard=shard)
    cases.assert_same(expected, control)
    trainer, found = run(decoder, name, shard=shard, save=tmp_path / "ours.ckpt")
    assert is_offloaded(trainer.optimizers[0])
    assert trainer.strategy._choice.overlap == "backward"
    cases.assert_same(expected, found)
    for saved in ("plain", "ours"):
        for strategy in (plain(), name):
            trainer, resumed = run(decoder, strategy, shard=shard, load=tmp_path / f"{saved}.ckpt")
            for key in ("params", "state"):
                cases.assert_same(expected[key], resumed[key], f"{saved} {strategy} {key}")
            if strategy == name:
                assert_pinned(trainer.optimizers[0])


def measured(call: Any) -> int:
    """Return the peak of GPU bytes that ``call`` allocates on top of what was there."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_beside_backward_gradients_take_no_memory_and_resumes_no_more(
    decoder: Any, tmp_path: Path
) -> None:
    path = tmp_path / "x.ckpt"
    options = {"accumulate_grad_batches": 1, "precision": "32-true"}
    run(decoder, "auto", save=path, **options)  # and workspaces are allocated now
    num_bytes = sum(
        p.numel() * 4
        for p in make_module(importlib.import_module("lightning.pytorch"), decoder).parameters()
    )
    peaks = {
        (overlap, load): measured(
            lambda overlap=overlap, load=load: run(
                decoder,
                OffloadOptimizerStrategy(chunk_size=MIB // 2, num_slots=2, overlap=overlap),
                load=path if load else None,
                **options,
            )
        )
        for overlap in ("step", "backward", "forward")
        for load in (False, True)
    }
    plain = measured(lambda: run(decoder, "auto", **options))
    for (overlap, load), peak in peaks.items():
        # two moments of a parameter, of four times its bytes in all
        assert peak < plain - num_bytes, (overlap, load, peak / MIB, plain / MIB)
        assert peak <= peaks[overlap, False] + MIB // 2, (overlap, load)


def test_the_monitor_tells_of_the_gpu(decoder: Any) -> None:
    strategy = OffloadOptimizerStrategy(chunk_size=CHUNK)
    monitor = OffloadMonitor(every_n_steps=1)
    trainer, _ = run(decoder, strategy, callbacks=[monitor])
    figures = trainer.callback_metrics
    assert figures["offload/peak_gpu_bytes"] > 0
    assert figures["offload/step_s"] > 0
    assert figures["offload/h2d_bytes"] == figures["offload/d2h_bytes"] > 0


def test_a_gradient_scaler_has_the_bits_of_plain(decoder: Any) -> None:
    options = {"precision": "16-mixed", "accumulate_grad_batches": 1}
    _, plain = run(decoder, "auto", **options)
    strategy = OffloadOptimizerStrategy(chunk_size=CHUNK)
    _, found = run(decoder, strategy, **options)
    assert strategy._choice.overlap == "forward"
    cases.assert_same(plain, found)


def test_fsdp1_with_an_offloaded_optimizer_is_refused(decoder: Any) -> None:
    pl = importlib.import_module("lightning.pytorch")
    module = make_module(pl, decoder)
    from torch_offload import offload

    plain = module.configure_optimizers
    module.configure_optimizers = lambda: offload(plain()["optimizer"])
    trainer = cases.make_trainer(pl, "fsdp", accelerator="gpu", devices=1, gradient_clip_val=None)
    with pytest.raises(NotImplementedError, match=r"FSDP1.*offload_optimizer_fsdp"):
        trainer.fit(module, cases.make_loader(), cases.make_loader())


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks("cuda")
    yield started
    started.stop()


@pytest.mark.multigpu
@pytest.mark.parametrize("name", ["offload_optimizer", "offload_optimizer_ddp"])
@pytest.mark.parametrize("overlap", ["step", "backward", "forward", "auto"])
def test_two_gpus_have_the_bits_of_ddp(ranks: Ranks, name: str, overlap: str) -> None:
    case = {"accelerator": "gpu", "gradient_clip_val": None, "max_epochs": 3}
    plain, control = (ranks(fit, "lightning.pytorch", "ddp", **case) for _ in range(2))
    assert_equal(plain, control)
    wanted = name if overlap == "auto" else ("DDP", {"overlap": overlap})
    ours = ranks(fit, "lightning.pytorch", wanted, **case)
    assert_equal(plain, ours)
    for rank in ours:
        assert set(rank["devices"]) == {"cpu"}
        assert rank["strategy"] == OffloadOptimizerDDPStrategy.__name__


@pytest.mark.multigpu
@pytest.mark.parametrize("clip", [None, 0.05])
def test_two_gpus_have_the_bits_of_fsdp2(ranks: Ranks, clip: float | None, tmp_path: Path) -> None:
    case: dict[str, Any] = {
        "accelerator": "gpu",
        "shard": True,
        "gradient_clip_val": clip,
        "accumulate_grad_batches": 1,
    }
    path = str(tmp_path / "x.ckpt")
    plain, control = (ranks(fit, "lightning.pytorch", PLAIN_FSDP, **case) for _ in range(2))
    assert_equal(plain, control)
    ours = ranks(fit, "lightning.pytorch", "offload_optimizer_fsdp", save=path, **case)
    assert_equal(plain, ours)
    resumed = ranks(fit, "lightning.pytorch", "offload_optimizer_fsdp", load=path, **case)
    for one, two in zip(ours, resumed, strict=True):
        cases.assert_same([one["params"], one["state"]], [two["params"], two["state"]])
        assert two["strategy"] == OffloadOptimizerFSDPStrategy.__name__
