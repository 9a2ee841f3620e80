"""OffloadedOptimizer: the wrapper that ``Accelerator.prepare`` returns when offload is on."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from accelerate.optimizer import (  # type: ignore[import-untyped]
    AcceleratedOptimizer,
    move_to_device,
)
from accelerate.state import AcceleratorState, is_initialized  # type: ignore[import-untyped]
from accelerate.utils import DistributedType  # type: ignore[import-untyped]
from torch.optim import Optimizer

from torch_offload import OffloadConfig, attach_model, is_offloaded, offload

from . import accelerator, environment, report

_OWN_OPTIMIZER = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


class OffloadedOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """Accelerate's wrapper around an optimizer whose state lives in host memory.

    ``Accelerator.prepare`` builds it by itself when ``ACCELERATE_OFFLOAD_OPTIMIZER`` is on. One
    that is built in code passes through ``prepare`` unchanged; where that variable says false it
    leaves its optimizer as it is. A pickle of it holds the plain optimizer, and loads as an
    offloaded one again.

    Args:
        optimizer: the user's optimizer; converted in place by ``torch_offload.offload``.
        device_placement: as in ``AcceleratedOptimizer``, except that state stays on the host.
        scaler: the gradient scaler of fp16 mixed precision: ``accelerator.scaler``.
        config: how to offload. Default: what ``ACCELERATE_OFFLOAD_<FIELD>`` variables say, or
            nothing new for an optimizer that is already offloaded. ``overlap`` is "auto" there
            by default.

    Raises:
        ValueError: ``optimizer`` is already wrapped, there is no ``Accelerator`` yet, an fp16 run
            without ``scaler`` or with ``overlap="backward"``, or a wrong variable.
        NotImplementedError: an optimizer or a kind of distributed run that is not supported.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        device_placement: bool = True,
        scaler: Any = None,
        config: OffloadConfig | None = None,
    ) -> None:
        self._models: Any = None
        if environment.refused() and not is_offloaded(optimizer):
            super().__init__(optimizer, device_placement=device_placement, scaler=scaler)
            self.offload_config = None
            self._is_accelerate_prepared = True
            report.switched_off("OffloadedOptimizer")
            return
        accelerator.extend(sys.modules["accelerate.accelerator"])  # if no hook could do it
        _check(optimizer, scaler)
        name = type(optimizer).__name__.removeprefix("Offloaded")
        if config is None and not is_offloaded(optimizer):
            config = environment.config_from_environment()
        if config is not None:
            _check_overlap(config, scaler)
            # Before the base class looks: with a scaler it keeps `optimizer.step` as it finds it.
            try:
                offload(optimizer, config)
            except NotImplementedError as error:
                text = f"{error} {environment.SWITCH}=false trains without offload."
                raise NotImplementedError(text) from error
        # Its device placement would copy all state to the device, so what else that does is ours.
        super().__init__(optimizer, device_placement=False, scaler=scaler)
        self.device_placement = device_placement
        if device_placement:
            self._place()
        self.offload_config = config
        self._is_accelerate_prepared = True
        report.active(name, config, is_main_process=self.accelerator_state.is_main_process)

    def attach_models(self, models: Sequence[torch.nn.Module]) -> None:
        """Say whose parameters these are, as ``torch_offload.attach_model`` does.

        Args:
            models: outermost modules, as training calls them; none for unknown.
        """
        if len(models) > 1:
            if self._models is None or list(self._models) != list(models):
                self._models = torch.nn.ModuleList(models)  # which the core holds weakly
            attach_model(self.optimizer, self._models)
        elif models:
            self._models = None
            attach_model(self.optimizer, models[0])

    def _place(self) -> None:
        """Do what device placement does, with hyper-parameters that are tensors but no state."""
        state_dict = self.optimizer.state_dict()
        device = self.accelerator_state.device
        state_dict["param_groups"] = move_to_device(state_dict["param_groups"], device)
        self.optimizer.load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        state["_models"] = None
        state["_offload_on_load"] = is_offloaded(self.optimizer)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A pickle holds the plain optimizer, a deepcopy one that is already offloaded.
        state = dict(state)
        if state.pop("_offload_on_load", False) and not is_offloaded(state["optimizer"]):
            offload(state["optimizer"], state["offload_config"])
        super().__setstate__(state)


def _check(optimizer: Optimizer, scaler: Any) -> None:
    """Refuse what would go wrong later, before the optimizer is touched."""
    if isinstance(optimizer, AcceleratedOptimizer):
        raise ValueError(
            f"The optimizer is already wrapped, in {type(optimizer).__name__}. Give prepare() the "
            "wrapper itself, or wrap the optimizer it holds: wrapper.optimizer."
        )
    if not is_initialized():
        raise ValueError(
            "OffloadedOptimizer needs an Accelerator: build `accelerator = Accelerator()` first."
        )
    if all(callable(getattr(optimizer, name, None)) for name in ("train", "eval")):
        raise NotImplementedError(
            f"{type(optimizer).__name__} has train() and eval(), which read its state outside of "
            "step(), where offload keeps it on the host. Use another optimizer (optim= of "
            f"TrainingArguments), or set {environment.SWITCH}=false."
        )
    state, switch = AcceleratorState(), environment.SWITCH
    kind = state.distributed_type
    if kind in _OWN_OPTIMIZER:
        raise NotImplementedError(
            f"{kind.value} brings an optimizer and an offload of its own. Use its settings, and "
            f"unset {switch}."
        )
    if kind is DistributedType.XLA:
        raise NotImplementedError(f"Optimizer offload does not run on XLA. Unset {switch}.")
    if kind is DistributedType.FSDP and state.fsdp_plugin.fsdp_version == 1:
        raise NotImplementedError(
            "Optimizer offload works with FSDP version 2, and this run has version 1, whose flat "
            f"parameters it cannot follow. Launch with --fsdp_version 2, or unset {switch}."
        )
    if getattr(getattr(state, "parallelism_config", None), "tp_enabled", False):
        raise NotImplementedError(
            "Optimizer offload does not follow the parameters that Accelerate exchanges for tensor "
            f"parallelism. Launch with --parallelism_config_tp_size 1, or unset {switch}."
        )
    if state.mixed_precision == "fp16" and state.device.type != "cpu" and scaler is None:
        raise ValueError(
            "mixed_precision='fp16' scales the gradients, and this wrapper would step them scaled: "
            "build it with scaler=accelerator.scaler, or give prepare() the bare optimizer."
        )


def _check_overlap(config: OffloadConfig, scaler: Any) -> None:
    if config.overlap == "backward" and scaler is not None:
        raise ValueError(
            'overlap="backward" updates parameters before mixed_precision="fp16" has unscaled '
            'their gradients. Use overlap="forward", "step" or "auto", or bf16.'
        )
