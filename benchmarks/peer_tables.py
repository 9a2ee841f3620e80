"""The table of bench_peers.py's record, for a terminal and for a page."""

from __future__ import annotations

import statistics

from rich.table import Table

from record import Record
from train_tables import gib

HEADER = (
    "tokens",
    "trained by",
    "step",
    "of no offload",
    "tokens/s",
    "peak GPU",
    "reserved",
    "host",
    "set-up",
    "bits",
)
_LABELS = {
    "none": "no offload",
    "none (control)": "no offload, again",
    "step": "**ours**, in `step()`",
    "backward": "**ours**, beside backward",
    "forward": "**ours**, beside forward",
    "per-tensor": "chunks, one copy per tensor",
    "torchao": "torchao CPUOffloadOptimizer",
    "fsdp2": "FSDP2 CPUOffloadPolicy",
    "deepspeed": "DeepSpeed ZeRO-2, CPU offload",
    "bitsandbytes": "bitsandbytes PagedAdamW32bit",
}
_EQUAL = {True: "equal", False: "differ", None: ""}


def rows(record: Record) -> list[tuple[str, ...]]:
    """Return the rows as text, in the columns of `HEADER`."""
    result: list[tuple[str, ...]] = []
    for number, tokens in enumerate(record["config"]["tokens"]):
        plain = next((m for m in record["modes"] if m["label"] == "none"), None)
        plain_s = plain["points"][number].get("median_step_s") if plain else None
        for mode in record["modes"]:
            point = mode["points"][number]
            label = _LABELS.get(mode["label"], mode["label"])
            if point["outcome"] != "ok":
                blank = [""] * (len(HEADER) - 3)
                result.append((f"{tokens:,}", label, point["outcome"], *blank))
                continue
            step_s = point["median_step_s"]
            is_plain = mode is plain
            result.append(
                (
                    f"{tokens:,}",
                    label,
                    f"{step_s:.3f} s",
                    "" if is_plain or not plain_s else f"{step_s / plain_s:.2f}",
                    f"{point['tokens_per_s']:,.0f}",
                    gib(point["peak_allocated_bytes"]),
                    gib(point["peak_reserved_bytes"]),
                    gib(point["host_used_bytes"]),
                    f"{setup_s(mode, point):.1f} s",
                    "reference" if is_plain else _EQUAL[point["equal"]],
                )
            )
    return result


def setup_s(mode: Record, point: Record) -> float:
    """Return seconds of the conversion, and what the first step took longer than another."""
    return float(mode["convert_s"] + max(point["first_step_s"] - point["median_step_s"], 0.0))


def reasons(record: Record) -> list[str]:
    """Return why rows are empty, and what must be known of the others, once each."""
    found: dict[str, None] = {}
    for mode in record["modes"]:
        label = _LABELS.get(mode["label"], mode["label"])
        note = mode["settings"].get("note")
        if note:
            found[f"{label}: {note}."] = None
        for point in mode["points"]:
            if point["outcome"] != "ok":
                first = (point["reason"] or "").partition("\n")[0]
                found[f"{label}, {point['outcome']}: {first}"] = None
    return list(found)


def caption(record: Record) -> str:
    """Return what the numbers were measured on and with."""
    config, versions = record["config"], record["versions"]
    duplex = record["link_bytes_per_s"]["duplex"]
    link = f" {statistics.median(duplex) / 1e9:.1f} GB/s each way." if duplex else ""
    others = ", ".join(
        f"{name} {versions[name]}"
        for name in ("torchao", "deepspeed", "bitsandbytes")
        if versions.get(name)
    )
    same = {True: "has", False: "does NOT have", None: ""}[record["deterministic"]]
    control = f" The control {same} the bits of its reference." if same else ""
    return (
        f"{record['device']}, torch {versions['torch']}{', ' if others else ''}{others}, "
        f"{record['date'][:10]}, commit {record['commit'][:10]}. "
        f"{config['num_params'] / 1e9:.2f}e9 parameters, {record['state_bytes'] / 1e9:.1f} GB of "
        f"AdamW state.{link} Median of {config['steps']} steps after {config['warmup']}.{control}"
    )


def table(record: Record) -> Table:
    """Return the table for a terminal."""
    text = "\n".join([caption(record), *reasons(record)])
    result = Table(caption=text.replace("**", "").replace("`", ""), caption_justify="left")
    for number, name in enumerate(HEADER):
        result.add_column(name, justify="left" if number in (1, 9) else "right")
    for row in rows(record):
        result.add_row(*(cell.replace("**", "").replace("`", "") for cell in row))
    return result


def markdown(record: Record, name: str) -> str:
    """Return the table for a page."""
    dashes = ("---:", "---", *["---:"] * 7, "---")
    lines = [HEADER, dashes, *rows(record)]
    parts = ["\n".join(f"| {' | '.join(line)} |" for line in lines)]
    parts += ["\n".join(f"- {reason}" for reason in reasons(record))]
    parts += [f"{caption(record)} Record: `benchmarks/results/{name}`."]
    return "\n\n".join(parts)
