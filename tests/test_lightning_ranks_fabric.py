"""Fabric on two processes (gloo, CPU): the bits of plain DDP and plain FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning_cases as cases
import pytest
from lightning_rank_cases import train_fabric_fsdp, train_with_fabric
from ranks import Ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks("cpu")
    yield started
    started.stop()


@pytest.mark.parametrize("package", cases.FABRICS)
@pytest.mark.parametrize(
    "wanted",
    [
        "offload_optimizer",
        "offload_optimizer_ddp",
        "optstate_host",
        ("DDP", {"overlap": "forward"}),
    ],
    ids=str,
)
def test_fabric_has_the_bits_of_ddp(ranks: Ranks, package: str, wanted: Any) -> None:
    plain, ours = (ranks(train_with_fabric, package, kind) for kind in ("ddp", wanted))
    for one, two in zip(plain, ours, strict=True):
        cases.assert_same(
            [one[k] for k in ("params", "state")], [two[k] for k in ("params", "state")]
        )
        assert two["is_offloaded"]
        assert two["strategy"] == "OffloadOptimizerFabricDDPStrategy"


@pytest.mark.parametrize("resumed_with", ["plain", "ours"])
@pytest.mark.parametrize("saved_with", ["plain", "ours"])
def test_fabric_resumes_from_either(
    ranks: Ranks, tmp_path: Path, saved_with: str, resumed_with: str
) -> None:
    kinds = {"plain": "ddp", "ours": "offload_optimizer"}
    path = str(tmp_path / "x.ckpt")
    saved = ranks(train_with_fabric, "lightning.fabric", kinds[saved_with], save=path)
    resumed = ranks(train_with_fabric, "lightning.fabric", kinds[resumed_with], load=path)
    for one, two in zip(saved, resumed, strict=True):
        cases.assert_same(
            [one[k] for k in ("params", "state")], [two[k] for k in ("params", "state")]
        )


@pytest.mark.parametrize("package", cases.FABRICS)
def test_fabric_has_the_bits_of_fsdp2(ranks: Ranks, tmp_path: Path, package: str) -> None:
    runs = [
        ranks(train_fabric_fsdp, package, name, str(tmp_path / name))
        for name in ("plain", "offload_optimizer_fsdp")
    ]
    for one, two in zip(*runs, strict=True):
        cases.assert_same([one["end"], one["middle"]], [two["end"], two["middle"]])
        assert two["is_offloaded"]
        assert not one["is_offloaded"]
