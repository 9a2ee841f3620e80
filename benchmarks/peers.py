"""What else trains a model whose optimizer state does not fit, each behind the same steps.

A *peer* is a way to train `bench_train.py`'s model by another library or scheme. Its class builds
the same model from the same seed, converts it, and has the same `step`. What a peer cannot do here
is an `UnsupportedError` with the reason.
"""

from __future__ import annotations

import importlib
import os
import time
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from bench_train import ADAMW, Training
from measuring import Hash, Laps, synchronize
from record import Record
from schemes import ChunkedPerTensor, pinned_state
from torch_offload.memory import available_host_bytes
from torch_offload.recording import Timeline
from train_modes import Mode, UnsupportedError
from train_plan import Batch, Plan
from transformer import build

#: Of the per-tensor scheme.
CHUNK_BYTES, NUM_SLOTS = 2**30, 2


class Counted(Training):
    """Counts the host memory that a way of training takes, by what is free before and after."""

    def __init__(self, plan: Plan, mode: Mode, device: torch.device) -> None:
        self.free_before = available_host_bytes()
        super().__init__(plan, mode, device)

    def measure(self, tokens: int, hashed: Hash) -> Record:
        """Train. Adds ``host_used_bytes``, ``None`` where it cannot be told."""
        point = super().measure(tokens, hashed)
        free = available_host_bytes()
        known = free is not None and self.free_before is not None
        point["host_used_bytes"] = max(self.free_before - free, 0) if known else None
        return point


class Peer(Counted):
    """A peer: :meth:`convert` is what differs, and sometimes :meth:`step`."""

    #: What must be importable.
    package: str | None = None
    needs_gpu = True
    #: What a reader of the table must know.
    note = ""

    def __init__(self, plan: Plan, mode: Mode, device: torch.device) -> None:
        self.plan, self.mode, self.device = plan, mode, device
        if self.needs_gpu and device.type != "cuda":
            raise UnsupportedError(f"{mode.name} needs a GPU.")
        if self.package is not None:
            try:
                importlib.import_module(self.package)
            except Exception as error:  # a broken install fails in its own ways
                raise UnsupportedError(
                    f"{self.package} cannot be imported: {type(error).__name__}: {error}"
                ) from error
        self.settings: Record = {}
        self.last_microbatch = nullcontext
        self.prepare()
        self.free_before = available_host_bytes()
        began = time.perf_counter()
        self.model = build(plan.size, plan.sequence, device, plan.seed)
        self.params = list(self.model.parameters())
        synchronize(device)
        self.build_s = time.perf_counter() - began
        self.optimizer: Any = self.convert()
        self.settings["note"] = self.note
        synchronize(device)
        self.convert_s = time.perf_counter() - began - self.build_s

    def prepare(self) -> None:
        """Do what a machine needs once; it is not timed."""

    def convert(self) -> Any:
        """Return what has ``step`` and ``zero_grad``."""
        raise NotImplementedError


class PerTensor(Peer):
    """Chunks through two slots, one copy for each tensor of state."""

    needs_gpu = False
    note = f"{CHUNK_BYTES // 2**20} MiB chunks, {NUM_SLOTS} slots, torch's pinned memory"

    def convert(self) -> Any:
        """Return the scheme that `bench_step.py` measures, too."""
        host = pinned_state(self.params)
        scheme = ChunkedPerTensor(
            self.params, host, chunk_bytes=CHUNK_BYTES, num_slots=NUM_SLOTS, settings=ADAMW
        )
        return _Chunks(scheme)


