"""The Trainer on two processes (gloo, CPU): the bits of plain DDP and plain FSDP2."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning_cases as cases
import pytest
import torch
from lightning_rank_cases import FSDP_CASE, PLAIN_FSDP, assert_equal, class_of, fit
from ranks import Ranks

pytestmark = cases.QUIET


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks("cpu")
    yield started
    started.stop()


@pytest.mark.parametrize("package", cases.TRAINERS)
@pytest.mark.parametrize(
    "name", ["offload_optimizer", "offload_optimizer_ddp", "optstate_host", "optstate_host_ddp"]
)
def test_the_names_have_the_bits_of_ddp(ranks: Ranks, package: str, name: str) -> None:
    plain, control, ours = (ranks(fit, package, kind) for kind in ("ddp", "ddp", name))
    assert_equal(plain, control)
    assert_equal(plain, ours)
    assert plain[0]["step"] == 6
    for rank in ours:
        assert rank["strategy"] == "OffloadOptimizerDDPStrategy"
        assert rank["world_size"] == 2
        assert rank["is_offloaded"]
    for a, b in zip(plain[0]["params"], plain[1]["params"], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("overlap", ["step", "backward", "forward", "auto"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_each_overlap_has_the_bits_of_ddp(ranks: Ranks, overlap: str, accumulate: int) -> None:
    case = {"gradient_clip_val": None, "accumulate_grad_batches": accumulate, "max_epochs": 4}
    plain = ranks(fit, "lightning.pytorch", "ddp", **case)
    ours = ranks(fit, "lightning.pytorch", ("DDP", {"overlap": overlap}), **case)
    assert_equal(plain, ours)
    for rank in ours:
        # the first step counts; from the third on updates are beside backward, whatever accumulates
        assert rank["overlap"] == ("backward" if overlap == "auto" else overlap)
        assert bool(rank["early"][-1]) == (overlap in ("backward", "auto"))


@pytest.mark.parametrize("resumed_with", ["plain", "ours"])
@pytest.mark.parametrize("saved_with", ["plain", "ours"])
def test_ddp_resumes_from_either(
    ranks: Ranks, tmp_path: Path, saved_with: str, resumed_with: str
) -> None:
    kinds = {"plain": "ddp", "ours": ("DDP", {})}
    path = str(tmp_path / "x.ckpt")
    case = {"gradient_clip_val": None, "accumulate_grad_batches": 1}
    saved = ranks(fit, "lightning.pytorch", kinds[saved_with], save=path, **case)
    resumed = ranks(fit, "lightning.pytorch", kinds[resumed_with], load=path, **case)
    for one, two in zip(saved, resumed, strict=True):
        for key in ("params", "state", "step"):
            cases.assert_same(one[key], two[key], key)
        assert two["is_offloaded"] == (resumed_with == "ours")


SETTINGS: dict[str, dict[str, Any]] = {
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
    "small buckets": {"bucket_cap_mb": 0.002},
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_settings_of_ddp_are_handed_on(ranks: Ranks, settings: str) -> None:
    case = {"gradient_clip_val": None, "accumulate_grad_batches": 1}
    plain = ranks(fit, "lightning.pytorch", "ddp", **case)
    ours = ranks(fit, "lightning.pytorch", ("DDP", SETTINGS[settings]), **case)
    assert_equal(plain, ours)
    assert all(rank["early"][-1] for rank in ours)


@pytest.mark.parametrize("package", cases.TRAINERS)
@pytest.mark.parametrize("clip", [None, 0.05])
def test_the_name_for_fsdp_has_the_bits_of_model_parallel(
    ranks: Ranks, package: str, clip: float | None
) -> None:
    case = {"shard": True, "gradient_clip_val": clip}
    plain, control = (ranks(fit, package, PLAIN_FSDP, **case) for _ in range(2))
    assert_equal(plain, control)
    for kind in ("offload_optimizer_fsdp", ("FSDP", {}), ("FSDP", {"overlap": "step"})):
        ours = ranks(fit, package, kind, **case)
        assert_equal(plain, ours)
        for rank in ours:
            assert rank["strategy"] == "OffloadOptimizerFSDPStrategy"
            assert rank["is_offloaded"]
            assert set(rank["devices"]) == {"cpu"}
        if isinstance(kind, str):
            assert rank["overlap"] == ("forward" if clip else "backward")
    sizes = [sum(p.numel() for p in rank["params"]) for rank in plain]
    assert sum(sizes) < 2 * sum(p.numel() for p in cases.make_net().parameters())


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("resumed_with", ["model parallel", "FSDP"])
@pytest.mark.parametrize("saved_with", ["model parallel", "FSDP"])
def test_fsdp_resumes_from_either(
    ranks: Ranks, tmp_path: Path, saved_with: str, resumed_with: str, distributed: bool
) -> None:
    path = str(tmp_path / "x.ckpt")
    kinds = [
        (short, {"save_distributed_checkpoint": distributed})
        for short in (saved_with, resumed_with)
    ]
    saved = ranks(fit, "lightning.pytorch", kinds[0], save=path, **FSDP_CASE)
    assert Path(path).is_dir() == distributed
    resumed = ranks(fit, "lightning.pytorch", kinds[1], load=path, **FSDP_CASE)
    for one, two in zip(saved, resumed, strict=True):
        for key in ("params", "state", "step"):
            cases.assert_same(one[key], two[key], key)
        assert two["is_offloaded"] == (resumed_with == "FSDP")


ALONE = """
import sys, torch
from lightning_rank_cases import FSDP_CASE, PLAIN_FSDP, fit

