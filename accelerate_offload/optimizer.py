"""OffloadedOptimizer: the wrapper that ``Accelerator.prepare`` returns when offload is on."""

from __future__ import annotations

from typing import Any

from accelerate.optimizer import (  # type: ignore[import-untyped]
    AcceleratedOptimizer,
    move_to_device,
)
from accelerate.state import AcceleratorState, is_initialized  # type: ignore[import-untyped]
from accelerate.utils import DistributedType  # type: ignore[import-untyped]
from torch.optim import Optimizer

from torch_offload import OffloadConfig, is_offloaded, offload

from . import environment, report

_ONE_PROCESS_ONLY = (DistributedType.FSDP, DistributedType.XLA)
_OWN_OPTIMIZER = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


class OffloadedOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """Accelerate's wrapper around an optimizer whose state lives in host memory.

    ``Accelerator.prepare`` builds it by itself when ``ACCELERATE_OFFLOAD_OPTIMIZER`` is on. One
    that is built in code passes through ``prepare`` unchanged. A pickle of it holds the plain
    optimizer, and loads as an offloaded one again.

    Args:
        optimizer: the user's optimizer; converted in place by ``torch_offload.offload``.
        device_placement: as in ``AcceleratedOptimizer``, except that state stays on the host.
        scaler: the gradient scaler of fp16 mixed precision: ``accelerator.scaler``.
        config: how to offload. Default: what ``ACCELERATE_OFFLOAD_<FIELD>`` variables say, or
            nothing new for an optimizer that is already offloaded.

    Raises:
        ValueError: ``optimizer`` is already wrapped, there is no ``Accelerator`` yet, an fp16 run
            without ``scaler``, or a wrong variable.
        NotImplementedError: an optimizer or a kind of distributed run that is not supported.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        device_placement: bool = True,
        scaler: Any = None,
        config: OffloadConfig | None = None,
    ) -> None:
        _check(optimizer, scaler)
        name = type(optimizer).__name__.removeprefix("Offloaded")
        if config is None and not is_offloaded(optimizer):
            config = environment.config_from_environment()
        if config is not None:
            # Before the base class looks: with a scaler it keeps `optimizer.step` as it finds it.
            offload(optimizer, config)
        # Its device placement would copy all state to the device, so what else that does is ours.
        super().__init__(optimizer, device_placement=False, scaler=scaler)
        self.device_placement = device_placement
        if device_placement:
            self._place()
        self.offload_config = config
        self._is_accelerate_prepared = True
        report.active(name, config, is_main_process=self.accelerator_state.is_main_process)

    def _place(self) -> None:
        """Do what device placement does, with hyper-parameters that are tensors but no state."""
        state_dict = self.optimizer.state_dict()
        device = self.accelerator_state.device
        state_dict["param_groups"] = move_to_device(state_dict["param_groups"], device)
        self.optimizer.load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
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
    state = AcceleratorState()
    kind = state.distributed_type
    if kind in _OWN_OPTIMIZER:
        raise NotImplementedError(
            f"{kind.value} brings an optimizer and an offload of its own. Use its settings, and "
            f"unset {environment.SWITCH}."
        )
    if state.num_processes > 1 or kind in _ONE_PROCESS_ONLY:
        raise NotImplementedError(
            "Optimizer offload runs in one process on one device for now; this run is "
            f"{kind.value} with num_processes={state.num_processes}. Launch with "
            f"--num_processes 1, or unset {environment.SWITCH}."
        )
    if state.mixed_precision == "fp16" and state.device.type != "cpu" and scaler is None:
        raise ValueError(
            "mixed_precision='fp16' scales the gradients, and this wrapper would step them scaled: "
            "build it with scaler=accelerator.scaler, or give prepare() the bare optimizer."
        )
