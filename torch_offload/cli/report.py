"""What the commands print: tables of a probe and of a plan."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from .advice import Choice, accelerate_command, lightning_code, python_code
from .link import WAYS
from .machine import Probe

_FITS = {True: "yes", False: "no", None: "?"}


def probe_report(probe: Probe) -> RenderableType:
    """Return the tables of a probe."""
    parts: list[RenderableType] = [_machine_table(probe)]
    if probe.samples:
        parts.append(_link_table(probe))
    else:
        parts.append(Text("No GPU is visible: there is no link to measure."))
    return Group(*parts)


def _machine_table(probe: Probe) -> Table:
    table = Table(title="machine", show_header=False, title_justify="left")
    table.add_row("torch", probe.torch)
    table.add_row("free host memory", gib(probe.host_bytes) or "not known")
    for gpu in probe.gpus:
        node = "" if gpu.numa_node is None else f", NUMA node {gpu.numa_node}"
        memory = f"{gib(gpu.free_bytes)} of {gib(gpu.memory_bytes)} free"
        table.add_row(f"GPU {gpu.index}", f"{gpu.name}, {memory}{node}")
    if probe.pinning is not None:
        size = probe.pinning.num_bytes / 2**30
        table.add_row("pinning", f"{probe.pinning.ours_s / size:.2f} s per GiB")
        table.add_row("pinning by torch", f"{probe.pinning.torch_s / size:.2f} s per GiB")
    return table


def _link_table(probe: Probe) -> Table:
    table = Table(title="copies, GB/s each way", title_justify="left")
    table.add_column("GPU")
    table.add_column("copy", justify="right")
    for way in WAYS:
        table.add_column("both ways" if way == "duplex" else way, justify="right")
    rows: dict[tuple[tuple[int, ...], int], dict[str, str]] = {}
    for sample in probe.samples:
        row = rows.setdefault((sample.devices, sample.copy_bytes), {})
        row[sample.way] = f"{sample.median / 1e9:.1f}"
    for (devices, size), row in rows.items():
        name = str(devices[0]) if len(devices) == 1 else f"{len(devices)} at once, each"
        table.add_row(name, f"{size / 2**20:g} MiB", *(row.get(way, "") for way in WAYS))
    return table


def plan_report(
    candidates: list[Choice],
    chosen: Choice | None,
    offloading: Choice | None,
    facts: list[tuple[str, str]],
    *,
    num_gpus: int,
    is_sharded: bool,
) -> RenderableType:
    """Return the tables of a plan, and what to write."""
    about = Table(show_header=False, box=None)
    for fact in facts:
        about.add_row(*fact)
    table = Table(
        title="one step: seconds, then GiB: peak on the GPU, that of the first step, host",
        title_justify="left",
    )
    table.add_column("update runs", no_wrap=True)
    for name in ("step", "exposed", "peak", "first", "host", "fits"):
        table.add_column(name, justify="right")
    for choice in candidates:
        forecast = choice.forecast
        table.add_row(
            choice.name,
            f"{forecast.step_s:.3f}",
            "" if choice.settings is None else f"{max(forecast.exposed_s, 0.0):.3f}",
            f"{forecast.gpu_bytes / 2**30:.1f}",
            f"{forecast.first_gpu_bytes / 2**30:.1f}",
            f"{forecast.host_bytes / 2**30:.1f}",
            "no" if choice.reason else _FITS[choice.fits],
            style="bold" if choice is chosen else "",
        )
    parts: list[RenderableType] = [about, table]
    parts += [Text(f"{c.name}: {c.reason}.") for c in candidates if c.reason]
    parts.append(Text(verdict(chosen, offloading)))
    if offloading is not None and offloading.settings is not None:
        settings = offloading.settings
        for title, code in (
            ("plain PyTorch", python_code(settings)),
            ("Lightning", lightning_code(settings, num_gpus, is_sharded)),
            ("Accelerate", accelerate_command(settings, num_gpus, is_sharded)),
        ):
            # Never wrapped: it is there to be copied.
            parts.append(Text(f"\n{title}", style="bold"))
            parts.append(Text(code, no_wrap=True, overflow="ignore"))
    return Group(*parts)


def verdict(chosen: Choice | None, offloading: Choice | None) -> str:
    """Return the recommendation in words."""
    if chosen is None:
        return (
            "Nothing fits. Use activation checkpointing (--recompute), fewer tokens at once "
            "(--accumulation), several GPUs (--num-gpus with --sharded), or something that "
            "offloads parameters too."
        )
    if chosen.settings is None:
        saved = ""
        if offloading is not None:
            bytes_saved = chosen.forecast.needed_bytes - offloading.forecast.needed_bytes
            saved = (
                f" Offload ({offloading.name}) would save {gib(max(bytes_saved, 0))} of GPU memory "
                f"for {max(offloading.forecast.exposed_s, 0.0):.3f} s a step:"
            )
        return f"Everything fits without offload, and nothing is faster.{saved}"
    return f"Recommended: {chosen.name}."


def gib(num_bytes: int | None) -> str:
    """Return a size as text; empty where it is not known."""
    return "" if num_bytes is None else f"{num_bytes / 2**30:.1f} GiB"


def show(report: RenderableType) -> None:
    """Print a report."""
    Console(highlight=False, soft_wrap=False).print(report, crop=False)
