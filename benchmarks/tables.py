"""Make README's tables and those of docs/several_gpus.md from the newest record of each machine.

python benchmarks/tables.py            # write each table between its markers
python benchmarks/tables.py --check    # exit with 1 where a page and the records disagree
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from rich.table import Table

from multi_tables import markdown as multi_markdown
from peer_tables import markdown as peers_markdown
from record import RESULTS, ROOT, Record
from train_tables import caption as train_caption

BEGIN, END = "<!-- bench_step:start -->", "<!-- bench_step:end -->"
TRAIN_BEGIN, TRAIN_END = "<!-- bench_train:start -->", "<!-- bench_train:end -->"
MULTI_BEGIN, MULTI_END = "<!-- bench_multi:start -->", "<!-- bench_multi:end -->"
PEERS_BEGIN, PEERS_END = "<!-- bench_peers:start -->", "<!-- bench_peers:end -->"
TRAIN_HEADER = (
    "tokens a step",
    "update runs",
    "step",
    "tokens/s",
    "of no offload",
    "peak GPU",
    "bits",
)
_TRAIN_LABELS = {
    "none": "no offload",
    "none+clip": "no offload, clipping",
    "step": "in `step()`",
    "backward": '**`overlap="backward"`**',
    "forward+clip": '**`overlap="forward"`**, clipping',
    "forward+clip+50%": '**`overlap="forward"`**, clipping, `gpu_budget="50%"`',
}
HEADER = (
    "scheme",
    "step",
    "least to most",
    "x limit",
    "peak GPU",
    "first step",
    "pinned",
    "set-up",
)
_LABELS = {
    "resident": "states resident",
    "move-all": "move all in, step, move all out",
    "per-tensor": "{chunk} chunks, {slots} slots, one copy per tensor",
    "ours": "**torch_offload**, {chunk} chunks, {slots} slots",
}


def newest(folder: Path, benchmark: str = "bench_step") -> list[tuple[str, Record]]:
    """Return name and record of the newest run of each size on each GPU.

    Runs on a CPU are for tests only.
    """
    found: dict[tuple[Any, ...], tuple[str, Record]] = {}
    for path in folder.glob(f"{benchmark}-*.json"):
        record = json.loads(path.read_text())
        tokens = tuple(record.get("config", {}).get("tokens", ()))
        size = record["device"], record.get("state_bytes", 0), tokens
        newer = size not in found or record["date"] > found[size][1]["date"]
        if record["device_type"] != "cpu" and newer:
            found[size] = (path.name, record)
    return [found[size] for size in sorted(found)]


def rows(record: Record) -> list[tuple[str, ...]]:
    """Return the table's rows as text, in the columns of `HEADER`."""
    limit_s = record["limit_s"]
    result: list[tuple[str, ...]] = []
    if limit_s is not None:
        gb_per_s = statistics.median(record["duplex_bytes_per_s"]) / 1e9
        label = f"limit: copies alone, {gb_per_s:.1f} GB/s each way"
        result.append((label, f"{limit_s:.3f} s", "", "1.00", "", "", "", ""))
    for variant in record["variants"]:
        step_s, settings = variant["step_s"], variant["settings"]
        label = _LABELS[variant["name"]].format(
            chunk=_binary(settings.get("chunk_size", 0)), slots=settings.get("num_slots")
        )
        # The resident state crosses no link, so the limit says nothing about it.
        compared = limit_s is not None and variant["name"] != "resident"
        setup_s = variant["stats"]["setup_s"] if variant["stats"] else record["torch_pin_s"]
        result.append(
            (
                label,
                f"{statistics.median(step_s):.3f} s",
                f"{min(step_s):.3f} to {max(step_s):.3f}",
                f"{statistics.median(step_s) / limit_s:.2f}" if compared else "",
                _gib(variant["peak_allocated_bytes"]),
                _gib(variant["first_step_peak_allocated_bytes"]),
                _gib(variant["pinned_bytes"] or None),
                f"{setup_s:.1f} s" if variant["pinned_bytes"] else "",
            )
        )
    return result


def same_bits(record: Record) -> bool:
    """Return whether all schemes agreed, in the check and in the parameters at full size."""
    checksums = {variant["params_checksum"] for variant in record["variants"]}
    return bool(record["check"]["equal"]) and len(checksums) == 1


