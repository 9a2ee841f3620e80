"""What the tests found out about each optimizer: the record of it, and the table made from it.

The record, docs/optimizers.jsonl, has one row for each optimizer, flavour, dtype and device. A
test run adds to it with ``--write-outcomes`` and is checked against it without.

python tests/outcomes.py            # write docs/optimizers.md from the record
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
RECORD = DOCS / "optimizers.jsonl"
TABLE = DOCS / "optimizers.md"

EQUAL, REFUSED, PLAIN_REFUSES, UNDEFINED = "equal", "refused", "plain refuses", "undefined"
ALL = (EQUAL, REFUSED, PLAIN_REFUSES, UNDEFINED)
DTYPES = ("float32", "bfloat16", "float16", "float64", "complex64")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one optimizer with one flavour and dtype on one kind of device.

    Attributes:
        device: ``"cpu"``, or the name of the accelerator.
        torch: its version, without the build.
        package: where the class is from, with the version unless it is torch.
        optimizer: name of the class.
        flavour: the settings that choose its code, in words.
        dtype: of parameters and gradients, without ``torch.``.
        outcome: ``EQUAL`` (the bits of plain in parameters and state), ``REFUSED`` (here, with a
            message), ``PLAIN_REFUSES`` (by the class itself) or ``UNDEFINED`` (two plain runs
            differ).
        reason: of everything but ``EQUAL``; one line.
        test: node id of the test function that found it out.
    """

    device: str
    torch: str
    package: str
    optimizer: str
    flavour: str
    dtype: str
    outcome: str
    reason: str
    test: str

    @property
    def key(self) -> tuple[str, ...]:
        """What there is one row for. The name of a package, not its version."""
        package = self.package.partition(" ")[0]
        return (self.device, package, self.optimizer, self.flavour, self.dtype)


def load(path: Path = RECORD) -> list[Outcome]:
    """Read a record; an absent one is empty."""
    if not path.exists():
        return []
    return [Outcome(**json.loads(line)) for line in path.read_text().splitlines()]


def save(rows: Iterable[Outcome], path: Path = RECORD) -> None:
    """Write a record, one line a row."""
    path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))


def merge(old: Sequence[Outcome], new: Sequence[Outcome], *, complete: bool) -> list[Outcome]:
    """Put new rows in the place of old ones.

    Args:
        old: rows of the record.
        new: rows of one test run.
        complete: the run had all parameters of its tests: their other rows on this device go,
            but for those of packages that the run did not find.
    """

    def kind(row: Outcome) -> tuple[str, str, str]:
        return (row.device, row.test, row.package.partition(" ")[0])

    redone = {kind(row) for row in new} if complete else set()
    kept = {row.key: row for row in old if kind(row) not in redone}
    kept.update({row.key: row for row in new})
    return sorted(kept.values(), key=_rank)


def disagreement(row: Outcome, record: Iterable[Outcome]) -> str | None:
    """Say what the record has instead of ``row``. Rows of other versions are not compared."""
    of_device = [other for other in record if other.device == row.device]
    if row.torch not in {other.torch for other in of_device}:
        return None
    known = {other.key: other for other in of_device}.get(row.key)
    if known is None:
        return f"docs/optimizers.jsonl has no row for {row.key}. Run make docs-table."
    if known == row or (known.torch, known.package) != (row.torch, row.package):
        return None
    return f"docs/optimizers.jsonl says\n{known}\nand this run\n{row}\nRun make docs-table."


def render(rows: Sequence[Outcome]) -> str:
    """Return the page: a section per device, a table per package, notes with the reasons."""
    lines = [
        "# Optimizers",
        "",
        "Every row was trained plain and offloaded, with two groups, a schedule, late and missing "
        "gradients: *equal* means the same bits in every parameter, state tensor and `step`. "
        "Everything else has its reason below. Written by `make docs-table` while the tests run; "
        "do not edit.",
    ]
    for device in dict.fromkeys(row.device for row in rows):
        notes: dict[str, int] = {}
        here = [row for row in rows if row.device == device]
        for package in dict.fromkeys(row.package for row in here):
            own = [row for row in here if row.package == package]
            versions = " and ".join(sorted({row.torch for row in own}))
            kind = "the CPU" if device == "cpu" else device
            lines += ["", f"## {package} on {kind}", "", f"With torch {versions}.", ""]
            lines += _table(own, notes)
        lines += ["", *(f"{number}. {text}" for text, number in notes.items())]
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[Outcome], notes: dict[str, int]) -> list[str]:
    dtypes = sorted({row.dtype for row in rows}, key=_position)
    cells = {(row.optimizer, row.flavour, row.dtype): _cell(row, notes) for row in rows}
    lines = [
        "| optimizer | flavour | " + " | ".join(dtypes) + " |",
        "|---|---|" + "---|" * len(dtypes),
    ]
    for name, flavour in dict.fromkeys((row.optimizer, row.flavour) for row in rows):
        found = [cells.get((name, flavour, dtype), "") for dtype in dtypes]
        lines.append(f"| {name} | {flavour} | " + " | ".join(found) + " |")
    return lines


def _cell(row: Outcome, notes: dict[str, int]) -> str:
    if row.outcome == EQUAL:
        return EQUAL
    reason = row.reason.replace(f"{row.optimizer} ", "This class ", 1)  # one note for all of them
    return f"{row.outcome} ({notes.setdefault(reason, len(notes) + 1)})"


def _rank(row: Outcome) -> tuple[object, ...]:
    device, package, optimizer, flavour, dtype = row.key
    first = flavour != "default"
    return (device != "cpu", device, package != "torch.optim", package, optimizer.lower(), first,
            flavour, _position(dtype))  # fmt: skip


def _position(dtype: str) -> tuple[int, str]:
    return (DTYPES.index(dtype) if dtype in DTYPES else len(DTYPES), dtype)


if __name__ == "__main__":
    TABLE.write_text(render(load()))