class _Chunks:
    def __init__(self, scheme: ChunkedPerTensor) -> None:
        self.step = scheme.step
        self._optimizers = scheme.optimizers

    def zero_grad(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad()


class TorchAO(Peer):
    """torchao: gradients go to the host, the CPU updates, parameters come back."""

    package = "torchao.optim"
    note = "fp32 copies of parameters and gradients on the host, updated by the CPU"

    def convert(self) -> Any:
        """Return torchao's optimizer; gradients stay on the GPU."""
        from torchao.optim import CPUOffloadOptimizer

        return CPUOffloadOptimizer(self.params, torch.optim.AdamW, **ADAMW)


class FSDP2(Peer):
    """torch's FSDP2 on one rank: parameters, gradients and state live on the host."""

    needs_gpu = False
    note = "parameters and gradients on the host too, updated by the CPU"

    def convert(self) -> Any:
        """Shard by layers, and return AdamW over what lies on the host."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

        _one_rank(self.device)
        mesh = init_device_mesh(self.device.type, (1,))
        policy = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh, offload_policy=policy)
        fully_shard(self.model, mesh=mesh, offload_policy=policy)
        self.params = []  # the whole ones may go
        return torch.optim.AdamW(self.model.parameters(), **ADAMW)

    def numbers(self) -> list[Tensor]:
        """Return the local tensors, which are whole on one rank."""
        return [p.to_local() for p in self.model.parameters()]  # type: ignore[attr-defined]


class DeepSpeed(Peer):
    """DeepSpeed ZeRO-2 with the optimizer on the host."""

    package = "deepspeed"
    needs_gpu = False
    note = "bf16 parameters and gradients, fp32 masters on the host, updated by the CPU"

    def prepare(self) -> None:
        """Compile DeepSpeed's CPU Adam. Where that fails, torch's fused one takes its place."""
        # It is compiled for this CPU; CUDA's compiler plays no part.
        os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")
        began = time.perf_counter()
        try:
            from deepspeed.ops.op_builder import CPUAdamBuilder

            CPUAdamBuilder().load(verbose=False)
            self.settings["update"] = "DeepSpeedCPUAdam"
        except Exception as error:  # no compiler, no headers, no ninja
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            self.settings["update"] = f"torch.optim.AdamW(fused=True): {reason}"
            self.note += "; by torch, since DeepSpeed's kernel does not compile here"
        self.settings["compile_s"] = time.perf_counter() - began

    def convert(self) -> Any:
        """Initialise the engine."""
        import deepspeed

        _one_rank(self.device)
        sequences = min(self.plan.tokens) // self.plan.sequence
        zero = {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": self.device.type == "cuda"},
            "overlap_comm": True,
            "contiguous_gradients": True,
        }
        config = {
            "train_micro_batch_size_per_gpu": sequences,
            "gradient_accumulation_steps": 1,
            "bf16": {"enabled": True},
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
        }
        self.engine, _, _, _ = deepspeed.initialize(
            model=self.model, optimizer=self._adam(), config=config
        )
        self.settings["config"] = config
        self.params = []
        return self.engine

    def _adam(self) -> torch.optim.Optimizer:
        if self.settings["update"] != "DeepSpeedCPUAdam":
            return torch.optim.AdamW(self.params, **ADAMW)
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        settings = {key: ADAMW[key] for key in ("lr", "weight_decay")}
        return DeepSpeedCPUAdam(self.params, adamw_mode=True, **settings)

    def step(self, batch: Batch, laps: Laps, recorded: Timeline | None = None) -> Tensor:
        """Issue one training step through the engine."""
        ((tokens, targets),) = batch
        loss = self.engine(tokens, targets)
        laps.mark("forward")
        self.engine.backward(loss)
        laps.mark("backward")
        self.engine.step()
        laps.mark("optimizer")
        return loss.detach()

    def numbers(self) -> list[Tensor]:
        """Return the bf16 parameters."""
        return list(self.model.parameters())


class Bitsandbytes(Peer):
    """bitsandbytes: state in managed memory, which the driver moves when the GPU is full."""

    package = "bitsandbytes"
    note = "nothing is paged while GPU memory is free, as here: the update is that of state there"

    def convert(self) -> Any:
        """Return the paged AdamW with 32-bit state."""
        from bitsandbytes.optim import PagedAdamW32bit

        return PagedAdamW32bit(self.params, lr=ADAMW["lr"], weight_decay=ADAMW["weight_decay"])


#: By the names on the command line.
PEERS: dict[str, type[Peer]] = {
    "per-tensor": PerTensor,
    "torchao": TorchAO,
    "fsdp2": FSDP2,
    "bitsandbytes": Bitsandbytes,
    "deepspeed": DeepSpeed,
}


def versions() -> dict[str, str | None]:
    """Return the versions of the packages; ``None``: not installed."""
    found: dict[str, str | None] = {}
    for package in ("torchao", "deepspeed", "bitsandbytes"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def _one_rank(device: torch.device) -> None:
    if not dist.is_initialized():
        # Libraries look at these before they look at the group.
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
