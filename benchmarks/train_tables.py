"""What bench_train.py makes of its samples: comparisons of bits, bounds, and the table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.table import Table

from record import Record

HEADER = (
    "tokens",
    "mode",
    "step",
    "least",
    "x plain",
    "forward",
    "backward",
    "clip+step",
    "tokens/s",
    "peak GPU",
    "reserved",
    "host",
    "set-up",
    "equal",
)
_EQUAL = {True: "yes", False: "NO", None: "unknown"}


def compare(modes: Sequence[Record]) -> bool | None:
    """Say in each point whether it has the bits of plain AdamW, and return the control's answer.

    `equal` is None where there is nothing to compare with: for the reference itself, and for a
    point whose reference is missing.
    """
    references = {mode["name"]: mode for mode in modes if mode["overlap"] is None}
    control: bool | None = None
    for mode in modes:
        reference = references.get("none+clip" if mode["clip"] else "none")
        for number, point in enumerate(mode["points"]):
            point["equal"] = None
            if reference is None or reference is mode or point["outcome"] != "ok":
                continue
            other = reference["points"][number]
            if other["outcome"] == "ok":
                bits = ("losses", "params_sha256")
                point["equal"] = all(point[key] == other[key] for key in bits)
                if mode["control"]:
                    control = point["equal"] and control is not False
    return control


def bounds(modes: Sequence[Record], state_bytes: int, bytes_per_s: float | None) -> list[Record]:
    """Return for each number of tokens what backward mode cannot be faster than.

    All state crosses the link both ways after forward: `backward_s` is forward and the copies
    alone. The step without offload is the other bound.
    """
    plain = next((m for m in modes if m["name"] == "none" and not m["control"]), None)
    if plain is None or bytes_per_s is None:
        return []
    copies_s = state_bytes / bytes_per_s
    return [
        {
            "tokens": point["tokens"],
            "forward_s": point["median_forward_s"],
            "copies_s": copies_s,
            "backward_s": point["median_forward_s"] + copies_s,
        }
        for point in plain["points"]
        if point["outcome"] == "ok"
    ]


def rows(record: Record) -> list[tuple[str, ...]]:
    """Return the table's rows as text, in the columns of `HEADER`."""
    result: list[tuple[str, ...]] = []
    for number, tokens in enumerate(record["config"]["tokens"]):
        plain = {
            mode["name"]: mode["points"][number].get("median_step_s")
            for mode in record["modes"]
            if mode["overlap"] is None and not mode["control"]
        }
        for mode in record["modes"]:
            point = mode["points"][number]
            if point["outcome"] != "ok":
                row = (str(tokens), mode["label"], point["outcome"])
                result.append((*row, *[""] * (len(HEADER) - len(row))))
                continue
            reference_s = plain.get("none+clip" if mode["clip"] else "none")
            step_s = point["median_step_s"]
            result.append(
                (
                    str(tokens),
                    mode["label"],
                    f"{step_s:.3f} s",
                    f"{point['min_step_s']:.3f}",
                    f"{step_s / reference_s:.2f}" if reference_s else "",
                    f"{point['median_forward_s']:.3f}",
                    f"{point['median_backward_s']:.3f}",
                    f"{point['median_clip_s'] + point['median_optimizer_s']:.3f}",
                    f"{point['tokens_per_s']:.0f}",
                    gib(point["peak_allocated_bytes"]),
                    gib(point["peak_reserved_bytes"]),
                    gib(point["host_bytes"] or None),
                    f"{point['setup_s']:.1f} s" if point["host_bytes"] else "",
                    "reference" if mode["label"] in plain else _EQUAL[point["equal"]],
                )
            )
        for bound in record["bounds"]:
            if bound["tokens"] == tokens:
                row = (str(tokens), "bound of backward", f"{bound['backward_s']:.3f} s", "", "")
                row = (*row, f"{bound['forward_s']:.3f}")
                result.append((*row, *[""] * (len(HEADER) - len(row))))
    return result


def caption(record: Record) -> str:
    """Return what the numbers were measured on and with."""
    config = record["config"]
    link = {kind: statistics.median(s) / 1e9 for kind, s in record["link_bytes_per_s"].items() if s}
    speeds = ", ".join(f"{kind} {speed:.1f}" for kind, speed in link.items())
    same = {
        True: "The control has the bits of its reference.",
        False: "The control differs from its reference: the kernels are not deterministic.",
        None: "There is no control.",
    }
    return (
        f"{record['device']}, torch {record['versions']['torch']}, {record['date'][:10]}, "
        f"commit {record['commit'][:10]}. {config['num_params'] / 1e9:.2f}e9 fp32 parameters, "
        f"{record['state_bytes'] / 1e9:.1f} GB of AdamW state"
        + (f"; GB/s each way: {speeds}" if speeds else "")
        + f". Median of {config['steps']} steps after {config['warmup']}. "
        + same[record["deterministic"]]
    )


def table(record: Record) -> Table:
    """Return the table for a terminal."""
    result = Table(caption=caption(record))
    for number, name in enumerate(HEADER):
        result.add_column(name, justify="left" if number == 1 else "right")
    before = None
    for row in rows(record):
        if before not in (None, row[0]):
            result.add_section()
        before = row[0]
        result.add_row(*row)
    return result


def gib(num_bytes: int | None) -> str:
    """Return a size as text; empty where it is not known."""
    return "" if num_bytes is None else f"{num_bytes / 2**30:.1f} GiB"
