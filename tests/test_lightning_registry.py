"""The strategy's name in its four registries, and which class the package hands out."""

from __future__ import annotations

import importlib
import pickle
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


_KINDS = {
    "": ("", "SingleDeviceStrategy"),
    "_ddp": ("DDP", "DDPStrategy"),
    "_ddp_find_unused_parameters_true": ("DDP", "DDPStrategy"),
    "_ddp_spawn": ("DDP", "DDPStrategy"),
    "_fsdp": ("FSDP", "ModelParallelStrategy"),
}
NAMES = {
    f"{name}{suffix}": kind
    for name in ("offload_optimizer", "optstate_host")
    for suffix, kind in _KINDS.items()
}


@pytest.mark.parametrize("package", CLASSES)
def test_registering_twice_changes_nothing(package: str) -> None:
    strategies = importlib.import_module(f"{package}.strategies")
    attribute = "StrategyRegistry" if package in cases.TRAINERS else "STRATEGY_REGISTRY"
    before = dict(getattr(strategies, attribute))
    registry.on_strategies(strategies)
    assert dict(getattr(strategies, attribute)) == before
    names = {name for name in before if name.startswith(("offload_optimizer", "optstate_host"))}
    assert names == set(NAMES)
    assert all(before[name]["description"] for name in names)


@pytest.mark.parametrize("package", CLASSES)
@pytest.mark.parametrize("name", NAMES)
def test_each_name_builds_its_class(package: str, name: str) -> None:
    strategies = importlib.import_module(f"{package}.strategies")
    attribute = "StrategyRegistry" if package in cases.TRAINERS else "STRATEGY_REGISTRY"
    strategy = getattr(strategies, attribute).get(name)
    short, base = NAMES[name]
    module, class_name = CLASSES[package]
    assert type(strategy).__module__ == f"lightning_offload.{module}"
    assert type(strategy).__name__ == class_name.replace("Strategy", f"{short}Strategy")
    assert isinstance(strategy, getattr(strategies, base))
    assert getattr(strategy, "_start_method", "popen") == ("spawn" if "spawn" in name else "popen")
    unused = getattr(strategy, "_ddp_kwargs", {}).get("find_unused_parameters", False)
    assert unused == ("find_unused" in name)
    assert pickle.loads(pickle.dumps(strategy)).offload_config == strategy.offload_config


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
        (["pytorch_lightning"], "OffloadOptimizerDDPStrategy", 1),
        (["pytorch_lightning"], "OffloadOptimizerFSDPStrategy", 1),
        (["pytorch_lightning"], "OffloadMonitor", 1),
        (["lightning_fabric"], "OffloadOptimizerFabricDDPStrategy", 3),
        (["lightning.fabric"], "OffloadOptimizerFabricFSDPStrategy", 2),
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
