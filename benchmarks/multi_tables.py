"""What bench_multi.py makes of its samples: comparisons of bits, and tables of 1, 2, ... GPUs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from record import Record

STEP_HEADER = (
    "GPUs at once",
    "state each",
    "one alone, each way",
    "all at once, each way",
    "state stays",
    "step",
    "limit",
    "x limit",
    "peak each",
    "set-up",
    "bits",
)
TRAIN_HEADER = (
    "GPUs",
    "under",
    "update runs",
    "step",
    "tokens/s each",
    "of no offload",
    "peak each",
    "reserved each",
    "set-up",
    "bits",
)
_EQUAL = {True: "equal", False: "**differ**", None: ""}


def compare(rows: Sequence[Record]) -> None:
    """Say in each row whether all its ranks have the bits of the row that offloads nothing.

    `equal` is None for that row, and where one of the two was not measured.
    """
    for row in rows:
        reference = "none+clip" if row.get("clip") else "none"
        plain = next((r for r in rows if r["name"] == reference and not r["control"]), None)
        row["equal"] = None
        if plain is None or plain is row or "ok" != row["outcome"] or plain["outcome"] != "ok":
            continue
        row["equal"] = all(
            mine.get(key) == theirs.get(key)
            for mine, theirs in zip(row["ranks"], plain["ranks"], strict=True)
            for key in ("losses", "params_sha256", "params_checksum")
        )


def duplex(record: Record, name: str) -> list[float]:
    """Return the median bytes per second, both ways at once, of each rank.

    Args:
        record: of one run.
        name: "alone" or "together".
    """
    ranks = record.get("probe", {}).get(name, [])
    return [statistics.median(rank["duplex"]) for rank in ranks if rank.get("duplex")]


def limit_s(record: Record, row: Record) -> float | None:
    """Return how long the copies of a step's state take alone, on the rank that needs longest."""
    speeds = duplex(record, "together")
    bytes_of_all = [rank["travelling_bytes"] for rank in row["ranks"]]
    if len(speeds) != len(bytes_of_all) or not any(bytes_of_all):
        return None
    return max(num / speed for num, speed in zip(bytes_of_all, speeds, strict=True))


def step_rows(record: Record) -> list[tuple[str, ...]]:
    """Return the table of the step part as text, in the columns of `STEP_HEADER`."""
    result = []
    for row in record.get("step", []):
        if row["control"] or row["outcome"] != "ok":
            continue
        limit = limit_s(record, row)
        offloads = bool(row["settings"])
        result.append(
            (
                str(record["num_ranks"]),
                f"{record['state_bytes'] / 1e9:.1f} GB",
                _speed(duplex(record, "alone")),
                _speed(duplex(record, "together")),
                str(row["settings"]["gpu_budget"]) if offloads else "all",
                f"{row['median_step_s']:.3f} s",
                f"{limit:.3f} s" if limit else "",
                f"{row['median_step_s'] / limit:.2f}" if limit else "",
                _gib(_most(row, "peak_allocated_bytes")),
                f"{_most(row, 'setup_s'):.1f} s" if offloads else "",
                _EQUAL[row["equal"]],
            )
        )
    return result


def train_rows(record: Record) -> list[tuple[str, ...]]:
    """Return the table of the train part as text, in the columns of `TRAIN_HEADER`."""
    result = []
    for kind, rows in record.get("train", {}).items():
        speeds = {row["name"]: _speed_of(row) for row in rows if row["outcome"] == "ok"}
        for row in rows:
            if row["control"] or row["outcome"] != "ok":
                continue
            plain = speeds.get("none+clip" if row["clip"] else "none")
            offloads = not row["name"].startswith("none")
            result.append(
                (
                    str(record["num_ranks"]),
                    kind,
                    row["name"].replace("none", "no offload"),
                    f"{row['median_step_s']:.3f} s",
                    f"{speeds[row['name']]:,.0f}",
                    f"{speeds[row['name']] / plain:.1%}" if plain and offloads else "",
                    _gib(_most(row, "peak_allocated_bytes")),
                    _gib(_most(row, "peak_reserved_bytes")),
                    f"{_most(row, 'setup_s'):.1f} s" if offloads else "",
                    _EQUAL[row["equal"]],
                )
            )
    return result


def caption(record: Record) -> str:
    """Return what the numbers were measured on and with."""
    config, trained = record["config"], record["config"]["train"]
    controls = [r["equal"] for r in record.get("step", []) if r["control"]]
    for rows in record.get("train", {}).values():
        controls += [row["equal"] for row in rows if row["control"]]
    commit, dirty, _ = record["commit"].partition("+dirty")
    parts = [
        f"{record['device']}, driver {record['driver']}, torch {record['versions']['torch']}, "
        f"{record['date'][:10]}, commit {commit[:10]}{dirty}."
    ]
    if "step" in record:
        parts.append(
            f"Step: {config['num_params'] / 1e9:.2g}e9 fp32 parameters each, median of "
            f"{config['steps']} steps, each as long as on the slowest GPU."
        )
    if "train" in record:
        parts.append(
            f"Training: {trained['num_params'] / 1e9:.3g}e9 fp32 parameters, "
            f"{trained['tokens'][0]:,} tokens each, median of {trained['steps']} steps after "
            f"{trained['warmup']}."
        )
    if controls:
        same = "The controls have the bits of what they repeat."
        parts.append(same if all(controls) else "**A control differs.**")
    return " ".join(parts)


def markdown(records: Sequence[tuple[str, Record]]) -> str:
    """Return both tables, with all records in each, fewest GPUs first, and what they are from."""
    if not records:
        return "No record yet: `python benchmarks/bench_multi.py` writes one."
    ordered = sorted(records, key=lambda named: named[1]["num_ranks"])
    parts = []
    for header, rows in ((STEP_HEADER, step_rows), (TRAIN_HEADER, train_rows)):
        body = [row for _, record in ordered for row in rows(record)]
        if body:
            lines = [header, ("---:",) * len(header), *body]
            parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
    parts += [f"{caption(record)} Record: `benchmarks/results/{name}`." for name, record in ordered]
    return "\n\n".join(parts)


def _speed(bytes_per_s: Sequence[float]) -> str:
    """Say the speed of the slowest."""
    return f"{min(bytes_per_s) / 1e9:.1f} GB/s" if bytes_per_s else ""


def _speed_of(row: Record) -> float:
    return min(float(rank["tokens_per_s"]) for rank in row["ranks"])


def _most(row: Record, name: str) -> float:
    return max((rank[name] for rank in row["ranks"] if rank[name] is not None), default=0)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes else ""
