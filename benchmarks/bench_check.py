"""Is a fresh run as fast as the committed records say? Compares ratios, never seconds.

A machine's link and GPU differ from day to day, so each time is divided by what the same run's
probe allows: the state's bytes over the bandwidth in both directions, and the step without offload.
A *figure* is such a ratio: 1 is the limit. It fails where one has grown by more than a tenth, and
where a run that was tried gave none.

python benchmarks/bench_check.py                       # runs the benchmarks, then compares
python benchmarks/bench_check.py --fresh a.json b.json # compares these
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from record import RESULTS, Record, commit

#: A figure may grow by this share.
TOLERANCE = 0.10
#: What is run: the sizes of the committed records, but fewer points.
RUNS = {
    "bench_step.py": "--params 4e9 --chunk-size 512MiB --num-slots 3 --steps 8",
    "bench_train.py": "--params 3.1e9 --tokens 16384 --modes none step backward none+clip "
    "forward+clip --steps 5",
}


@dataclass(frozen=True, slots=True)
class Figure:
    """A time over what the run's own probe allows, and what makes it comparable."""

    name: str
    ratio: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """A figure of a fresh run beside the committed one."""

    name: str
    fresh: float
    committed: float
    source: str

    @property
    def growth(self) -> float:
        """How much longer it takes, as a share."""
        return self.fresh / self.committed - 1

    @property
    def is_loss(self) -> bool:
        """Whether it fails."""
        return self.growth > TOLERANCE


def figures(record: Record) -> list[Figure]:
    """Return the figures of a record, of either benchmark. None without a probe."""
    makers = {"bench_step": _step_figures, "bench_train": _train_figures}
    maker = makers.get(record["benchmark"])
    return [] if maker is None else list(maker(record))


def _step_figures(record: Record) -> Iterator[Figure]:
    if not record["duplex_bytes_per_s"]:
        return
    limit_s = record["state_bytes"] / statistics.median(record["duplex_bytes_per_s"])
    num_params = record["config"]["num_params"]
    for variant in record["variants"]:
        if variant["name"] == "ours":
            settings = variant["settings"]
            chunk, slots = settings["chunk_size"] // 2**20, settings["num_slots"]
            name = f"step alone, {num_params / 1e9:.1f}e9, {chunk} MiB x {slots}"
            yield Figure(name, statistics.median(variant["step_s"]) / limit_s)


def _train_figures(record: Record) -> Iterator[Figure]:
    if not record["link_bytes_per_s"]["duplex"]:
        return
    link = statistics.median(record["link_bytes_per_s"]["duplex"])
    for mode, point, other in _train_points(record):
        if point["outcome"] == other["outcome"] == "ok":
            # Not what was copied: a run that copies more than it must is slower for it.
            copies_s = (record["state_bytes"] - point["stats"]["resident_bytes"]) / link
            limit_s = _limit(mode["overlap"], other, copies_s)
            ratio = statistics.median(point["step_s"]) / limit_s
            yield Figure(_train_name(record, mode, point), ratio)


def _train_points(record: Record) -> Iterator[tuple[Record, Record, Record]]:
    """Go through the modes that offload: mode, point, and that of plain AdamW."""
    plain = {m["name"]: m for m in record["modes"] if m["overlap"] is None and not m["control"]}
    for mode in record["modes"]:
        reference = plain.get("none+clip" if mode["clip"] else "none")
        if mode["overlap"] is not None and reference is not None:
            for point, other in zip(mode["points"], reference["points"], strict=True):
                yield mode, point, other


def _train_name(record: Record, mode: Record, point: Record) -> str:
    sizes = sorted(record["config"]["sizes"].items())
    with_settings = "".join(f", {key} {value}" for key, value in sizes)
    return (
        f"{mode['name']}, {record['config']['num_params'] / 1e9:.2f}e9, "
        f"{point['tokens']} tokens{with_settings}"
    )


def failures(fresh: Sequence[Record], committed: Sequence[tuple[str, Record]]) -> list[str]:
    """Return what was tried and has no figure, where a committed record of the GPU has it."""
    found = []
    for record in fresh:
        if record["benchmark"] != "bench_train":
            continue
        same = [other for _, other in committed if other["device"] == record["device"]]
        known = {figure.name for other in same for figure in figures(other)}
        for mode, point, other in _train_points(record):
            name = _train_name(record, mode, point)
            failed = point if point["outcome"] != "ok" else other
            if failed["outcome"] != "ok" and name in known:
                found.append(f"{name}: {failed['outcome']}: {failed['reason']}")
    return found


