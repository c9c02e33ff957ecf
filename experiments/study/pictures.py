"""Pictures as values: panels of curves, each with a title that says what is seen, and one way to draw them all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from experiments.study.compared import POLICIES
from experiments.study.report import picture

#: Okabe and Ito's colours, which colour-blind readers tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666")
BLACK = "black"

_SHARES = {0.0: "0", 1.0: "90", 2.0: "99", 3.0: "99.9", 4.0: "99.99", 5.0: "99.999"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Points that belong together, joined by a line."""

    x: Sequence[float]
    y: Sequence[float]
    #: In the legend; empty: none.
    label: str = ""
    colour: str = BLACK
    line: str = "-"
    marker: str = ""
    width: float = 1.6
    #: Range around each `y`, below and above.
    spread: tuple[Sequence[float], Sequence[float]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One idea: a title that says it, axes with units, curves."""

    title: str
    x: str
    y: str
    curves: Sequence[Curve]
    log_x: bool = False
    log_y: bool = False
    #: Ticks by place, with their words; None: matplotlib's own.
    x_ticks: Mapping[float, str] | None = None
    y_ticks: Mapping[float, str] | None = None
    x_range: tuple[float | None, float | None] = (None, None)
    y_range: tuple[float | None, float | None] = (0, None)
    #: Vertical lines, by place, with their words.
    marks: Mapping[float, str] = field(default_factory=dict)
    #: Horizontal lines, by place, with their words: an SLO, a bound.
    levels: Mapping[float, str] = field(default_factory=dict)
    #: Where the legend stands; empty: there is none.
    legend: str = "best"


def draw(
    target: Path, rows: Sequence[Sequence[Panel]], *, size: tuple[float, float] = (4.4, 3.4)
) -> None:
    """Draw panels.

    Args:
        target: a PNG.
        rows: panels of each row.
        size: width and height of a panel, inches.
    """
    columns = max(len(row) for row in rows)
    with picture(target, len(rows), columns, size=(size[0] * columns, size[1] * len(rows))) as grid:
        for axes_of_row, row in zip(grid, rows, strict=True):
            for axes, panel in zip(axes_of_row, row, strict=False):
                _draw(axes, panel)
            for axes in axes_of_row[len(row) :]:
                axes.set_axis_off()


def _draw(axes: Any, panel: Panel) -> None:  # noqa: ANN401
    for curve in panel.curves:
        axes.errorbar(
            curve.x,
            curve.y,
            yerr=curve.spread,
            color=curve.colour,
            ls=curve.line,
            marker=curve.marker,
            ms=5,
            lw=curve.width,
            label=curve.label or None,
        )
    for place, words in panel.marks.items():
        axes.axvline(place, color="grey", lw=1, ls=":", label=words or None)
    for place, words in panel.levels.items():
        axes.axhline(place, color=BLACK, lw=1, ls=":", label=words or None)
    if panel.log_x:
        axes.set_xscale("log")
    if panel.log_y:
        axes.set_yscale("log")
    for ticks, axis in ((panel.x_ticks, axes.xaxis), (panel.y_ticks, axes.yaxis)):
        if ticks is not None:
            axis.set_ticks(list(ticks), list(ticks.values()), fontsize="small")
            axis.set_ticks([], minor=True)
    axes.set_xlim(*panel.x_range)
    # A logarithmic axis has no zero.
    axes.set_ylim(None if panel.log_y else panel.y_range[0], panel.y_range[1])
    axes.set_title(panel.title, fontsize="medium", loc="left")
    axes.set_xlabel(panel.x)
    axes.set_ylabel(panel.y)
    axes.grid(visible=True, lw=0.3)
    if panel.legend and any(curve.label for curve in panel.curves):
        axes.legend(fontsize="x-small", loc=panel.legend)


#: A field of a point, or what is made of the point.
Value = str | Callable[[Any], Any]


def lines(
    points: Iterable[Any],
    x: Value,
    y: Value,
    *,
    by: Value,
    up_to: Value | None = None,
    line: str = "-",
    marker: str = "o",
) -> list[Curve]:
    """A curve for each group of points, in the order in which they come.

    Args:
        points: a group's own are in the curve's order.
        x: where a point stands.
        y: how high.
        by: the group, as the legend names it.
        up_to: the upper end of the range around a point; None: there is none.
        line: matplotlib's style; `none` for points alone.
        marker: matplotlib's style.
    """
    groups: dict[str, list[Any]] = {}
    for point in points:
        groups.setdefault(str(_value(by)(point)).replace("_", " "), []).append(point)
    curves = []
    for number, (label, mine) in enumerate(groups.items()):
        heights = [_value(y)(point) for point in mine]
        above = [max(_value(up_to or y)(p) - at, 0.0) for p, at in zip(mine, heights, strict=True)]
        curves.append(
            Curve(
                x=[_value(x)(point) for point in mine],
                y=heights,
                label=label,
                colour=COLOURS[number % len(COLOURS)],
                line=line,
                marker=marker,
                spread=([0.0] * len(mine), above) if up_to else None,
            )
        )
    return curves


def _value(of: Value) -> Callable[[Any], Any]:
    return attrgetter(of) if isinstance(of, str) else of


def tail_percentiles(nines: int) -> tuple[float, ...]:
    """Shares of answers, in percent, spread out towards the tail, up to so many nines."""
    at = np.arange(0, nines + 0.01, 0.1)
    return tuple(round(float(100 * (1 - 10**-place)), 4) for place in at)


def tail(
    title: str,
    x: str,
    curves: Sequence[Curve],
    percentiles: Sequence[float],
    **others: Any,  # noqa: ANN401
) -> Panel:
    """A panel of distributions, their tails stretched: a curve's `x` is at `percentiles`, its `y` is not looked at.

    Args:
        title: what is seen.
        x: what is distributed, with its unit.
        curves: the distributions; one with fewer values has its own percentiles in `y`.
        percentiles: in percent.
        others: more of `Panel`.
    """
    stretched = [
        Curve(
            x=curve.x,
            y=[nines_of(at) for at in curve.y or percentiles],
            label=curve.label,
            colour=curve.colour,
            line=curve.line,
            marker=curve.marker,
            width=curve.width,
        )
        for curve in curves
    ]
    return Panel(title=title, x=x, y="percentile", curves=stretched, y_ticks=_SHARES, **others)


def nines_of(percentile: float) -> float:
    """How many nines a percentile has: 2 for 99 %."""
    return -float(np.log10(1 - percentile / 100))


def colour_of(policy: str) -> str:
    """The colour that a policy has in every picture."""
    return COLOURS[list(POLICIES).index(policy) % len(COLOURS)]
