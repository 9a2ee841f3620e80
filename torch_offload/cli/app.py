"""The commands of `torch-offload`: their options, and what they call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from . import benchmarks, inputs, link, machine, planning
from .report import probe_report, show

_PATH = click.Path(path_type=Path, dir_okay=False)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="torch-offload")
def commands() -> None:
    """Optimizer-state offload: what your link gives, what offload saves, what it costs."""


@commands.command()
@click.option("--json", "as_json", is_flag=True, help="Print a record that `plan --probe` reads.")
@click.option("--out", type=_PATH, help="Write that record to a file.")
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
@click.option("--quick", is_flag=True, help="Only the largest copies, once.")
def probe(as_json: bool, out: Path | None, repeats: int, quick: bool) -> None:
    """Measure copies between host and GPU, pinning, and free memory.

    Each GPU by itself, by direction and size, then all visible GPUs at once.
    """
    sizes = link.SIZES[-1:] if quick else link.SIZES
    repeats = 1 if quick else repeats
    num_devices = len(machine.gpus())
    with _errors(), _progress(link.num_ticks(num_devices, sizes) + bool(num_devices)) as tick:
        found = machine.run_probe(sizes=sizes, repeats=repeats, tick=tick)
    if out is not None:
        out.write_text(found.to_json(), encoding="utf-8")
    if as_json:
        click.echo(found.to_json(), nl=False)
    else:
        show(probe_report(found))


@commands.command()
@click.option("--params", type=float, help="Number of parameters, such as 7e9.")
@click.option("--model", help="module:function that builds the model; called on the meta device.")
@click.option("--config", type=_PATH, help="A Hugging Face config.json.")
@click.option("--dtype", type=click.Choice(planning.DTYPES), default="float32", show_default=True)
@click.option("--optimizer", default="AdamW", show_default=True, help="Or module:class.")
@click.option("--optimizer-setting", multiple=True, metavar="NAME=VALUE")
@click.option("--tokens", type=int, default=16384, show_default=True, help="A step, one GPU.")
@click.option("--sequence", type=int, default=4096, show_default=True, help="Tokens of one.")
@click.option("--accumulation", type=int, default=1, show_default=True, help="Micro-batches.")
@click.option("--recompute/--no-recompute", default=True, help="Activation checkpointing [on].")
@click.option("--loss-tokens", type=int, help="Tokens whose logits live at once [all].")
@click.option("--clip/--no-clip", default=False, help="Clip by the global norm [off].")
@click.option("--num-gpus", type=int, default=1, show_default=True, help="Of this host.")
@click.option("--sharded", is_flag=True, help="FSDP2: each GPU has a part of the model.")
@click.option("--gpu", help="A GPU to plan for, by name [this machine's, else H200].")
@click.option("--gpu-memory", help='Such as "24GiB" [the GPU\'s].')
@click.option("--host-memory", help='For all GPUs, such as "256GiB" [what is free here].')
@click.option("--bandwidth", type=float, help="GB/s each way, both directions at once.")
@click.option("--probe", "probe_file", type=_PATH, help="A record of `torch-offload probe`.")
@click.option("--compute-s", type=float, help="Measured: forward and backward of a step.")
@click.option("--compute-tokens", type=int, help="Tokens that was measured with [--tokens].")
@click.option("--chunk-size", default="512MiB", show_default=True)
@click.option("--num-slots", type=int, default=3, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print a record instead of tables.")
def plan(as_json: bool, **options: Any) -> None:
    """Tell memory and time with and without offload, and the settings to use.

    Give the model by one of --params, --model and --config. What is not given is measured here
    where it can be, or assumed, and the output says which.
    """
    with _errors():
        sys.path.insert(0, "")  # module:function of the current folder
        made = planning.make_plan(inputs.Request(**options), say=_say)
    if as_json:
        click.echo(made.to_json(), nl=False)
    else:
        show(made.report())


@commands.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@click.argument("name", type=click.Choice(sorted(benchmarks.SCRIPTS)))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(name: str, arguments: tuple[str, ...]) -> None:
    """Run a benchmark of the repository: the optimizer step, whole training steps, or peers.

    Further arguments are the benchmark's: `torch-offload bench train --params 3.1e9`.
    """
    with _errors():
        code = benchmarks.run(name, arguments)
    raise SystemExit(code)


def _say(text: str) -> None:
    Console(stderr=True, highlight=False).print(text)


@contextmanager
def _errors() -> Iterator[None]:
    """Print what the user can mend without a traceback."""
    try:
        yield
    except (ValueError, MemoryError) as error:
        raise click.ClickException(str(error)) from error


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """Show a bar on the terminal, on stderr: stdout is for the result."""
    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    # No thread of its own: it would compete with the loop that issues copies.
    console = Console(stderr=True)
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        bar = progress.add_task("", total=total, start=True)
        started = False

        def tick(text: str) -> None:
            nonlocal started
            progress.update(bar, description=text, advance=int(started), refresh=True)
            started = True

        yield tick