def _limit(overlap: str, plain: Record, copies_s: float) -> float:
    """Return what a step cannot be faster than: the plain one, with its copies beside what hides
    them."""
    step_s = statistics.median(plain["step_s"])
    forward_s = statistics.median(plain["forward_s"])
    if overlap == "step":
        return step_s - statistics.median(plain["optimizer_s"]) + copies_s
    hidden_s = forward_s if overlap == "forward" else step_s - forward_s
    return step_s - hidden_s + max(hidden_s, copies_s)


def compare(fresh: Sequence[Record], committed: Sequence[tuple[str, Record]]) -> list[Comparison]:
    """Return each figure that both have, against the newest committed one of the same GPU.

    Raises:
        ValueError: nothing can be compared.
    """
    found = []
    for record in fresh:
        known: dict[str, tuple[str, float]] = {}
        same = [(n, c) for n, c in committed if c["device"] == record["device"]]
        for name, other in sorted(same, key=lambda pair: str(pair[1]["date"])):
            known |= {figure.name: (name, figure.ratio) for figure in figures(other)}
        for figure in figures(record):
            if figure.name in known:
                source, ratio = known[figure.name]
                found.append(Comparison(figure.name, figure.ratio, ratio, source))
    if not found:
        devices = ", ".join(sorted({record["device"] for record in fresh})) or "no fresh record"
        raise ValueError(
            f"No committed record has the same figures for {devices}. Commit one of this GPU first "
            "(make bench), and compare with the same sizes."
        )
    return found


def table(comparisons: Sequence[Comparison]) -> Table:
    """Return the comparison for a terminal."""
    result = Table(caption="times over what the same run's probe allows")
    for name in ("figure", "fresh", "committed", "growth", "", "record"):
        result.add_column(
            name, justify="right" if name in ("fresh", "committed", "growth") else "left"
        )
    for c in comparisons:
        verdict = "LOSS" if c.is_loss else "ok"
        numbers = (f"{c.fresh:.3f}", f"{c.committed:.3f}", f"{c.growth:+.1%}")
        result.add_row(c.name, *numbers, verdict, c.source)
    return result


def committed_records(folder: Path) -> list[tuple[str, Record]]:
    """Return name and content of the records in a folder that can be compared with."""
    paths = sorted(folder.glob("bench_*.json"))
    return [(path.name, json.loads(path.read_text())) for path in paths]


def run_benchmarks(folder: Path, runs: dict[str, str] = RUNS) -> list[Path]:
    """Run the benchmarks, and return their records.

    Raises:
        SystemExit: one failed.
    """
    paths = []
    for script, arguments in runs.items():
        out = folder / f"{script.removesuffix('.py')}.json"
        command = [sys.executable, str(Path(__file__).parent / script), *arguments.split()]
        done = subprocess.run([*command, "--out", str(out)], check=False)
        if done.returncode:
            raise SystemExit(f"{script} failed with {done.returncode}.")
        paths.append(out)
    return paths


def main(argv: list[str] | None = None) -> None:
    """Compare, print, and fail on a loss."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fresh", nargs="+", type=Path, help="records, instead of new runs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the committed records")
    parser.add_argument("--keep", type=Path, help="folder for the records of new runs")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        paths = args.fresh
        if paths is None:
            os.environ["TORCH_OFFLOAD_COMMIT"] = commit()
            paths = run_benchmarks(args.keep or Path(folder))
        fresh = [json.loads(path.read_text()) for path in paths]
    committed = committed_records(args.results)
    try:
        comparisons = compare(fresh, committed)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    console = Console(highlight=False)
    console.width = max(console.width, 140)
    console.print(table(comparisons))
    failed = failures(fresh, committed)
    if failed:
        raise SystemExit("No figure where a committed record has one: " + "; ".join(failed))
    losses = [c for c in comparisons if c.is_loss]
    if losses:
        raise SystemExit(
            f"More than {TOLERANCE:.0%} slower than committed: "
            + "; ".join(f"{c.name} ({c.growth:+.1%})" for c in losses)
        )


if __name__ == "__main__":
    main()
