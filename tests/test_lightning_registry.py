"""The strategy's name in its four registries, and which class the package hands out."""

from __future__ import annotations

import importlib
from types import ModuleType, SimpleNamespace
from typing import Any

import lightning_cases as cases
import pytest

import lightning_offload
from lightning_offload import registry

CLASSES = {
    "lightning.pytorch": ("trainer_lightning", "OffloadOptimizerStrategy"),
    "pytorch_lightning": ("trainer_pytorch_lightning", "OffloadOptimizerStrategy"),
    "lightning.fabric": ("fabric_lightning", "OffloadOptimizerFabricStrategy"),
    "lightning_fabric": ("fabric_lightning_fabric", "OffloadOptimizerFabricStrategy"),
}


@pytest.mark.parametrize("package", CLASSES)
def test_registering_twice_changes_nothing(package: str) -> None:
    strategies = importlib.import_module(f"{package}.strategies")
    attribute = "StrategyRegistry" if package in cases.TRAINERS else "STRATEGY_REGISTRY"
    entry = getattr(strategies, attribute)["offload_optimizer"]
    registry.on_strategies(strategies)
    assert getattr(strategies, attribute)["offload_optimizer"] is entry
    assert entry["description"]


def test_a_reload_of_a_registry_does_not_lose_the_name() -> None:
    # in a process of its own: a reload leaves modules with an old registry behind
    code = (
        "import importlib, lightning.pytorch.strategies as strategies\n"
        "strategies = importlib.reload(strategies)\n"
        "assert 'offload_optimizer' in strategies.StrategyRegistry\n"
    )
    cases.succeed("-c", code)


def test_a_stranger_is_refused() -> None:
    with pytest.raises(ValueError, match="collections is not the strategies module of a Lightning"):
        registry.on_strategies(ModuleType("collections"))


@pytest.mark.parametrize("package", CLASSES)
def test_each_mirror_has_a_class_of_its_own_that_its_base_knows(package: str) -> None:
    module, name = CLASSES[package]
    cls = getattr(importlib.import_module(f"lightning_offload.{module}"), name)
    assert issubclass(cls, importlib.import_module(f"{package}.strategies").Strategy)
    assert (cls.__module__, cls.__qualname__) == (f"lightning_offload.{module}", name)


@pytest.mark.parametrize(
    ("imported", "name", "module"),
    [
        (["lightning.pytorch", "pytorch_lightning"], "OffloadOptimizerStrategy", 0),
        (["pytorch_lightning", "lightning"], "OffloadOptimizerStrategy", 1),
        ([], "OffloadOptimizerStrategy", 0),
        (["lightning.fabric", "lightning_fabric"], "OffloadOptimizerFabricStrategy", 2),
        (["lightning_fabric"], "OffloadOptimizerFabricStrategy", 3),
        ([], "OffloadOptimizerFabricStrategy", 2),
    ],
)
def test_the_package_hands_out_the_class_of_the_mirror_in_use(
    monkeypatch: pytest.MonkeyPatch, imported: list[str], name: str, module: int
) -> None:
    monkeypatch.setattr(registry, "sys", SimpleNamespace(modules=dict.fromkeys(imported)))
    expected = f"lightning_offload.{list(CLASSES.values())[module][0]}"
    assert getattr(lightning_offload, name).__module__ == expected


def test_without_lightning_the_class_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "sys", SimpleNamespace(modules={}))
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'torch-offload\[lightning\]'"):
        _ = lightning_offload.OffloadOptimizerStrategy


def test_other_names_are_missing_as_ever() -> None:
    module: Any = lightning_offload
    with pytest.raises(AttributeError, match="no attribute 'Strategy'"):
        _ = module.Strategy
