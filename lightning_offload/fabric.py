"""What a Fabric's strategy does around optimizers, for each number of devices.

Fabric does not know the user's loop: ``overlap="auto"`` is ``"step"``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from torch_offload import OffloadConfig

from .devices import FSDPMixin, ParallelMixin, SingleDeviceMixin, StartMethod
from .overlap import Choice
from .strategy import OffloadMixin

_AUTO = Choice("step", 'Fabric does not know the loop; "forward" and "backward" can be asked for')


class FabricMixin(OffloadMixin):
    """Converts optimizers when they are set up."""

    def setup_module(self, module: Any) -> Any:
        """Do what Lightning does, and remember the model for its optimizers."""
        module = super().setup_module(module)
        self.__dict__.setdefault("_modules", []).append(weakref.ref(module))
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Convert the optimizer in place and return it."""
        optimizer = super().setup_optimizer(optimizer)
        wanted = self.offload_config.overlap
        choice = _AUTO if wanted == "auto" else Choice(wanted, "as asked for")
        self._offload(optimizer, choice, self._model_of(optimizer))
        return optimizer

    def _model_of(self, optimizer: Optimizer) -> torch.nn.Module | None:
        own = {id(param) for group in optimizer.param_groups for param in group["params"]}
        references: list[weakref.ref[torch.nn.Module]] = self.__dict__.get("_modules", [])
        for reference in reversed(references):
            module = reference()
            if module is not None and own <= {id(param) for param in module.parameters()}:
                return module
        return None


class FabricSingleDevice(FabricMixin, SingleDeviceMixin):
    """One device."""


class FabricDDP(FabricMixin, ParallelMixin):
    """Trains by DistributedDataParallel with optimizer state in host memory.

    Args:
        chunk_size: bytes of optimizer state that travel together, an int or ``"512MiB"``.
        num_slots: device buffers of one chunk each, at least 2.
        overlap: when chunks are updated: ``"step"`` (as ``"auto"``), ``"backward"``, ``"forward"``.
        gpu_budget: state that stays on each device: bytes, ``"8GiB"``, ``"50%"`` or ``"auto"``.
        pin_memory: keep host state in page-locked memory.
        find_unused_parameters: see ``torch.nn.parallel.DistributedDataParallel``.
        gradient_as_bucket_view: the same.
        static_graph: the same.
        broadcast_buffers: the same.
        bucket_cap_mb: the same.
        process_group_backend: ``"nccl"`` or ``"gloo"``; by the device if ``None``.
        timeout: of collectives; torch's if ``None``.
        start_method: how processes are started that nobody else starts.

    Raises:
        ValueError: a value is out of range.
    """

    def __init__(
        self,
        *,
        chunk_size: int | str = OffloadConfig.chunk_size,
        num_slots: int = OffloadConfig.num_slots,
        overlap: str = "auto",
        gpu_budget: int | str = OffloadConfig.gpu_budget,
        pin_memory: bool = OffloadConfig.pin_memory,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        broadcast_buffers: bool = True,
        bucket_cap_mb: float | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        start_method: StartMethod = "popen",
    ) -> None:
        config = {
            "chunk_size": chunk_size,
            "num_slots": num_slots,
            "overlap": overlap,
            "gpu_budget": gpu_budget,
            "pin_memory": pin_memory,
        }
        self._make(
            config,
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            broadcast_buffers=broadcast_buffers,
            bucket_cap_mb=bucket_cap_mb,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )


class FabricFSDP(FabricMixin, FSDPMixin):
    """Trains by FSDP2 with optimizer state in host memory.

    Args:
        parallelize_fn: called with the module and the device mesh, returns the sharded module. By
            default a module without DTensor parameters is sharded as a whole.
        chunk_size: bytes of optimizer state that travel together, an int or ``"512MiB"``.
        num_slots: device buffers of one chunk each, at least 2.
        overlap: when chunks are updated: ``"step"`` (as ``"auto"``), ``"backward"``, ``"forward"``.
        gpu_budget: state that stays on each device: bytes, ``"8GiB"``, ``"50%"`` or ``"auto"``.
        pin_memory: keep host state in page-locked memory.
        data_parallel_size: devices among which parameters are sharded; ``"auto"`` for all that
            tensor parallelism leaves.
        tensor_parallel_size: devices that share one tensor; ``"auto"`` for those of a node.
        save_distributed_checkpoint: a folder with a file of each rank, instead of one file.
        process_group_backend: ``"nccl"`` or ``"gloo"``; by the device if ``None``.
        timeout: of collectives; torch's if ``None``.

    Raises:
        ValueError: a value is out of range.
    """

    def __init__(
        self,
        parallelize_fn: Callable[[Any, Any], torch.nn.Module] | None = None,
        *,
        chunk_size: int | str = OffloadConfig.chunk_size,
        num_slots: int = OffloadConfig.num_slots,
        overlap: str = "auto",
        gpu_budget: int | str = OffloadConfig.gpu_budget,
        pin_memory: bool = OffloadConfig.pin_memory,
        data_parallel_size: Literal["auto"] | int = "auto",
        tensor_parallel_size: Literal["auto"] | int = 1,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        config = {
            "chunk_size": chunk_size,
            "num_slots": num_slots,
            "overlap": overlap,
            "gpu_budget": gpu_budget,
            "pin_memory": pin_memory,
        }
        self._make(
            config,
            parallelize_fn=parallelize_fn or shard_whole,
            data_parallel_size=data_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )


def shard_whole(module: torch.nn.Module, mesh: Any) -> torch.nn.Module:
    """Shard a module by ``fully_shard``, unless something in it is sharded already."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    if not any(isinstance(param, DTensor) for param in module.parameters()):
        fully_shard(module, mesh=mesh["data_parallel"])
    return module
