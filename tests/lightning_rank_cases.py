"""What the tests of Lightning on two processes run there, and how they compare it."""

from __future__ import annotations

import importlib
import os
from typing import Any

import lightning_cases as cases
import torch

from torch_offload import is_offloaded, offload_stats

PLAIN_FSDP = ("model parallel", {})

COMPARED = ("losses", "params", "state", "step")


def assert_equal(expected: list[Any], found: list[Any]) -> None:
    for one, two in zip(expected, found, strict=True):
        for key in COMPARED:
            cases.assert_same(one[key], two[key], key)


FSDP_CASE: dict[str, Any] = {
    "shard": True,
    "gradient_clip_val": None,
    "accumulate_grad_batches": 1,
}


def as_rank_of_lightning() -> None:
    """Let Lightning join the processes that there are, and not start any."""
    os.environ["LOCAL_RANK"] = str(torch.distributed.get_rank())


def class_of(package: str, short: str) -> Any:
    """Return our class for a package of Lightning and a kind of strategy."""
    root = package.partition(".")[0]
    is_fabric = "fabric" in package
    module = importlib.import_module(
        f"lightning_offload.{'fabric' if is_fabric else 'trainer'}_{root}"
    )
    return getattr(module, f"OffloadOptimizer{'Fabric' if is_fabric else ''}{short}Strategy")


def make_strategy(package: str, wanted: Any, devices: int = 2) -> Any:
    """Return a strategy by its name, ours or Lightning's for FSDP2: ``(short name, arguments)``."""
    if isinstance(wanted, str):
        return wanted
    short, arguments = wanted
    if short != "model parallel":
        return class_of(package, short)(**({"chunk_size": cases.CHUNK} | arguments))
    strategies = importlib.import_module(f"{package}.strategies")
    return strategies.ModelParallelStrategy(
        data_parallel_size=devices, tensor_parallel_size=1, **arguments
    )


def whole(value: Any) -> Any:
    """Return copies on the CPU, DTensors as their local part."""
    if isinstance(value, torch.Tensor):
        own = value.to_local() if hasattr(value, "to_local") else value
        return own.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    return [whole(item) for item in value] if isinstance(value, (list, tuple)) else value


def own_loader() -> Any:
    """Return five batches that are this rank's own: the last step of an epoch has one of them."""
    factor = int(os.environ.get("LOCAL_RANK", 0)) + 1
    batches = [batch * factor for batch in cases.make_batches(5)]
    return torch.utils.data.DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def sharded(base: Any) -> Any:
    class Sharded(base):  # type: ignore[misc]
        def configure_model(self) -> None:
            from torch.distributed.fsdp import fully_shard

            if not hasattr(self.net[0].weight, "to_local"):
                mesh = self.device_mesh["data_parallel"]
                for layer in (self.net[0], self.net[3]):
                    fully_shard(layer, mesh=mesh)
                fully_shard(self.net, mesh=mesh)

    return Sharded


def fit(
    package: str,
    wanted: Any,
    *,
    max_epochs: int = 2,
    shard: bool = False,
    save: str | None = None,
    load: str | None = None,
    devices: int = 2,
    **options: Any,
) -> dict[str, Any]:
    """Fit and return what came out: losses, parameters, state, and what is offloaded how."""
    if devices > 1:
        as_rank_of_lightning()
    pl = importlib.import_module(package)
    losses: list[torch.Tensor] = []
    early: list[int] = []
    base = type(cases.make_module(pl))

    class Module(sharded(base) if shard else base):  # type: ignore[misc]
        def validation_step(self, batch: torch.Tensor, batch_index: int) -> None:
            losses.append(self.net(batch.to(self.net[0].weight.dtype)).mean())

        def configure_optimizers(self) -> Any:
            if not shard:
                return super().configure_optimizers()
            # all parameters of a group on a mesh, or DTensor refuses to mix
            built = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
            return {"optimizer": built, "lr_scheduler": cases.make_scheduler(built)}

    class Note(pl.Callback):  # type: ignore[misc,name-defined]
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            losses.append(outputs["loss"])
            if is_offloaded(trainer.optimizers[0]):
                early.append(offload_stats(trainer.optimizers[0]).num_early_chunks)

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            if save and trainer.current_epoch == 0:
                trainer.save_checkpoint(save)

    trainer = cases.make_trainer(
        pl,
        make_strategy(package, wanted, devices),
        max_epochs,
        devices=devices,
        callbacks=[Note()],
        use_distributed_sampler=False,  # it shuffles, and in another order after a resume
        **options,
    )
    trainer.fit(Module(), own_loader(), own_loader(), ckpt_path=load)
    (optimizer,) = trainer.optimizers
    return {
        "losses": whole(losses),
        "params": [whole(p) for p in trainer.lightning_module.parameters()],
        "state": [whole(dict(s)) for s in optimizer.state.values()],
        "schedules": [whole(c.scheduler.state_dict()) for c in trainer.lr_scheduler_configs],
        "step": trainer.global_step,
        "strategy": type(trainer.strategy).__name__,
        "world_size": trainer.world_size,
        "is_offloaded": is_offloaded(optimizer),
        "devices": [str(t.device) for s in optimizer.state.values() for t in s.values()],
        "early": early,
        "overlap": optimizer._offload_core.config.overlap if is_offloaded(optimizer) else None,
    }


def train_with_fabric(
    package: str, wanted: Any, num_steps: int = 6, save: str = "", load: str = ""
) -> dict[str, Any]:
    """Train on two ranks and return what came out."""
    as_rank_of_lightning()
    fabric_package = importlib.import_module(package)
    strategy = make_strategy(package, wanted)
    run = cases.start_fabric(fabric_package, strategy, devices=2)
    objects = {key: run[key] for key in ("module", "optimizer", "schedule")}
    first = 3 if load else 0
    if load:
        run["fabric"].load(load, objects)
    for index in range(first, num_steps):
        cases.train_fabric(run, 1, first=index)
        if save and index == 2:
            run["fabric"].save(save, objects)
    optimizer = run["user_optimizer"]
    return {
        "params": [whole(param) for param in run["module"].parameters()],
        "state": [whole(dict(state)) for state in optimizer.state.values()],
        "strategy": type(run["fabric"].strategy).__name__,
        "is_offloaded": is_offloaded(optimizer),
        "early": offload_stats(optimizer).num_early_chunks if is_offloaded(optimizer) else 0,
    }


def train_fabric_fsdp(package: str, name: str, path: str) -> dict[str, Any]:
    """Train three steps, save, train three more; return what came out."""
    as_rank_of_lightning()
    module = importlib.import_module("lightning_offload.fabric")
    strategy: Any = name
    if name == "plain":
        strategies = importlib.import_module(f"{package}.strategies")
        strategy = strategies.ModelParallelStrategy(module.shard_whole, 2, 1)
    fabric = importlib.import_module(package).Fabric(
        accelerator="cpu", strategy=strategy, devices=2
    )
    fabric.launch()
    net = fabric.setup_module(cases.make_net())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(net.parameters(), lr=1e-2))
    for index, batch in enumerate(cases.make_batches(6)):
        if index == 3:
            fabric.save(path, {"net": net, "optimizer": optimizer})
        fabric.backward(net(batch * (fabric.global_rank + 1)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    end = [whole(p) for p in net.parameters()], [whole(dict(s)) for s in optimizer.state.values()]
    fabric.load(path, {"net": net, "optimizer": optimizer})
    middle = [whole(dict(s)) for s in optimizer.state.values()]
    return {"end": end, "middle": middle, "is_offloaded": is_offloaded(optimizer)}