def caption(record: Record) -> str:
    """Return what the numbers were measured on and with."""
    config, versions = record["config"], record["versions"]
    commit, dirty, _ = record["commit"].partition("+dirty")
    return (
        f"{record['device']}, driver {record['driver']}, torch {versions['torch']}, "
        f"{record['date'][:10]}, commit {commit[:10]}{dirty and '+dirty'}. "
        f"{config['num_params'] / 1e9:.1f}e9 fp32 parameters = "
        f"{record['state_bytes'] / 1e9:.1f} GB of AdamW state; parameters and gradients alone are "
        f"{_gib(record['params_and_grads_bytes'])}. Median of {config['steps']} steps; peak "
        f"GPU memory allocated in those and in the first step. The bits are "
        f"{'the same in all rows' if same_bits(record) else '**NOT the same in all rows**'}."
    )


def markdown(records: list[tuple[str, Record]]) -> str:
    """Return the README's section, without its markers."""
    if not records:
        return "No record yet: `make bench` on a machine with a GPU writes one."
    parts = []
    for name, record in records:
        lines = [HEADER, ("---", *["---:"] * (len(HEADER) - 1)), *rows(record)]
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
        parts.append(f"{caption(record)} Record: `benchmarks/results/{name}`.")
    return "\n\n".join(parts)


def train_rows(record: Record) -> list[tuple[str, ...]]:
    """Return the table of whole training steps as text, in the columns of `TRAIN_HEADER`."""
    result: list[tuple[str, ...]] = []
    for number, tokens in enumerate(record["config"]["tokens"]):
        speeds = {m["name"]: m["points"][number].get("tokens_per_s") for m in record["modes"]}
        for mode in record["modes"]:
            point = mode["points"][number]
            if mode["control"] or point["outcome"] != "ok":
                continue
            plain = speeds.get("none+clip" if mode["clip"] else "none")
            is_plain = mode["overlap"] is None
            result.append(
                (
                    f"{tokens:,}",
                    _TRAIN_LABELS.get(mode["name"], mode["name"]),
                    f"{point['median_step_s']:.3f} s",
                    f"{point['tokens_per_s']:,.0f}",
                    f"{point['tokens_per_s'] / plain:.1%}" if plain and not is_plain else "",
                    _gib(point["peak_allocated_bytes"]),
                    "" if is_plain else {True: "equal", False: "**differ**"}[point["equal"]],
                )
            )
    return result


def train_markdown(records: list[tuple[str, Record]]) -> str:
    """Return the README's section on whole training steps, without its markers."""
    parts = []
    for name, record in records:
        lines = [TRAIN_HEADER, ("---:", "---", *["---:"] * 4, "---"), *train_rows(record)]
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
        parts.append(f"{train_caption(record)} Record: `benchmarks/results/{name}`.")
    return "\n\n".join(parts)


def rich_table(record: Record) -> Table:
    """Return the same table for a terminal."""
    table = Table(caption=caption(record).replace("**", ""))
    for number, name in enumerate(HEADER):
        table.add_column(name, justify="right" if number else "left")
    for row in rows(record):
        table.add_row(*(text.replace("**", "") for text in row))
    return table


def main() -> None:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    text = args.readme.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise SystemExit(f"{args.readme} must have one line `{BEGIN}` and, below it, one `{END}`.")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    current = f"{before}{BEGIN}\n{markdown(newest(args.results))}\n{END}{after}"
    if TRAIN_BEGIN in current:
        before, rest = current.split(TRAIN_BEGIN)
        section = train_markdown(newest(args.results, "bench_train"))
        current = f"{before}{TRAIN_BEGIN}\n{section}\n{TRAIN_END}{rest.split(TRAIN_END)[1]}"
    if PEERS_BEGIN in current:
        before, rest = current.split(PEERS_BEGIN)
        found = newest(args.results, "bench_peers")
        section = "\n\n".join(peers_markdown(record, name) for name, record in found)
        section = section or "No record yet: `make bench-peers` on a machine with a GPU writes one."
        current = f"{before}{PEERS_BEGIN}\n{section}\n{PEERS_END}{rest.split(PEERS_END)[1]}"
    pages = [(args.readme, text, current)]
    several = args.readme.parent / "docs" / "several_gpus.md"
    if several.exists():
        text = several.read_text(encoding="utf-8")
        before, rest = text.split(MULTI_BEGIN)
        section = multi_markdown(newest(args.results, "bench_multi"))
        current = f"{before}{MULTI_BEGIN}\n{section}\n{MULTI_END}{rest.split(MULTI_END)[1]}"
        pages.append((several, text, current))
    for page, text, current in pages:
        if args.check and current != text:
            raise SystemExit(
                f"{page} does not show the newest record. Run `python benchmarks/tables.py`."
            )
        if not args.check:
            page.write_text(current, encoding="utf-8")


def _gib(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 2**30:.1f} GiB"


def _binary(num_bytes: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= unit and num_bytes % unit == 0:
            return f"{num_bytes // unit} {name}"
    return f"{num_bytes} B"


if __name__ == "__main__":
    main()
