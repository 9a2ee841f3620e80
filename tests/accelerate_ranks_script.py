"""What test_accelerate_ranks.py launches with two processes; it knows nothing of offload.

``python accelerate_ranks_script.py FOLDER OTHER CASE...``: trains once for each case, saves
half-way under FOLDER, and once more from what another launch saved under OTHER ("-" for none). A
case is a few words joined by "+":

- ``clip``: gradients are clipped;
- ``apart``: the optimizer is prepared by a call of its own, before the model;
- ``stray``: the script calls ``loss.backward()`` itself;
- ``full``: FSDP saves whole tensors;
- ``hook``: DDP has a communication hook;
- ``backward``, ``forward``, ``step``: the variable that chooses the overlap; else it is not set.

With RANKS_ON_GPU=1 each process has a GPU, else all is on the CPU.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import (
    Accelerator,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    PartialState,
)
from accelerate.utils import DistributedType

NUM_MICRO = 12
HALF = 6
ON_GPU = os.environ.get("RANKS_ON_GPU") == "1"
IS_FSDP = os.environ.get("ACCELERATE_USE_FSDP") == "true"


def start(words: set[str]) -> tuple[Accelerator, torch.nn.Module, Any, Any]:
    for word in ("backward", "forward", "step"):
        os.environ.pop("ACCELERATE_OFFLOAD_OVERLAP", None)
        if word in words:
            os.environ["ACCELERATE_OFFLOAD_OVERLAP"] = word
            break
    options: dict[str, Any] = {} if ON_GPU else {"cpu": True}
    if "hook" in words:
        hook = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
        options["kwargs_handlers"] = [hook]
    if IS_FSDP and not ON_GPU:
        # Accelerate leaves FSDP out on the CPU; this is what it finds with several GPUs.
        PartialState(cpu=True)
        if PartialState._shared_state["distributed_type"] is DistributedType.MULTI_CPU:
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    accelerator = Accelerator(gradient_accumulation_steps=2, **options)
    if IS_FSDP:
        kind = "FULL_STATE_DICT" if "full" in words else "SHARDED_STATE_DICT"
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(state_dict_type=kind)
    torch.manual_seed(0)
    net: Any = torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 33), torch.nn.Linear(33, 1)
    )
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=False)
    schedule: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    if "apart" in words:
        optimizer = accelerator.prepare(optimizer)
        net = accelerator.prepare(net)
        schedule = accelerator.prepare(schedule)
    else:
        net, optimizer, schedule = accelerator.prepare(net, optimizer, schedule)
    return accelerator, net, optimizer, schedule


def train(words: set[str], folder: Path, resume_from: Path | None) -> dict[str, Any]:
    accelerator, net, optimizer, schedule = start(words)
    first = 0
    if resume_from is not None:
        accelerator.load_state(str(resume_from))
        first = HALF
    generator = torch.Generator().manual_seed(1)
    batches = torch.randn(2, NUM_MICRO, 8, 16, generator=generator)[accelerator.process_index]
    losses = []
    for index, batch in enumerate(batches[first:].to(accelerator.device), first):
        with accelerator.accumulate(net):
            loss = net(batch).pow(2).mean()
            if "stray" in words:
                loss.backward()
            else:
                accelerator.backward(loss)
            if "clip" in words and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), 0.05)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if index == HALF - 1:
            accelerator.save_state(str(folder))
    accelerator.wait_for_everyone()
    params = list(net.parameters())
    end = {
        "losses": losses,
        "params": [own(p) for p in params],
        "state": [{k: own(v) for k, v in optimizer.state[p].items()} for p in params],
        "schedule": schedule.state_dict(),
    }
    print(describe(accelerator, words, resume_from, optimizer), flush=True)
    accelerator.free_memory()
    return end


def own(tensor: Any) -> torch.Tensor:
    """Return this rank's part, on the CPU."""
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return tensor.detach().cpu().clone()


def describe(accelerator: Accelerator, words: set[str], resumed: Any, optimizer: Any) -> str:
    """What the test looks for in the output, on one line for each rank."""
    found = f"{accelerator.distributed_type.value} {type(optimizer).__name__}"
    module = sys.modules.get("torch_offload")
    if module is not None and module.is_offloaded(optimizer):
        stats = module.offload_stats(optimizer)
        found += f" early={stats.num_early_chunks} chunks={stats.num_chunks}"
    return f"case {'+'.join(sorted(words))} resumed={resumed is not None}: {found}\n"


def main() -> None:
    folder, other = Path(sys.argv[1]), sys.argv[2]
    torch.use_deterministic_algorithms(True)
    ends = {}
    for case in sys.argv[3:]:
        words = set(case.split("+"))
        ends[case] = train(words, folder / case, None)
        if other != "-":
            ends[f"{case} resumed"] = train(words, folder / case, Path(other) / case)
    torch.save(ends, folder / f"end{PartialState().process_index}.pt")
    Accelerator(cpu=not ON_GPU).end_training()


if __name__ == "__main__":
    main()
