"""Draws one training step as a timeline: what the link and the device did when.

Vocabulary: a *lane* is one row of the picture. *h2d* and *d2h* are copies of state into and out of
the device, *step* is updates, *compute* is forward and backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LANES = ("h2d", "step", "d2h", "compute")
_COLORS = dict(zip(LANES, ("#4477aa", "#ee6677", "#228833", "#999999"), strict=True))

Interval = tuple[float, float]


def figure_class() -> Any:
    """Return matplotlib's `Figure`, which needs no display.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "A timeline is drawn with matplotlib, which is not installed. "
            "Run `pip install matplotlib`, or leave --timeline out."
        ) from error
    return Figure


def draw(axes: Any, lanes: Mapping[str, Sequence[Interval]], title: str) -> None:
    """Draw the timeline of one step.

    Args:
        axes: matplotlib's.
        lanes: start and end of each interval, in seconds from the start of the step, by lane. A
            lane that is missing stays empty.
        title: the line above it.

    Raises:
        ValueError: an unknown lane, or an interval that ends before it starts.
    """
    _check(lanes)
    for row, name in enumerate(LANES):
        bars = [(start, end - start) for start, end in lanes.get(name, ())]
        axes.broken_barh(
            bars, (row - 0.4, 0.8), color=_COLORS[name], edgecolor="white", linewidth=0.5
        )
    axes.set_yticks(range(len(LANES)), LANES)
    axes.set_ylim(len(LANES) - 0.5, -0.5)  # the first lane on top
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds from the start of the step")
    axes.set_title(title)


def plot(lanes: Mapping[str, Sequence[Interval]], path: Path | str, title: str) -> None:
    """Write the timeline of one step as a PNG.

    Args:
        lanes: as in :func:`draw`.
        path: where the picture goes; folders are made.
        title: the line above it.

    Raises:
        ValueError: as in :func:`draw`, or a path that does not end in ``.png``.
        ImportError: matplotlib is not installed.
    """
    path = Path(path)
    if path.suffix != ".png":
        raise ValueError(f"path={str(path)!r} is no PNG. Give a name that ends in .png.")
    _check(lanes)
    figure = figure_class()(figsize=(12, 2.8), layout="constrained")
    draw(figure.add_subplot(), lanes, title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _check(lanes: Mapping[str, Sequence[Interval]]) -> None:
    for name, intervals in lanes.items():
        if name not in LANES:
            raise ValueError(f"lanes has {name!r}, which is no lane. Use {', '.join(LANES)}.")
        for start, end in intervals:
            if end < start:
                raise ValueError(
                    f"lanes[{name!r}] has ({start}, {end}), which ends before it starts. "
                    "Give (start, end)."
                )
