"""Strategies of a Trainer for each number of devices, but for Lightning's own class behind them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

from torch_offload import OffloadConfig

from .devices import FSDPMixin, ParallelMixin, SingleDeviceMixin, StartMethod
from .trainer import OrdinaryStateMixin, TrainerMixin

#: What Lightning's ModelParallelStrategy takes. It looks for its own class only, not for a name.
_PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-true")


class TrainerSingleDevice(OrdinaryStateMixin, SingleDeviceMixin):
    """One device."""


class TrainerDDP(OrdinaryStateMixin, ParallelMixin):
    """Trains by DistributedDataParallel with optimizer state in host memory.

    Args:
        chunk_size: bytes of optimizer state that travel together, an int or ``"512MiB"``.
        num_slots: device buffers of one chunk each, at least 2.
        overlap: when chunks are updated: ``"step"``, ``"backward"``, ``"forward"`` or ``"auto"``.
        gpu_budget: state that stays on each device: bytes, ``"8GiB"``, ``"50%"`` or ``"auto"``.
        pin_memory: keep host state in page-locked memory.
        find_unused_parameters: see ``torch.nn.parallel.DistributedDataParallel``.
        gradient_as_bucket_view: the same.
        static_graph: the same.
        broadcast_buffers: the same.
        bucket_cap_mb: the same.
        ddp_comm_state: given to ``ddp_comm_hook``.
        ddp_comm_hook: exchanges gradients; then chunks cannot be updated beside backward.
        ddp_comm_wrapper: is put around it.
        model_averaging_period: steps between two averages of parameters, for post-local SGD.
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
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        model_averaging_period: int | None = None,
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
            ddp_comm_state=ddp_comm_state,
            ddp_comm_hook=ddp_comm_hook,
            ddp_comm_wrapper=ddp_comm_wrapper,
            model_averaging_period=model_averaging_period,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )


class TrainerFSDP(TrainerMixin, FSDPMixin):
    """Trains by FSDP2 with optimizer state in host memory.

    ``configure_model`` of the LightningModule calls ``fully_shard`` with
    ``self.device_mesh["data_parallel"]``, as for Lightning's ModelParallelStrategy.

    Args:
        chunk_size: bytes of optimizer state that travel together, an int or ``"512MiB"``.
        num_slots: device buffers of one chunk each, at least 2.
        overlap: when chunks are updated: ``"step"``, ``"backward"``, ``"forward"`` or ``"auto"``.
        gpu_budget: state that stays on each device: bytes, ``"8GiB"``, ``"50%"`` or ``"auto"``.
        pin_memory: keep host state in page-locked memory.
        data_parallel_size: devices among which parameters are sharded; ``"auto"`` for all that
            tensor parallelism leaves.
        tensor_parallel_size: devices that share one tensor; ``"auto"`` for those of a node.
        save_distributed_checkpoint: a folder with a file of each rank, instead of one file.
        process_group_backend: ``"nccl"`` or ``"gloo"``; by the device if ``None``.
        timeout: of collectives; torch's if ``None``.

    Raises:
        ValueError: a value is out of range, or the Trainer's precision is not supported.
    """

    def __init__(
        self,
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
            data_parallel_size=data_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )

    @property
    def precision_plugin(self) -> Any:
        """The Trainer's."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        if plugin is not None and plugin.precision not in _PRECISIONS:
            raise ValueError(
                f"precision={plugin.precision!r} is not supported with FSDP2. Use one of "
                f"{', '.join(_PRECISIONS)}."
            )
        super(TrainerFSDP, type(self)).precision_plugin.__set__(self, plugin)