KINDS = {"plain": PLAIN_FSDP, "ours": ("FSDP", {})}

if __name__ == "__main__":
    *jobs, out = sys.argv[1:]
    found = [
        fit("lightning.pytorch", KINDS[job], devices=1, **{which: path}, **FSDP_CASE)
        for job, which, path in (job.split("=") for job in jobs)
    ]
    torch.save(found, out)
"""
KINDS = {"plain": PLAIN_FSDP, "ours": ("FSDP", {})}


@pytest.mark.slow
def test_fsdp_goes_on_with_another_number_of_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """Whatever saved and whatever resumes: with another world size all four have the same bits."""
    (tmp_path / "alone.py").write_text(ALONE)

    def alone(*jobs: str) -> list[Any]:
        out = str(tmp_path / "out.pt")
        cases.succeed(str(tmp_path / "alone.py"), *jobs, out)
        found: list[Any] = torch.load(out, weights_only=False)
        return found

    for kind in KINDS:
        path = str(tmp_path / f"two-{kind}")
        ranks(fit, "lightning.pytorch", KINDS[kind], save=path, **FSDP_CASE)
    shrunk = alone(*[f"{b}=load={tmp_path}/two-{a}" for a in KINDS for b in KINDS])
    for other in shrunk[1:]:
        assert_equal(shrunk[:1], [other])
    assert [run["is_offloaded"] for run in shrunk] == [False, True, False, True]

    alone(*[f"{kind}=save={tmp_path}/one-{kind}" for kind in KINDS])
    grown = [
        ranks(fit, "lightning.pytorch", KINDS[b], load=f"{tmp_path}/one-{a}", **FSDP_CASE)
        for a in KINDS
        for b in KINDS
    ]
    for other in grown[1:]:
        assert_equal(grown[0], other)


@pytest.mark.slow
@pytest.mark.parametrize("saved_by", ["ddp", "one device"])
def test_ddp_and_one_device_go_on_from_each_other(
    ranks: Ranks, tmp_path: Path, saved_by: str
) -> None:
    case = {"gradient_clip_val": None, "accumulate_grad_batches": 1}
    pl = importlib.import_module("lightning.pytorch")

    def one_device(kind: str, **paths: Any) -> Any:
        strategy = "auto" if kind == "plain" else class_of("lightning.pytorch", "")()
        save = paths.pop("save", None)
        trainer = cases.fit(pl, strategy, 1 if save else 2, **paths, **case)
        if save:
            trainer.save_checkpoint(save)
        return cases.training_state(trainer)

    def ddp(kind: str, **paths: Any) -> Any:
        return ranks(
            fit, "lightning.pytorch", {"plain": "ddp", "ours": ("DDP", {})}[kind], **paths, **case
        )

    first, second = (ddp, one_device) if saved_by == "ddp" else (one_device, ddp)
    key = "load" if saved_by == "one device" else "ckpt_path"
    results = []
    for saved_with in ("plain", "ours"):
        path = str(tmp_path / f"{saved_with}.ckpt")
        first(saved_with, save=path)
        results += [second(kind, **{key: path}) for kind in ("plain", "ours")]
    for other in results[1:]:
        if saved_by == "ddp":
            cases.assert_same(results[0], other)
        else:
            assert_equal(results[0], other)


@pytest.mark.parametrize("package", cases.TRAINERS)
def test_a_precision_that_fsdp2_lacks_is_refused(package: str) -> None:
    """Lightning looks for the class of the strategy, where a name is only a name."""
    pl = importlib.import_module(package)
    with pytest.raises(ValueError, match=r"precision='64-true' is not supported.*bf16-mixed"):
        cases.make_trainer(pl, "offload_optimizer_fsdp", precision="64-true")
    cases.make_trainer(pl, "offload_optimizer_fsdp", precision="bf16-true")
