"""How much host memory this process may still take: the system's free memory and cgroup limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def available_host_bytes(root: Path = _ROOT) -> int | None:
    """Return the bytes of host memory that can be taken now, or ``None`` where it is unknown.

    The smallest of ``MemAvailable`` and what each enclosing cgroup (v1 or v2) leaves; file cache
    that can be dropped counts as free.

    Args:
        root: where ``proc`` and ``sys`` are; for tests.
    """
    candidates = list(_cgroup_room(root))
    meminfo = _fields(root / "proc/meminfo", separator=":")
    if "MemAvailable" in meminfo:
        candidates.append(meminfo["MemAvailable"] * 1024)
    return max(min(candidates), 0) if candidates else None


def _cgroup_room(root: Path) -> Iterator[int]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, group_of = line.partition(":")
        controllers, _, path = group_of.partition(":")
        if controllers == "":
            base = root / "sys/fs/cgroup"
            names, prefix = ("memory.max", "memory.current"), ""
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names, prefix = ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"
        else:
            continue
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            # Inside a container the path may name a group of the host that is not mounted here.
            limit, used = _number(folder / names[0]), _number(folder / names[1])
            if limit is not None and used is not None:
                # Both lists: a file that was read twice is active and can be dropped all the same.
                stat = _fields(folder / "memory.stat", separator=" ")
                cache = sum(stat.get(f"{prefix}{kind}_file", 0) for kind in ("inactive", "active"))
                yield limit - used + cache
            if folder == base:
                break


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None


def _fields(path: Path, *, separator: str) -> dict[str, int]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    values = {}
    for line in lines:
        name, _, rest = line.partition(separator)
        number = rest.split()[:1]
        if number and number[0].isdigit():
            values[name] = int(number[0])
    return values
